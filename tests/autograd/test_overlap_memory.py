"""Many steps of overlapped layers hold what the first one took; an error in one leaves the next one alone."""

from __future__ import annotations

import gc
import itertools
import threading
from typing import Any

import pytest
import torch
from ranks import RankPool
from test_overlap_schedule import results, same_bits
from torch import Tensor

import pynccl_autograd as ad
from pynccl import Communicator
from pynccl.host.memory import tensor_at
from pynccl_autograd import OverlapConfig
from pynccl_autograd.overlap import reducing
from pynccl_autograd.overlap.workspace import workspace_of

SEQUENCE, WIDTH = 64, 32
SLICES = OverlapConfig("slices", chunks=3)


def held(comm: Communicator) -> tuple[int, int, int]:
    """Bytes of the workspace, tensors, threads."""
    tensor_at.cache_clear()  # views of addresses that were passed, a bounded number, which hold no memory
    gc.collect()
    tensors = sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())
    return workspace_of(comm).nbytes, tensors, threading.active_count()


def many_steps(comm: Communicator) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """What is held after the first step, and at the end."""
    options: dict[str, Any] = {"comm": comm, "sequence_parallel": True, "overlap": SLICES}
    column = ad.ColumnParallelLinear(WIDTH, WIDTH * 2, **options)
    row = ad.RowParallelLinear(WIDTH * 2, WIDTH, **options)
    x = torch.randn(SEQUENCE // comm.size, 2, WIDTH)
    found: list[tuple[int, int, int]] = []
    for _ in range(100):
        row(column(x)).square().sum().backward()
        for parameter in (*column.parameters(), *row.parameters()):
            parameter.grad = None
        found.append(held(comm) if len(found) in (0, 99) else (0, 0, 0))
    return found[0], found[-1]


def test_many_steps_take_no_more_than_the_first(ranks: RankPool) -> None:
    for first, last in ranks.run(2, many_steps):
        assert first[0] == last[0] > 0
        assert last[1] <= first[1] and last[2] <= first[2]


class Broken(Exception):
    """What the tests let go wrong."""


def failing_once(patch: pytest.MonkeyPatch, owner: Any, name: str, at: int) -> None:
    """The call of this number raises, the others do not."""
    plain, calls = getattr(owner, name), itertools.count()

    def call(*args: Any, **options: Any) -> Any:
        if next(calls) == at:
            raise Broken
        return plain(*args, **options)

    patch.setattr(owner, name, call)


# Of forward and backward passes; the sums of an exchange are made in the thread of its lane.
BROKEN: list[tuple[str, OverlapConfig, Any, str]] = [
    ("all_gather_matmul", SLICES, Communicator, "all_gather"),
    ("all_gather_matmul", SLICES, Communicator, "reduce_scatter"),
    ("matmul_reduce_scatter", SLICES, Communicator, "reduce_scatter"),
    ("matmul_reduce_scatter", SLICES, Communicator, "all_gather"),
    ("matmul_all_reduce", SLICES, Communicator, "all_reduce"),
    ("copy_matmul", SLICES, Communicator, "all_reduce"),
    ("matmul_reduce_scatter", OverlapConfig("exchange", chunks=3), reducing, "sum_in_order"),
]


def after_errors(comm: Communicator) -> list[str]:
    """What is wrong once the first, second or third call of something has raised."""
    workspace, wrong = workspace_of(comm), []
    for name, way, owner, what in BROKEN:
        workspace.drop()
        wanted = results(name, way, comm)
        needed = workspace.nbytes
        for at in range(3):
            with pytest.MonkeyPatch.context() as patch:
                failing_once(patch, owner, what, at)
                with pytest.raises(Broken):
                    results(name, way, comm)
            if workspace._lock.locked() or workspace.nbytes:
                wrong.append(f"{name}, {what} {at}: the workspace is kept, {workspace.nbytes} bytes")
            if not same_bits(results(name, way, comm), wanted) or workspace.nbytes != needed:
                wrong.append(f"{name}, {what} {at}: the next call gives other bits")
    return wrong


def test_an_error_in_the_middle_leaves_the_next_call_alone(ranks: RankPool) -> None:
    assert ranks.run(2, after_errors) == [[]] * 2
