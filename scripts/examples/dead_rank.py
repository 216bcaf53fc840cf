"""A rank dies in the middle of a job, and the others go on without it.

    torchrun --standalone --nproc-per-node=3 scripts/examples/dead_rank.py
    dead_rank: 3 steps on 3 ranks, 3 on 2: all sums are right

The last rank ends in step 3 without a word. The call of the others raises an NcclError that names it; they agree on who
is left, at the launch's store, and make a smaller communicator: shrink(..., abort=True) stops what is under way on the
old one. The step is done again. torchrun ends all ranks once one has failed, so this one ends with exit code 0.
"""

from __future__ import annotations

import os
import time

import torch
from torch.distributed import PrefixStore, Store, TCPStore

import pynccl

STEPS, DEATH = 6, 3
STEP_SECONDS, MEETING_SECONDS = 10.0, 3.0  # for a step; for all who live to come to the store


def step(comm: pynccl.Communicator, value: float) -> float:
    """The sum over ranks of what each has. On a GPU the call returns at once: what goes wrong later has to be asked."""
    x = torch.full((4,), value, device=comm.device)
    comm.all_reduce(x, x)
    done, deadline = pynccl.current_stream(comm.device).record(), time.monotonic() + STEP_SECONDS
    while not done.query():
        comm.check_async_error()
        if time.monotonic() > deadline:
            raise pynccl.NcclTimeout(f"a step has not ended within {STEP_SECONDS:g} s")
        time.sleep(0.001)
    return x[0].item()


def missing(comm: pynccl.Communicator, store: Store) -> list[int]:
    """The ranks that do not come to the store; the same on all that do: the first one's word counts."""
    store.set(f"alive/{comm.rank}", "")
    deadline = time.monotonic() + MEETING_SECONDS
    gone = list(range(comm.size))
    while gone and time.monotonic() < deadline and not store.check(["gone"]):
        gone = [rank for rank in gone if not store.check([f"alive/{rank}"])]
        time.sleep(0.01)
    said = store.compare_set("gone", "", ",".join(map(str, gone)) or "none").decode()
    return [] if said == "none" else [int(rank) for rank in said.split(",")]


def main(comm: pynccl.Communicator, store: Store) -> str:
    size, value = comm.size, float(10**comm.rank)
    sums: list[float] = []
    while len(sums) < STEPS:
        if len(sums) == DEATH and comm.rank == size - 1 > 0:
            os._exit(0)
        try:
            sums.append(step(comm, value))
        except pynccl.NcclError as error:
            if comm.rank == 0:
                print(f"{type(error).__name__} in step {len(sums)}: {error.verdict or error}")
            gone = missing(comm, store)
            if not gone or comm.rank in gone:  # it was something else; or the others have waited for this rank in vain
                raise
            smaller = comm.shrink(gone, abort=True)
            comm.abort()  # it has failed: destroy() would wait for the dead
            comm = smaller
    with comm:
        whole, rest = (float("1" * n) for n in (size, max(size - 1, 1)))
        if sums != [whole] * DEATH + [rest] * (STEPS - DEATH):
            raise AssertionError(f"rank {comm.rank}: {sums}")
        return f"dead_rank: {DEATH} steps on {size} ranks, {STEPS - DEATH} on {comm.size}: all sums are right"


if __name__ == "__main__":
    world = pynccl.init()
    launch = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    verified = main(world, PrefixStore("dead_rank", launch))
    if world.rank == 0:
        print(verified)
