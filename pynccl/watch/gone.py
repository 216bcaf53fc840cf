"""Ranks that will not come: processes that ended or are stopped, communicators that ended, calls that raised."""

from __future__ import annotations

import re
from collections.abc import Sequence

from .findings import CONSEQUENCE, SHOWN, Case, Finding, chain, concern, lines_of, progress, standings, waiting
from .formatting import ago, at, call_name, called, clean, line_of
from .job import Group, Member, consequence, ended_about, follows, killed, names_of, normal
from .records import DEAD, FAILED, INSIDE, STOPPED, CallRecord, ProcessRecord
from .waits import LEFT, Meeting

_EXCEPTION = re.compile(r"([A-Za-z_][\w.]*)(?:: ?(.*))?$", re.DOTALL)


def gone(case: Case) -> list[Finding]:
    """All that is found of ranks that are gone, or whose calls have raised."""
    ends = [one for one in (_dead(case), _stopped(case)) if one]
    left = [found for meeting in case.stuck() if (found := _left(case, meeting))]
    return [*ends, *left, *(found for group in case.job.groups if (found := _failure(case, group)))]


# Processes that have ended


def _dead(case: Case) -> Finding | None:
    """Of all processes that ended, the first one; None if all of them ended as they should and nobody waits for one."""
    ended = [process for process in case.job.processes if process.state == DEAD]
    awaited = _awaited(case, DEAD)
    blamed = [process for process in ended if not normal(process) or id(process) in awaited]
    if not blamed:
        return None
    several = len({process.machine for process in blamed}) > 1

    def order(process: ProcessRecord) -> tuple[bool, bool, int, float]:
        # Clocks of two machines are not compared: there, the rank that made the fewest calls is taken for the first.
        made = sum(comm.entered for comm in process.comms) if several else 0
        return follows(process), normal(process), made, ended_about(process)

    first, *others = sorted(blamed, key=order)
    meetings = awaited.get(id(first), [])
    every = f"all {len(ended):,} processes have ended: " if len(ended) == len(case.job.processes) > 1 else ""
    # Calls that disagree come before the ends that NCCL's own errors have brought about.
    weight = CONSEQUENCE if follows(first) else 15 if first.end.startswith("Nccl") else 0
    found = Finding("dead", every + ending(case, first, meetings), weight)
    group = meetings[0].group if meetings else None
    if place := case.job.place(first, group):
        found.details.append(f"{case.job.name(first, group)}: {progress(place[1])}")
    found.details += [line for one in meetings[:1] for line in chain(case, one)]
    found.details += [f"also: {ending(case, one)}" for one in others[:SHOWN]]
    found.culprits, found.comms = [case.job.key(first, group)], [comm.uid for comm in first.comms]
    inside = [call for comm in first.comms for call in comm.calls if call.state == INSIDE]
    lines = [line_of(first.end_site), *lines_of(inside[-1:]), line_of(first.where)]
    found.lines = [line for line in lines if line][:1]
    return concern(case, found, meetings)


def _awaited(case: Case, why: str) -> dict[int, list[Meeting]]:
    """By id() of the process, the meetings that it does not come to since it has ended or is stopped."""
    found: dict[int, list[Meeting]] = {}
    for meeting in case.waits.meetings:
        for rank in (rank for rank, reason in meeting.gone.items() if reason == why):
            found.setdefault(id(meeting.group.members[rank].process), []).append(meeting)
    return found


def ending(case: Case, process: ProcessRecord, meetings: Sequence[Meeting] = ()) -> str:
    """ "rank 2 left by ValueError at train.py:31 3.1 s ago: no such file; 3 ranks have waited 3.0 s for it in ..."."""
    who = case.job.name(process, meetings[0].group if meetings else None)
    when = ago(process, process.end_at)
    inside = next((group.brief(call) for group, call in _inside(case, process)), "")
    place = f" inside {inside}" if inside else at(process.where, case.paths)
    match = None if killed(process) else _EXCEPTION.match(process.end)
    if normal(process):  # the code of a sys.exit(3) is not to be seen by what runs at exit
        text = f"{who} exited by itself{when} (the end of its program, or sys.exit)"
    elif match:
        text = f"{who} left by {clean(match[1], 60)}{at(process.end_site, case.paths)}{when}"
        text += f": {clean(match[2], 480)}" if match[2] else ""
    elif killed(process) and not process.end.startswith("SIG"):
        seen = ago(process, process.heartbeat).removesuffix(" ago")  # its end is later than its last heartbeat
        when = when or (f" within the last{seen}" if seen else "")
        text = f"{who}'s process {process.pid} was killed or crashed (no last word){when}{place}"
    else:
        text = f"{who}'s process {process.pid} ended{when}{place}: {clean(process.end)}"
    return f"{text}; {waiting(meetings[0], 'for it')} in {case.describe(meetings[0])}" if meetings else text


