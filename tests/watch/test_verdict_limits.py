"""The verdict on many ranks, on many calls, and on records that make no sense."""

from __future__ import annotations

import dataclasses
import json
import random
import sys
import time
from typing import Any

import pytest
from watched import COMPLETED, INSIDE, ISSUED, NOW, behind, call, comm, dp, process, ring, waiting

from pynccl.watch.records import DEAD, FAILED, STOPPED, UNKNOWN, CallRecord, CommRecord, ProcessRecord
from pynccl.watch.verdict import Verdict, about, judge, render

SOON = 20.0  # seconds of this process's time: what grows with the square of the ranks or calls takes minutes


def big(size: int = 1024) -> list[ProcessRecord]:
    """Ranks with 64 recorded calls each in two communicators, of which one third is missing."""
    records = []
    for rank in range(size):
        calls = [call(number, site=f"/m/model.py:{number % 7}") for number in range(1, 65)]
        if rank % 3:
            calls[-1].state = INSIDE
        else:
            calls.pop()
        other = [call(n, "all_gather", state, site="/m/dp.py:1") for n, state in ((1, COMPLETED), (2, ISSUED))]
        records.append(process(rank, comm(rank, size, calls), dp(rank % 8, *other, size=8), where="/m/data.py:9 load"))
        records[-1].comms[1].uid = f"u-dp{rank // 8}"
    return records


def exchanging(rank: int, steps: int) -> ProcessRecord:
    """A rank of a ring that has issued so many exchanges, of which none is known to have completed."""
    calls: list[CallRecord] = []
    for step in range(steps):
        for kind, peer in (("send", (rank + 1) % 4), ("recv", (rank - 1) % 4)):
            entry = len(calls) + 1
            more = {"entry": entry, "peer": peer, "group": step + 1, "stream": entry % 3}
            calls.append(call(0, kind, ISSUED, 900 - 0.1 * entry, **more))
    return process(rank, comm(rank, 4, calls))


def everybody(size: int) -> list[ProcessRecord]:
    """All send to all, but the last one."""
    records = []
    for rank in range(size - 1):
        peers = [peer for peer in range(size) if peer != rank]
        calls = [call(0, kind, INSIDE, entry=i, peer=i, group=1) for kind in ("send", "recv") for i in peers]
        records.append(process(rank, comm(rank, size, calls)))
    return [*records, process(size - 1, comm(size - 1, size, []))]


def soon(records: list[ProcessRecord]) -> Verdict:
    """The verdict, within reason, in few words."""
    start = time.process_time()
    verdict = judge(records)
    assert time.process_time() - start < SOON
    assert len(render(verdict)) < 4000
    return verdict


def test_many_ranks_and_calls_are_judged_at_once_and_in_few_words() -> None:
    records = big()
    verdict = soon(records)
    assert verdict.kind == "missing" and len(verdict.culprits) == 342
    assert "and 336 more never entered" in verdict.sentence
    for one in records:
        one.state, one.end = DEAD, "killed or crashed"
    assert soon(records).wrong
    assert soon(ring(1024)).kind == "crossed"
    assert soon(everybody(128)).culprits == [("u-tp", 127)]
    exchanges = [exchanging(rank, 2000) for rank in range(4)]
    assert soon(exchanges[:3]).culprits == [("u-tp", 3)]
    soon(exchanges)
    soon([*exchanges[:3], exchanging(3, 1)])


@pytest.mark.parametrize("size", [0, -5, 10**18, sys.maxsize])
def test_absurd_sizes_and_ranks_do_not_break_it(size: int) -> None:
    verdict = judge([waiting(0, size), waiting(-7, size), waiting(10**17, size), behind(0, size)])
    assert len(render(verdict)) < 5000
    json.dumps(verdict.to_json())


TEXTS = ["", "u-tp", "\x00\n\x1b[31m", "x" * 9999, "a:b:c", ":", "all_reduce", "recv", "send", "init", "check"]
STATES = [INSIDE, ISSUED, COMPLETED, FAILED, DEAD, STOPPED, UNKNOWN, "running"]
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
        elif word == "str":
            made[one.name] = rng.choice(STATES if one.name == "state" else [*TEXTS, INSIDE, DEAD])
        elif word in ("int", "bool"):
            made[one.name] = rng.choice(NUMBERS)
        elif word == "float":
            made[one.name] = rng.choice(TIMES)
        else:
            made[one.name] = tuple(rng.choices(TEXTS, k=rng.randrange(3)))
    return kind(**made)


@pytest.mark.parametrize("seed", [*random.Random(28).sample(range(10_000), 24), 187])
def test_hostile_records_do_not_break_it(seed: int) -> None:
    rng = random.Random(seed)
    records = [hostile(rng, ProcessRecord) for _ in range(rng.randrange(1, 6))]
    before = json.dumps([dataclasses.asdict(one) for one in records])
    verdict = judge(records, patience=rng.choice([0.0, 5.0]))
    text = render(verdict)
    assert "\x1b" not in text and "\x00" not in text
    assert len(text) < 40_000
    assert isinstance(about(verdict, "u-tp", 0), str)
    json.dumps(verdict.to_json())
    assert json.dumps([dataclasses.asdict(one) for one in records]) == before, "the records were changed"


@pytest.mark.parametrize("ahead", [5.0, 5000.0])
def test_no_time_is_negative(ahead: float) -> None:
    """Where a clock was set back."""
    records = [waiting(rank, 3) for rank in range(2)]
    for one in records:
        one.comms[0].calls[-1].issued = NOW + ahead
    dead = behind(2, 3, state=DEAD, end="ValueError: x", end_at=NOW + ahead)
    assert "-" not in judge([*records, dead]).sentence
    assert "waited 0.0 s" in judge([*records, behind(2, 3)]).sentence
