"""What the tests of a step came to on all ranks, and which of them are left where a rank has ended early.

With several ranks a failure ends the run: the ranks are no longer in the same test. So that one failure, or one hang,
does not hide all that comes after it, the tests behind it are started again, in new processes.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_steps import Step

MOST_FAILURES = 20  # that are kept of a step


@dataclass
class Rank:
    """What gpu_record.py wrote in one rank's pytest. Tests go by their place in the order of all of them."""

    places: dict[str, int] = field(default_factory=dict)
    reports: list[dict[str, Any]] = field(default_factory=list)
    under_way: str = ""  # the test in which the process ended
    finished: int = 0  # how many tests are done, those of earlier processes included

    @property
    def total(self) -> int:
        return max(self.places.values(), default=-1) + 1

    def stopped_at(self) -> int | None:
        """The place of the test that ended it; None if it came to the end."""
        if self.under_way:
            return self.places[self.under_way]
        failed = [self.places[row["test"]] for row in self.reports if row["outcome"] == "failed"]
        return failed[-1] if failed and self.finished < self.total else None


def read(path: Path) -> Rank:
    rank = Rank()
    for row in _rows(path):
        if row["event"] == "collected":
            rank.finished = row["first"]
            rank.places = {test: place for place, test in enumerate(row["tests"], row["first"])}
        elif row["event"] == "start":
            rank.under_way = row["test"]
        elif row["event"] == "end":
            rank.under_way = ""
            rank.finished += 1
        else:
            rank.reports.append(row)
    return rank


def count(step: Step, records: list[Path]) -> int | None:
    """Add what one run of the tests came to; the place of the test to go on with, None if none is left."""
    ranks = [read(path) for path in records]
    places = [place for rank in ranks if (place := rank.stopped_at()) is not None]
    total = max(rank.total for rank in ranks)
    last = min(places) if places else total - 1
    for number, rank in enumerate(ranks):
        for row in rank.reports:
            if rank.places[row["test"]] <= last:
                _add(step, number, row["test"], row["outcome"], row["message"])
        if rank.under_way and rank.places[rank.under_way] <= last:
            _add(step, number, rank.under_way, "cut off", "had not ended when the process was")
    return last + 1 if places and last + 1 < total else None


def _add(step: Step, rank: int, test: str, outcome: str, message: str) -> None:
    step.tests[outcome] = step.tests.get(outcome, 0) + 1
    if outcome == "skipped":
        step.skips[message] = step.skips.get(message, 0) + 1
    elif outcome != "passed" and len(step.failures) < MOST_FAILURES:
        step.failures.append({"rank": rank, "test": test, "message": message})


def _rows(path: Path) -> list[dict[str, Any]]:
    """Of a file of JSON lines, up to one that was cut off."""
    rows = []
    with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
        for text in path.read_text(errors="replace").splitlines():
            rows.append(json.loads(text))
    return rows
