"""The report as text for a terminal: the verdict first, then what each rank does, stacks and calls."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ...watch.records import DEAD, INSIDE, ISSUED, CallRecord, CommRecord, ProcessRecord
from ...watch.verdict import Verdict, render
from . import table
from .jobs import Job, summary
from .text import INDENT, at_most, columns, cut, place, plural, ranks, seconds

FRAMES = 24  # of a stack, the innermost
OTHERS, PROBLEMS = 5, 10  # that are shown; the rest is counted


@dataclass
class Report:
    """What is to be told of a job.

    others    the other jobs that there are
    problems  one text for each file that could not be read
    calls     how many of each rank's last calls; stacks: of all processes; all_apart: a row for each rank
    """

    job: Job
    verdict: Verdict
    others: Sequence[Job] = ()
    problems: Sequence[str] = ()
    calls: int = 0
    stacks: bool = False
    all_apart: bool = False
    blamed: list[ProcessRecord] = field(init=False)

    def __post_init__(self) -> None:
        self.job.processes.sort(key=lambda one: (table.rank_of(one), one.host, one.pid))
        named = {(uid, rank) for uid, rank in self.verdict.culprits}
        self.blamed = [
            one
            for one in self.job.processes
            if any((uid, comm.rank) in named for comm in one.comms for uid in (comm.uid, *comm.aliases))
        ]

    def text(self) -> str:
        """All of it, without a newline at its end."""
        parts = [
            said(self.verdict),
            [self._heading(), "", *self._table()],
            *self._stacks(),
            *(last_calls(one, self.calls) for one in self.job.processes if self.calls),
            unread(self.problems),
            self._other_jobs(),
        ]
        return "\n\n".join("\n".join(part) for part in parts if part)

    def _heading(self) -> str:
        processes = self.job.processes
        hosts = list(dict.fromkeys(cut(one.host, 40) for one in processes))
        text = f"{cut(self.job.name, 80)}: {plural(len(processes), 'process')}"
        text += f" on {hosts[0]}" if len(hosts) == 1 else f" on {len(hosts)} hosts"
        newest = max(one.now for one in processes)
        return text + (f", read at {_clock(newest)}" if newest else "")

    def _table(self) -> list[str]:
        blamed = {uid for uid, _ in self.verdict.culprits if uid} if self.verdict.wrong else set()
        waited_in = {found[0].uid for one in self.job.processes if (found := table.open_call(one.comms))}
        rows = table.rows(self.job.processes, blamed or waited_in or self.verdict.comms, self.all_apart)
        return table.text(rows, len(rows) if self.all_apart else table.MOST)

    def _stacks(self) -> Iterator[list[str]]:
        """Of the culprits and of one that waits for them; or of all. Equal ones are printed once."""
        waiting = [one for one in self.job.processes if one not in self.blamed and table.open_call(one.comms)]
        chosen = self.job.processes
        if not self.stacks:
            chosen = [*self.blamed, *[one for one in waiting if one.stack][:1]] if self.verdict.wrong else []
        alike: dict[tuple[str, bool], list[ProcessRecord]] = {}
        for one in chosen:
            alike.setdefault((one.stack, one in self.blamed), []).append(one)
        for group in alike.values():
            first = group[0]
            if not first.stack:
                where = f"; its main thread was last in {place(first.where)}" if first.where else ""
                yield [f"{_all_of(group)}: no stack was recorded{where if len(group) == 1 else ''}"]
                continue
            head = _all_of(group)
            if first in waiting:
                over = first.end or first.state == DEAD
                head += f"{',' if len(group) == 1 else ':'} {'was ' if over else ''}waiting"
            if first.where_at and first.now:
                head += f", as of {seconds(first.now - first.where_at)} ago"
            yield [head + ":", *_frames(first.stack)]

    def _other_jobs(self) -> list[str]:
        rows = [f"{cut(job.name, 80)}  {summary(job)}" for job in self.others]
        return [f"{plural(len(rows), 'other job')}: --job ID", *at_most(OTHERS, rows)] if rows else []


def said(verdict: Verdict) -> list[str]:
    """The verdict: what is too long for the terminal goes on, indented, on the next line."""
    found = []
    for one in render(verdict).splitlines():
        deeper = " " * (len(one) - len(one.lstrip()) + 4)
        found += textwrap.wrap(
            one, table.WIDTH, subsequent_indent=deeper, break_long_words=False, break_on_hyphens=False
        ) or [""]
    return found


def _all_of(group: list[ProcessRecord]) -> str:
    """The first one, and which others."""
    if len(group) == 1:
        return _who(group[0])
    others = ranks((table.rank_of(one) for one in group[1:]), 50)
    return f"{_who(group[0])}, and the same on rank{'s' if len(group) > 2 else ''} {others}"


def _who(process: ProcessRecord) -> str:
    rank = table.rank_of(process)
    name = f"rank {rank}" if rank >= 0 else "a process without a rank"
    return f"{name} (pid {process.pid} on {cut(process.host, 40)})"


def _frames(stack: str) -> list[str]:
    """The innermost frames."""
    found = [INDENT + one[:200] for one in stack.splitlines() if one.strip()]
    left_out = [f"{INDENT}... {len(found) - FRAMES} outer frames"] if len(found) > FRAMES else []
    return left_out + found[-FRAMES:]


def last_calls(process: ProcessRecord, most: int) -> list[str]:
    """The last calls of a process on all its communicators, the newest last."""
    found = [(comm, call) for comm in process.comms for call in comm.calls]
    found.sort(key=lambda one: (one[1].issued, one[1].entry))
    if not found:
        return [f"{_who(process)}: no calls"]
    head = ["issued", "took", "state", "call", "comm", "what", "site"]
    rows = columns([head, *(_call_cells(comm, call, process.now) for comm, call in found[-most:])])
    title = f"{_who(process)}, the last {min(most, len(found))} of {len(found):,} calls that are kept:"
    return [title, *(INDENT + row for row in rows)]


def _call_cells(comm: CommRecord, call: CallRecord, now: float) -> list[str]:
    took, ended = "-", call.completed or call.returned
    if call.state in (INSIDE, ISSUED) and call.issued:
        took = seconds(now - call.issued) + " so far"
    elif ended and call.issued:
        took = f"{(ended - call.issued) * 1e3:.2f} ms" if ended - call.issued < 0.05 else seconds(ended - call.issued)
    return [
        f"{_clock(call.issued)}.{int(call.issued % 1 * 1000):03d}" if call.issued else "-",
        took,
        call.state,
        table.call_name(call),
        table.comm_name(comm),
        _what(call) or "-",
        f"{place(call.site)} {call.function}".strip() or "-",
    ]


def _clock(moment: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(moment))


def _what(call: CallRecord) -> str:
    """ "BFLOAT16 x 33,554,432, SUM, root 0, in group 7"."""
    words = [f"{call.dtype} x {call.count:,}" if call.count >= 0 else call.dtype, call.op]
    words.append(f"root {call.root}" if call.root >= 0 else "")
    words.append(f"stream {call.stream:#x}" if call.stream > 0 else "")
    words.append(f"group {call.group}" if call.group else "")
    words += ["plan" if call.plan else "", cut(call.detail, 60), cut(call.error, 80)]
    return ", ".join(filter(None, words))


def unread(problems: Sequence[str]) -> list[str]:
    if not problems:
        return []
    return [
        f"{plural(len(problems), 'file')} could not be read:",
        *at_most(PROBLEMS, [cut(one, 300) for one in problems]),
    ]
