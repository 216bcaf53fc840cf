"""A ring on two streams: blocks travel round the ranks on one while the block that is there is worked on, on the other.

    torchrun --standalone --nproc-per-node=2 scripts/examples/ring.py
    ring: 2 blocks have passed every rank, and their weighted sum is right

Each rank sends the block that it has to the next rank and receives that of the rank before, in one group: as two
launches every rank would wait in its send for a recv that nobody has come to. After N - 1 steps all have seen all.

Streams are ordered by nothing but the waits. There are two a step, and each is needed:

    side.wait(current)    the transfer overwrites the buffer that the work of the step before reads; in the first step,
                          it sends the block that the current stream has filled
    current.wait(side)    the work of the next step reads what the transfer brings

On a CPU the caller works and is never ahead of himself, so only the second can be missed there; on a GPU both.
"""

from __future__ import annotations

import torch
from torch import Tensor

import pynccl

COUNT = 1 << 16  # elements of a block


def block_of(rank: int) -> Tensor:
    return torch.randn(COUNT, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def use(total: Tensor, block: Tensor, source: int) -> None:
    """The work on a block, on the current stream: here so little that it hides nothing."""
    total.add_(block, alpha=1.0 + source)


def ring(own: Tensor, comm: pynccl.Communicator) -> Tensor:
    """The sum of all ranks' blocks, that of rank r times 1 + r."""
    side = pynccl.create_stream(comm.device)
    following, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    here, there, total = own.clone(), torch.full_like(own, torch.nan), torch.zeros_like(own)
    for step in range(comm.size):
        if step < comm.size - 1:
            side.wait(pynccl.current_stream(comm.device))
            with pynccl.group():
                comm.send(here, following, stream=side)
                comm.recv(there, before, stream=side)
        use(total, here, (comm.rank - step) % comm.size)  # beside the transfer, which reads the same block
        if step < comm.size - 1:
            pynccl.current_stream(comm.device).wait(side)
        here, there = there, here
    return total


def main(comm: pynccl.Communicator) -> str:
    total = ring(block_of(comm.rank).to(comm.device), comm)
    expected = sum(((1.0 + rank) * block_of(rank) for rank in range(comm.size)), torch.zeros(COUNT))
    torch.testing.assert_close(total.cpu(), expected)
    return f"ring: {comm.size} blocks have passed every rank, and their weighted sum is right"


if __name__ == "__main__":
    with pynccl.init() as world:
        verified = main(world)
        if world.rank == 0:
            print(verified)
