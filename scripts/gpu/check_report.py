"""The results of gpu_check: gpu.jsonl as they come, the page gpu.md after each step, gpu.log with all output."""

from __future__ import annotations

import json
import re
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

COUNTED = ("passed", "failed", "hung", "skipped")


class Result(NamedTuple):
    """The outcome of a test on one rank: one of COUNTED, or "not run". A result without a test is that of the step: the
    first one says that it was planned, the last one how it ended."""

    step: str
    ranks: int
    rank: int
    test: str
    outcome: str
    message: str = ""
    seconds: float = 0.0


def read(page: Path) -> list[Result]:
    """Return the results in the gpu.jsonl beside a page."""
    return [Result(**json.loads(line)) for line in page.with_suffix(".jsonl").read_text().splitlines()]


def ends_of(results: Iterable[Result]) -> dict[str, Result]:
    """Return how each step has ended."""
    return {result.step: result for result in results if not result.test}


class Report:
    """The three files, in the folder `out`. The lanes share it.   kept: results of an earlier call that still hold"""

    def __init__(self, out: Path, kept: Sequence[Result] = ()) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self.results: list[Result] = []
        self._lines, self._page, self._log = (out / f"gpu.{ending}" for ending in ("jsonl", "md", "log"))
        self._lock = threading.Lock()
        for path in (self._lines, self._page, self._log):
            path.write_text("")
        self.add(*kept)

    def add(self, *results: Result) -> None:
        with self._lock, self._lines.open("a") as file:
            self.results += results
            file.writelines(json.dumps(result._asdict()) + "\n" for result in results)
            if any(not result.test for result in results):
                self._page.write_text(to_page(self.results))

    def add_log(self, title: str, log: Path) -> None:
        with self._lock, self._log.open("a") as file:
            file.write(f"===== {title}\n{log.read_text(errors='replace')}\n\n")


def to_page(results: list[Result]) -> str:
    """Return a table of the steps that have ended, then each kind of failure with the first of its messages."""
    lines = ["# GPU check", "", "Tests are counted once for each rank.", ""]
    lines += [f"| step | | {' | '.join(COUNTED)} | seconds | |", f"|{'---|' * (len(COUNTED) + 4)}"]
    for end in ends_of(results).values():
        counts = Counter(result.outcome for result in results if result.step == end.step and result.test)
        cells = [end.step, end.outcome, *(counts[name] or "" for name in COUNTED), f"{end.seconds:.1f}"]
        lines.append(f"| {' | '.join(map(str, cells))} | {end.message.replace('|', '/')} |")
    kinds: dict[str, list[Result]] = {}
    for result in results:
        if result.test and result.outcome in ("failed", "hung"):
            kinds.setdefault(kind_of(result.message), []).append(result)
    for kind, shown in kinds.items():
        tests: dict[str, list[int]] = {}
        for result in shown:
            tests.setdefault(f"{result.step}: {result.test} {result.outcome}", []).append(result.rank)
        lines += ["", f"## {kind}", "", *(f"- {test} on ranks {ranks}" for test, ranks in tests.items())]
        lines += ["", "```text", shown[0].message, "```"]
    return "\n".join(lines) + "\n"


def kind_of(message: str) -> str:
    """Return the last error in pytest's text, or the last line, without numbers and addresses."""
    errors = re.findall(r"^(?!E ).*\nE +(.*)", f"\n{message}", re.MULTILINE)  # the first line of each
    return re.sub(r"0x[0-9a-f]+|\d+(\.\d+)?", "N", (errors or message.splitlines() or [""])[-1])[:200]
