"""Random programs of four ranks in which one of them does something else: it is blamed."""

from __future__ import annotations

import dataclasses
import random

import pytest
from watched import Do, Played

from pynccl.watch.records import DEAD, STOPPED
from pynccl.watch.verdict import Verdict, judge, render

SIZE = 4
DRAWN = random.Random(28)
TP, PP, WORLD = [[0, 1], [2, 3]], [[0, 2], [1, 3]], [0, 1, 2, 3]
COMMS = {"tp0": TP[0], "tp1": TP[1], "pp0": PP[0], "pp1": PP[1], "world": WORLD}
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")


def job(rng: random.Random) -> Played:
    """Four ranks of a 2 x 2 grid that all run one program, of 40 steps in a random order."""
    steps = [(rng.choice(["tp", "pp", "world"]), rng.choice(OPERATIONS), line) for line in range(40)]
    programs: list[list[Do]] = []
    for rank in range(SIZE):
        names = {
            kind: next(n for n, ranks in COMMS.items() if n.startswith(kind) and rank in ranks)
            for kind in ("tp", "pp", "world")
        }
        programs.append([Do(names[kind], operation, line) for kind, operation, line in steps])
    return Played(COMMS, programs, ahead=rng.choice([1, 1, 4]))


def blamed(verdict: Verdict) -> set[int]:
    """The culprits as ranks of the launch."""
    return {COMMS[uid[2:]][rank] for uid, rank in verdict.culprits}


some_seeds = pytest.mark.parametrize("seed", DRAWN.sample(range(1_000_000), 12))


@some_seeds
def test_a_job_that_runs_to_its_end_has_no_culprit(seed: int) -> None:
    one = job(random.Random(seed))
    assert one.play()
    assert judge(one.records()).kind == "running"


@some_seeds
@pytest.mark.parametrize("state", ["late", "dead", "stopped"])
def test_whoever_halts_is_blamed_in_any_program(seed: int, state: str) -> None:
    rng = random.Random(seed)
    one = job(rng)
    rank = rng.randrange(SIZE)
    one.halted = {rank: rng.randrange(2, 30)}
    assert not one.play()
    records = one.records()
    if state != "late":
        records[rank].state = {"dead": DEAD, "stopped": STOPPED}[state]
    verdict = judge(records)
    assert (verdict.kind, blamed(verdict)) == ({"late": "missing"}.get(state, state), {rank}), render(verdict)
    assert verdict.lines == ["/job/data.py:7"]


@some_seeds
def test_whoever_makes_another_call_is_blamed_in_any_program(seed: int) -> None:
    rng = random.Random(seed)
    one = job(rng)
    rank = rng.randrange(SIZE)
    at = rng.randrange(2, 30)
    one.programs[rank][at] = dataclasses.replace(one.programs[rank][at], count=7, line=99)
    assert not one.play()
    verdict = judge(one.records())
    assert verdict.kind == "mismatch" and rank in blamed(verdict), render(verdict)
    assert "/job/train.py:99" in verdict.lines
    if one.programs[rank][at].comm == "world":
        assert blamed(verdict) == {rank}


@some_seeds
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


@some_seeds
def test_whoever_leaves_out_a_call_of_all_ranks_is_blamed(seed: int) -> None:
    rng = random.Random(seed)
    one = job(rng)
    rank = rng.randrange(SIZE)
    program = one.programs[rank]
    del program[rng.choice([n for n in range(2, 30) if program[n].comm == "world"])]
    assert not one.play()
    verdict = judge(one.records())
    assert rank in blamed(verdict), render(verdict)
    assert verdict.kind in ("mismatch", "crossed", "missing")
