"""An all-to-all without receives: each rank writes into its peers' memory, and they wait for a signal of each.

    torchrun --standalone --nproc-per-node=2 scripts/examples/one_sided.py
    one_sided: in 3 rounds each of 2 ranks has put a block into every rank's window

Every rank has a window: memory of pynccl.mem_alloc with a slot for each rank, registered on all of them. put_signal
writes into slot `rank` of the peer's and raises its signal; wait_signal holds the stream until a peer has raised it so
often. A slot may be written again only when its reader is done with it, which he says by a signal as well. The signals
of one peer come in the order of its stream, so one counter does for both. NCCL has all this from 2.29 on.
"""

from __future__ import annotations

import torch

import pynccl

WIDTH, ROUNDS = 1024, 3  # elements of a slot, a multiple of 4096 bytes


def value(source: int, target: int, turn: int) -> float:
    return 100.0 * turn + 10.0 * source + target


def main(comm: pynccl.Communicator) -> str:
    one_of_each = dict.fromkeys(range(comm.size), 1)
    with pynccl.mem_alloc((comm.size, WIDTH), "float32", device=comm.device) as memory, comm.window(memory) as window:
        slots = torch.from_dlpack(memory)
        stream = pynccl.create_stream(comm.device)
        for turn in range(ROUNDS):
            current = pynccl.current_stream(comm.device)
            rows = [torch.full((WIDTH,), value(comm.rank, peer, turn), device=comm.device) for peer in range(comm.size)]
            stream.wait(current)  # the rows are there
            for peer in range(comm.size):
                comm.put_signal(rows[peer], peer, window, comm.rank * WIDTH * 4, stream=stream)  # offset in bytes
            comm.wait_signal(one_of_each, stream=stream)  # every rank has written its slot here
            current.wait(stream)
            found = slots.clone()
            stream.wait(current)  # the clone has read them
            for peer in range(comm.size):
                comm.signal(peer, stream=stream)
            comm.wait_signal(one_of_each, stream=stream)  # every rank has read what was written there
            expected = torch.tensor([value(source, comm.rank, turn) for source in range(comm.size)])
            torch.testing.assert_close(found.cpu(), expected[:, None].expand(-1, WIDTH))
        stream.synchronize()
    return f"one_sided: in {ROUNDS} rounds each of {comm.size} ranks has put a block into every rank's window"


if __name__ == "__main__":
    with pynccl.init() as world:
        verified = main(world)
        if world.rank == 0:
            print(verified)
