"""Format the report for a terminal: verdict, table of ranks, stacks and calls; and the list of jobs."""

from __future__ import annotations

import os
import shlex
import textwrap
import time
from collections.abc import Iterator, Sequence

from ...watch.formatting import call_name, clean, global_rank, numbers, place, seconds
from ...watch.records import DEAD, INSIDE, ISSUED, LAUNCHED, CallRecord, CommRecord, ProcessRecord
from ...watch.verdict import Verdict, render
from . import table
from .jobs import Job

MAX_FRAMES = 24  # innermost frames shown of a stack
MAX_OTHER_JOBS, MAX_PROBLEMS = 5, 10  # shown; the rest is only counted
WIDTH = 100
INDENT = "    "


def text(
    job: Job,
    verdict: Verdict,
    others: Sequence[Job] = (),
    problems: Sequence[str] = (),
    calls: int = 0,
    stacks: bool = False,
    row_per_rank: bool = False,
) -> str:
    """Return the report on a job, without a trailing newline.

    others    the other jobs found
    problems  one text per file that could not be read
    calls     number of last calls to print per rank; stacks: print all stacks; row_per_rank: one row per rank
    """
    if job.exited:  # nothing else is known of it
        name, ago = _program(job) or clean(job.name, 80), seconds(time.time() - job.last_seen)
        text = f"{name} ({job.known_ranks}) ended without an exception {ago} ago."
        parts = [_wrapped(text), unread(problems), _other_jobs(job, others)]
        return "\n\n".join("\n".join(part) for part in parts if part)
    processes = sorted(job.processes, key=lambda process: (table.rank_of(process), process.host, process.pid))
    parts = [
        _wrapped(render(verdict)),
        [_heading(job, others), "", *_table(processes, verdict, row_per_rank)],
        *_stacks(processes, verdict, stacks),
        *(_last_calls(process, calls) for process in processes if calls),
        unread(problems),
        _other_jobs(job, others),
    ]
    return "\n\n".join("\n".join(part) for part in parts if part)


def _wrapped(verdict: str) -> list[str]:
    """Wrap long lines; continuation lines are indented."""
    found = []
    for line in verdict.splitlines():
        deeper = " " * (len(line) - len(line.lstrip()) + 4)
        found += textwrap.wrap(
            line, WIDTH, subsequent_indent=deeper, break_long_words=False, break_on_hyphens=False
        ) or [""]
    return found


def _heading(job: Job, others: Sequence[Job]) -> str:
    name = clean(job.short_name(others), 80)
    name = f"{_program(job)} (job {name})" if job.command else name
    hosts = list(dict.fromkeys(clean(process.host, 40) for process in job.processes))
    where = hosts[0] if len(hosts) == 1 else f"{len(hosts)} hosts"
    newest = max(process.now for process in job.processes)
    if job.processes[0].pid < 0:
        return f"{name}: {_count(job.processes, 'dump')}, the last of {_clock(newest)}"
    read = f", read at {_clock(newest)}" if newest else ""
    return f"{name}: {_count(job.processes, 'process')} on {where}{read}"


def _table(processes: list[ProcessRecord], verdict: Verdict, row_per_rank: bool) -> list[str]:
    blamed = {uid for uid, _ in verdict.culprits if uid} if verdict.wrong else set()
    waited_in = {found[0].uid for process in processes if (found := table.open_call(process.comms))}
    rows = table.rows(processes, blamed or waited_in or verdict.comms, row_per_rank)
    return table.text(rows, len(rows) if row_per_rank else table.MAX_ROWS)


def _stacks(processes: list[ProcessRecord], verdict: Verdict, every: bool) -> Iterator[list[str]]:
    """Yield the stacks of the culprits and of one rank that waits for them, or of all. Equal stacks appear once."""
    blamed = [process for process in processes if (process.host, process.pid) in verdict.processes]
    waiting = [process for process in processes if process not in blamed and table.open_call(process.comms)]
    some = [*blamed, *[process for process in waiting if process.stack][:1]] if verdict.wrong else []
    alike: dict[tuple[str, bool], list[ProcessRecord]] = {}
    for process in processes if every else some:
        alike.setdefault((process.stack, process in blamed), []).append(process)
    for same in alike.values():
        first, head = same[0], _who(same[0])
        if len(same) > 1:
            others = numbers(map(table.rank_of, same[1:]), 6)
            head += f", and the same on rank{'s' if len(same) > 2 else ''} {others}"
        if not first.stack:
            yield [f"{head}: no stack was recorded"]
            continue
        if first in waiting:
            head += f"{',' if len(same) == 1 else ':'} {'was ' if first.end or first.state == DEAD else ''}waiting"
        if first.where_at and first.now:
            head += f", as of {seconds(first.now - first.where_at)} ago"
        yield [f"{head}:", *_frames(first.stack)]


