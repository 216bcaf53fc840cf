"""Implement an all-to-all with puts: each rank writes into its peers' memory, and they wait for its signals.

    torchrun --standalone --nproc-per-node=2 scripts/examples/one_sided.py
    one_sided: in 3 rounds each of 2 ranks has put a block into every rank's window

Every rank has a window: memory of pynccl.mem_alloc with a slot for each rank, registered on all ranks. put_signal
writes into slot `rank` of the peer's window and signals it; wait_signal blocks the stream until a given number of
signals from each peer has arrived. A slot can be overwritten only after its reader has finished, so readers also send
a signal. Signals from one peer arrive in stream order, so one counter serves both. Needs NCCL 2.29 or later.
"""

from __future__ import annotations

import torch

import pynccl

WIDTH, ROUNDS = 1024, 3  # elements per slot: a multiple of 4096 bytes


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
            stream.wait(current)  # the rows are filled
            for peer in range(comm.size):
                comm.put_signal(rows[peer], peer, window, comm.rank * WIDTH * 4, stream=stream)  # offset in bytes
            comm.wait_signal(one_of_each, stream=stream)  # every rank has written its slot here
            current.wait(stream)
            found = slots.clone()
            stream.wait(current)  # the clone has read the slots
            for peer in range(comm.size):
                comm.signal(peer, stream=stream)
            comm.wait_signal(one_of_each, stream=stream)  # every rank has read its slots
            expected = torch.tensor([value(source, comm.rank, turn) for source in range(comm.size)])
            torch.testing.assert_close(found.cpu(), expected[:, None].expand(-1, WIDTH))
        stream.synchronize()
    return f"one_sided: in {ROUNDS} rounds each of {comm.size} ranks has put a block into every rank's window"


if __name__ == "__main__":
    with pynccl.init() as world:
        verified = main(world)
        if world.rank == 0:
            print(verified)
