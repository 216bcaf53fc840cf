"""The report as text for a terminal: the verdict first, then what each rank does, stacks, calls, and what NCCL says."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ...watch.records import DEAD, CallRecord, CommRecord, ProcessRecord
from . import table
from .clean import clock, cut, known, line, lines, place, ranks, seconds
from .ras import Answer, trimmed
from .sources import Job, render

FRAMES = 24  # of a stack, the innermost
OTHERS, PROBLEMS = 5, 10  # that are named; the rest is counted
_INDENT = "    "
_OWN = re.compile(r"/pynccl/(comm|host|watch|bindings)/\w+\.py:")


@dataclass(frozen=True)
class Wanted:
    """calls: how many of each rank's last ones; stacks: of all processes; all_apart: a row for each rank."""

    calls: int = 0
    stacks: bool = False
    all_apart: bool = False


def whole(job: Job, verdict: Any, ras: Answer | None, wanted: Wanted = Wanted()) -> str:
    """All of it, without a newline at its end."""
    parts = [
        said(verdict),
        [_heading(job), "", *_table(job, verdict, wanted)],
        *stacks(job.processes, culprits(verdict, job.processes), verdict.wrong, wanted.stacks),
        *(calls(one, wanted.calls) for one in in_order(job.processes) if wanted.calls),
        ras_says(ras),
        unread(job.problems),
        other_jobs(job.others),
    ]
    return "\n\n".join("\n".join(part) for part in parts if part)


def _table(job: Job, verdict: Any, wanted: Wanted) -> list[str]:
    blamed = {uid for uid, _ in verdict.culprits if uid} if verdict.wrong else set()
    waited_in = {found[0].uid for one in job.processes if (found := table.open_call(one.comms))}
    rows = table.rows(job.processes, blamed or waited_in or verdict.comms, wanted.all_apart)
    return table.text(rows, len(rows) if wanted.all_apart else table.MOST)


def said(verdict: Any) -> list[str]:
    """The verdict: what is too long for the terminal goes on, indented, on the next line."""
    found = []
    for one in lines(render(verdict)):
        deeper = " " * (len(one) - len(one.lstrip()) + 4)
        found += textwrap.wrap(
            one, table.WIDTH, subsequent_indent=deeper, break_long_words=False, break_on_hyphens=False
        ) or [""]
    return found


def culprits(verdict: Any, processes: list[ProcessRecord]) -> list[ProcessRecord]:
    """The processes of the members that the verdict blames: (uid of a communicator, rank in it)."""
    named = {tuple(one) for one in verdict.culprits}
    return [
        one
        for one in in_order(processes)
        if any((uid, comm.rank) in named for comm in one.comms for uid in (comm.uid, *comm.aliases))
    ]


def in_order(processes: list[ProcessRecord]) -> list[ProcessRecord]:
    return sorted(processes, key=lambda one: (table.rank_of(one), one.host, one.pid))


def _heading(job: Job) -> str:
    hosts = list(dict.fromkeys(line(one.host, 40) for one in job.processes))
    count = len(job.processes)
    text = f"{line(job.name, 80)}: {count:,} process{'es' if count > 1 else ''}"
    text += f" on {hosts[0]}" if len(hosts) == 1 else f" on {len(hosts)} hosts"
    newest = max(one.now for one in job.processes)
    return text + (f", read at {clock(newest)[:8]}" if known(newest) else "")


# ------------------------------------------------------------------------------------------------------- stacks


def stacks(
    processes: list[ProcessRecord], blamed: list[ProcessRecord], wrong: bool, of_all: bool
) -> Iterator[list[str]]:
    """Of those to blame and of one that waits for them; or of all."""
    if of_all:
        chosen = in_order(processes)
    elif wrong:
        waiting = [one for one in in_order(processes) if one not in blamed and one.stack and table.open_call(one.comms)]
        chosen = [*blamed, *waiting[:1]]
    else:
        return
    alike: dict[str, list[ProcessRecord]] = {}
    for one in chosen:
        alike.setdefault(one.stack + ("" if one in blamed else "\n"), []).append(one)
    for group in alike.values():
        if group[0].stack:
            yield [_stack_head(group, blamed), *_frames(group[0].stack, of_all)]
        else:
            where = f"; its main thread was last in {place(group[0].where)}" if group[0].where else ""
            yield [f"{_all_of(group)}: no stack was recorded{where if len(group) == 1 else ''}"]


def _all_of(group: list[ProcessRecord]) -> str:
    """The first one, and how many others."""
    if len(group) == 1:
        return who(group[0])
    others = ranks((table.rank_of(one) for one in group[1:]), 50)
    return f"{who(group[0])}, and the same on rank{'s' if len(group) > 2 else ''} {others}"


