"""Random programs of four ranks in which one of them does something else: it is blamed."""

from __future__ import annotations

import dataclasses
import random

import pytest
from watched import Do, Played

from pynccl.watch.records import DEAD, STOPPED
from pynccl.watch.verdict import Verdict, judge, render

SIZE = 4
SEEDS = range(28, 40)
COMMS = {"tp0": [0, 1], "tp1": [2, 3], "pp0": [0, 2], "pp1": [1, 3], "world": [0, 1, 2, 3]}
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")


def job(rng: random.Random) -> Played:
    """Four ranks of a 2 x 2 grid that all run one program, of 40 steps in a random order."""
    steps = [(rng.choice(["tp", "pp", "world"]), rng.choice(OPERATIONS), line) for line in range(40)]
    programs: list[list[Do]] = []
    for rank in range(SIZE):
        own = {name.rstrip("01"): name for name, ranks in COMMS.items() if rank in ranks}
        programs.append([Do(own[kind], operation, line) for kind, operation, line in steps])
    return Played(COMMS, programs, ahead=rng.choice([1, 1, 4]))


def blamed(verdict: Verdict) -> set[int]:
    """The culprits as ranks of the launch."""
    return {COMMS[uid[2:]][rank] for uid, rank in verdict.culprits}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("state", ["late", "dead", "stopped"])
def test_whoever_halts_is_blamed_in_any_program(seed: int, state: str) -> None:
    rng = random.Random(seed)
    one = job(rng)
    assert one.play() and judge(one.records()).kind == "running"
    rank = rng.randrange(SIZE)
    one.halted = {rank: rng.randrange(2, 30)}
    assert not one.play()
    records = one.records()
    if state != "late":
        records[rank].state = {"dead": DEAD, "stopped": STOPPED}[state]
    verdict = judge(records)
    assert (verdict.kind, blamed(verdict)) == ({"late": "missing"}.get(state, state), {rank}), render(verdict)
    assert verdict.lines == ["/job/data.py:7"]


@pytest.mark.parametrize("seed", SEEDS)
def test_whoever_makes_another_call_is_blamed_in_any_program(seed: int) -> None:
    rng = random.Random(seed)
    one = job(rng)
    rank, at = rng.randrange(SIZE), rng.randrange(2, 30)
    one.programs[rank][at] = dataclasses.replace(one.programs[rank][at], count=7, line=99)
    assert not one.play()
    verdict = judge(one.records())
    assert verdict.kind == "mismatch" and rank in blamed(verdict), render(verdict)
    assert "/job/train.py:99" in verdict.lines
    if one.programs[rank][at].comm == "world":
        assert blamed(verdict) == {rank}


@pytest.mark.parametrize("seed", SEEDS)
def test_whoever_swaps_two_communicators_is_blamed_in_any_program(seed: int) -> None:
    rng = random.Random(seed)
    one = job(rng)
    rank = rng.randrange(SIZE)
    program = list(one.programs[rank])
    for at in rng.sample(range(2, 38), 36):  # some two calls may come in either order
        one.programs[rank] = [*program[:at], program[at + 1], program[at], *program[at + 2 :]]
        if program[at].comm != program[at + 1].comm and not one.play():
            break
    verdict = judge(one.records())
    assert verdict.kind == "crossed" and rank in blamed(verdict), render(verdict)
