"""The wait-for graph: which calls need several ranks, which of these have entered, and what blocks the others.

A sync point is a collective with one number, or a send with its recv. It waits for another sync point if a rank that
it needs is inside that one, or issued that one first. A cycle of sync points means that calls are crossed. If a sync
point waits for a rank that waits for nothing, that rank is the cause.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, auto
from itertools import chain, zip_longest
from typing import Any

from .formatting import line_of, seconds
from .job import Group, Job, Member
from .records import COMPLETED, DEAD, FAILED, INSIDE, ISSUED, LAUNCHED, NOT_KNOWN, STOPPED, CallRecord

# Why a rank is missing at a sync point. The other reasons are DEAD, STOPPED and FAILED.
NOT_ENTERED, COMM_ENDED, NO_RECORD = "away", "left", "no record"
MESSAGES = ("send", "recv")
_CALLED_BY_ALL_RANKS = ("finalize", "destroy", "shrink", "grow")  # not numbered, but all ranks call them
_MAX_POINTS = 16  # per communicator, and per pair of ranks: the first ones explain the later ones
_MAX_ORDERED_CALLS = 64  # per process: later calls wait for the same reasons


class Weight(IntEnum):
    """Priority of a finding: the one that comes first in this list is reported as the cause. From CONSEQUENCE on, a
    finding only follows from something else."""

    ENDED = 0
    MISMATCH = auto()
    ENDED_BY_NCCL = auto()
    CROSSED = auto()
    STOPPED = auto()
    FAILED = auto()
    COMM_ENDED = auto()
    NOT_ENTERED = auto()
    UNCERTAIN = auto()  # crossed only if two streams block each other; or NCCL reports a mismatch
    KILLED = auto()  # all processes were killed: what they waited for comes first
    UNKNOWN = auto()
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
    weight: Weight
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
        return self.weight < Weight.CONSEQUENCE


@dataclass(eq=False)
class Dependency:
    """Why one sync point waits for another: a rank called `earlier_call`, and then `later_call` or not yet."""

    member: Member
    earlier_call: CallRecord
    later_call: CallRecord | None
    certain: bool  # its thread or stream is known to be blocked there


@dataclass(eq=False)
class SyncPoint:
    """A call that needs several ranks: a collective, or a send and its recv.

    arrived     rank -> its call, for the ranks that wait in it
    missing     rank -> reason, for the ranks that it needs and that have not entered it
    blocked_by  the sync points that must complete first, and why
    excluded    the ranks that a shrink excludes
    paired      whether a send and a recv are certainly the two ends of one message
    """

    group: Group
    call: CallRecord
    arrived: dict[int, CallRecord] = field(default_factory=dict)
    missing: dict[int, str] = field(default_factory=dict)
    blocked_by: dict[SyncPoint, list[Dependency]] = field(default_factory=dict)
    excluded: set[int] = field(default_factory=set)
    paired: bool = True

    @property
    def collective(self) -> bool:
        return self.call.operation not in (*MESSAGES, "wait_signal")

    def age(self) -> float:
        """Seconds that the first rank has waited, or had waited when it gave up."""
        return max((self.group.members[rank].waited(call) for rank, call in self.arrived.items()), default=0.0)

    def complete_since(self) -> float:
        """Seconds since the last rank entered."""
        members = self.group.members
        return min((members[rank].process.now - call.issued for rank, call in self.arrived.items()), default=0.0)

    def missing_because(self, why: str) -> list[Member]:
        """Return the ranks that are missing for this reason (not NO_RECORD)."""
        return [self.group.members[rank] for rank, reason in self.missing.items() if reason == why]

    def idle(self) -> list[Member]:
        """Return the ranks that have not entered it although they wait for nothing known: the causes."""
        held = {
            id(dependency.member.process)
            for dependencies in self.blocked_by.values()
            for dependency in dependencies
            if dependency.later_call is None
        }
        return [member for member in self.missing_because(NOT_ENTERED) if id(member.process) not in held]

    def complete(self) -> bool:
        """Return whether all needed ranks have arrived."""
        return len(self.arrived) >= (self.group.size - len(self.excluded) if self.collective else 2)

    def short_name(self) -> str:
        """ "all_reduce #41 of comm 'tp'"."""
        return self.group.short_name(self.call)

    def describe(self) -> str:
        """ "all_reduce #41 (comm 'tp', 4 ranks, BFLOAT16 x 33,554,432, model.py:88)"."""
        return self.group.describe(self.call)

    def waiting(self, where: str = "") -> str:
        """ "3 ranks have waited 12.3 s there", "rank 0 gave up after 60.0 s"."""
        words = []
        for how in (f"waited {{}}{where}", f"perhaps waited {{}}{where} ({NOT_KNOWN})", "gave up after {}"):
            ranks = [rank for rank, call in self.arrived.items() if how.startswith(_how_it_waits(call))]
            if ranks:
                who, have = (f"{len(ranks):,} ranks", "have ") if len(ranks) > 1 else (self.group.names(ranks), "has ")
                longest = seconds(max(self.group.members[rank].waited(self.arrived[rank]) for rank in ranks))
                words.append(f"{who} {'' if how.startswith('gave') else have}{how.format(longest)}")
        return " and ".join(words)


class WaitGraph:
    """All sync points of a job. Waits shorter than `min_wait` seconds are ignored; communicator `uid` comes first."""

    def __init__(self, job: Job, min_wait: float = 0.0, uid: str = "") -> None:
        self.job, self.min_wait, self.uid = job, min_wait, uid
        self.post_mortem = all(
            process.state == DEAD for process in job.processes
        )  # then the state before the end is judged
        members = [member for group in job.groups for member in group.members.values()]
        self._calls = {member: self._calls_of(member) for member in members}
        self.points = [point for group in job.groups for point in self._sync_points(group)]
        self._waiting_at: dict[int, list[tuple[SyncPoint, Member, CallRecord]]] = {}  # by id() of the process
        for point in self.points:
            for rank, call in point.arrived.items():
                member = point.group.members[rank]
                newest = max(comm.calls[-1].issued for comm in member.process.comms if comm.calls)
                left = member.comm.ended and member.process.state != DEAD  # the program caught the error
                if call.state != FAILED or (call.returned >= newest and not left):  # no newer call was issued
                    self._waiting_at.setdefault(id(member.process), []).append((point, member, call))
        self._link_by_issue_order()
        self._link_by_missing_ranks()
        self._dependents: dict[SyncPoint, list[SyncPoint]] = {}  # sync point -> those that wait for it
        for point in self.points:
            for other in point.blocked_by:
                self._dependents.setdefault(other, []).append(point)

    def stuck(self) -> list[SyncPoint]:
        """Return the sync points with missing ranks: those of communicator `uid` first, then the oldest."""
        found = [point for point in self.points if point.missing and point.age() >= self.min_wait]
        return sorted(found, key=lambda point: (point.group.uid != self.uid, -point.age()))

    def finding(
        self,
        kind: str,
        weight: Weight,
        text: str,
        *,
        points: Sequence[SyncPoint],
        sites: Iterable[str] = (),
        **rest: Any,
    ) -> Finding:
        """Create a finding that blocks these sync points and all that wait for them.

        sites  file:line of the calls or of the ranks' positions; rest: details, culprits, comms"""
        found = Finding(kind, weight, text, **rest)
        behind = _reachable(points, self._dependents)
        found.waiting = len({id(point.group.members[rank].process) for point in behind for rank in point.arrived})
        found.age = max((point.age() for point in points), default=0.0)
        found.comms = list(dict.fromkeys([*found.comms, *(point.group.uid for point in behind)]))
        found.lines = list(dict.fromkeys(line for site in sites if (line := line_of(site))))
        found.culprits = list(dict.fromkeys(found.culprits))
        members = [member for key in found.culprits if (member := self.job.member_of(*key))]
        found.processes = list(dict.fromkeys((member.process.host, member.process.pid) for member in members))
        return found

    def was_handled(self, group: Group, calls: Mapping[int, CallRecord], points: Sequence[SyncPoint]) -> bool:
        """Return whether the program caught the errors of these calls (by rank) and continued, so that they do not
        explain what happens now: nobody waits at `points`, the ranks are alive, and have ended the communicator; or the
        verdict is about another communicator, and they have used others since."""
        if self.post_mortem or self.uid == group.uid:
            return False
        if any(call.state != FAILED for point in points for call in point.arrived.values()):
            return False
        members = [group.members[rank] for rank in calls]
        return all(
            member.process.state != DEAD
            and (member.comm.ended or (bool(self.uid) and _continued(member, calls[member.rank])))
            for member in members
        )

    def cycles(self) -> list[list[SyncPoint]]:
        """Return the cycles of sync points, each once and as short as possible; each point waits for the next one."""
        after = {point: list(point.blocked_by) for point in self.points}
        found: list[list[SyncPoint]] = []
        seen: set[SyncPoint] = set()
        for start in self.points:
            if start.blocked_by and start not in seen and (path := _shortest_cycle(start, after)):
                found.append(path)
                seen |= set(_reachable([start], after)) & set(_reachable([start], self._dependents))
        return found

    # Calls that wait

    def _calls_of(self, member: Member) -> list[CallRecord]:
        """Return the calls in which a rank waits, or waited until it gave up."""
        gave_up = [] if self._went_on(member) else _gave_up(member)
        found = [] if self._ended(member) else member.waits
        if member.comm.ended and not self.post_mortem and not gave_up:  # calls on streams ended with it
            found = [call for call in found if call.state == INSIDE]
        return found + gave_up

    def _went_on(self, member: Member) -> bool:
        """Return whether the program caught the error of a rank's last call, which then explains nothing in other
        communicators: it has used one of them since, or did not wait for the call."""
        last = member.comm.last()
        if last is None or self.uid == member.group.uid or member.process.state == DEAD:
            return False
        return _continued(member, last) or (last.posted and not member.comm.awaited_at)

    def _ended(self, member: Member) -> bool:
        """Return whether its process has ended by itself. A process that ended because other ranks made its call fail
        still counts as waiting there; so does a killed process if all processes have ended."""
        process = member.process
        return process.state == DEAD and not process.gave_up and not (self.post_mortem and process.killed)

    def _why_absent(self, member: Member) -> str:
        """Return why a rank will never enter a call; "" if it may."""
        if self._ended(member):
            return DEAD
        if member.comm.ended and not member.process.gave_up:
            return COMM_ENDED
        return STOPPED if member.process.state == STOPPED else ""

    # Sync points

    def _sync_points(self, group: Group) -> Iterator[SyncPoint]:
        for point in chain(self._collectives(group), self._messages(group), self._other_calls(group)):
            known = any(call.state != LAUNCHED for call in point.arrived.values())
            if known or set(point.missing.values()) - {NO_RECORD}:  # else it may have run
                yield point

    def _collectives(self, group: Group) -> Iterator[SyncPoint]:
        inside: set[int] = set()
        numbers: set[int] = set()
        for member in group.members.values():
            waiting = [call.number for call in self._calls[member] if call.number > 0]
            inside |= set(waiting)
            numbers |= {min(waiting), max(waiting)} if waiting else set()
        numbers |= inside & {min((member.comm.entered for member in group.members.values()), default=0) + 1}
        for number in sorted(numbers)[:_MAX_POINTS]:
            point = SyncPoint(group, CallRecord(0, number, ""))
            for member in group.members.values():
                self._add_rank(point, member, number)
            if point.arrived:
                point.call = next(iter(point.arrived.values()))
                point.missing |= dict.fromkeys(group.unknown, NO_RECORD)
                yield point

    def _add_rank(self, point: SyncPoint, member: Member, number: int) -> None:
        """Add a rank to collective `number`, as arrived or missing, unless it has completed it."""
        call = next((call for call in self._calls[member] if call.number == number), None) or member.numbered.get(
            number
        )
        if number <= member.comm.completed or (call and call.state == COMPLETED):
            return
        if call and call.state == LAUNCHED and (member.comm.ended or self._ended(member)):
            return  # it may have run
        if call and call.gave_up:
            point.arrived[member.rank] = call
        elif call and call.state == FAILED and not self._ended(member):
            point.missing[member.rank] = FAILED
        elif why := self._why_absent(member):
            point.missing[member.rank] = why
        elif call:
            point.arrived[member.rank] = call
        elif member.comm.entered < number:
            point.missing[member.rank] = NOT_ENTERED

    def _mark_missing(self, point: SyncPoint, rank: int) -> None:
        """Mark a rank as missing at a sync point that is not a numbered collective, unless it has arrived."""
        member = point.group.members.get(rank)
        why = self._why_absent(member) if member else NO_RECORD
        if why or rank not in point.arrived:
            point.missing[rank] = why or NOT_ENTERED

    def _messages(self, group: Group) -> Iterator[SyncPoint]:
        """Pair the n-th send from one rank to another with the n-th recv, counting all calls if they are still
        recorded, else only those that wait."""
        recorded: dict[tuple[str, int, int], list[CallRecord]] = {}  # by operation, rank, peer
        waiting: dict[tuple[str, int, int], list[CallRecord]] = {}
        for member in group.members.values():
            for calls, of in ((member.comm.calls, recorded), (self._calls[member], waiting)):
                for call in calls:
                    if call.operation in MESSAGES:
                        of.setdefault((call.operation, member.rank, call.peer), []).append(call)
        pairs = dict.fromkeys(
            (rank, peer) if operation == "send" else (peer, rank) for operation, rank, peer in waiting
        )
        for source, target in pairs:
            fully_recorded = _fully_recorded(group, source, target)
            keys = ("send", source, target), ("recv", target, source)
            rows = list(zip_longest(*((recorded if fully_recorded else waiting).get(key, ()) for key in keys)))
            unfinished = {id(call) for key in keys for call in waiting.get(key, ())}
            rows = [row for row in rows if id(row[0]) in unfinished or id(row[1]) in unfinished]
            for row in rows[:_MAX_POINTS]:
                both = {rank: call for rank, call in zip((source, target), row, strict=True) if call}
                here = {rank: call for rank, call in both.items() if id(call) in unfinished}
                rank, call = list(here.items())[-1]
                point = SyncPoint(group, call, here)
                point.paired = fully_recorded or not any(call.group for call in here.values())
                if len(both) == 1 and (fully_recorded or not _peer_may_have_called(group, rank, call, recorded)):
                    self._mark_missing(point, call.peer)
                yield point

    def _other_calls(self, group: Group) -> Iterator[SyncPoint]:
        found: dict[str, SyncPoint] = {}
        for member in group.members.values():
            for call in self._calls[member]:
                if call.number > 0 or call.operation in MESSAGES or call.state == ISSUED:
                    continue
                if call.operation == "wait_signal" and call.peer >= 0:
                    point = SyncPoint(group, call, {member.rank: call})
                    self._mark_missing(point, call.peer)
                    yield point
                else:
                    found.setdefault(call.operation, SyncPoint(group, call)).arrived[member.rank] = call
        for operation, point in found.items():
            callers = [*group.members, *group.unknown] if operation in _CALLED_BY_ALL_RANKS else []
            if operation == "shrink":
                excluded = {rank for caller in point.arrived for rank in group.members[caller].comm.excluded}
                callers = [rank for rank in callers if rank not in excluded]
                point.excluded = excluded
            for rank in callers:
                other = group.members.get(rank)
                ended = other is not None and other.comm.ended and operation in ("finalize", "destroy")
                called = other is not None and any(call.operation == operation for call in other.comm.calls)
                if not ended and not called:
                    self._mark_missing(point, rank)
            yield point

    # Dependencies

    def _link_by_issue_order(self) -> None:
        """Make each call wait for the calls that its rank issued before it."""
        for rows in self._waiting_at.values():
            rows = sorted(rows, key=lambda row: (row[2].issued, row[2].entry))[:_MAX_ORDERED_CALLS]
            for later, member, then in rows:
                for earlier, other, first in rows:
                    if later is not earlier and _before(first, then, other is member):
                        certain = first.stream == then.stream
                        later.blocked_by.setdefault(earlier, []).append(Dependency(other, first, then, certain))

    def _link_by_missing_ranks(self) -> None:
        """Make each sync point wait for those in which its missing ranks wait."""
        stuck = {point for point in self.points if point.missing or point.blocked_by}
        for point in self.points:
            for absent in point.missing_because(NOT_ENTERED):
                for other, member, call in self._waiting_at.get(id(absent.process), []):
                    on_stream = call.issued < member.comm.waits_at
                    certain = call.state in (INSIDE, FAILED) or on_stream or call.posted
                    if other is not point and (certain or other in stuck):
                        point.blocked_by.setdefault(other, []).append(Dependency(member, call, None, certain))


