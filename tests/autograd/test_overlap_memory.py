"""Many steps of overlapped layers hold what the first one took; an error in one leaves the next one alone."""

from __future__ import annotations

import gc
import itertools
import os
import threading
import weakref
from typing import Any, NamedTuple

import pytest
import torch
from ranks import RankPool
from test_overlap_delays import results, same_bits
from test_overlap_schedule import CASES, Variant, tensors
from torch import Tensor

import pynccl_autograd as ad
from pynccl import Communicator
from pynccl.host.memory import tensor_at
from pynccl.interop.streams import Handle
from pynccl_autograd import OverlapConfig
from pynccl_autograd.overlap import reducing
from pynccl_autograd.overlap.lanes import Lanes
from pynccl_autograd.overlap.workspace import workspace_of

WARM_UP, STEPS = 100, 400
PAGE = os.sysconf("SC_PAGE_SIZE")
# Bytes of a rank that the allocator may still take after the warm-up: 300 steps that kept one activation each, of
# 16 KiB, would take 5 MiB.
GROWTH = 4 << 20
SEQUENCE, WIDTH = 64, 32


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
        resident = int(file.read().split()[1]) * PAGE
    return Held(workspace_of(comm).nbytes, tensors, threading.active_count(), resident)


def many_steps(comm: Communicator, way: OverlapConfig) -> list[Held]:
    """What is held after the first step, after the warm-up, and at the end."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"comm": comm, "sequence_parallel": True, "overlap": way}
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


RING = pytest.param(OverlapConfig("ring"), id="ring", marks=pytest.mark.slow)


@pytest.mark.parametrize("way", [pytest.param(OverlapConfig("slices", chunks=4), id="slices"), RING])
def test_many_steps_take_no_more_than_the_first(ranks: RankPool, way: OverlapConfig) -> None:
    for first, warm, last in ranks.run(2, many_steps, way, timeout=110):
        assert first.workspace == last.workspace > 0
        assert last.tensors <= first.tensors and last.threads <= first.threads
        assert last.resident - warm.resident < GROWTH, (warm, last)


def as_on_a_gpu(lanes: Lanes) -> Any:
    """The handle of the lane of communication, which lets the lanes keep the buffers."""
    stream = getattr(lanes.comm, "stream", None)
    if stream is None:
        return None
    handle = Handle(stream.handle)
    handle.owner = lanes.kept
    return handle


def deleted_layers(comm: Communicator) -> list[bool]:
    """Which of two layers' weights are still there when the layers are not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Lanes, "_handle", as_on_a_gpu)
        way = OverlapConfig("slices", chunks=4)  # a ring's calls are groups, which are not kept
        options: dict[str, Any] = {"comm": comm, "sequence_parallel": True, "overlap": way}
        column = ad.ColumnParallelLinear(WIDTH, WIDTH * 2, **options)
        row = ad.RowParallelLinear(WIDTH * 2, WIDTH, **options)
        x = torch.randn(SEQUENCE // comm.size, 2, WIDTH)
        for _ in range(4):  # a call is kept when it is made for the second time
            row(column(x)).square().sum().backward()
        weights = [weakref.ref(column.weight), weakref.ref(row.weight)]
        del column, row
        gc.collect()
    return [weight() is not None for weight in weights]


def test_the_weights_of_deleted_layers_go(ranks: RankPool) -> None:
    assert ranks.run(2, deleted_layers) == [[False, False]] * 2


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


COLLECTIVES = {
    "all_gather_matmul": ("all_gather", "reduce_scatter"),
    "matmul_reduce_scatter": ("reduce_scatter", "all_gather"),
    "matmul_all_reduce": ("all_reduce",),
    "copy_matmul": ("all_reduce",),
}


def after_errors(comm: Communicator) -> list[str]:
    return [f"{name}: {wrong}" for name in CASES for wrong in after_an_error(comm, name)]


def after_an_error(comm: Communicator, name: str) -> list[str]:
    """A collective of the forward or of the backward pass raises: what is wrong afterwards."""
    variant = Variant(OverlapConfig("slices", chunks=3))
    workspace = workspace_of(comm)
    workspace._buffers = {}
    wanted, wrong = results(name, variant, comm), []
    needed = workspace.nbytes
    for collective, at in itertools.product(COLLECTIVES[name], (0, 1, 2)):
        with pytest.MonkeyPatch.context() as patch:
            failing_once(patch, Communicator, collective, at)
            with pytest.raises(Broken):
                results(name, variant, comm)
        if workspace._lock.locked() or workspace.nbytes:
            wrong.append(f"{collective} {at}: the workspace is kept, {workspace.nbytes} bytes")
        if not same_bits(results(name, variant, comm), wanted) or workspace.nbytes != needed:
            wrong.append(f"{collective} {at}: the next call gives other bits")
    return wrong


def test_an_error_in_the_middle_leaves_the_next_call_alone(ranks: RankPool) -> None:
    assert ranks.run(2, after_errors) == [[]] * 2


def after_an_error_on_a_lane(comm: Communicator) -> bool:
    """The sum of a slice raises in the thread of the lane; who waits for it hears of it."""
    name, variant = "matmul_reduce_scatter", Variant(OverlapConfig("exchange", chunks=3))
    wanted = results(name, variant, comm)
    with pytest.MonkeyPatch.context() as patch:
        failing_once(patch, reducing, "sum_in_order", 1)
        with pytest.raises(Broken):
            results(name, variant, comm)
    return not workspace_of(comm)._lock.locked() and same_bits(results(name, variant, comm), wanted)


def test_an_error_on_a_lane_reaches_the_caller_once(ranks: RankPool) -> None:
    assert ranks.run(2, after_an_error_on_a_lane) == [True, True]


def after_dropped_slices(comm: Communicator) -> list[str]:
    """Slices that nobody reads, or not to the end, or after others were asked for: what is wrong afterwards."""
    name, wrong = "matmul_all_reduce", []
    variant = Variant(OverlapConfig("slices", chunks=3))
    x, w, bias = tensors(name, variant, comm)
    whole = ad.matmul_all_reduce(x, w, comm, bias, overlap=variant.way)

    def hand_off() -> ad.overlap.Slices:
        return ad.matmul_all_reduce(x, w, comm, bias, overlap=variant.way, hand_off=True)

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
