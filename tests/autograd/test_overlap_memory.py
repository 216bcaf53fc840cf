"""Many steps of overlapped layers hold what the first one took; an error in one leaves the next one alone."""

from __future__ import annotations

import gc
import itertools
import os
import threading
from typing import Any, NamedTuple

import pytest
import torch
from ranks import RankPool
from test_overlap_schedule import results, same_bits, tensors
from torch import Tensor

import pynccl_autograd as ad
from pynccl import Communicator
from pynccl.host.memory import tensor_at
from pynccl_autograd import OverlapConfig
from pynccl_autograd.overlap import reducing
from pynccl_autograd.overlap.workspace import workspace_of

WARM_UP, STEPS = 100, 400
# Bytes of a rank that the allocator may still take after the warm-up: 300 steps that kept one activation each, of
# 16 KiB, would take 5 MiB.
GROWTH = 4 << 20
SEQUENCE, WIDTH = 64, 32
SLICES = OverlapConfig("slices", chunks=3)


class Held(NamedTuple):
    """What a process holds between steps."""

    workspace: int  # bytes
    tensors: int
    threads: int
    resident: int  # bytes


def held(comm: Communicator) -> Held:
    tensor_at.cache_clear()  # views of addresses that were passed, a bounded number, which hold no memory
    gc.collect()
    tensors = sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return Held(workspace_of(comm).nbytes, tensors, threading.active_count(), resident)


def many_steps(comm: Communicator) -> list[Held]:
    """What is held after the first step, after the warm-up, and at the end."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"comm": comm, "sequence_parallel": True, "overlap": SLICES}
    column = ad.ColumnParallelLinear(WIDTH, WIDTH * 2, **options)
    row = ad.RowParallelLinear(WIDTH * 2, WIDTH, **options)
    x = torch.randn(SEQUENCE // comm.size, 2, WIDTH)
    found = []
    for step in range(STEPS):
        row(column(x)).square().sum().backward()
        for parameter in (*column.parameters(), *row.parameters()):
            parameter.grad = None
        if step in (0, WARM_UP, STEPS - 1):
            found.append(held(comm))
    return found


def test_many_steps_take_no_more_than_the_first(ranks: RankPool) -> None:
    for first, warm, last in ranks.run(2, many_steps, timeout=110):
        assert first.workspace == last.workspace > 0
        assert last.tensors <= first.tensors and last.threads <= first.threads
        assert last.resident - warm.resident < GROWTH, (warm, last)


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


def after_dropped_slices(comm: Communicator) -> list[str]:
    """Slices that nobody reads, or not to the end, or after others were asked for: what is wrong afterwards."""
    wrong = []
    x, w, bias = tensors("matmul_all_reduce", comm)
    whole = ad.matmul_all_reduce(x, w, comm, bias, overlap=SLICES)

    def hand_off() -> ad.overlap.Slices:
        return ad.matmul_all_reduce(x, w, comm, bias, overlap=SLICES, hand_off=True)

    def check(what: str, found: Tensor, expected: Tensor) -> None:
        if not torch.equal(found, expected):
            wrong.append(what)

    hand_off()
    check("after unread ones", hand_off().whole(), whole)
    slices = hand_off()
    first, rows = slices[0], slices.rows[0]
    del slices
    check("after the first was read", hand_off().whole(), whole)
    check("the first, of which the others were dropped", first, whole[rows])
    one, other = hand_off(), hand_off()
    check("the second of two", other.whole(), whole)
    check("the first of two", one.whole(), whole)
    hand_off()[-1].sum().backward()
    assert x.grad is not None
    check("the gradient of the rows before the last slice", x.grad[: rows.stop], torch.zeros_like(x)[: rows.stop])
    if workspace_of(comm)._lock.locked():
        wrong.append("the workspace is lent")
    return wrong


def test_slices_that_are_dropped_leave_the_next_call_alone(ranks: RankPool) -> None:
    assert ranks.run(2, after_dropped_slices) == [[]] * 2