def _how_it_waits(call: CallRecord) -> str:
    return "gave up" if call.state == FAILED else "perhaps" if call.state == LAUNCHED else "waited"


def _continued(member: Member, call: CallRecord) -> bool:
    """Return whether the process has created or used another communicator since this call returned. To close one is
    not to use it: an exception does that too."""
    others = [comm for comm in member.process.comms if comm.uid != member.group.uid]
    used = [later for comm in others for later in comm.calls if later.operation not in ("finalize", "destroy")]
    times = [comm.made for comm in others] + [later.issued for later in used]
    return 0 < call.returned < max(times, default=0.0)


def _gave_up(member: Member) -> list[CallRecord]:
    """Return the last call of a rank and the rest of its group, if other ranks made it fail."""
    last = member.comm.last()
    if last is None or not last.gave_up:
        return []
    together = member.comm.calls if last.group else [last]
    return [member.resolve_check(call) for call in together if call.state == FAILED and call.group == last.group]


def _before(first: CallRecord, then: CallRecord, same_comm: bool) -> bool:
    if first.group and first.group == then.group:
        return False
    if first.state == then.state and first.state in (INSIDE, FAILED):
        return False  # called by two threads
    return first.entry < then.entry if same_comm else 0 < first.issued < then.issued


def _fully_recorded(group: Group, *ranks: int) -> bool:
    """Return whether all calls of these ranks are still recorded."""
    comms = [group.members[rank].comm for rank in ranks if rank in group.members]
    return len(comms) == len(ranks) and all(comm.calls and comm.calls[0].entry == 1 for comm in comms)