def _frames(stack: str) -> list[str]:
    """Return the innermost frames."""
    found = [INDENT + line[:200] for line in stack.splitlines() if line.strip()]
    left_out = [f"{INDENT}... {len(found) - MAX_FRAMES} outer frames"] if len(found) > MAX_FRAMES else []
    return left_out + found[-MAX_FRAMES:]


def _last_calls(process: ProcessRecord, max_calls: int) -> list[str]:
    """Return the last calls of a process on all its communicators, the newest last."""
    found = [(comm, call) for comm in process.comms for call in comm.calls]
    found.sort(key=lambda pair: (pair[1].issued, pair[1].entry))
    if not found:
        return [f"{_who(process)}: no calls"]
    head = ["issued", "took", "state", "call", "comm", "what", "site"]
    rows = table.columns([head, *(_call_cells(comm, call, process.now) for comm, call in found[-max_calls:])])
    title = f"{_who(process)}, last {min(max_calls, len(found))} of {len(found):,} recorded calls:"
    return [title, *(INDENT + row for row in rows)]


def _call_cells(comm: CommRecord, call: CallRecord, now: float) -> list[str]:
    took, ended = "-", call.completed or call.returned
    if call.state in (INSIDE, ISSUED) and call.issued:
        took = seconds(now - call.issued) + " so far"
    elif ended and call.issued and call.state != LAUNCHED:
        took = f"{(ended - call.issued) * 1e3:.2f} ms" if ended - call.issued < 0.05 else seconds(ended - call.issued)
    return [
        f"{_clock(call.issued)}.{int(call.issued % 1 * 1000):03d}" if call.issued else "-",
        took,
        call.state,
        call_name(call, comm.ranks),
        table.comm_name(comm),
        _what(call, comm.ranks) or "-",
        f"{place(call.site)} {call.function}".strip() or "-",
    ]


def _what(call: CallRecord, ranks: Sequence[int]) -> str:
    """ "BFLOAT16 x 33,554,432, SUM, root 0, group 7"."""
    words = [f"{call.dtype} x {call.count:,}" if call.count >= 0 else call.dtype, call.op]
    words.append(f"root {global_rank(call.root, ranks)}" if call.root >= 0 else "")
    words.append(f"stream {call.stream:#x}" if call.stream > 0 else "")
    words.append(f"group {call.group}" if call.group else "")
    words += ["plan" if call.plan else "", clean(call.detail, 60), clean(call.error, 80)]
    return ", ".join(filter(None, words))


def _other_jobs(job: Job, others: Sequence[Job]) -> list[str]:
    if not others:
        return []
    some, first = others[:MAX_OTHER_JOBS], clean(others[0].short_name([job, *others]), 80)
    shows = f"--job {shlex.quote(first)} shows " + ("it" if len(others) == 1 else "the first")
    shows += ", --list lists all" if len(others) > len(some) else ""
    return [f"{_count(others, 'other job')}; {shows}:", *(INDENT + row for row in listed(some, [job, *others]))]


def unread(problems: Sequence[str]) -> list[str]:
    rows = [clean(problem, 300) for problem in problems]
    return [f"{_count(rows, 'file')} could not be read:", *_first(MAX_PROBLEMS, rows)] if rows else []


def listed(jobs: Sequence[Job], every: Sequence[Job] = ()) -> list[str]:
    """Return a table with one row per job.   every: the jobs that their names are distinguished from"""
    now = time.time()
    rows = [["job", "state", "processes", "started", "program"]]
    for job in jobs:
        started = f"{seconds(now - job.started)} ago" if job.started else "?"
        name = clean(job.short_name(every or jobs), 80)
        rows.append([name, _state(job, now), f"{len(job.processes):,}", started, _program(job)])
    return table.columns(rows)


def _state(job: Job, now: float) -> str:
    if job.living:
        running = "running" if job.living == len(job.processes) else f"{job.living} running"
        return f"{running}, hangs" if job.verdict.wrong else running
    all_ended = all(process.state == DEAD for process in job.processes)
    what = "exited" if job.exited else "failed" if all_ended else "seen"
    return f"{what} {seconds(now - job.last_seen)} ago"


def _program(job: Job) -> str:
    words = job.command.split(" ")
    return clean(" ".join([*map(os.path.basename, words[:2]), *words[2:]]), 60)


# Text


def _who(process: ProcessRecord) -> str:
    rank = table.rank_of(process)
    name = f"rank {rank}" if rank >= 0 else "a process without a rank"
    return f"{name} (pid {process.pid} on {clean(process.host, 40)})" if process.pid > 0 else name


def _clock(moment: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(moment))


def _count(found: Sequence[object], noun: str) -> str:
    """ "1 process", "1,021 files"."""
    return f"{len(found):,} {noun}" + ("" if len(found) == 1 else "es" if noun.endswith("s") else "s")


def _first(max_rows: int, rows: Sequence[str]) -> list[str]:
    """Return the first rows, indented, and the number of omitted ones."""
    more = [f"{INDENT}... {len(rows) - max_rows:,} more"] if len(rows) > max_rows else []
    return [*(INDENT + row for row in rows[:max_rows]), *more]
