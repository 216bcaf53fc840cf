"""overlap="auto": what is tried, what is then kept, and that all ranks keep the same."""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any

import pytest
import torch
from ranks import RankPool
from torch import nn
from tried import (
    FORWARD,
    FUNCTIONS,
    IN,
    OF_FUNCTION,
    OUT,
    PATTERNS,
    ROWS,
    Took,
    Ways,
    calling,
    mlp,
    settled,
    timed_by,
    tried_small,
)

import pynccl
import pynccl_autograd as ad
from pynccl import Communicator
from pynccl.comm.observing import Observer, observing
from pynccl_autograd.overlap import routes
from pynccl_autograd.overlap.trials import TOO_FEW, Decision

MOST_CALLS = 24
WITHIN = 30.0  # seconds from the death of a rank to the errors of the others


# ---------------------------------------------------------------------------------------------- how many calls, of what


def turns(comm: Communicator, name: str) -> dict[str, tuple[list[str], list[int], str, bool]]:
    """Of each pattern: the ways in order, at which calls it was settled, what was kept, and whether it stays."""
    layer, ways = nn.Identity(), Ways()
    with tried_small(), observing(ways):
        call = calling(comm, name, layer)
        for _ in range(MOST_CALLS + 4):
            call()
        found = {}
        for pattern in OF_FUNCTION[name]:
            took = [one for one in ways.took if one.pattern == pattern]
            after = [number for number, one in enumerate(took, 1) if one.settled]
            kept = settled(layer)[pattern]
            found[pattern] = [one.way for one in took], after, kept, {one.way for one in took if one.settled} == {kept}
    return found


def all_turns(comm: Communicator) -> dict[str, tuple[list[str], list[int], str, bool]]:
    return {pattern: found for name in FUNCTIONS for pattern, found in turns(comm, name).items()}


def test_the_ways_take_turns_in_at_most_24_calls(ranks: RankPool) -> None:
    first, other = ranks.run(2, all_turns)
    assert first == other and set(first) == set(PATTERNS)
    for pattern, (took, after, kept, stays) in first.items():
        ways = PATTERNS[pattern]
        rounds = MOST_CALLS // len(ways)
        trial = took[: rounds * len(ways)]
        assert sorted(set(trial)) == sorted(ways) and kept in ways and stays
        assert all(trial.count(way) == rounds for way in ways)
        assert all(sorted(trial[at : at + len(ways)]) == sorted(ways) for at in range(0, len(trial), len(ways)))
        assert len({trial[at] for at in range(0, len(trial), len(ways))}) == rounds  # each round begins with another
        assert len(trial) <= MOST_CALLS
        assert after == list(range(len(trial) + 1, len(took) + 1))


def chosen(comm: Communicator, tables: list[dict[str, Any]], names: tuple[str, ...] = FUNCTIONS) -> dict[str, str]:
    """What is kept by the times of a table, one for each rank: seconds of a way, or of its first, second, .. call."""
    table = tables[comm.rank]

    def seconds(decision: Decision, number: int) -> float:
        took = table.get(decision.way, 1.0)
        return took[number % len(took)] if isinstance(took, list) else took

    found: dict[str, str] = {}
    with timed_by(seconds):
        for name in names:
            layer = nn.Identity()
            call = calling(comm, name, layer)
            for _ in range(MOST_CALLS + 1):
                call()
            found.update(settled(layer))
    return found


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
    for found in ranks.run(len(tables), chosen, tables):
        assert set(found) == set(PATTERNS)
        for pattern, way in found.items():
            assert way == (best if best in PATTERNS[pattern] else "slices 2"), pattern


class Fails(Observer):
    """Calls that are to go a certain way raise before they begin."""

    def __init__(self, ways: tuple[str, ...]) -> None:
        self.ways = ways

    def decided(self, owner: Any, decision: Any) -> None:
        """See Observer."""
        if decision.way in self.ways:
            raise MemoryError(decision.way)