def who(process: ProcessRecord) -> str:
    rank = table.rank_of(process)
    name = f"rank {rank}" if rank >= 0 else "a process without a rank"
    return f"{name} (pid {process.pid} on {line(process.host, 40)})"


def _stack_head(group: list[ProcessRecord], blamed: list[ProcessRecord]) -> str:
    first = group[0]
    text = _all_of(group)
    if first not in blamed and table.open_call(first.comms):
        text += f"{',' if len(group) == 1 else ':'} {'was ' if first.end or first.state == DEAD else ''}waiting"
    if known(first.where_at) and known(first.now):
        text += f", as of {seconds(first.now - first.where_at)} ago"
    return text + ":"


def _frames(stack: str, full: bool) -> list[str]:
    """The innermost frames. What a call does within this package is counted, if not all is asked for."""
    found = [cut(one, 200) for one in lines(stack) if one.strip()]
    inner = len(found)
    while not full and inner and _OWN.search(found[inner - 1]):
        inner -= 1
    if len(found) - inner > 2:
        found[inner + 1 :] = [f"... {len(found) - inner - 1} more frames within pynccl: --stacks has them"]
    left_out = [f"{_INDENT}... {len(found) - FRAMES} outer frames"] if len(found) > FRAMES else []
    return left_out + [_INDENT + one for one in found[-FRAMES:]]


# -------------------------------------------------------------------------------------------------------- calls


def calls(process: ProcessRecord, most: int) -> list[str]:
    """The last calls of a process on all its communicators, the newest last."""
    found = [(comm, call) for comm in process.comms for call in comm.calls]
    found.sort(key=lambda one: (one[1].issued, one[1].entry))
    head = ["issued", "took", "state", "call", "comm", "what", "site"]
    cells = [head, *(_call_cells(comm, call, process.now) for comm, call in found[-most:])]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    rows = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    if not found:
        return [f"{who(process)}: no calls"]
    return [f"{who(process)}, the last {min(most, len(found))} of {len(found):,} calls that are kept:"] + [
        _INDENT + row for row in rows
    ]


def _call_cells(comm: CommRecord, call: CallRecord, now: float) -> list[str]:
    ended = call.completed or call.returned
    took = seconds(ended - call.issued) if known(ended) and known(call.issued) else "-"
    if call.state in ("inside", "issued") and known(call.issued) and known(now):
        took = seconds(now - call.issued) + " so far"
    elif took == "0.0 s":
        took = f"{(ended - call.issued) * 1e3:.2f} ms"
    return [
        clock(call.issued) or "-",
        took,
        line(call.state, 12),
        table.call_name(call),
        table.comm_name(comm),
        what(call) or "-",
        " ".join(filter(None, [place(call.site), line(call.function, 40)])) or "-",
    ]


def what(call: CallRecord) -> str:
    """ "BFLOAT16 x 33,554,432, SUM, root 0, in group 7"."""
    words = [f"{line(call.dtype, 20)} x {call.count:,}" if call.count >= 0 else line(call.dtype, 20), line(call.op, 20)]
    words.append(f"root {call.root}" if call.root >= 0 else "")
    words.append(f"stream {call.stream:#x}" if call.stream > 0 else "")
    words.append(f"group {call.group}" if call.group else "")
    words += ["plan" if call.plan else "", line(call.detail, 60), line(call.error, 80)]
    return ", ".join(filter(None, words))


# ------------------------------------------------------------------------------------------------- what else


def ras_says(answer: Answer | None) -> list[str]:
    if answer is None:
        return []
    head = f"NCCL's RAS at {answer.address}"
    found = [_INDENT + one for one in trimmed(answer.text)]
    if not found:
        return [f"{head}: {line(answer.note)}"]
    return [f"{head} says" + (f" ({line(answer.note)}):" if answer.note else ":"), *found]


def unread(problems: list[str]) -> list[str]:
    if not problems:
        return []
    head = f"{len(problems):,} file{'s' if len(problems) > 1 else ''} could not be read:"
    more = [f"{_INDENT}... {len(problems) - PROBLEMS:,} more"] if len(problems) > PROBLEMS else []
    return [head, *(_INDENT + line(one, 300) for one in problems[:PROBLEMS]), *more]


def other_jobs(others: list[tuple[str, str]]) -> list[str]:
    if not others:
        return []
    head = f"{len(others)} other job{'s' if len(others) > 1 else ''}: --job ID"
    more = [f"{_INDENT}... {len(others) - OTHERS} more"] if len(others) > OTHERS else []
    return [head, *(f"{_INDENT}{line(name, 80)}  {line(state, 60)}" for name, state in others[:OTHERS]), *more]
