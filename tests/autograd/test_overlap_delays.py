"""Overlapped layers whose lanes run late, each in its own time: the same bits; NaN where a buffer is used wrongly."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from deferred import deferred_lanes, poisoned_workspaces
from ranks import RankPool
from schedule import Log, Schedule
from test_overlap_schedule import CASES, ON_ONE, ON_TWO, OTHERS, Variant, tensors
from torch import Tensor

import pynccl_autograd as ad
from pynccl import Communicator
from pynccl_autograd import OverlapConfig
from pynccl_autograd.overlap.lanes import HostLane
from pynccl_autograd.overlap.workspace import Workspace, workspace_of

SEEDS = 50
LATE = 0.0005  # seconds: some times what a piece takes
VERY_LATE = 0.01  # longer than all of a pass
ATTEMPTS = 5  # at showing that a wait is missing: a busy machine may be later still
GATHERED_TWICE = tuple(OverlapConfig(method, save_gathered=False) for method in ("slices", "ring"))
WAYS = (*ON_ONE, *ON_TWO, OTHERS[0], *GATHERED_TWICE)
MORE: dict[str, tuple[dict[str, Any], ...]] = {
    "all_gather_matmul": ({}, {"return_gathered": True}),
    "matmul_all_reduce": ({}, {"hand_off": True}),
    "matmul_reduce_scatter": ({}, {"reduce_dtype": torch.float32}),
    "copy_matmul": ({}, {"reduce_dtype": torch.float32}),
}


def variants(name: str) -> list[Variant]:
    return [
        Variant(way, dtype=torch.bfloat16 if "reduce_dtype" in more else torch.float32, more=tuple(more.items()))
        for way in WAYS
        for more in MORE[name]
    ]


def results(name: str, variant: Variant, comm: Communicator) -> list[Tensor]:
    """Outputs and gradients."""
    leaves = tensors(name, variant, comm)
    y = CASES[name].function(*leaves[:2], comm, leaves[2], overlap=variant.way, **dict(variant.more))
    outputs = [part * 1 for part in y] if isinstance(y, (tuple, ad.overlap.Slices)) else [y]
    there = [out.detach().clone() for out in outputs]  # at once: what comes too late is not there
    loss = sum((out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum() for out in outputs)
    loss.backward()  # type: ignore[union-attr]
    return there + [leaf.grad.clone() for leaf in leaves if leaf.grad is not None]


def same_bits(found: list[Tensor], expected: list[Tensor]) -> bool:
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


def repetitions_that_differ(comm: Communicator, name: str) -> list[str]:
    """Every way at once with lanes that only run ahead; then one after the other, late by chance."""
    expected = [(variant, results(name, variant, comm)) for variant in variants(name)]
    differ = []
    with poisoned_workspaces():
        for variant, wanted in expected:
            with deferred_lanes():
                if not same_bits(results(name, variant, comm), wanted):
                    differ.append(f"{variant}, no delay")
        for seed in range(SEEDS):
            variant, wanted = expected[seed % len(expected)]
            with deferred_lanes(seed * comm.size + comm.rank, LATE):
                if not same_bits(results(name, variant, comm), wanted):
                    differ.append(f"{variant}, seed {seed}")
    return differ


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_lanes_that_run_late_give_the_same_bits(ranks: RankPool, n: int, name: str) -> None:
    assert ranks.run(n, repetitions_that_differ, name) == [[]] * n


@contextmanager
def left_out(number: int) -> Iterator[None]:
    """The wait of this number, counted from here, is not issued; all believe it was. What is made is NaN at first."""
    plain, waits = HostLane._wait, itertools.count()

    def wait(self: HostLane, event: Any) -> None:
        if next(waits) != number:
            plain(self, event)

    HostLane._wait = wait  # type: ignore[method-assign]
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        HostLane._wait = plain  # type: ignore[method-assign]


def waits_behind_work(log: Log) -> list[bool]:
    """Of each wait, whether the lane that is waited for was given work before. What the caller has made before is there
    when the lanes begin, on a CPU; that it is waited for, too, shows in the proof of the schedule alone."""
    given: set[str] = set()
    behind: dict[int, bool] = {}
    for event in log.events:
        if event.kind == "ran":
            given.add(event.lane)
        elif event.kind == "recorded":
            behind[event.point] = event.lane in given
    return [behind[log.events[at].point] for at in log.waits]


def left_out_one_by_one(comm: Communicator, name: str, variant: Variant) -> dict[str, bool]:
    """Wait -> whether a result is another without it, where the lane that is not waited for is very late."""
    wanted = results(name, variant, comm)
    with deferred_lanes(), Schedule() as schedule:
        results(name, variant, comm)
    waits = [
        (log.events[at], behind)
        for log in schedule.logs
        for at, behind in zip(log.waits, waits_behind_work(log), strict=True)
    ]
    shown = {}
    for number, (event, behind) in enumerate(waits):
        if behind:
            shown[f"{number}: {event}"] = any(
                differs_without(comm, number, event.name, name, variant, wanted) for _ in range(ATTEMPTS)
            )
    return shown


def differs_without(
    comm: Communicator, number: int, late: str, name: str, variant: Variant, wanted: list[Tensor]
) -> bool:
    """On any rank."""
    with deferred_lanes(delay={late: VERY_LATE}), poisoned_workspaces(), left_out(number):
        try:
            differs = not same_bits(results(name, variant, comm), wanted)
        except RuntimeError as error:  # autograd may see that what was saved is written to only now
            differs = "modified by an inplace operation" in str(error)
            if not differs:
                raise
    return bool(comm.all_reduce(torch.tensor(float(differs))).item())


LEFT_OUT = {
    "gather by slices": ("all_gather_matmul", OverlapConfig("slices", chunks=2, save_gathered=False)),
    "gather around the ring": ("all_gather_matmul", OverlapConfig("ring", save_gathered=False)),
    "gather on two streams": ("all_gather_matmul", OverlapConfig("slices", chunks=3, compute_streams=2)),
    "scatter by slices": ("matmul_reduce_scatter", OverlapConfig("slices", chunks=2)),
    "scatter around the ring": ("matmul_reduce_scatter", OverlapConfig("ring")),
    "scatter by exchange on two": ("matmul_reduce_scatter", OverlapConfig("exchange", chunks=2, compute_streams=2)),
    "all-reduce by exchange": ("matmul_all_reduce", OverlapConfig("exchange", chunks=2)),
    "copy, bulk": ("copy_matmul", OverlapConfig("bulk")),
    "copy around the ring": ("copy_matmul", OverlapConfig("ring")),
}  # fmt: skip


@pytest.mark.parametrize("case", LEFT_OUT)
def test_a_wait_that_is_left_out_shows_in_the_results(ranks: RankPool, case: str) -> None:
    name, way = LEFT_OUT[case]
    for shown in ranks.run(2, left_out_one_by_one, name, Variant(way)):
        assert shown and all(shown.values()), shown


def test_a_slice_that_is_handed_out_early_shows_in_the_results(ranks: RankPool) -> None:
    variant = Variant(OverlapConfig("slices", chunks=3), more=(("hand_off", True),))
    for shown in ranks.run(2, left_out_one_by_one, "matmul_all_reduce", variant):
        assert [wait.partition(" ")[2] for wait in shown] == ["comm waits main"] * 3 + ["main waits comm"] * 3
        assert all(shown.values()), shown


def passes_with_poison(comm: Communicator, name: str) -> list[str]:
    """Variants with a NaN in an output, or in a gradient, which is made later. A kept buffer must have become NaN."""
    bad = []
    with poisoned_workspaces():
        for variant in variants(name):
            if any(t.isnan().any() for t in results(name, variant, comm)):
                bad.append(str(variant))
    buffers = workspace_of(comm)._buffers
    assert buffers and all(buffer.view(torch.float64).isnan().all() for buffer in buffers.values())
    return bad


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_no_result_is_in_a_buffer_that_was_let_go(ranks: RankPool, n: int, name: str) -> None:
    assert ranks.run(n, passes_with_poison, name) == [[]] * n


def kept_buffers(comm: Communicator) -> list[bool]:
    """Whether a buffer is NaN: when an operation gets it, while it is used, after it was let go, when it has grown."""
    work, like = Workspace(), torch.zeros(1)
    found = []
    with poisoned_workspaces():
        with work.lent(like):
            kept = work.empty("partial", (3, 5), like)
            found.append(bool(kept.isnan().all()))
            found.append(bool(kept.fill_(1).isnan().any()))
        found.append(bool(kept.isnan().all()))
        with work.lent(like):
            found.append(bool(work.empty("partial", (4, 99), like).isnan().all()))
    with work.lent(like):
        work.empty("partial", (3, 5), like).fill_(1)
    found.append(bool(work.empty("partial", (3, 5), like).isnan().any()))
    return found


def test_a_buffer_that_is_kept_becomes_nan(ranks: RankPool) -> None:
    assert ranks.run(2, kept_buffers) == [[True, False, True, True, False]] * 2
