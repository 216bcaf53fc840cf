"""Every rank says where it runs, and all of them add up their numbers.

    torchrun --standalone --nproc-per-node=2 scripts/examples/hello.py
    hello: rank 0 of 2 on cpu of node0: the sum is 3

A line per rank, in any order. On several machines: multi_node.sh, beside this file.
"""

from __future__ import annotations

import socket

import torch

import pynccl


def main(comm: pynccl.Communicator) -> str:
    x = torch.full((4,), comm.rank + 1.0, device=comm.device)
    comm.all_reduce(x, x)  # in place: the sum over all ranks, on every rank
    total = comm.size * (comm.size + 1) / 2  # of 1 to N
    torch.testing.assert_close(x.cpu(), torch.full((4,), total))
    where = f"{comm.device} of {socket.gethostname()}"
    return f"hello: rank {comm.rank} of {comm.size} on {where}: the sum is {x[0].item():g}"


if __name__ == "__main__":
    with pynccl.init() as world:
        print(main(world) + "\n", end="")  # in one piece, since all ranks write to one terminal
