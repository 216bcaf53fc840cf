"""Random programs of four ranks in which one of them does something else: it is blamed. And records of any kind."""

from __future__ import annotations

import dataclasses
import json
import random
from typing import Any

import pytest
from watched import INSIDE, ISSUED, NOW, Do, Played

from pynccl.watch.records import DEAD, STOPPED, CallRecord, CommRecord, ProcessRecord
from pynccl.watch.verdict import Verdict, about, judge, render

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


TEXTS = ["", "u-tp", "\x00\n\x1b[31m", "x" * 9999, "a:b:c", ":", "all_reduce", "recv", "init", INSIDE, ISSUED, DEAD]
NUMBERS = [-1, 0, 1, 2, 3, 2**63, -(2**63), 10**30]
TIMES = [0.0, -1.0, NOW, NOW + 1e9, 1e308, float("inf"), float("nan")]


def hostile(rng: random.Random, kind: type) -> Any:
    """A record with whatever its types allow."""
    made: dict[str, Any] = {}
    for one in dataclasses.fields(kind):
        word = str(one.type)
        if word.startswith("list"):
            inner = {"comms": CommRecord, "calls": CallRecord}[one.name]
            made[one.name] = [hostile(rng, inner) for _ in range(rng.randrange(4))]
        elif word in ("str", "int", "bool", "float"):
            made[one.name] = rng.choice({"str": TEXTS, "float": TIMES}.get(word, NUMBERS))
        else:
            made[one.name] = tuple(rng.choices(TEXTS, k=rng.randrange(3)))
    return kind(**made)


@pytest.mark.parametrize("seed", SEEDS)
def test_hostile_records_do_not_break_it(seed: int) -> None:
    rng = random.Random(seed)
    verdict = judge([hostile(rng, ProcessRecord) for _ in range(rng.randrange(1, 6))], patience=rng.choice([0.0, 5.0]))
    text = render(verdict)
    assert "\x1b" not in text and "\x00" not in text
    assert len(text) < 40_000
    assert isinstance(about(verdict, "u-tp", 0), str)
    json.dumps(verdict.to_json())