def _peer_may_have_called(
    group: Group, rank: int, call: CallRecord, recorded: Mapping[tuple[str, int, int], Sequence[CallRecord]]
) -> bool:
    """Return whether the peer of this send or recv has made its call, or may have, given an incomplete record."""
    peer = group.members.get(call.peer)
    if peer is None:
        return False
    if peer.comm.cut:
        return True  # a truncated record cannot show that the call is missing
    # Completion on a stream may be observed late, so only synchronous calls count.
    answers = recorded.get(("recv" if call.operation == "send" else "send", call.peer, rank), [])
    done = [answer.completed for answer in answers if answer.state == COMPLETED and answer.completed == answer.returned]
    return peer.process.machine == group.members[rank].process.machine and max(done, default=0) >= call.issued > 0


def _reachable(starts: Iterable[SyncPoint], after: Mapping[SyncPoint, Iterable[SyncPoint]]) -> list[SyncPoint]:
    """Return the start points and all points reachable from them, breadth first."""
    queue = list(dict.fromkeys(starts))
    found = set(queue)
    for node in queue:
        fresh = [point for point in dict.fromkeys(after.get(node, ())) if point not in found]
        found.update(fresh)
        queue += fresh
    return queue


def _shortest_cycle(start: SyncPoint, after: Mapping[SyncPoint, Iterable[SyncPoint]]) -> list[SyncPoint]:
    """Return a shortest cycle through `start`; [] if it is in none."""
    previous: dict[SyncPoint, SyncPoint] = {}
    queue = [start]
    for node in queue:
        for point in after[node]:
            if point is start:
                path = [node]
                while path[-1] is not start:
                    path.append(previous[path[-1]])
                return path[::-1]
            if point not in previous:
                previous[point] = node
                queue.append(point)
    return []