def never_timed(comm: Communicator, fail: tuple[str, ...]) -> list[tuple[str, list[str]]]:
    """What is kept of a layer some of whose ways never came to an end, and of which a time is told."""
    found = []
    with timed_by(lambda decision, number: 1.0):
        for name in FUNCTIONS[:3]:
            layer = nn.Identity()
            torch.manual_seed(comm.rank)
            x = torch.randn(ROWS // comm.size if name == "all_gather_matmul" else ROWS, IN)
            with torch.no_grad(), observing(Fails(fail)):
                for _ in range(MOST_CALLS + 1):
                    try:
                        getattr(ad, name)(x, torch.ones(OUT, IN), comm, owner=layer)
                    except MemoryError as error:
                        assert str(error) in fail
            (decision,) = ad.overlap.decisions(layer)
            assert decision.settled
            found.append((decision.way, list(decision.tried)))
    return found


def test_a_way_that_was_never_timed_is_not_kept(ranks: RankPool) -> None:
    for found in ranks.run(2, never_timed, ("slices 4", "ring")):
        for (way, tried), ways in zip(found, FORWARD.values(), strict=True):
            assert way == "off"
            assert tried == [one for one in ways if one not in ("slices 4", "ring")]
    for found in ranks.run(2, never_timed, ("off", "slices 2", "slices 4", "slices 8", "bulk")):
        assert found == [("ring", ["ring"])] * 3


def few(comm: Communicator, rows: int, features: int) -> tuple[str, str, bool]:
    """Of a layer, at the clock and the bounds of the machine."""
    layer = ad.RowParallelLinear(features, features, comm, sequence_parallel=True)
    x = torch.randn(rows, features // comm.size)
    with torch.no_grad(), ad.overlap.report() as report:
        layer(x)
    (row,) = report.rows()
    return row.decision.way, row.decision.reason, row.decision.settled


def told_on_one_rank(comm: Communicator) -> list[tuple[str, bool]]:
    """Many small shapes of which one rank alone has a report: they are nothing that ranks remember."""
    layer = ad.RowParallelLinear(64, 64, comm, sequence_parallel=True)
    with tried_small():
        layer(torch.randn(ROWS, 64 // comm.size))
    with pytest.MonkeyPatch.context() as patch, ad.overlap.report() if comm.rank == 0 else contextlib.nullcontext():
        patch.setattr(routes, "MOST_KEPT", 16)
        for rows in range(comm.size, 80, comm.size):
            layer(torch.randn(rows, 64 // comm.size))
    with tried_small():
        layer(torch.randn(ROWS, 64 // comm.size))
    return [(one.reason, one.settled) for one in ad.overlap.decisions(layer)]


def test_a_report_on_one_rank_lets_ranks_forget_nothing(ranks: RankPool) -> None:
    first, second = ranks.run(2, told_on_one_rank)
    assert first == second == [("on trial, call 2 of 20", False), ("on trial, call 0 of 24", False)]


def test_what_is_too_small_to_gain_is_off_at_once(ranks: RankPool) -> None:
    assert set(ranks.run(2, few, 256, 64)) == {("off", TOO_FEW, True)}
    way, reason, is_settled = ranks.run(2, few, 256, 512)[0]
    assert (way, reason, is_settled) == ("off", "on trial, call 1 of 20", False)


def many_shapes(comm: Communicator) -> tuple[int, int, str]:
    layer = nn.Identity()
    with tried_small(), torch.no_grad():
        for more in range(routes.MOST_SHAPES + 3):
            x = torch.randn(comm.size * (64 + more), IN)
            ad.matmul_reduce_scatter(x, torch.ones(OUT, IN), comm, owner=layer)
    found = ad.overlap.decisions(layer)
    return sum(not one.settled for one in found), len(found), found[-1].reason


def test_of_many_shapes_only_the_first_are_tried(ranks: RankPool) -> None:
    for on_trial, all_of_them, reason in ranks.run(2, many_shapes):
        assert (on_trial, all_of_them) == (routes.MOST_SHAPES, routes.MOST_SHAPES + 3)
        assert reason.startswith("16 shapes of this pass were tried before; ad.overlap.retry(layer)")


# ---------------------------------------------------------------------------------------------- all ranks alike


class Slow(Observer):
    """Communication of this rank takes longer: within the passes, so that they do."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def launching(self, calls: Any) -> None:
        """See Observer."""
        time.sleep(self.seconds)


def all_calls(comm: Communicator, slow_rank: int | None, seed: int | None) -> tuple[list[Took], dict[str, int]]:
    """The ways of 32 training steps with evaluation between them; how many passes go each way in the end."""
    ways, kept = Ways(), dict[str, int]()
    clock = None if seed is None else seed * comm.size + comm.rank
    with tried_small(clock), observing(ways), observing(Slow(3e-4 if comm.rank == slow_rank else 0.0)):
        for sequence_parallel in (True, False):
            model = mlp(comm, sequence_parallel)
            torch.manual_seed(1)
            x = torch.randn(ROWS // comm.size if sequence_parallel else ROWS, IN, dtype=torch.float64)
            for step in range(32):
                model(x).square().mean().backward()
                if step % 7 == 3:
                    with torch.no_grad():
                        model(x)
            for layer in model:
                for way in settled(layer).values():
                    kept[way] = kept.get(way, 0) + 1
    return ways.took, kept


def test_all_ranks_take_the_same_way_where_one_is_slow(ranks: RankPool) -> None:
    (first, kept), *others = ranks.run(3, all_calls, 2, None)
    assert len(first) > 200 and sum(kept.values()) == 9
    assert all(took == first for took, _ in others)


@pytest.mark.parametrize(("n", "seed"), [(2, 1), (4, 2)])
def test_all_ranks_take_the_same_way_whatever_their_clocks_say(ranks: RankPool, n: int, seed: int) -> None:
    (first, kept), *others = ranks.run(n, all_calls, None, seed)
    assert sum(kept.values()) == 9 and len(kept) > 1  # of random times not the same way everywhere
    assert all(took == first for took, _ in others)


def dying(comm: Communicator, at: int) -> tuple[str, float]:
    """The last rank ends in the middle of a trial; the error of another one, and after how long."""
    own = comm.split(0)
    assert own is not None
    layer = nn.Identity()
    begun = time.monotonic()
    with tried_small():
        call = calling(own, "all_gather_matmul", layer)
        try:
            for number in range(MOST_CALLS + 5):
                begun = time.monotonic()
                if number == at and own.rank == own.size - 1:
                    os._exit(3)
                call()
        except pynccl.NcclError as error:
            return f"{type(error).__name__}: {error}", time.monotonic() - begun
        finally:
            own.abort()
    return "", 0.0


@pytest.mark.parametrize("at", [24])  # the call that decides
def test_a_rank_that_dies_in_a_trial_is_an_error_on_the_others(doomed: RankPool, at: int) -> None:
    *others, last = doomed.outcomes(3, dying, at)
    assert "died: exit code 3" in last.report
    for outcome in others:
        assert not outcome.report, outcome.report
        said, seconds = outcome.value
        assert said.startswith("NcclRemoteError: ")
        assert seconds < WITHIN
