"""The verdict on many ranks, on many calls, and on records that make no sense."""

from __future__ import annotations

import dataclasses
import json
import random
import sys
import time
from typing import Any

import pytest
from watched import COMPLETED, DEAD, INSIDE, ISSUED, NOW, STOPPED, behind, call, comm, dp, process, ring, waiting

from pynccl.watch.records import FAILED, UNKNOWN, CallRecord, CommRecord, ProcessRecord
from pynccl.watch.verdict import about, judge, render


def big(size: int = 1024) -> list[ProcessRecord]:
    """Ranks with 64 recorded calls each in two communicators, of which one third is missing."""
    records = []
    for rank in range(size):
        calls = [call(number, site=f"/m/model.py:{number % 7}") for number in range(1, 65)]
        if rank % 3:
            calls[-1].state = INSIDE
        else:
            calls.pop()
        other = [
            call(number, "all_gather", uid_site, site="/m/dp.py:1")
            for number, uid_site in ((1, COMPLETED), (2, ISSUED))
        ]
        records.append(process(rank, comm(rank, size, calls), dp(rank % 8, *other, size=8), where="/m/data.py:9 load"))
        records[-1].comms[1].uid = f"u-dp{rank // 8}"
    return records


def test_a_thousand_ranks_are_judged_at_once_and_in_few_words() -> None:
    records = big()
    start = time.process_time()
    verdict = judge(records)
    spent = time.process_time() - start
    assert verdict.kind == "missing" and len(verdict.culprits) == 342
    assert "and 336 more never entered" in verdict.sentence
    assert len(render(verdict)) < 3000
    assert spent < 1.0, f"{spent:.2f} s"


def test_a_circle_of_a_thousand_ranks_is_seen_at_once() -> None:
    records = ring(1024)
    start = time.process_time()
    verdict = judge(records)
    assert verdict.kind == "crossed" and len(render(verdict)) < 3000
    assert time.process_time() - start < 1.0


def exchanging(rank: int, steps: int) -> ProcessRecord:
    """A rank of a ring that has issued so many exchanges, of which none is known to have completed."""
    calls: list[CallRecord] = []
    for step in range(steps):
        for kind, peer in (("send", (rank + 1) % 4), ("recv", (rank - 1) % 4)):
            entry = len(calls) + 1
            calls.append(
                call(0, kind, ISSUED, 900 - 0.1 * entry, entry=entry, peer=peer, group=step + 1, stream=entry % 3)
            )
    return process(rank, comm(rank, 4, calls))


def test_thousands_of_exchanges_on_streams_are_judged_at_once() -> None:
    records = [exchanging(rank, 2000) for rank in range(4)]
    start = time.process_time()
    assert judge(records[:3]).culprits == [("u-tp", 3)]
    judge(records)
    judge([*records[:3], exchanging(3, 1)])
    assert time.process_time() - start < 3.0


def test_everybody_sends_to_everybody_among_many_ranks() -> None:
    size, records = 256, []
    for rank in range(size - 1):
        peers = [peer for peer in range(size) if peer != rank]
        calls = [call(0, kind, INSIDE, entry=i, peer=i, group=1) for kind in ("send", "recv") for i in peers]
        records.append(process(rank, comm(rank, size, calls)))
    records.append(process(size - 1, comm(size - 1, size, [])))
    start = time.process_time()
    verdict = judge(records)
    assert verdict.culprits == [("u-tp", size - 1)] and len(render(verdict)) < 4000
    assert time.process_time() - start < 6.0


def test_a_thousand_ranks_that_all_died() -> None:
    records = big()
    for one in records:
        one.state, one.end = DEAD, "killed or crashed"
    assert len(render(judge(records))) < 4000


@pytest.mark.parametrize("size", [0, -5, 10**18, sys.maxsize])
def test_absurd_sizes_and_ranks_do_not_break_it(size: int) -> None:
    verdict = judge([waiting(0, size), waiting(-7, size), waiting(10**17, size), behind(0, size)])
    assert len(render(verdict)) < 5000
    json.dumps(verdict.to_json())


def hostile(rng: random.Random, kind: type, depth: int = 0) -> Any:
    """A record with whatever its types allow."""
    texts = [
        "",
        "u-tp",
        "\x00\n\x1b[31m",
        "x" * 9999,
        "a:b:c",
        ":",
        "all_reduce",
        "recv",
        "send",
        "init",
        "check",
        INSIDE,
        DEAD,
    ]
    numbers = [-1, 0, 1, 2, 3, 2**63, -(2**63), 10**30]
    made: dict[str, Any] = {}
    for one in dataclasses.fields(kind):
        word = str(one.type)
        if word.startswith("list"):
            inner = {"comms": CommRecord, "calls": CallRecord}[one.name]
            made[one.name] = [hostile(rng, inner) for _ in range(rng.randrange(4))]
        elif word == "str":
            states = [INSIDE, ISSUED, COMPLETED, FAILED, DEAD, STOPPED, UNKNOWN, "running"]
            made[one.name] = rng.choice(states if one.name == "state" else texts)
        elif word in ("int", "bool"):
            made[one.name] = rng.choice(numbers)
        elif word == "float":
            made[one.name] = rng.choice([0.0, -1.0, NOW, NOW + 1e9, 1e308, float("inf"), float("nan")])
        else:
            made[one.name] = tuple(rng.choices(texts, k=rng.randrange(3)))
    return kind(**made)


@pytest.mark.parametrize("seed", range(200))
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
