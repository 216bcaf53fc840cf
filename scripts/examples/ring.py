"""Pass blocks around a ring of ranks on one stream while another stream computes on the block that has arrived.

    torchrun --standalone --nproc-per-node=2 scripts/examples/ring.py
    ring: 2 blocks have passed every rank, and their weighted sum is right

In each step every rank sends its block to the next rank and receives one from the previous rank, in one group: as two
launches, every rank would block in its send, because no rank reaches its recv. After N - 1 steps all ranks have seen
all blocks.

Only the waits order the streams. Each step needs two:

    side.wait(current)    the transfer overwrites the buffer that the previous step's computation reads; in the first
                          step, it sends the block that the current stream has filled
    current.wait(side)    the next step's computation reads the received block

On a CPU the caller computes synchronously, so only a missing second wait causes errors; on a GPU either does.
"""

from __future__ import annotations

import torch
from torch import Tensor

import pynccl

COUNT = 1 << 16  # elements per block


def block_of(rank: int) -> Tensor:
    return torch.randn(COUNT, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def use(total: Tensor, block: Tensor, source: int) -> None:
    """Compute on a block, on the current stream; here too little to hide communication."""
    total.add_(block, alpha=1.0 + source)


def ring(own: Tensor, comm: pynccl.Communicator) -> Tensor:
    """Return the sum over ranks r of (1 + r) times rank r's block."""
    side = pynccl.create_stream(comm.device)
    following, previous = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    block, received, total = own.clone(), torch.full_like(own, torch.nan), torch.zeros_like(own)
    for step in range(comm.size):
        if step < comm.size - 1:
            side.wait(pynccl.current_stream(comm.device))
            with pynccl.group():
                comm.send(block, following, stream=side)
                comm.recv(received, previous, stream=side)
        use(total, block, (comm.rank - step) % comm.size)  # during the transfer, which reads the same block
        if step < comm.size - 1:
            pynccl.current_stream(comm.device).wait(side)
        block, received = received, block
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
