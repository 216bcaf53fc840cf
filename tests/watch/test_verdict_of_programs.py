"""Random programs of four ranks in which one rank deviates: the verdict names it."""

from __future__ import annotations

import dataclasses
import random

import pytest
from watched import ProgramStep, SimulatedJob

from pynccl.watch.records import DEAD, STOPPED
from pynccl.watch.verdict import Verdict, judge, render

SIZE = 4
SEEDS = range(28, 40)
COMMS = {"tp0": [0, 1], "tp1": [2, 3], "pp0": [0, 2], "pp1": [1, 3], "world": [0, 1, 2, 3]}
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")


def job(rng: random.Random) -> SimulatedJob:
    """Return four ranks of a 2 x 2 grid that run the same program of 40 random steps."""
    steps = [(rng.choice(["tp", "pp", "world"]), rng.choice(OPERATIONS), line) for line in range(40)]
    programs: list[list[ProgramStep]] = []
    for rank in range(SIZE):
        own = {name.rstrip("01"): name for name, ranks in COMMS.items() if rank in ranks}
        programs.append([ProgramStep(own[kind], operation, line) for kind, operation, line in steps])
    return SimulatedJob(COMMS, programs, ahead=rng.choice([1, 1, 4]))


def culprit_ranks(verdict: Verdict) -> set[int]:
    """Return the culprits as global ranks."""
    return {COMMS[uid[2:]][rank] for uid, rank in verdict.culprits}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("state", ["late", "dead", "stopped"])
def test_a_rank_that_halts_is_the_culprit(seed: int, state: str) -> None:
    rng = random.Random(seed)
    simulated = job(rng)
    assert simulated.play() and judge(simulated.records()).kind == "running"
    rank = rng.randrange(SIZE)
    simulated.halted = {rank: rng.randrange(2, 30)}
    assert not simulated.play()
    records = simulated.records()
    if state != "late":
        records[rank].state = {"dead": DEAD, "stopped": STOPPED}[state]
    verdict = judge(records)
    assert (verdict.kind, culprit_ranks(verdict)) == ({"late": "missing"}.get(state, state), {rank}), render(verdict)
    assert verdict.lines == ["/job/data.py:7"]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_rank_that_makes_another_call_is_a_culprit(seed: int) -> None:
    rng = random.Random(seed)
    simulated = job(rng)
    rank, at = rng.randrange(SIZE), rng.randrange(2, 30)
    simulated.programs[rank][at] = dataclasses.replace(simulated.programs[rank][at], count=7, line=99)
    assert not simulated.play()
    verdict = judge(simulated.records())
    assert verdict.kind == "mismatch" and rank in culprit_ranks(verdict), render(verdict)
    assert "/job/train.py:99" in verdict.lines
    if simulated.programs[rank][at].comm == "world":
        assert culprit_ranks(verdict) == {rank}


@pytest.mark.parametrize("seed", SEEDS)
def test_a_rank_that_swaps_two_communicators_is_a_culprit(seed: int) -> None:
    rng = random.Random(seed)
    simulated = job(rng)
    rank = rng.randrange(SIZE)
    program = list(simulated.programs[rank])
    for at in rng.sample(range(2, 38), 36):  # some pairs of calls may be swapped without a hang
        simulated.programs[rank] = [*program[:at], program[at + 1], program[at], *program[at + 2 :]]
        if program[at].comm != program[at + 1].comm and not simulated.play():
            break
    verdict = judge(simulated.records())
    assert verdict.kind == "crossed" and rank in culprit_ranks(verdict), render(verdict)
