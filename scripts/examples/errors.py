"""Show the errors of common mistakes: bad arguments, mismatched calls, a missing rank. The job continues after each.

    torchrun --standalone --nproc-per-node=2 scripts/examples/errors.py
    errors: 6 mistakes on 2 ranks, and the job continues:

Bad arguments raise TypeError or ValueError before anything is launched. Errors from NCCL and errors that involve other
ranks are pynccl.NcclError. PYNCCL_CHECK=1, read when a communicator is created, makes mismatched calls an error on all
ranks; without it they can return wrong numbers or hang. Initialization has a deadline, `timeout=` in seconds.
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


def invalid_root(comm: pynccl.Communicator) -> None:
    comm.broadcast(torch.ones(3, device=comm.device), root=comm.size)


def mismatched_counts(comm: pynccl.Communicator) -> None:
    comm.all_reduce(torch.ones(3 if comm.rank == 0 else 4, device=comm.device))


def missing_rank(comm: pynccl.Communicator) -> None:
    device = None if comm.device == "cpu" else comm.device
    size = comm.size + 1  # as the last rank of one more: the others never join
    pynccl.Communicator.init(size, pynccl.get_unique_id(), size - 1, device=device, timeout=1.0)


MISTAKES: dict[Callable[[pynccl.Communicator], None], type[Exception]] = {
    transposed: ValueError,
    booleans: TypeError,
    indivisible: ValueError,
    invalid_root: ValueError,
    mismatched_counts: pynccl.NcclInvalidUsage,
    missing_rank: pynccl.NcclTimeout,
}


def main(comm: pynccl.Communicator) -> str:
    os.environ["PYNCCL_CHECK"] = "1"
    checked = comm.split(0)
    assert checked is not None
    lines = []
    with checked:
        for mistake, expected in MISTAKES.items():
            try:
                mistake(checked)
                if comm.size > 1:  # on a single rank some of these calls are valid
                    raise AssertionError(f"{mistake.__name__} passed without an error")
            except expected as error:
                text = str(error).replace("\n", "\n  ")
                lines.append(f"{mistake.__name__}: {type(error).__name__}: {text}")
            total = checked.all_reduce(torch.ones(3, device=comm.device))  # the communicator still works
            torch.testing.assert_close(total.cpu(), torch.full((3,), float(comm.size)))
    return "\n".join([f"errors: {len(lines)} mistakes on {comm.size} ranks, and the job continues:", *lines])


if __name__ == "__main__":
    with pynccl.init() as world:
        verified = main(world)
        if world.rank == 0:
            print(verified)
