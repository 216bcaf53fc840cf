"""Processes that have ended or are stopped: which was the first, why, and what the others were doing."""

from __future__ import annotations

import re
from collections.abc import Sequence

from .findings import (
    CONSEQUENCE,
    SHOWN,
    SILENT_SECONDS,
    Case,
    Finding,
    ago,
    briefly,
    chain,
    concern,
    describe,
    progress,
    waiting,
)
from .members import Group, Member, ended_about, follows, killed, normal
from .records import DEAD, INSIDE, STOPPED, ProcessRecord
from .waits import Meeting
from .wording import at, clean, line_of, ranks_text

_EXCEPTION = re.compile(r"([A-Za-z_][\w.]*)(?:: ?(.*))?$", re.DOTALL)


def dead(case: Case) -> Finding | None:
    """Of all processes that ended, the first one; None if all of them ended as they should and nobody waits for one."""
    ended = [process for process in case.job.processes if process.state == DEAD]
    awaited = _awaited(case, DEAD)
    blamed = [process for process in ended if not normal(process) or id(process) in awaited]
    if not blamed:
        return None
    machines = {process.machine for process in blamed}

    def order(process: ProcessRecord) -> tuple[bool, bool, int, float]:
        # Clocks of two machines are not compared: there, the rank that made the fewest calls is taken for the first.
        made = sum(comm.entered for comm in process.comms) if len(machines) > 1 else 0
        return follows(process), normal(process), made, ended_about(process)

    first = min(blamed, key=order)
    meetings = awaited.get(id(first), [])
    rivals = [one for one in blamed if one is not first and order(one)[:2] == order(first)[:2] and _close(one, first)]
    every = f"all {len(ended):,} processes have ended: " if len(ended) == len(case.job.processes) > 1 else ""
    sentence = every + ending(case, first, meetings)
    found = Finding("dead", sentence, _weight(first))
    found.details = _doing(case, first, meetings) + [line for one in meetings[:1] for line in chain(case, one)]
    found.details += _others(case, [one for one in ended if one is not first])
    if rivals:
        found.details.append(f"which one of {len(rivals) + 1:,} processes was the first to end cannot be told")
    group = meetings[0].group if meetings else None
    found.culprits, found.comms = [case.job.key(first, group)], [comm.uid for comm in first.comms]
    line = line_of(first.end_site) or _inside_line(first) or line_of(first.where)
    found.lines = [line] if line else []
    return concern(case, found, meetings, [])


def _weight(process: ProcessRecord) -> int:
    """Calls that disagree come before the ends that NCCL's own errors have brought about."""
    return CONSEQUENCE if follows(process) else 15 if process.end.startswith("Nccl") else 0


def _close(one: ProcessRecord, other: ProcessRecord) -> bool:
    """Whether it cannot be told which of two ended first: on two machines, or without a word within a few seconds."""
    apart = abs(ended_about(one) - ended_about(other))
    return one.machine != other.machine or apart <= (0.0 if one.end_at and other.end_at else SILENT_SECONDS)


def stopped(case: Case) -> Finding | None:
    """Processes that somebody has stopped."""
    halted = [process for process in case.job.processes if process.state == STOPPED]
    if not halted:
        return None
    awaited = _awaited(case, STOPPED)
    meetings = list(dict.fromkeys(meeting for process in halted for meeting in awaited.get(id(process), [])))
    halted.sort(key=lambda process: id(process) not in awaited)
    group = meetings[0].group if meetings else None
    lines = [_halted(case, process, group) for process in halted]
    sentence = lines[0] if len(halted) == 1 else f"{lines[0]}; {len(halted) - 1:,} more processes are stopped, too"
    for meeting in meetings[:1]:
        sentence += f"; {waiting(meeting, 'for it')} in {describe(meeting.call, meeting.group, case.paths)}"
    found = Finding("stopped", sentence, 25, lines[1:SHOWN])
    found.details += [line for one in meetings[:1] for line in chain(case, one)]
    found.culprits = [case.job.key(process, group) for process in halted]
    found.comms = [comm.uid for process in halted for comm in process.comms]
    places = [member for process in halted for _, member in case.job.members.get(id(process), [])[:1]]
    return concern(case, found, meetings, places)


def _halted(case: Case, process: ProcessRecord, group: Group | None) -> str:
    hosts = {one.host for one in case.job.processes}
    host = f" on host {clean(process.host, 60)}" if len(hosts) > 1 else ""
    who = f"{case.job.name(process, group)}'s process {process.pid}{host}"
    remedy = f": kill -CONT {process.pid}" if process.pid > 1 else ""
    return f"{who} is stopped (SIGSTOP, or a debugger){remedy}"


