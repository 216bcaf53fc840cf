"""Print where every rank runs, and sum a number over all ranks.

    torchrun --standalone --nproc-per-node=2 scripts/examples/hello.py
    hello: rank 0 of 2 on cpu of node0: the sum is 3

Every rank prints a line, in any order. To run on several nodes, see multi_node.sh in this folder.
"""

from __future__ import annotations

import socket

import torch

import pynccl


def main(comm: pynccl.Communicator) -> str:
    x = torch.full((4,), comm.rank + 1.0, device=comm.device)
    comm.all_reduce(x, x)  # in place: the sum over all ranks, on every rank
    total = comm.size * (comm.size + 1) / 2  # 1 + 2 + .. + N
    torch.testing.assert_close(x.cpu(), torch.full((4,), total))
    where = f"{comm.device} of {socket.gethostname()}"
    return f"hello: rank {comm.rank} of {comm.size} on {where}: the sum is {x[0].item():g}"


if __name__ == "__main__":
    with pynccl.init() as world:
        print(main(world) + "\n", end="")  # one write, so that the lines of different ranks do not mix
