"""Continue a job after one of its ranks has died.

    torchrun --standalone --nproc-per-node=3 scripts/examples/dead_rank.py
    dead_rank: 3 steps on 3 ranks, 3 on 2: all sums are right

The last rank exits silently in step 3. The other ranks' call raises an NcclError that names it. They use the launch's
store to agree on the remaining ranks, abort the communicator and create a smaller one. Then they repeat the step. The
dead rank exits with code 0, as torchrun ends all ranks if one fails. comm.shrink(gone, abort=True) would keep what the
remaining ranks share, but over sockets, so between nodes, NCCL cannot always do it after a rank has died.
"""

from __future__ import annotations

import os
import time

import torch
from torch.distributed import PrefixStore, Store, TCPStore

import pynccl

STEPS, DEATH = 6, 3
STEP_SECONDS, AGREEMENT_SECONDS = 10.0, 3.0  # deadline of a step; deadline for the survivors to reach the store


def step(comm: pynccl.Communicator, value: float) -> float:
    """Sum value over all ranks. On a GPU the call returns immediately, so poll for errors that occur later."""
    x = torch.full((4,), value, device=comm.device)
    comm.all_reduce(x, x)
    done, deadline = pynccl.current_stream(comm.device).record(), time.monotonic() + STEP_SECONDS
    while not done.query():
        comm.check_async_error()
        if time.monotonic() > deadline:
            raise pynccl.NcclTimeout(f"the step did not complete within {STEP_SECONDS:g} s")
        time.sleep(0.001)
    return x[0].item()


def missing(comm: pynccl.Communicator, store: Store) -> list[int]:
    """Return the ranks that do not reach the store. All survivors return the list of the first one to publish it."""
    store.set(f"alive/{comm.rank}", "")
    deadline = time.monotonic() + AGREEMENT_SECONDS
    gone = list(range(comm.size))
    while gone and time.monotonic() < deadline and not store.check(["gone"]):
        gone = [rank for rank in gone if not store.check([f"alive/{rank}"])]
        time.sleep(0.01)
    published = store.compare_set("gone", "", ",".join(map(str, gone)) or "none").decode()
    return [] if published == "none" else [int(rank) for rank in published.split(",")]


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
            if not gone or comm.rank in gone:  # no rank died, or this rank was too late for the others
                raise
            left = [rank for rank in range(comm.size) if rank not in gone]
            rank, device = left.index(comm.rank), comm.device
            comm.abort()  # destroy() would wait for the dead rank
            comm = pynccl.from_store(PrefixStore("smaller", store), rank, len(left), device=device)
    with comm:
        full, reduced = (float("1" * n) for n in (size, max(size - 1, 1)))
        if sums != [full] * DEATH + [reduced] * (STEPS - DEATH):
            raise AssertionError(f"rank {comm.rank}: {sums}")
        return f"dead_rank: {DEATH} steps on {size} ranks, {STEPS - DEATH} on {comm.size}: all sums are right"


if __name__ == "__main__":
    world = pynccl.init()
    launch = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    verified = main(world, PrefixStore("dead_rank", launch))
    if world.rank == 0:
        print(verified)
