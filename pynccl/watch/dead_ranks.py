"""Ranks that will not come: processes that ended or are stopped, communicators that ended, calls that raised."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from .formatting import ago, at, call_name, called, clean
from .job import SHOWN, Group, names_of
from .records import DEAD, FAILED, INSIDE, STOPPED, CallRecord, ProcessRecord
from .wait_graph import LEFT, Finding, Meeting, Waits, Weight

_EXCEPTION = re.compile(r"([A-Za-z_][\w.]*)(?:: ?(.*))?$", re.DOTALL)


def gone(waits: Waits) -> Iterator[Finding]:
    """All that is found of ranks that are gone, or whose calls have raised."""
    found = [_dead(waits), _stopped(waits)]
    found += [_left(waits, meeting) for meeting in waits.stuck() if LEFT in meeting.lacks.values()]
    found += [_failure(waits, group) for group in waits.job.groups]
    return (one for one in found if one)


def _awaited(waits: Waits, why: str) -> dict[int, list[Meeting]]:
    """By id() of the process, the meetings that it does not come to since it has ended or is stopped."""
    found: dict[int, list[Meeting]] = {}
    for meeting in waits.meetings:
        for member in meeting.lacking(why):
            found.setdefault(id(member.process), []).append(meeting)
    return found


def _for_it(meetings: Sequence[Meeting]) -> str:
    return f"; {meetings[0].waiting(' for it')} in {meetings[0].describe()}" if meetings else ""


# Processes that have ended


def _dead(waits: Waits) -> Finding | None:
    """Of all processes that ended, the first one; None if all of them ended as they should and nobody waits for one."""
    job, awaited = waits.job, _awaited(waits, DEAD)
    ended = [process for process in job.processes if process.state == DEAD]
    blamed = [process for process in ended if not process.ended_well or id(process) in awaited]
    if not blamed:
        return None
    several = len({process.machine for process in blamed}) > 1

    def order(process: ProcessRecord) -> tuple[bool, bool, int, float]:
        # Clocks of two machines are not compared: there, the rank that made the fewest calls is taken for the first.
        made = sum(comm.entered for comm in process.comms) if several else 0
        return process.gave_up, process.ended_well, made, process.ended_about

    first, *others = sorted(blamed, key=order)
    meetings = awaited.get(id(first), [])
    group = meetings[0].group if meetings else None
    every = f"all {len(ended):,} processes have ended: " if len(ended) == len(job.processes) > 1 else ""
    # Calls that disagree come before the ends that NCCL's own errors have brought about.
    weight = Weight.ENDED_BY_NCCL if first.end.startswith("Nccl") else Weight.ENDED
    weight = Weight.CONSEQUENCE if first.gave_up else weight
    member = job.member(first, group)
    details = [f"{job.name(first, group)}: {member.progress()}"] if member else []
    details += [f"also: {ending(waits, one)}" for one in others if not one.gave_up][:SHOWN]
    places = [first.end_site, *(call.site for call in _inside(waits, first).values()), first.where]
    return waits.finding(
        "dead",
        weight,
        every + ending(waits, first, group) + _for_it(meetings),
        meetings=meetings,
        details=details,
        culprits=[job.key(first, group)],
        comms=[comm.uid for comm in first.comms],
        sites=[place for place in places if place][:1],
    )


def ending(waits: Waits, process: ProcessRecord, group: Group | None = None) -> str:
    """ "rank 2 left by ValueError at train.py:31 3.1 s ago: no such file", "rank 2's process 7 ended ...: SIGTERM"."""
    who, when = waits.job.name(process, group), ago(process, process.end_at)
    inside = next((group.brief(call) for group, call in _inside(waits, process).items()), "")
    where = f" inside {inside}" if inside else at(process.where)
    match = _EXCEPTION.match(process.end)
    if process.ended_well:  # the code of a sys.exit(3) is not to be seen by what runs at exit
        return f"{who} exited by itself{when} (the end of its program, or sys.exit)"
    if process.killed and not process.end.startswith("SIG"):
        seen = ago(process, process.heartbeat).removesuffix(" ago")  # its end is later than its last heartbeat
        when = when or (f" within the last{seen}" if seen else "")
        return f"{who}'s process {process.pid} was killed or crashed (no last word){when}{where}"
    if process.killed or not match:
        return f"{who}'s process {process.pid} ended{when}{where}: {clean(process.end)}"
    text = f": {clean(match[2], 480)}" if match[2] else ""
    return f"{who} left by {clean(match[1], 60)}{at(process.end_site)}{when}{text}"


def _inside(waits: Waits, process: ProcessRecord) -> dict[Group, CallRecord]:
    """The newest call of each communicator that it is in."""
    members = waits.job.members.get(id(process), [])
    return {one.group: call for one in members for call in one.pending if call.state == INSIDE}


# Processes that are stopped


def _stopped(waits: Waits) -> Finding | None:
    """Processes that somebody has stopped."""
    job, awaited = waits.job, _awaited(waits, STOPPED)
    halted = [process for process in job.processes if process.state == STOPPED]
    halted.sort(key=lambda process: id(process) not in awaited)
    if not halted:
        return None
    meetings = list(dict.fromkeys(meeting for process in halted for meeting in awaited.get(id(process), [])))
    group = meetings[0].group if meetings else None
    texts = [
        f"{job.name(process, group)}'s process {process.pid} is stopped (SIGSTOP, or a debugger): "
        f"kill -CONT {process.pid} on host {clean(process.host, 60)}"
        for process in halted
    ]
    members = [member for process in halted for member in job.members.get(id(process), [])[:1]]
    return waits.finding(
        "stopped",
        Weight.STOPPED,
        texts[0] + _for_it(meetings),
        meetings=meetings,
        details=texts[1:SHOWN],
        culprits=[job.key(process, group) for process in halted],
        comms=[comm.uid for process in halted for comm in process.comms],
        sites=[member.site for member in members],
    )


# Communicators that have ended, calls that have raised


def _left(waits: Waits, meeting: Meeting) -> Finding:
    """Ranks whose own end of the communicator has ended."""
    members = meeting.lacking(LEFT)
    first = min(members, key=lambda one: (one.comm.ended_at, one.rank))
    how = f"{clean(first.comm.ended)}{at(first.comm.ended_site)}{ago(first.process, first.comm.ended_at)}"
    text = f"{names_of([first])}'s comm '{meeting.group.name}' was {how}; {meeting.waiting()} in {meeting.describe()}"
    text += ", which it never entered"
    return waits.finding(
        "left",
        Weight.LEFT,
        text,
        meetings=[meeting],
        details=waits.job.standings(members),
        culprits=[one.key for one in members],
        sites=[one.comm.ended_site or one.site for one in members],
    )


def _failure(waits: Waits, group: Group) -> Finding | None:
    """Calls that have raised on ranks which live on."""
    living = [one for one in group.members.values() if one.process.state != DEAD]
    rows = [(one, last) for one in living if (last := one.comm.last()) and last.state == FAILED]
    if not rows:
        return None
    several = len({member.process.machine for member, _ in rows}) > 1  # whose clocks are not compared
    rows.sort(key=lambda row: (row[1].gave_up, 0.0 if several else row[1].returned or row[1].issued))
    member, call = rows[0]
    meetings = [one for one in waits.meetings if one.group is group and one.lacks.get(member.rank) == FAILED]
    text = f"{names_of([member])}'s {group.describe(call)}{_raised(call)}{ago(member.process, call.returned)}"
    text += f"; {meetings[0].waiting(' there')}" if meetings else ""
    # That calls disagree is the library's word, where the records do not show which.
    weight = Weight.FAILED
    if call.gave_up:
        weight = Weight.UNCERTAIN if "disagree" in call.error else Weight.FAILED_SINCE
    details = [f"{names_of([one])}: {call_name(other)}{called(other)}{_raised(other)}" for one, other in rows[1:SHOWN]]
    return waits.finding(
        "failed",
        weight,
        text,
        meetings=meetings,
        details=details,
        culprits=[member.key],
        comms=[group.uid],
        sites=[call.site],
    )


def _raised(call: CallRecord) -> str:
    return f" raised {clean(call.error) or 'an exception'}"
