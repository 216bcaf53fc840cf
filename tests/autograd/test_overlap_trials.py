"""overlap="auto": what is tried, what is then kept, and that all ranks keep the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import RankPool
from torch import nn
from tried import (
    BACKWARD,
    FUNCTIONS,
    IN,
    MOST_CALLS,
    OUT,
    PATTERNS,
    ROWS,
    Took,
    Ways,
    calling,
    settled,
    timed_by,
    tried_small,
)

import pynccl_autograd as ad
from pynccl import Communicator
from pynccl.comm.observers import observing
from pynccl_autograd import OverlapConfig
from pynccl_autograd.overlap import routes
from pynccl_autograd.overlap.trials import TOO_FEW, Decision


def all_turns(comm: Communicator, more: int = 4, **options: Any) -> tuple[list[Took], dict[str, str]]:
    """What was taken in calls of all functions, and what was kept."""
    layer, ways = nn.Identity(), Ways()
    with tried_small(), observing(ways):
        for name in FUNCTIONS:
            call = calling(comm, name, layer, **options)
            for _ in range(MOST_CALLS + more):
                call()
    assert all(one.settled for one in ad.overlap.decisions(layer))
    return ways.took, settled(layer)


def test_the_ways_take_turns_in_at_most_24_calls(ranks: RankPool) -> None:
    first, other = ranks.run(2, all_turns)
    assert first == other
    took, kept = first
    assert set(kept) == set(PATTERNS)
    for pattern, ways in PATTERNS.items():
        found = [one for one in took if one.pattern == pattern]
        rounds = MOST_CALLS // len(ways)
        trial = [one.way for one in found[: rounds * len(ways)]]
        each = [trial[at : at + len(ways)] for at in range(0, len(trial), len(ways))]
        assert all(sorted(one) == sorted(ways) for one in each)
        assert len({one[0] for one in each}) == rounds  # each round begins with another
        assert [one.settled for one in found] == [False] * len(trial) + [True] * (len(found) - len(trial))
        assert {one.way for one in found[len(trial) :]} == {kept[pattern]} <= set(ways)


SLICES, EXCHANGES = ([f"{method} {chunks}" for chunks in (2, 4, 8)] for method in ("slices", "exchange"))
GATHERS = ("all_gather_matmul", "row_backward")
# What is tried of what is left open; with deterministic sums nothing is.
OPEN: list[tuple[Any, dict[str, list[str]]]] = [
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


def tried_of_open(comm: Communicator) -> list[dict[str, list[str]]]:
    """The ways of each pattern, in the order in which they were first taken."""
    found = []
    for config, _ in OPEN:
        of_torch = isinstance(config, str)
        torch.use_deterministic_algorithms(of_torch)
        try:
            took, _ = all_turns(comm, 1, overlap="auto" if of_torch else config)
        finally:
            torch.use_deterministic_algorithms(False)
        found.append({one: list(dict.fromkeys(took.way for took in took if took.pattern == one)) for one in PATTERNS})
    return found


def test_what_is_left_open_is_tried(ranks: RankPool) -> None:
    assert ranks.run(2, tried_of_open) == [[expected for _, expected in OPEN]] * 2


def chosen(comm: Communicator, tables: list[dict[str, Any]]) -> dict[str, str]:
    """What is kept by the times of a table, one for each rank: seconds of a way, or of its first, second, .. call."""
    table = tables[comm.rank]

    def seconds(decision: Decision, number: int) -> float:
        took = table.get(decision.way, 1.0)
        return took[number % len(took)] if isinstance(took, list) else took

    layer = nn.Identity()
    with timed_by(seconds):
        for name in FUNCTIONS:
            call = calling(comm, name, layer)
            for _ in range(MOST_CALLS + 1):
                call()
        return settled(layer)


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
def test_the_fastest_way_is_kept(ranks: RankPool, case: str) -> None:
    tables, best = KEPT[case]
    expected = {pattern: best if best in PATTERNS[pattern] else "slices 2" for pattern in PATTERNS}
    assert ranks.run(len(tables), chosen, tables) == [expected] * len(tables)


def not_tried(comm: Communicator) -> list[Any]:
    """What is too small by the bounds of the machine, what is not, and the last of too many shapes of a layer."""
    found: list[Any] = []
    for features in (64, 512):
        layer = ad.RowParallelLinear(features, features, comm, sequence_parallel=True)
        with torch.no_grad(), ad.overlap.report() as report:
            layer(torch.randn(256, features // comm.size))
        found += [(row.decision.way, row.decision.reason, row.decision.settled) for row in report.rows()]
    many = nn.Identity()
    with tried_small(), torch.no_grad():
        for more in range(routes.MOST_SHAPES + 3):
            x = torch.randn(comm.size * (64 + more), IN)
            ad.matmul_reduce_scatter(x, torch.ones(OUT, IN), comm, owner=many)
    decisions = ad.overlap.decisions(many)
    return [*found, sum(not one.settled for one in decisions), len(decisions), decisions[-1].reason[:50]]


def test_what_is_too_small_or_of_many_shapes_is_not_tried(ranks: RankPool) -> None:
    for found in ranks.run(2, not_tried):
        assert found == [
            ("off", TOO_FEW, True),
            ("off", "on trial, call 1 of 20", False),
            routes.MOST_SHAPES,
            routes.MOST_SHAPES + 3,
            "16 shapes of this pass were tried before; ad.overlap.retry(layer)"[:50],
        ]


def all_calls(comm: Communicator, seed: int) -> tuple[list[Took], int]:
    """The ways of 32 training steps with evaluation between them; how many passes were decided in the end."""
    ways, kept = Ways(), 0
    options: dict[str, Any] = {"dtype": torch.float64}
    with tried_small(seed * comm.size + comm.rank), observing(ways):
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
            kept += sum(len(settled(layer)) for layer in model)
    return ways.took, kept


@pytest.mark.parametrize(("n", "seed"), [(2, 1), (3, 2), (4, 3)])
def test_all_ranks_take_the_same_way_whatever_their_clocks_say(ranks: RankPool, n: int, seed: int) -> None:
    first, *others = ranks.run(n, all_calls, seed)
    assert len(first[0]) > 150 and first[1] == 6
    assert others == [first] * (n - 1)