def _inside(case: Case, process: ProcessRecord) -> list[tuple[Group, CallRecord]]:
    """The calls that it is in."""
    places = case.job.members.get(id(process), [])
    return [(group, call) for group, member in places for call in reversed(member.pending) if call.state == INSIDE]


# Processes that are stopped


def _stopped(case: Case) -> Finding | None:
    """Processes that somebody has stopped."""
    awaited = _awaited(case, STOPPED)
    halted = [process for process in case.job.processes if process.state == STOPPED]
    halted.sort(key=lambda process: id(process) not in awaited)
    if not halted:
        return None
    meetings = list(dict.fromkeys(meeting for process in halted for meeting in awaited.get(id(process), [])))
    group = meetings[0].group if meetings else None
    lines = [
        f"{case.job.name(process, group)}'s process {process.pid} is stopped (SIGSTOP, or a debugger): "
        f"kill -CONT {process.pid} on host {clean(process.host, 60)}"
        for process in halted
    ]
    found = Finding("stopped", lines[0], 25, lines[1:SHOWN])
    for meeting in meetings[:1]:
        found.sentence += f"; {waiting(meeting, 'for it')} in {case.describe(meeting)}"
        found.details += chain(case, meeting)
    found.culprits = [case.job.key(process, group) for process in halted]
    found.comms = [comm.uid for process in halted for comm in process.comms]
    places = [member for process in halted for _, member in case.job.members.get(id(process), [])[:1]]
    return concern(case, found, meetings, places)


# Communicators that have ended, calls that have raised


def _left(case: Case, meeting: Meeting) -> Finding | None:
    """Ranks whose own end of the communicator has ended."""
    members = [meeting.group.members[rank] for rank, why in meeting.gone.items() if why == LEFT]
    ended = sorted(((one.comm.ended_at, one.rank, one.comm) for one in members if one.comm), key=lambda row: row[:2])
    if not ended:
        return None
    _, rank, comm = ended[0]
    first = meeting.group.members[rank]
    text = (
        f"{names_of([first])}'s comm '{meeting.group.name}' was {clean(comm.ended)}{at(comm.ended_site, case.paths)}"
        f"{ago(first.process, comm.ended_at)}; {waiting(meeting, '')} in {case.describe(meeting)}, "
        "which it never entered"
    )
    found = Finding("left", text, 35, [*standings(case, members, meeting), *chain(case, meeting)])
    found.culprits = [(meeting.group.uid, one.rank) for one in members]
    found.lines = [line for _, _, one in ended if (line := line_of(one.ended_site))]
    return concern(case, found, [meeting], [] if found.lines else members)


def _failure(case: Case, group: Group) -> Finding | None:
    """Calls that have raised on ranks which live on."""
    living = [(member, last) for member in group.members.values() if not member.dead and (last := member.last())]
    rows = [(member, last) for member, last in living if last.state == FAILED]
    if not rows:
        return None
    several = len({member.process.machine for member, _ in rows}) > 1

    def order(row: tuple[Member, CallRecord]) -> tuple[bool, float]:  # clocks of two machines are not compared
        return consequence(row[1].error), 0.0 if several else row[1].returned or row[1].issued

    rows.sort(key=order)
    member, call = rows[0]
    meetings = [one for one in case.waits.meetings if one.group is group and one.gone.get(member.rank) == FAILED]
    text = f"{names_of([member])}'s {group.describe(call, case.paths)} raised {clean(call.error) or 'an exception'}"
    text += ago(member.process, call.returned)
    text += f"; {waiting(meetings[0])}" if meetings else ""
    # That calls disagree is the library's word, where the records do not show which.
    weight = 33 if not consequence(call.error) else 45 if "disagree" in call.error else 80
    found = Finding("failed", text, weight, [], [(group.uid, member.rank)], lines_of([call]), [group.uid])
    for other, theirs in rows[1:SHOWN]:
        what = f"{call_name(theirs)}{called(theirs, case.paths)}"
        found.details.append(f"{names_of([other])}: {what} raised {clean(theirs.error) or 'an exception'}")
    return concern(case, found, meetings)
