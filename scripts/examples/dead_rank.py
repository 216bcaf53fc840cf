"""Continue a job after one of its ranks has died.

    torchrun --standalone --nproc-per-node=3 scripts/examples/dead_rank.py
    dead_rank: 3 steps on 3 ranks, 3 on 2: all sums are right

The last rank exits silently in step 3. The calls of the other ranks raise an NcclError. They meet again, without the
dead rank, and repeat the step. The dead rank exits with code 0, since torchrun's agent ends all of its ranks if one
fails: docs/elastic.md has the launches for real jobs, and how model and optimizer go on.
"""

from __future__ import annotations

import os

import torch

import pynccl

STEPS, DEATH = 6, 3


def main(comm: pynccl.Communicator) -> str:
    size, step, ready, sums = comm.size, 0, True, torch.zeros(STEPS)
    while step < STEPS:
        try:
            if not ready:
                step = comm.agree(step)  # the newest step that a rank has
                comm.sync_state(sums)  # from there to the ranks that are behind
                ready = True
            if step == DEATH and comm.generation == 0 and comm.rank == size - 1 > 0:
                os._exit(0)
            total = comm.all_reduce(torch.full((4,), float(10**comm.rank), device=comm.device))
            comm.commit()  # it has run on all ranks, or this raises
            sums[step] = total[0]
            step += 1
        except pynccl.NcclError as error:
            comm, ready = comm.survivors(), False
            if comm.rank == 0:
                print(f"{type(error).__name__} in step {step}: {comm.verdict}")
    with comm:
        full, reduced = (float("1" * n) for n in (size, max(size - 1, 1)))
        if sums.tolist() != [full] * DEATH + [reduced] * (STEPS - DEATH):
            raise AssertionError(f"rank {comm.rank}: {sums}")
        return f"dead_rank: {DEATH} steps on {size} ranks, {STEPS - DEATH} on {comm.size}: all sums are right"


if __name__ == "__main__":
    world = pynccl.init(elastic=True)
    verified = main(world)
    if world.rank == 0:
        print(verified)
