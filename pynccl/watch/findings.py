"""What ranks did wrong: they ended, were stopped, ended a communicator, raised, or made calls that differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, auto
from typing import Any

from ..bindings.abi import ELEMENTS
from ..bindings.errors import Outcome, disagreement
from .formatting import ago, at, call_site, call_text, clean, line_of
from .graph import WaitGraph
from .job import MAX_LINES, Group, names_of
from .layout import ENDED_AS, ProcessEnd
from .points import COMM_ENDED, SyncPoint
from .records import DEAD, FAILED, INSIDE, STOPPED, CallRecord, ProcessRecord


class Priority(IntEnum):
    """Of findings: the one that comes first in this list is reported as the cause. From CONSEQUENCE on, a finding only
    follows from something else."""

    PROCESS_ENDED = 0
    MISMATCH = auto()
    ENDED_BY_NCCL = auto()
    CROSSED = auto()
    STOPPED = auto()
    FAILED = auto()
    COMM_ENDED = auto()
    NOT_ENTERED = auto()
    UNKNOWN = auto()  # a rank without a record
    UNCERTAIN = auto()  # crossed only if two streams block each other; or NCCL reports a mismatch
    KILLED = auto()  # all processes were killed: what they waited for comes first
    STALLED_BETWEEN_NODES = auto()
    STALLED = auto()
    CONSEQUENCE = auto()
    FAILED_SINCE = auto()
    BEFORE_THE_END = auto()  # a wait, although the processes ended for another reason


@dataclass
class Finding:
    """One finding; see Verdict. `waiting`: number of processes that wait because of it; `age`: for how many seconds.
    `processes`: (host, pid) of the culprits' processes."""

    kind: str
    priority: Priority
    sentence: str
    details: list[str] = field(default_factory=list)
    culprits: list[tuple[str, int]] = field(default_factory=list)
    processes: list[tuple[str, int]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    comms: list[str] = field(default_factory=list)
    waiting: int = 0
    age: float = 0.0

    @property
    def is_cause(self) -> bool:
        return self.priority < Priority.CONSEQUENCE


def new_finding(
    graph: WaitGraph,
    kind: str,
    priority: Priority,
    text: str,
    *,
    points: Sequence[SyncPoint],
    sites: Iterable[str] = (),
    **rest: Any,
) -> Finding:
    """Return a finding that blocks these sync points and all that wait for them.

    sites  file:line of the calls or of the ranks' positions; rest: details, culprits, comms"""
    found = Finding(kind, priority, text, **rest)
    behind = graph.behind(points)
    found.waiting = len({id(point.group.members[rank].process) for point in behind for rank in point.waits})
    found.age = max((graph.ages[point] for point in points), default=0.0)
    found.comms = list(dict.fromkeys([*found.comms, *(point.group.uid for point in behind)]))
    found.lines = list(dict.fromkeys(line for site in sites if (line := line_of(site))))
    found.culprits = list(dict.fromkeys(found.culprits))
    members = [member for key in found.culprits if (member := graph.job.member_of(*key))]
    found.processes = list(dict.fromkeys((member.process.host, member.process.pid) for member in members))
    return found


def find_unavailable_ranks(graph: WaitGraph) -> Iterator[Finding]:
    """Yield the findings on dead and stopped processes, ended communicators and calls that raised."""
    found = [_find_dead(graph), _find_stopped(graph)]
    found += [_find_ended_comm(graph, point) for point in graph.stuck() if COMM_ENDED in point.missing.values()]
    failed: dict[Group, dict[int, CallRecord]] = {}
    for point in graph.points:
        if point.failed:  # the first one explains the later ones
            failed[point.group] = {**point.failed, **failed.get(point.group, {})}
    found += [_find_failure(graph, group, failed.get(group, {})) for group in graph.job.groups]
    return (finding for finding in found if finding)


def _points_by_process(graph: WaitGraph, why: str) -> dict[int, list[SyncPoint]]:
    """Return by id() of each process the sync points where it is missing for this reason (DEAD or STOPPED)."""
    found: dict[int, list[SyncPoint]] = {}
    for point in graph.points:
        for member in point.missing_because(why):
            found.setdefault(id(member.process), []).append(point)
    return found


def _waiting_clause(points: Sequence[SyncPoint]) -> str:
    return f"; {points[0].waiting(' for it')} in {points[0].describe()}" if points else ""


# Processes that have ended


def _find_dead(graph: WaitGraph) -> Finding | None:
    """Find the first process that ended; None if all exited cleanly and no rank waits for them."""
    job, awaited = graph.job, _points_by_process(graph, DEAD)
    ended = [process for process in job.processes if process.state == DEAD]
    blamed = [process for process in ended if not process.exited_cleanly or id(process) in awaited]
    if not blamed:
        return None
    several = len({process.machine for process in blamed}) > 1
    waited = {  # until they were killed
        id(point.group.members[rank].process) for points in awaited.values() for point in points for rank in point.waits
    }

    def order(process: ProcessRecord) -> tuple[bool, bool, bool, int, float]:
        # Clocks of two nodes are not comparable: there, the rank with the fewest calls counts as the first.
        made = sum(comm.entered for comm in process.comms) if several else 0
        waits, clean = id(process) in waited, process.exited_cleanly
        return process.gave_up, waits, clean, made, process.estimated_end

    blamed.sort(key=order)
    missed = (one for one in blamed if not _is_replaced(graph, one, awaited.get(id(one), [])))
    first = next(missed, blamed[0])
    points = awaited.get(id(first), [])
    group = points[0].group if points else None
    every = f"all {len(ended):,} processes have ended: " if len(ended) == len(job.processes) > 1 else ""
    # Mismatched calls have priority over exits caused by NCCL's own errors.
    priority = Priority.ENDED_BY_NCCL if first.ending == ProcessEnd.CALL_FAILED else Priority.PROCESS_ENDED
    priority = Priority.CONSEQUENCE if first.gave_up or _is_replaced(graph, first, points) else priority
    member = job.member(first, group)
    details = [f"{job.name(first, group)}: {member.progress()}"] if member else []
    others = [process for process in blamed if process is not first and not process.gave_up]
    details += [f"also: {describe_end(graph, process)}" for process in others[:MAX_LINES]]
    places = [first.end_site, *(call.site for call in _inside(graph, first).values()), first.where]
    return new_finding(
        graph,
        "dead",
        priority,
        every + describe_end(graph, first, group) + _waiting_clause(points),
        points=points,
        details=details,
        culprits=[job.key(first, group)],
        comms=[comm.uid for comm in first.comms],
        sites=[place for place in places if place][:1],
    )


def _is_replaced(graph: WaitGraph, process: ProcessRecord, points: Sequence[SyncPoint]) -> bool:
    """Return whether the others have gone on without a process that ended: they have closed or shrunk its communicator,
    and use others. That is all who gave up there, or who are alive and have not closed it; nobody waits at `points`."""
    if any(call.state != FAILED for point in points for call in point.waits.values()):
        return False
    groups, uids = [member.group for member in graph.job.members.get(id(process), [])], process.uids()
    others = [member for group in groups for member in group.members.values() if member.process is not process]
    left = [member for member in others if member.comm.ended or member.comm.excluded]
    gone = {member for member in left if graph.went_on(member, without=uids)}
    stay = {one for one in others if one.process.state != DEAD and not one.comm.ended}
    stay |= {one for one in others if any(call.gave_up for call in one.comm.calls)}
    return bool(gone) and gone >= stay


def describe_end(graph: WaitGraph, process: ProcessRecord, group: Group | None = None) -> str:
    """ "rank 2 exited with ValueError at train.py:31 3.1 s ago: no such file"."""
    who, when = graph.job.name(process, group), ago(process, process.end_at)
    inside = next((group.short_name(call) for group, call in _inside(graph, process).items()), "")
    where = f" inside {inside}" if inside else at(process.where)
    if process.exited_cleanly:  # atexit handlers do not see the code of sys.exit(3)
        return f"{who} exited by itself{when} (the end of its program, or sys.exit)"
    if process.killed and process.ending != ProcessEnd.INTERRUPTED:
        seen = ago(process, process.heartbeat).removesuffix(" ago")  # it ended after its last heartbeat
        when = when or (f" within the last{seen}" if seen else "")
        return f"{who}'s process {process.pid} was killed or crashed (no exit recorded){when}{where}"
    error, _, text = process.end.partition(": ")
    text = f": {clean(text, 480)}" if text else ""
    return f"{who} exited with {clean(error, 60)}{at(process.end_site)}{when}{text}"


def _inside(graph: WaitGraph, process: ProcessRecord) -> dict[Group, CallRecord]:
    """Return the calls that it is inside, by communicator."""
    members = graph.job.members.get(id(process), [])
    return {member.group: call for member in members for call in member.pending if call.state == INSIDE}


# Processes that are stopped


def _find_stopped(graph: WaitGraph) -> Finding | None:
    """Find the processes that are stopped by a signal or a debugger."""
    job, awaited = graph.job, _points_by_process(graph, STOPPED)
    halted = [process for process in job.processes if process.state == STOPPED]
    halted.sort(key=lambda process: id(process) not in awaited)
    if not halted:
        return None
    points = list(dict.fromkeys(point for process in halted for point in awaited.get(id(process), [])))
    group = points[0].group if points else None
    texts = [
        f"{job.name(process, group)}'s process {process.pid} is stopped (SIGSTOP, or a debugger): "
        f"kill -CONT {process.pid} on host {clean(process.host, 60)}"
        for process in halted
    ]
    members = [member for process in halted for member in job.members.get(id(process), [])[:1]]
    return new_finding(
        graph,
        "stopped",
        Priority.STOPPED,
        texts[0] + _waiting_clause(points),
        points=points,
        details=texts[1:MAX_LINES],
        culprits=[job.key(process, group) for process in halted],
        comms=[comm.uid for process in halted for comm in process.comms],
        sites=[member.site for member in members],
    )


# Communicators that have ended, calls that have raised


def _find_ended_comm(graph: WaitGraph, point: SyncPoint) -> Finding:
    """Report the ranks that have destroyed or aborted their communicator."""
    members = point.missing_because(COMM_ENDED)
    first = min(members, key=lambda member: (member.comm.ended_at, member.rank))
    how = f"{ENDED_AS[first.comm.ended]}{at(first.comm.ended_site)}{ago(first.process, first.comm.ended_at)}"
    text = f"{names_of([first])}'s comm '{point.group.name}' was {how}; {point.waiting()} in {point.describe()}"
    text += ", which it never entered"
    return new_finding(
        graph,
        "destroyed",
        Priority.COMM_ENDED,
        text,
        points=[point],
        details=graph.job.status_lines(members),
        culprits=[member.key for member in members],
        sites=[member.comm.ended_site or member.site for member in members],
    )


def _find_failure(graph: WaitGraph, group: Group, failed: Mapping[int, CallRecord]) -> Finding | None:
    """Find calls that raised on ranks that are alive, or have ended for another reason.

    failed  rank -> its call for which others wait, although the rank may have made others since"""
    rows = []
    for member in group.members.values():
        last, process = failed.get(member.rank) or member.comm.last(), member.process
        elsewhere = process.gave_up or process.ending == ProcessEnd.KILLED  # it ended for another reason
        if last is None or (member.revoked and last.gave_up):
            continue
        if last.state == FAILED and (process.state != DEAD or (elsewhere and last.is_cause)):
            rows.append((member, last))
    if not rows:
        return None
    several = len({member.process.machine for member, _ in rows}) > 1  # their clocks are not comparable
    rows.sort(key=lambda row: (row[1].gave_up, 0.0 if several else row[1].returned or row[1].issued))
    member, call = rows[0]
    points = [point for point in graph.points if point.group is group and point.missing.get(member.rank) == FAILED]
    if graph.caught(group, {one.rank: other for one, other in rows}, *(point.arrived for point in points)):
        return None
    text = f"{names_of([member])}'s {group.describe(call)}{_raised(call)}{ago(member.process, call.returned)}"
    text += f"; {points[0].waiting(' there')}" if points else ""
    # A mismatch that only the library reports is uncertain: the records do not show it.
    priority = Priority.FAILED
    if call.gave_up:
        priority = Priority.UNCERTAIN if call.outcome == Outcome.MISMATCH else Priority.FAILED_SINCE
    details = [
        f"{names_of([one])}: {group.call_name(other)}{call_site(other)}{_raised(other)}"
        for one, other in rows[1:MAX_LINES]
    ]
    return new_finding(
        graph,
        "failed",
        priority,
        text,
        points=points,
        details=details,
        culprits=[member.key],
        comms=[group.uid],
        sites=[call.site],
    )


def _raised(call: CallRecord) -> str:
    return f" raised {clean(call.error) or 'an exception'}"


# Calls that do not match: operation, count, data type, operator or root

_COMPARED_BY_NAME = ("init", "split", "group plan", "barrier", "grow", "shrink")  # only the operation is compared
_ITEMSIZE = {element.dtype.name: element.itemsize for element in ELEMENTS}


def find_mismatches(graph: WaitGraph) -> list[Finding]:
    """Return a finding for each communicator whose ranks made different calls, and for each send and recv that differ
    in size."""
    found = [_mismatch(graph, group) for group in graph.job.groups]
    found += [_size_mismatch(graph, point) for point in graph.points]
    return [finding for finding in found if finding]


def _mismatch(graph: WaitGraph, group: Group) -> Finding | None:
    """Report the first collective that differs. Culprits: the minority, or all ranks if there is no majority."""
    keys: dict[int, set[tuple[str | int, ...]]] = {}
    for member in group.members.values():
        for number, call in member.numbered.items():
            keys.setdefault(number, set()).add(_key(call))
    number = min((number for number, found in keys.items() if len(found) > 1), default=0)
    if not number:
        return None
    calls = {rank: member.numbered[number] for rank, member in group.members.items() if number in member.numbered}
    points = [point for point in graph.points if point.group is group and point.call.number == number]
    if graph.caught(group, calls, *(point.arrived for point in points)):
        return None
    majority, votes = Counter(map(_key, calls.values())).most_common(1)[0]
    odd = {rank: call for rank, call in calls.items() if _key(call) != majority}
    usual = {rank: call for rank, call in calls.items() if _key(call) == majority}
    sides, others = _texts_by_call(group, odd), _texts_by_call(group, usual)
    if 2 * votes > len(calls):
        theirs = next(iter(usual.values()))
        text = f"{', '.join(sides[:3])} as #{number:,} ({group.title()}), where the others call "
        text += f"{call_text(theirs)}{call_site(theirs)}"
    else:
        text = disagreement([*sides, *others][:4], f" about call #{number:,} ({group.title()})")
        odd |= usual
    text += f"; {points[0].waiting(' there')}" if points else ""
    details = [*[*sides, *others][:MAX_LINES], "every rank must make the same collective calls in the same order"]
    return new_finding(
        graph,
        "mismatch",
        Priority.MISMATCH,
        text,
        points=points,
        details=details,
        culprits=[(group.uid, rank) for rank in sorted(odd)],
        comms=[group.uid],
        sites=[odd[rank].site for rank in sorted(odd)],
    )


def _texts_by_call(group: Group, calls: dict[int, CallRecord]) -> list[str]:
    """Return a text per distinct call: "rank 0 calls all_reduce(count=4, FLOAT32) at a.py:3"."""
    rows: dict[str, list[int]] = {}
    for rank, call in calls.items():
        rows.setdefault(call_text(call), []).append(rank)
    return [
        f"{group.names(ranks)} call{'s' if len(ranks) == 1 else ''} {text}{call_site(calls[ranks[0]])}"
        for text, ranks in rows.items()
    ]


def _key(call: CallRecord) -> tuple[str | int, ...]:
    """Return the properties of a call that must match on all ranks."""
    if call.outcome == Outcome.MISMATCH and call.detail:  # of PYNCCL_CHECK=1
        return call.operation, call.detail
    if call.operation in _COMPARED_BY_NAME:
        return (call.operation,)
    count = -1 if call.operation.endswith("_v") else call.count
    return call.operation, count, call.dtype, call.op, call.root


def _size_mismatch(graph: WaitGraph, point: SyncPoint) -> Finding | None:
    """Compare the sizes of a send and its recv."""
    calls = {call.operation: (rank, call) for rank, call in point.arrived.items()}
    if calls.keys() != {"send", "recv"}:
        return None
    group, (source, send), (target, recv) = point.group, calls["send"], calls["recv"]
    sent, expected = (call.count * _ITEMSIZE.get(call.dtype, -1) for call in (send, recv))
    if sent == expected or min(sent, expected) < 0:
        return None
    text = (
        f"{group.names([source])} sends {send.dtype} x {send.count:,}{call_site(send)} to "
        f"{group.names([target])}, which expects {recv.dtype} x {recv.count:,}{call_site(recv)} (comm '{group.name}')"
    )
    culprits = [(group.uid, source), (group.uid, target)]
    sites = [send.site, recv.site]
    return new_finding(graph, "mismatch", Priority.MISMATCH, text, points=[point], culprits=culprits, sites=sites)
