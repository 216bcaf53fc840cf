"""overlap="auto": which candidates are tried, which one is kept, and that all ranks agree."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from overlap_trials import (
    BACKWARD,
    FUNCTIONS,
    IN,
    MAX_CALLS,
    OUT,
    PATTERNS,
    ROWS,
    ChosenSchedule,
    Schedules,
    chosen_by_trials,
    make_call,
    tune_small_layers,
    tune_with_times,
)
from ranks import RankPool
from torch import nn

import pynccl_autograd as ad
from pynccl import Communicator
from pynccl.comm.observers import observing
from pynccl_autograd import OverlapConfig
from pynccl_autograd.overlap import routes
from pynccl_autograd.overlap.trials import TOO_FEW, Decision


def run_trials(comm: Communicator, more: int = 4, **options: Any) -> tuple[list[ChosenSchedule], dict[str, str]]:
    """Return the schedules used by calls of all functions, and the decisions."""
    layer, schedules = nn.Identity(), Schedules()
    with tune_small_layers(), observing(schedules):
        for name in FUNCTIONS:
            call = make_call(comm, name, layer, **options)
            for _ in range(MAX_CALLS + more):
                call()
    assert all(decision.settled for decision in ad.overlap.decisions(layer))
    return schedules.chosen, chosen_by_trials(layer)


def test_candidates_alternate_in_at_most_24_calls(ranks: RankPool) -> None:
    first, other = ranks.run(2, run_trials)
    assert first == other
    took, kept = first
    assert set(kept) == set(PATTERNS)
    for pattern, candidates in PATTERNS.items():
        found = [each for each in took if each.pattern == pattern]
        rounds = MAX_CALLS // len(candidates)
        trial = [each.schedule for each in found[: rounds * len(candidates)]]
        trial_rounds = [trial[at : at + len(candidates)] for at in range(0, len(trial), len(candidates))]
        assert all(sorted(each) == sorted(candidates) for each in trial_rounds)
        assert len({each[0] for each in trial_rounds}) == rounds  # each round begins with a different candidate
        assert [each.settled for each in found] == [False] * len(trial) + [True] * (len(found) - len(trial))
        assert {each.schedule for each in found[len(trial) :]} == {kept[pattern]} <= set(candidates)


SLICES, EXCHANGES = ([f"{method} {chunks}" for chunks in (2, 4, 8)] for method in ("slices", "exchange"))
GATHERS = ("all_gather_matmul", "row_backward")
# Candidates for options left open; deterministic sums leave none.
OPEN_OPTIONS: list[tuple[Any, dict[str, list[str]]]] = [
    (OverlapConfig("slices"), dict.fromkeys(PATTERNS, SLICES)),
    (OverlapConfig("exchange"), {one: SLICES if one in GATHERS else EXCHANGES for one in PATTERNS}),
    (OverlapConfig("slices", chunks=3), {one: ["slices 3"] for one in PATTERNS}),
    (
        OverlapConfig("off", dgrad=OverlapConfig("slices")),
        {one: SLICES if one in BACKWARD else ["off"] for one in PATTERNS},
    ),
    (
        OverlapConfig(deterministic=True),
        {one: ["off" if one in GATHERS else "exchange 1"] for one in PATTERNS},
    ),
    ("deterministic algorithms of torch", {one: ["off"] for one in PATTERNS}),
]


def open_candidates(comm: Communicator) -> list[dict[str, list[str]]]:
    """Return the schedules of each pattern in order of first use."""
    found = []
    for config, _ in OPEN_OPTIONS:
        deterministic_torch = isinstance(config, str)
        torch.use_deterministic_algorithms(deterministic_torch)
        try:
            took, _ = run_trials(comm, 1, overlap="auto" if deterministic_torch else config)
        finally:
            torch.use_deterministic_algorithms(False)
        found.append(
            {key: list(dict.fromkeys(took.schedule for took in took if took.pattern == key)) for key in PATTERNS}
        )
    return found


def test_open_options_are_tried(ranks: RankPool) -> None:
    assert ranks.run(2, open_candidates) == [[expected for _, expected in OPEN_OPTIONS]] * 2


def decisions_for(comm: Communicator, tables: list[dict[str, Any]]) -> dict[str, str]:
    """Return the decisions for given times: one table per rank, with the seconds of each schedule or call."""
    table = tables[comm.rank]

    def seconds(decision: Decision, number: int) -> float:
        took = table.get(decision.schedule, 1.0)
        return took[number % len(took)] if isinstance(took, list) else took

    layer = nn.Identity()
    with tune_with_times(seconds):
        for name in FUNCTIONS:
            call = make_call(comm, name, layer)
            for _ in range(MAX_CALLS + 1):
                call()
        return chosen_by_trials(layer)


SLOW: dict[str, Any] = {"off": 1.0, "bulk": 1.2, "slices 2": 1.1, "slices 4": 1.1, "slices 8": 1.1, "ring": 1.1}
FAST = {"off": 1.0, "bulk": 0.95, "slices 2": 0.9, "slices 4": 0.94, "slices 8": 0.92, "ring": 0.91}
KEPT: dict[str, tuple[list[dict[str, Any]], str]] = {
    "the bulk is the fastest": ([{**FAST, "bulk": 0.8}] * 2, "bulk"),
    "slices are the fastest": ([{**FAST, "slices 8": 0.8}] * 2, "slices 8"),
    "the ring is the fastest": ([{**FAST, "ring": 0.8}] * 2, "ring"),
    "less than 3 percent are gained": ([{**SLOW, "slices 4": 0.98}] * 2, "off"),
    "more than 3 percent are gained": ([{**SLOW, "slices 4": 0.96}] * 2, "slices 4"),
    "one call was slow by chance": ([{**SLOW, "slices 4": [9.0, 0.8, 0.8, 0.8]}] * 2, "slices 4"),
    "one call was fast by chance": ([{**SLOW, "slices 4": [1.1, 1.1, 0.3, 1.1]}] * 2, "off"),
    "one call without overlap was slow": ([{**SLOW, "off": [1.0, 1.0, 50.0, 1.0]}] * 2, "off"),
    "the slowest rank counts": (
        [
            {"off": 1.0, "bulk": 1.2, "slices 2": 0.9, "slices 4": 1.1, "slices 8": 0.5, "ring": 0.1},
            {"off": 1.0, "bulk": 1.2, "slices 2": 0.9, "slices 4": 1.1, "slices 8": 0.95, "ring": 1.3},
            dict.fromkeys(SLOW, 0.2),
        ],
        "slices 2",
    ),
}


@pytest.mark.parametrize("case", KEPT)
def test_the_fastest_schedule_is_kept(ranks: RankPool, case: str) -> None:
    tables, best = KEPT[case]
    expected = {pattern: best if best in PATTERNS[pattern] else "slices 2" for pattern in PATTERNS}
    assert ranks.run(len(tables), decisions_for, tables) == [expected] * len(tables)


def untried_decisions(comm: Communicator) -> list[Any]:
    """Decisions for matmuls below and above the size limit, and for a layer with too many shapes."""
    found: list[Any] = []
    for features in (64, 512):
        layer = ad.RowParallelLinear(features, features, comm, sequence_parallel=True)
        with torch.no_grad(), ad.overlap.report() as report:
            layer(torch.randn(256, features // comm.size))
        found += [(row.decision.schedule, row.decision.reason, row.decision.settled) for row in report.rows()]
    many = nn.Identity()
    with tune_small_layers(), torch.no_grad():
        for more in range(routes.MAX_SHAPES + 3):
            x = torch.randn(comm.size * (64 + more), IN)
            ad.matmul_reduce_scatter(x, torch.ones(OUT, IN), comm, owner=many)
    decisions = ad.overlap.decisions(many)
    return [*found, sum(not decision.settled for decision in decisions), len(decisions), decisions[-1].reason[:50]]


def test_small_matmuls_and_too_many_shapes_are_not_tried(ranks: RankPool) -> None:
    for found in ranks.run(2, untried_decisions):
        assert found == [
            ("off", TOO_FEW, True),
            ("off", "on trial, call 1 of 20", False),
            routes.MAX_SHAPES,
            routes.MAX_SHAPES + 3,
            "16 shapes of this pass were tried before; ad.overlap.retry(layer)"[:50],
        ]


def train_with_auto(comm: Communicator, seed: int) -> tuple[list[ChosenSchedule], int]:
    """Return the schedules of 32 training steps with evaluations in between, and the number of decided passes."""
    schedules, kept = Schedules(), 0
    options: dict[str, Any] = {"dtype": torch.float64}
    with tune_small_layers(seed * comm.size + comm.rank), observing(schedules):
        for scattered in (True, False):
            torch.manual_seed(3)
            model = nn.Sequential(
                ad.ColumnParallelLinear(IN, OUT, comm, sequence_parallel=scattered, **options),
                nn.GELU(),
                ad.RowParallelLinear(OUT, IN, comm, sequence_parallel=scattered, **options),
            )
            x = torch.randn(ROWS // comm.size if scattered else ROWS, IN, **options)
            for step in range(32):
                model(x.requires_grad_()).square().mean().backward()
                if step % 7 == 3:
                    with torch.no_grad():
                        model(x)
            kept += sum(len(chosen_by_trials(layer)) for layer in model)
    return schedules.chosen, kept


@pytest.mark.parametrize(("n", "seed"), [(2, 1), (3, 2), (4, 3)])
def test_all_ranks_use_the_same_schedule_when_their_clocks_differ(ranks: RankPool, n: int, seed: int) -> None:
    first, *others = ranks.run(n, train_with_auto, seed)
    assert len(first[0]) > 150 and first[1] == 6
    assert others == [first] * (n - 1)
