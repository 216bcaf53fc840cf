"""overlap="auto": which candidates are tried, which one is kept, and that all ranks agree."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from overlap_auto import (
    BACKWARD,
    FUNCTIONS,
    IN,
    MAX_CALLS,
    OUT,
    PATTERNS,
    ROWS,
    STARTS,
    ChosenSchedule,
    RandomClock,
    Schedules,
    chosen_by_races,
    make_call,
    tune_small_layers,
    tune_with_times,
)
from ranks import RankPool
from torch import nn

import pynccl_autograd as ad
from pynccl import Communicator
from pynccl_autograd import OverlapConfig
from pynccl_autograd.overlap import choose, saved, tune
from pynccl_autograd.overlap.lanes import observing
from pynccl_autograd.overlap.schedules import TOO_FEW
from pynccl_autograd.state import state_of


def run_races(comm: Communicator, more: int = 4, **options: Any) -> tuple[list[ChosenSchedule], dict[str, str]]:
    """Return the schedules used by calls of all functions, and the decisions."""
    layer, schedules = nn.Identity(), Schedules()
    with tune_small_layers(), observing(schedules):
        for name in FUNCTIONS:
            call = make_call(comm, name, layer, **options)
            for _ in range(MAX_CALLS + more):
                call()
        assert all(decision.settled for decision in ad.overlap.decisions(layer))
        return schedules.chosen, chosen_by_races(layer)


def test_candidates_run_twice_in_each_round(ranks: RankPool) -> None:
    first, other = ranks.run(2, run_races)
    assert first == other
    took, kept = first
    assert set(kept) == set(PATTERNS)
    for pattern, candidates in PATTERNS.items():
        found = [each for each in took if each.pattern == pattern]
        for begin in STARTS:
            ways = [each.schedule for each in found[begin : begin + 2 * len(candidates)]]
            assert sorted(ways[::2]) == sorted(candidates) and ways[::2] == ways[1::2]
        race = STARTS[-1] + 2 * len(candidates)
        assert [each.settled for each in found] == [False] * race + [True] * (len(found) - race)
        assert {each.schedule for each in found[race:]} == {kept[pattern]} <= set(candidates)


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
            took, _ = run_races(comm, 1, overlap="auto" if deterministic_torch else config)
        finally:
            torch.use_deterministic_algorithms(False)
        found.append(
            {key: list(dict.fromkeys(took.schedule for took in took if took.pattern == key)) for key in PATTERNS}
        )
    return found


def test_open_options_are_tried(ranks: RankPool) -> None:
    assert ranks.run(2, open_candidates) == [[expected for _, expected in OPEN_OPTIONS]] * 2


SLOWEST_COUNTS: list[dict[str, float]] = [
    {"off": 1.0, "bulk": 1.2, "slices 2": 0.9, "slices 4": 1.1, "slices 8": 0.5, "ring": 0.1},
    {"off": 1.0, "bulk": 1.2, "slices 2": 0.9, "slices 4": 1.1, "slices 8": 0.95, "ring": 1.3},
    dict.fromkeys(("off", "bulk", "slices 2", "slices 4", "slices 8", "ring"), 0.2),
]


def decisions_for(comm: Communicator) -> dict[str, str]:
    layer = nn.Identity()
    with tune_with_times(lambda decision: SLOWEST_COUNTS[comm.rank][decision.schedule]):
        for name in FUNCTIONS:
            call = make_call(comm, name, layer)
            for _ in range(MAX_CALLS + 1):
                call()
        return chosen_by_races(layer)


def test_the_slowest_rank_counts(ranks: RankPool) -> None:
    assert ranks.run(3, decisions_for) == [dict.fromkeys(PATTERNS, "slices 2")] * 3


def share_a_race(comm: Communicator) -> list[Any]:
    """Calls of two layers and of a third one with other sizes; return what the first two have decided."""
    layers, schedules = [nn.Identity() for _ in range(3)], Schedules()
    calls = [
        make_call(comm, "matmul_reduce_scatter", layer, **options)
        for layer, options in zip(layers, ({}, {}, {"overlap": OverlapConfig(save_gathered=False)}), strict=True)
    ]
    with tune_small_layers(RandomClock(comm.rank)), observing(schedules):
        for _ in range(MAX_CALLS // 2 + 1):
            for call in calls:
                call()
        kept = [ad.overlap.decisions(layer) for layer in layers]
        assert kept[0] == kept[1] and all(one.settled for one in kept[0])
        assert not any(one.settled for one in kept[2])
        ad.overlap.retry(layers[0])
        assert ad.overlap.decisions(layers[0]) == ad.overlap.decisions(layers[1]) == ()
        calls[1]()
        assert not any(one.settled for one in ad.overlap.decisions(layers[1]))
    return [*schedules.chosen, *kept]


def test_layers_with_equal_passes_share_a_race(ranks: RankPool) -> None:
    first, other = ranks.run(2, share_a_race)
    assert first == other


def ask_again(comm: Communicator, slower: bool) -> list[Any]:
    """The ring wins; then "off" is asked again, and is faster or not."""
    phase, layer, schedules = ["race"], nn.Identity(), Schedules()
    times = {"race": {"ring": 0.5, "off": 1.0}, "after": {"ring": 2.0 if slower else 0.5, "off": 1.0}}
    with (
        pytest.MonkeyPatch.context() as patch,
        tune_with_times(lambda decision: times[phase[0]].get(decision.schedule, 0.9)),
        observing(schedules),
    ):
        patch.setattr(tune, "ASK", 40)
        call = make_call(comm, "matmul_all_reduce", layer)
        for _ in range(MAX_CALLS + 1):
            call()
        assert [one.schedule for one in ad.overlap.decisions(layer)] == ["ring"]
        phase[0] = "after"
        for _ in range(40 + tune.ASK_ROUNDS * tune.EVERY):
            call()
        (decision,) = ad.overlap.decisions(layer)
        won = [one["schedule"] for one in saved.won.values()]
    return [*schedules.chosen, decision.schedule, decision.settled, decision.reason.split(";")[0], won]


def test_off_replaces_a_winner_that_has_become_slower(ranks: RankPool) -> None:
    for slower in (True, False):
        first, other = ranks.run(2, ask_again, slower)
        assert first == other
        reason = (
            "ring: median +100%, faster in 0 of 7 rounds after call 40: off"
            if slower
            else ("ring: median -50%, faster in 2 of 2 rounds")
        )
        expected = "off" if slower else "ring"
        assert first[-4:] == [expected, True, reason, [expected]]


def keep_winners(comm: Communicator) -> list[str]:
    """Return the decision for a pass before and after calls of many other shapes, which are not tried."""
    layer, found = nn.Identity(), []
    with tune_with_times(lambda decision: 0.5 if decision.schedule == "ring" else 1.0), torch.no_grad():
        w = torch.ones(OUT, IN)

        def call(rows: int) -> None:
            ad.matmul_reduce_scatter(torch.ones(comm.size * rows, IN), w, comm, owner=layer)

        for _ in range(MAX_CALLS + 1):
            call(64)
        found.append(ad.overlap.decisions(layer)[0].schedule)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(choose, "MAX_PASSES", 20)
            for rows in range(65, 110):
                call(rows)
            call(64)
        found += [one.schedule for one in ad.overlap.decisions(layer) if one.m == comm.size * 64]
    return found


def test_many_shapes_do_not_forget_a_winner(ranks: RankPool) -> None:
    assert ranks.run(2, keep_winners) == [["ring", "ring"]] * 2


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
        for more in range(choose.MAX_SHAPES + 3):
            x = torch.randn(comm.size * (64 + more), IN)
            ad.matmul_reduce_scatter(x, torch.ones(OUT, IN), comm, owner=many)
        decisions = ad.overlap.decisions(many)
    return [*found, sum(not decision.settled for decision in decisions), len(decisions), decisions[-1].reason[:50]]


def test_small_matmuls_and_too_many_shapes_are_not_tried(ranks: RankPool) -> None:
    for found in ranks.run(2, untried_decisions):
        assert found == [
            ("off", TOO_FEW, True),
            ("off", "round 1 of a race", False),
            choose.MAX_SHAPES,
            choose.MAX_SHAPES + 3,
            "16 numbers of rows were tried before; ad.overlap.retry(layer)"[:50],
        ]


def races_after_the_limit(comm: Communicator, folder: Path) -> list[bool]:
    """Return whether a race begins: after as many loaded decisions, without and with ad.overlap.retry(layer)."""

    def begins(layer: nn.Module, more: int) -> bool:
        x = torch.randn(comm.size * (64 + more), IN)
        ad.matmul_reduce_scatter(x, torch.ones(OUT, IN), comm, owner=layer)
        return not ad.overlap.decisions(layer)[-1].settled

    first, second, found = nn.Identity(), nn.Identity(), []
    with tune_small_layers(), torch.no_grad():
        for more in range(choose.MAX_SHAPES):
            begins(first, more)
        keys = state_of(comm, choose.Passes).entries
        decided = {key.name(comm): {"schedule": "off", "tried": {"off": 1e-3}} for key in keys}
        path = folder / str(comm.rank)
        path.write_text(json.dumps({"version": saved.FILE_VERSION, "decisions": decided}))
        ad.overlap.retry(first)
        ad.overlap.load(path)
        settled = [not begins(first, more) for more in range(choose.MAX_SHAPES)]
        found = [all(settled), begins(first, choose.MAX_SHAPES)]
        ad.overlap.retry(first)  # also discards the loaded decisions
        for more in range(choose.MAX_SHAPES):
            begins(first, more)
        found.append(begins(second, choose.MAX_SHAPES))
        ad.overlap.retry(second)
        return [*found, begins(second, choose.MAX_SHAPES)]


def test_only_races_count_for_their_limit_and_retry_begins_anew(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(2, races_after_the_limit, tmp_path) == [[True, True, False, True]] * 2


def train_with_auto(comm: Communicator, seed: int) -> tuple[list[ChosenSchedule], int]:
    """Return the schedules of 32 training steps with evaluations in between, and the number of decided passes."""
    schedules, kept = Schedules(), 0
    options: dict[str, Any] = {"dtype": torch.float64}
    with tune_small_layers(RandomClock(seed * comm.size + comm.rank)), observing(schedules):
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
            kept += sum(len(chosen_by_races(layer)) for layer in model)
    return schedules.chosen, kept


@pytest.mark.parametrize(("n", "seed"), [(2, 1), (3, 2), (4, 3)])
def test_all_ranks_use_the_same_schedule_when_their_clocks_differ(ranks: RankPool, n: int, seed: int) -> None:
    first, *others = ranks.run(n, train_with_auto, seed)
    assert len(first[0]) > 150 and first[1] == 6
    assert others == [first] * (n - 1)
