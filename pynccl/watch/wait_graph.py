"""Who waits for whom: where ranks have to meet, who is there, who is not, and what has to go on first.

A meeting is a collective call of one number, or a send with its recv. It waits for another one where a rank that it
needs is inside that one, or issued that one first. Meetings that wait for each other in a circle are crossed calls; one
that waits for a rank which waits for nothing has that rank as its cause.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, auto
from itertools import zip_longest
from typing import Any

from .formatting import line_of, seconds
from .job import Group, Job, Member
from .records import COMPLETED, DEAD, FAILED, INSIDE, ISSUED, STOPPED, CallRecord

# Why a rank is not at a meeting; or it is DEAD, STOPPED, its call FAILED.
AWAY, LEFT, NO_RECORD = "away", "left", "no record"
MESSAGES = ("send", "recv")
_TOGETHER = ("finalize", "destroy", "shrink", "grow")  # not numbered, but calls of all ranks
_LOOKED_AT = 16  # numbers of one communicator, and sends from one rank to another: the first ones explain the others
_OLDEST = 64  # calls of one process that are put in order: later ones wait as they do


class Weight(IntEnum):
    """Which of several findings is named as the cause: the first of this list. From CONSEQUENCE on a finding only
    follows from something else."""

    ENDED = 0
    MISMATCH = auto()
    ENDED_BY_NCCL = auto()
    CROSSED = auto()
    STOPPED = auto()
    FAILED = auto()
    LEFT = auto()
    AWAY = auto()
    UNCERTAIN = auto()  # crossed if two streams keep each other waiting; or calls that NCCL says to disagree
    KILLED = auto()  # as all processes were: what they waited for comes first
    UNKNOWN = auto()
    STALLED_BETWEEN_MACHINES = auto()
    STALLED = auto()
    CONSEQUENCE = auto()
    FAILED_SINCE = auto()
    BEFORE_THE_END = auto()  # of waits, where the processes ended for another reason


@dataclass
class Finding:
    """As Verdict has it. `waiting`: how many wait because of it; `age`: for how long."""

    kind: str
    weight: Weight
    sentence: str
    details: list[str] = field(default_factory=list)
    culprits: list[tuple[str, int]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    comms: list[str] = field(default_factory=list)
    waiting: int = 0
    age: float = 0.0

    @property
    def is_cause(self) -> bool:
        return self.weight < Weight.CONSEQUENCE


@dataclass(eq=False)
class Step:
    """Why one meeting waits for another: the rank that is needed has called `first`, and `then` later or not yet."""

    member: Member
    first: CallRecord
    then: CallRecord | None
    certain: bool  # its thread, or its stream, is held there


@dataclass(eq=False)
class Meeting:
    """`here`: the ranks that wait, and their calls; `lacks`: the ranks that are needed, and why they are not here.

    first   the meetings that have to go on first, and why
    paired  whether a send and a recv are sure to be the two ends of one message
    """

    group: Group
    call: CallRecord
    here: dict[int, CallRecord] = field(default_factory=dict)
    lacks: dict[int, str] = field(default_factory=dict)
    first: dict[Meeting, list[Step]] = field(default_factory=dict)
    paired: bool = True

    @property
    def collective(self) -> bool:
        return self.call.operation not in (*MESSAGES, "wait_signal")

    def age(self) -> float:
        """Seconds that the first one has waited, or had when it gave up."""
        return max((self.group.members[rank].waited(call) for rank, call in self.here.items()), default=0.0)

    def lacking(self, why: str) -> list[Member]:
        """The ranks that are not here for this reason, without NO_RECORD."""
        return [self.group.members[rank] for rank, reason in self.lacks.items() if reason == why]

    def idle(self) -> list[Member]:
        """The ranks that have not come although they wait for nothing that is known: the causes."""
        held = {id(step.member.process) for steps in self.first.values() for step in steps if step.then is None}
        return [member for member in self.lacking(AWAY) if id(member.process) not in held]

    def complete(self) -> bool:
        """Whether all who have to come are here."""
        return len(self.here) >= (self.group.size if self.collective else 2)

    def brief(self) -> str:
        """ "all_reduce #41 of comm 'tp'"."""
        return self.group.brief(self.call)

    def describe(self) -> str:
        """ "all_reduce #41 (comm 'tp', 4 ranks, BFLOAT16 x 33,554,432, model.py:88)"."""
        return self.group.describe(self.call)

    def waiting(self, where: str = "") -> str:
        """ "3 ranks have waited 12.3 s there", "rank 0 gave up after 60.0 s"."""
        words = []
        for gave_up in (False, True):
            ranks = [rank for rank, call in self.here.items() if (call.state == FAILED) == gave_up]
            if ranks:
                who, have = (f"{len(ranks):,} ranks", "have") if len(ranks) > 1 else (self.group.names(ranks), "has")
                longest = seconds(max(self.group.members[rank].waited(self.here[rank]) for rank in ranks))
                words.append(f"{who} gave up after {longest}" if gave_up else f"{who} {have} waited {longest}{where}")
        return " and ".join(words)


class Waits:
    """All meetings of a job. A wait younger than `patience` seconds is none; communicator `uid` comes first."""

    def __init__(self, job: Job, patience: float = 0.0, uid: str = "") -> None:
        self.job, self.patience, self.uid = job, patience, uid
        self.post_mortem = all(one.state == DEAD for one in job.processes)  # then it is judged what was before
        members = [member for group in job.groups for member in group.members.values()]
        self._calls = {member: self._calls_of(member) for member in members}
        self.meetings = [meeting for group in job.groups for meeting in self._of(group)]
        self._at: dict[int, list[tuple[Meeting, Member, CallRecord]]] = {}  # by id() of the process
        for meeting in self.meetings:
            for rank, call in meeting.here.items():
                member = meeting.group.members[rank]
                newest = max(comm.calls[-1].issued for comm in member.process.comms if comm.calls)
                if call.state != FAILED or call.returned >= newest:  # it has called nothing since
                    self._at.setdefault(id(member.process), []).append((meeting, member, call))
        self._order()
        self._link()
        self._above: dict[Meeting, list[Meeting]] = {}  # those that wait for it
        for one in self.meetings:
            for other in one.first:
                self._above.setdefault(other, []).append(one)

    def stuck(self) -> list[Meeting]:
        """Meetings that lack somebody, those of communicator `uid` first, then the oldest."""
        found = [meeting for meeting in self.meetings if meeting.lacks and meeting.age() >= self.patience]
        return sorted(found, key=lambda one: (one.group.uid != self.uid, -one.age()))

    def finding(
        self,
        kind: str,
        weight: Weight,
        text: str,
        *,
        meetings: Sequence[Meeting],
        sites: Iterable[str] = (),
        **rest: Any,
    ) -> Finding:
        """A finding because of which these meetings do not come about, and all those that wait for them.

        sites  file:line of the calls, or of where the ranks are; rest: details, culprits, comms"""
        found = Finding(kind, weight, text, **rest)
        behind = _reached(meetings, self._above)
        found.waiting = len({id(one.group.members[rank].process) for one in behind for rank in one.here})
        found.age = max((meeting.age() for meeting in meetings), default=0.0)
        found.comms = list(dict.fromkeys([*found.comms, *(meeting.group.uid for meeting in behind)]))
        found.lines = list(dict.fromkeys(line for site in sites if (line := line_of(site))))
        found.culprits = list(dict.fromkeys(found.culprits))
        return found

    def circles(self) -> list[list[Meeting]]:
        """Meetings that wait for each other, each circle once, as short as it can be; each waits for the next one."""
        after = {one: list(one.first) for one in self.meetings}
        found: list[list[Meeting]] = []
        seen: set[Meeting] = set()
        for start in self.meetings:
            if start.first and start not in seen and (path := _shortest(start, after)):
                found.append(path)
                seen |= set(_reached([start], after)) & set(_reached([start], self._above))
        return found

    # Which calls are waits

    def _calls_of(self, member: Member) -> list[CallRecord]:
        """The calls in which a rank waits, or waited until it gave up."""
        gave_up = _gave_up(member)
        found = [] if self._ended(member) else member.pending
        if member.comm.ended and not self.post_mortem and not gave_up:  # what was on streams went with it
            found = [call for call in found if call.state == INSIDE]
        return found + gave_up

    def _ended(self, member: Member) -> bool:
        """Whether its process has ended: not because of a call that others made fail, where it counts as waiting there;
        nor, where all have ended, by what may have killed them all."""
        process = member.process
        return process.state == DEAD and not process.gave_up and not (self.post_mortem and process.killed)

    def _gone(self, member: Member) -> str:
        """Why a rank will not come; "" if it may."""
        if self._ended(member):
            return DEAD
        if member.comm.ended and not member.process.gave_up:
            return LEFT
        return STOPPED if member.process.state == STOPPED else ""

    # Where ranks meet

    def _of(self, group: Group) -> Iterator[Meeting]:
        yield from self._collectives(group)
        yield from self._messages(group)
        yield from self._others(group)

    def _collectives(self, group: Group) -> Iterator[Meeting]:
        inside: set[int] = set()
        numbers: set[int] = set()
        for member in group.members.values():
            waiting = [call.number for call in self._calls[member] if call.number > 0]
            inside |= set(waiting)
            numbers |= {min(waiting), max(waiting)} if waiting else set()
        numbers |= inside & {min((member.comm.entered for member in group.members.values()), default=0) + 1}
        for number in sorted(numbers)[:_LOOKED_AT]:
            meeting = Meeting(group, CallRecord(0, number, ""))
            for member in group.members.values():
                self._place(meeting, member, number)
            if meeting.here:
                meeting.call = next(iter(meeting.here.values()))
                meeting.lacks |= dict.fromkeys(group.unknown, NO_RECORD)
                yield meeting

    def _place(self, meeting: Meeting, member: Member, number: int) -> None:
        """Put the rank where it is, as seen from collective `number`."""
        call = next((one for one in self._calls[member] if one.number == number), None) or member.numbered.get(number)
        if number <= member.comm.completed or (call and call.state == COMPLETED):
            return
        if call and call.gave_up:
            meeting.here[member.rank] = call
        elif call and call.state == FAILED and not self._ended(member):
            meeting.lacks[member.rank] = FAILED
        elif why := self._gone(member):
            meeting.lacks[member.rank] = why
        elif call:
            meeting.here[member.rank] = call
        elif member.comm.entered < number:
            meeting.lacks[member.rank] = AWAY

    def _lack(self, meeting: Meeting, rank: int) -> None:
        """A rank has not come to a meeting that is no collective of a number."""
        member = meeting.group.members.get(rank)
        why = self._gone(member) if member else NO_RECORD
        if why or rank not in meeting.here:
            meeting.lacks[rank] = why or AWAY

    def _messages(self, group: Group) -> Iterator[Meeting]:
        """The n-th send from one rank to another meets the n-th recv, where all are still recorded; else the n-th of
        those that wait."""
        recorded: dict[tuple[str, int, int], list[CallRecord]] = {}  # operation, who calls it, its peer
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
            counted = _counted(group, source, target)
            keys = ("send", source, target), ("recv", target, source)
            rows = list(zip_longest(*((recorded if counted else waiting).get(key, ()) for key in keys)))
            unfinished = {id(call) for key in keys for call in waiting.get(key, ())}
            rows = [row for row in rows if id(row[0]) in unfinished or id(row[1]) in unfinished]
            for row in rows[:_LOOKED_AT]:
                both = {rank: call for rank, call in zip((source, target), row, strict=True) if call}
                here = {rank: call for rank, call in both.items() if id(call) in unfinished}
                rank, call = list(here.items())[-1]
                meeting = Meeting(group, call, here)
                meeting.paired = counted or not any(one.group for one in here.values())
                if len(both) == 1 and (counted or not _answered(group, rank, call, recorded)):
                    self._lack(meeting, call.peer)
                yield meeting

    def _others(self, group: Group) -> Iterator[Meeting]:
        found: dict[str, Meeting] = {}
        for member in group.members.values():
            for call in self._calls[member]:
                if call.number > 0 or call.operation in MESSAGES or call.state == ISSUED:
                    continue
                if call.operation == "wait_signal" and call.peer >= 0:
                    meeting = Meeting(group, call, {member.rank: call})
                    self._lack(meeting, call.peer)
                    yield meeting
                else:
                    found.setdefault(call.operation, Meeting(group, call)).here[member.rank] = call
        for operation, meeting in found.items():
            for rank in (*group.members, *group.unknown) if operation in _TOGETHER else ():
                other = group.members.get(rank)
                ended = other is not None and other.comm.ended and operation in ("finalize", "destroy")
                called = other is not None and any(call.operation == operation for call in other.comm.calls)
                if not ended and not called:
                    self._lack(meeting, rank)
            yield meeting

    # What has to go on first

    def _order(self) -> None:
        """A call that its rank has issued after another one waits for that one."""
        for rows in self._at.values():
            rows = sorted(rows, key=lambda row: (row[2].issued, row[2].entry))[:_OLDEST]
            for later, member, then in rows:
                for earlier, other, first in rows:
                    if later is not earlier and _before(first, then, other is member):
                        certain = first.stream == then.stream
                        later.first.setdefault(earlier, []).append(Step(other, first, then, certain))

    def _link(self) -> None:
        """A meeting waits for those in which the ranks are that it lacks."""
        stuck = {meeting for meeting in self.meetings if meeting.lacks or meeting.first}
        for meeting in self.meetings:
            for away in meeting.lacking(AWAY):
                for other, member, call in self._at.get(id(away.process), []):
                    on_stream = call.issued < member.comm.waits_at
                    certain = call.state in (INSIDE, FAILED) or on_stream
                    if other is not meeting and (certain or other in stuck):
                        meeting.first.setdefault(other, []).append(Step(member, call, None, certain))


def _gave_up(member: Member) -> list[CallRecord]:
    """The last call of a rank, with those that were issued with it, if others have made it fail."""
    last = member.comm.last()
    if last is None or not last.gave_up:
        return []
    together = member.comm.calls if last.group else [last]
    return [call for call in together if call.state == FAILED and call.group == last.group]


def _before(first: CallRecord, then: CallRecord, same_comm: bool) -> bool:
    if first.group and first.group == then.group:
        return False
    if first.state == then.state and first.state in (INSIDE, FAILED):
        return False  # in two threads
    return first.entry < then.entry if same_comm else 0 < first.issued < then.issued


def _counted(group: Group, *ranks: int) -> bool:
    """Whether all calls of these ranks are still recorded."""
    comms = [group.members[rank].comm for rank in ranks if rank in group.members]
    return len(comms) == len(ranks) and all(one.calls and one.calls[0].entry == 1 for one in comms)


def _answered(
    group: Group, rank: int, call: CallRecord, recorded: Mapping[tuple[str, int, int], Sequence[CallRecord]]
) -> bool:
    """Whether the other side of this send or recv has come, or may have, though not all is recorded."""
    peer = group.members.get(call.peer)
    if peer is None:
        return False
    if peer.comm.cut:
        return True  # who says that it has not come must have seen all that it did
    # That a call on a stream has completed may have been noticed late.
    answers = recorded.get(("recv" if call.operation == "send" else "send", call.peer, rank), [])
    done = [one.completed for one in answers if one.state == COMPLETED and one.completed == one.returned]
    return peer.process.machine == group.members[rank].process.machine and max(done, default=0) >= call.issued > 0


def _reached(starts: Iterable[Meeting], after: Mapping[Meeting, Iterable[Meeting]]) -> list[Meeting]:
    queue = list(dict.fromkeys(starts))
    found = set(queue)
    for node in queue:
        fresh = [one for one in dict.fromkeys(after.get(node, ())) if one not in found]
        found.update(fresh)
        queue += fresh
    return queue


def _shortest(start: Meeting, after: Mapping[Meeting, Iterable[Meeting]]) -> list[Meeting]:
    """A shortest circle through a meeting; [] if it is in none."""
    came: dict[Meeting, Meeting] = {}
    queue = [start]
    for node in queue:
        for one in after[node]:
            if one is start:
                path = [node]
                while path[-1] is not start:
                    path.append(came[path[-1]])
                return path[::-1]
            if one not in came:
                came[one] = node
                queue.append(one)
    return []
