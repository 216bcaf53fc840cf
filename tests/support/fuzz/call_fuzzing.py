"""Runs fuzzed calls on ranks and counts what came of them: what scripts/faults/fuzzer.py and its test share."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from ranks import RankError, RankPool

from . import call_ranks
from .call_ranks import BAD, GOOD, Record


class Summary(NamedTuple):
    counts: Counter[str]
    bad: list[Record]  # one for each call that is neither right nor clearly refused


def fuzz(
    pool: RankPool,
    seeds: Sequence[int],
    n: int,
    *,
    chunk: int = 100,
    timeout: float = 60.0,
) -> Summary:
    """Make the calls of the seeds on n ranks. A call that hangs, or ends a rank, is noted, and the others go on."""
    found = Summary(Counter(), [])
    left = list(seeds)
    while left:
        now, left = left[:chunk], left[chunk:]
        try:
            by_rank = pool.run(n, call_ranks.run, now, timeout=timeout)
        except RankError as error:
            at, record = _culprit(error, now)
            _count(found, [record])
            left = now[:at] + now[at + 1 :] + left if at else now[1:] + left
            continue
        for records in zip(*by_rank, strict=True):
            _count(found, records)
    return found


def _count(found: Summary, records: Sequence[Record]) -> None:
    """One call, as all ranks saw it: the worst of them."""
    order = [*GOOD, *BAD]
    worst = max(records, key=lambda record: order.index(record.outcome))
    kinds = {record.outcome for record in records}
    if len(kinds) > 1 and kinds <= set(GOOD):
        said = "; ".join(f"rank {r}: {record.outcome} {record.message}" for r, record in enumerate(records))
        worst = worst._replace(outcome="differs", message=said)
    found.counts[worst.outcome] += 1
    if worst.outcome in BAD:
        found.bad.append(worst)


def _culprit(error: RankError, seeds: Sequence[int]) -> tuple[int, Record]:
    """(index, record) of the call that was under way when ranks died or hung: the earliest of them."""
    at, outcome, text = len(seeds), "hang", ""
    for rank in error.outcomes:
        calls = re.findall(r"^call (\d+): (.*)$", rank.report, re.M)
        if calls and seeds.index(int(calls[-1][0])) < at:
            at, text = seeds.index(int(calls[-1][0])), calls[-1][1]
        if " died: " in rank.report.partition("\n")[0]:
            outcome = "crash"
        elif " raised" in rank.report.partition("\n")[0]:
            outcome = "broken" if outcome == "hang" else outcome
    if at == len(seeds):
        at = 0
    return at, Record(seeds[at], text, outcome, _told(error))


def _told(error: RankError) -> str:
    rows = []
    for outcome in error.outcomes:
        lines = [line for line in outcome.report.splitlines() if line.strip() and not line.startswith("call ")]
        hung = [i for i, line in enumerate(lines) if line.startswith("Current thread")]
        rows += lines[:1] + (lines[hung[0] + 1 : hung[0] + 12] if hung else lines[-6:])
    return "\n      ".join(rows)