def _awaited(case: Case, why: str) -> dict[int, list[Meeting]]:
    """By id() of the process, the meetings that it does not come to since it has ended or is stopped."""
    found: dict[int, list[Meeting]] = {}
    for meeting in case.waits.meetings:
        for rank in (rank for rank, reason in meeting.gone.items() if reason == why):
            found.setdefault(id(meeting.group.members[rank].process), []).append(meeting)
    return found


def ending(case: Case, process: ProcessRecord, meetings: Sequence[Meeting] = ()) -> str:
    """ "rank 2 left by ValueError at train.py:31 3.1 s ago: no such file; 3 ranks have waited 3.0 s for it in ..."."""
    group = meetings[0].group if meetings else None
    who, when = case.job.name(process, group), ago(process, process.end_at)
    match = None if killed(process) or normal(process) else _EXCEPTION.match(process.end)
    if normal(process):
        text = f"{who} exited by itself{when}" + _without(case, meetings)
    elif match:
        text = f"{who} left by {clean(match[1], 60)}{at(process.end_site, case.paths)}{when}"
        text += f": {clean(match[2], 480)}" if match[2] else ""
    elif killed(process) and not process.end.startswith("SIG"):
        when = when or _within(process)
        text = f"{who}'s process {process.pid} was killed or crashed (no last word){when}{_place(case, process)}"
    else:
        text = f"{who}'s process {process.pid} ended{when}{_place(case, process)}: {clean(process.end)}"
    for meeting in meetings[:1]:
        there = describe(meeting.call, meeting.group, case.paths)
        text += (
            f"; {waiting(meeting, 'for it')} in {there}" if not normal(process) else f", where {waiting(meeting, '')}"
        )
    return text


def _without(case: Case, meetings: Sequence[Meeting]) -> str:
    # The code of a sys.exit(3) is not to be seen by what runs at exit.
    entered = f" without entering {describe(meetings[0].call, meetings[0].group, case.paths)}" if meetings else ""
    return f" (the end of its program, or sys.exit){entered}"


def _within(process: ProcessRecord) -> str:
    """Of an end that nobody saw: it is later than the last heartbeat."""
    text = ago(process, process.heartbeat)
    return f" within the last{text[: -len(' ago')]}" if text else ""


def _place(case: Case, process: ProcessRecord) -> str:
    doing = _inside(case, process)
    if doing:
        return f" inside {doing}"
    return at(process.where, case.paths)


def _inside(case: Case, process: ProcessRecord) -> str:
    for group, member in case.job.members.get(id(process), []):
        for call in reversed(member.pending):
            if call.state == INSIDE:
                return briefly(call, group)
    return ""


def _inside_line(process: ProcessRecord) -> str:
    calls = [call for comm in process.comms for call in comm.calls if call.state == INSIDE]
    return line_of(calls[-1].site) if calls else ""


def _doing(case: Case, first: ProcessRecord, meetings: Sequence[Meeting]) -> list[str]:
    member = next(
        (one for group, one in case.job.members.get(id(first), []) if not meetings or group is meetings[0].group), None
    )
    inside = _inside(case, first)
    words = [word for word in (progress(member) if member else "", f"inside {inside}" if inside else "") if word]
    words += [f"its main thread was last in {case.paths.short(first.where)}"] if first.where else []
    group = _group_of(case, member) if member else None
    return [f"{case.job.name(first, group)}: {'; '.join(words)}"] if words else []


def _group_of(case: Case, member: Member) -> Group | None:
    return next((group for group, one in case.job.members[id(member.process)] if one is member), None)


def _others(case: Case, ended: Sequence[ProcessRecord]) -> list[str]:
    """A line for each way in which the others ended, in the order of their ends."""
    rows: dict[str, list[ProcessRecord]] = {}
    for process in sorted(ended, key=ended_about):
        rows.setdefault(_manner(case, process), []).append(process)
    lines = []
    for manner, processes in rows.items():
        ranks = [one.rank if one.rank >= 0 else case.job.key(one)[1] for one in processes]
        who = ranks_text(ranks) if min(ranks) >= 0 else f"{len(processes):,} processes"
        lines.append(f"{who} ended too: {manner}")
    return lines[:SHOWN] + ([f"and {len(lines) - SHOWN:,} other ways of ending"] if len(lines) > SHOWN else [])


def _manner(case: Case, process: ProcessRecord) -> str:
    if normal(process):
        return "exited by itself (the end of its program, or sys.exit)"
    inside = _inside(case, process)
    if killed(process):
        how = clean(process.end) or "killed or crashed"
        return f"{how} inside {inside}" if inside else how + at(process.where, case.paths)
    return clean(process.end, 80) + at(process.end_site, case.paths)
