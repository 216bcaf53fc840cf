"""What mistakes look like: bad arguments, calls that disagree, a rank that never comes; and that the job can go on.

    torchrun --standalone --nproc-per-node=2 scripts/examples/errors.py
    errors: 6 mistakes on 2 ranks, and the job goes on:

Bad arguments are TypeError or ValueError, raised before anything is launched. What NCCL refuses, or what concerns other
ranks, is a pynccl.NcclError. With PYNCCL_CHECK=1, read when a communicator is made, calls that disagree are an error on
all ranks; without it, they may return wrong numbers or never. An init has a deadline, `timeout=` in seconds.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

import pynccl


def transposed(comm: pynccl.Communicator) -> None:
    comm.all_reduce(torch.ones(2, 3, device=comm.device).t())


def booleans(comm: pynccl.Communicator) -> None:
    comm.all_reduce(torch.ones(3, dtype=torch.bool, device=comm.device))


def indivisible(comm: pynccl.Communicator) -> None:
    comm.reduce_scatter(torch.ones(comm.size * 3 + 1, device=comm.device))


def no_such_rank(comm: pynccl.Communicator) -> None:
    comm.broadcast(torch.ones(3, device=comm.device), root=comm.size)


def counts_that_disagree(comm: pynccl.Communicator) -> None:
    comm.all_reduce(torch.ones(3 if comm.rank == 0 else 4, device=comm.device))


def a_rank_that_never_comes(comm: pynccl.Communicator) -> None:
    device = None if comm.device == "cpu" else comm.device
    pynccl.Communicator.init(2, pynccl.get_unique_id(), 0, device=device, timeout=1.0)  # nobody is rank 1


MISTAKES: dict[Callable[[pynccl.Communicator], None], type[Exception]] = {
    transposed: ValueError,
    booleans: TypeError,
    indivisible: ValueError,
    no_such_rank: ValueError,
    counts_that_disagree: pynccl.NcclInvalidUsage,
    a_rank_that_never_comes: pynccl.NcclTimeout,
}


def main(comm: pynccl.Communicator) -> str:
    os.environ["PYNCCL_CHECK"] = "1"
    checked = comm.split(0)
    assert checked is not None
    said = []
    with checked:
        for mistake, expected in MISTAKES.items():
            try:
                mistake(checked)
                if comm.size > 1:  # alone, a rank divides everything and agrees with itself
                    raise AssertionError(f"{mistake.__name__} passed without an error")
            except expected as error:
                text = str(error).replace("\n", "\n  ")
                said.append(f"{mistake.__name__}: {type(error).__name__}: {text}")
            total = checked.all_reduce(torch.ones(3, device=comm.device))  # the communicator is in order
            torch.testing.assert_close(total.cpu(), torch.full((3,), float(comm.size)))
    return "\n".join([f"errors: {len(said)} mistakes on {comm.size} ranks, and the job goes on:", *said])


if __name__ == "__main__":
    with pynccl.init() as world:
        verified = main(world)
        if world.rank == 0:
            print(verified)
