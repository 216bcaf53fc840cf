"""Who waits for whom: where ranks have to meet, who is there, who is not, and what has to go on first.

A meeting is a collective call of one number, or a send with its recv. It waits for another one where a rank that it
needs is inside that one, or issued that one first. Meetings that wait for each other in a circle are crossed calls; one
that waits for a rank which waits for nothing has that rank as its cause.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from .formatting import Range, ranges_of
from .job import Group, Job, Member, consequence, follows, killed
from .records import COMPLETED, DEAD, FAILED, INSIDE, ISSUED, STOPPED, CallRecord, ProcessRecord

LEFT = "left"  # a rank whose communicator has ended, or (FAILED) whose call has raised: it will not come
# Not numbered, but a call of all ranks. `shrink` and `grow` may leave some out.
_TOGETHER = ("finalize", "destroy", "shrink", "grow", "split", "init")
_MOST_TOGETHER = 64  # calls of a group
_LOOKED_AT = 16  # numbers of one communicator, and sends from one rank to another: the first ones explain the others
_MOST_PAIRED = 4096  # sends and recvs of one communicator that have met, and yet go on
_WAITS_FOR = re.compile(r"still waits for ranks \[(\d{1,9}(?:, \d{1,9}){0,1000})\]")
_OLDEST, _NEWEST = 48, 16  # calls of one process that are put in order: those between them wait as they do


@dataclass(eq=False)
class Step:
    """Why one meeting waits for another: the process that is needed has called `first`, and `then` later or not yet."""

    member: Member
    first: CallRecord
    then: CallRecord | None
    certain: bool  # its thread, or its stream, is held there


@dataclass(eq=False)
class Meeting:
    """`here` waits; `away` has not come; `gone` will not: DEAD, STOPPED, LEFT, FAILED; `unknown` left no record."""

    group: Group
    call: CallRecord
    here: dict[int, CallRecord] = field(default_factory=dict)
    away: list[int] = field(default_factory=list)
    gone: dict[int, str] = field(default_factory=dict)
    unknown: list[Range] = field(default_factory=list)
    first: dict[Meeting, list[Step]] = field(default_factory=dict)
    held: set[int] = field(default_factory=set)  # those of `away` that wait elsewhere
    paired: bool = True  # of a send and a recv: whether they are sure to be the two ends of one message

    @property
    def blocked(self) -> bool:
        return bool(self.away or self.gone or self.unknown)

    @property
    def collective(self) -> bool:
        return self.call.operation not in ("send", "recv", "wait_signal")

    @property
    def shared(self) -> bool:
        """Whether others than those who are here have to call it, too."""
        return not self.collective or self.call.number > 0 or self.call.operation in _TOGETHER

    def age(self) -> float:
        """Seconds that the first one has waited."""
        return max((self.group.members[rank].waited(call) for rank, call in self.here.items()), default=0.0)

    def lasted(self, rank: int) -> float:
        """Seconds that the rank has waited there, or had when it gave up."""
        call = self.here[rank]
        if call.state != FAILED:
            return self.group.members[rank].waited(call)
        return max(0.0, call.returned - call.issued) if call.issued and call.returned else 0.0

    def idle(self) -> list[int]:
        """The ranks that have not come although they wait for nothing that is known: the causes."""
        return [rank for rank in self.away if rank not in self.held]


class Waits:
    """All meetings of a job. Post mortem: of processes that have all ended, as they were before."""

    def __init__(self, job: Job, post_mortem: bool = False) -> None:
        self.job, self.post_mortem = job, post_mortem
        self._acts: dict[int, list[CallRecord]] = {}  # by id() of the member
        self.meetings = [meeting for group in job.groups for meeting in self._of(group)]
        self._at: dict[int, list[tuple[Meeting, Member, CallRecord]]] = {}
        for meeting in self.meetings:
            for rank, call in meeting.here.items():
                member = meeting.group.members[rank]
                if call.state != FAILED or call.returned >= _last_issue(member.process):  # has called nothing since
                    self._at.setdefault(id(member.process), []).append((meeting, member, call))
        for rows in self._at.values():
            rows.sort(key=lambda row: row[2].state == FAILED)  # what still waits says more
        self._order()
        self._link()
        self._above = _reversed(self.meetings)

    def circles(self) -> list[list[Meeting]]:
        """Meetings that wait for each other, each circle once, as short as it can be."""
        return [_shortest(part) for part in _components(self.meetings) if len(part) > 1]

    def behind(self, *meetings: Meeting) -> list[Meeting]:
        """These, and the meetings that wait for them, directly or not, nearest first."""
        seen = dict.fromkeys(meetings)
        queue = list(seen)
        for one in queue:
            for other in self._above.get(one, []):
                if other not in seen:
                    seen[other] = None
                    queue.append(other)
        return queue

    def elsewhere(self, member: Member, meeting: Meeting | None = None) -> list[tuple[Meeting, CallRecord]]:
        """What the member's process waits in, other than `meeting`."""
        at = self._at.get(id(member.process), [])
        return [(one, call) for one, _, call in at if one is not meeting and call.state != FAILED]

    def _of(self, group: Group) -> Iterator[Meeting]:
        yield from self._collectives(group)
        yield from self._pairs(group)
        yield from self._others(group)

    def _acting(self, member: Member) -> list[CallRecord]:
        """The calls in which a rank waits, or waited until it gave up."""
        found = self._acts.get(id(member))
        if found is None:
            found, gave_up = [] if self._ended(member) else member.pending, _gave_up(member)
            if member.left and not self.post_mortem and not gave_up:
                found = [
                    call for call in found if call.state == INSIDE
                ]  # what was on a stream went with the communicator
            found = self._acts[id(member)] = found + gave_up
        return found

    def _ended(self, member: Member) -> bool:
        """Whether its process has ended: not because of a call that others made fail, where it counts as waiting there;
        nor, where all have ended, by what may have killed them all."""
        ended = member.dead and not follows(member.process)
        return ended and not (self.post_mortem and killed(member.process))

    def _collectives(self, group: Group) -> Iterator[Meeting]:
        numbers: set[int] = set()
        inside: set[int] = set()
        for member in group.members.values():
            waiting = [call.number for call in self._acting(member) if call.number > 0]
            inside |= set(waiting)
            numbers |= {min(waiting), max(waiting)} if waiting else set()
            if forgotten := _forgotten(member):
                numbers.add(forgotten.number)
                inside.add(forgotten.number)
        lowest = min((member.entered for member in group.members.values()), default=0) + 1
        if lowest in inside:
            numbers.add(lowest)
        for number in sorted(numbers)[:_LOOKED_AT]:
            meeting = Meeting(group, CallRecord(0, number, ""), unknown=group.unknown)
            for member in group.members.values():
                self._place(meeting, member, number)
            if meeting.here:
                calls = list(meeting.here.values())
                meeting.call = next((one for one in calls if one.entry > 0), calls[0])
                meeting.unknown = _not_met(calls) or meeting.unknown
                yield meeting

    def _place(self, meeting: Meeting, member: Member, number: int) -> None:
        """Put the rank where it is, as seen from collective `number`."""
        call = next((one for one in self._acting(member) if one.number == number), None) or member.numbered.get(number)
        if call is None and (forgotten := _forgotten(member)) and forgotten.number <= number <= member.entered:
            call = forgotten
        if number <= member.completed or (call and call.state == COMPLETED):
            return
        if call and call.state == FAILED and consequence(call.error):
            meeting.here[member.rank] = call
        elif why := self._gone(member, call):
            meeting.gone[member.rank] = why
        elif call:
            meeting.here[member.rank] = call
        elif member.entered < number:
            meeting.away.append(member.rank)

    def _gone(self, member: Member, call: CallRecord | None) -> str:
        if self._ended(member):
            return DEAD
        if call and call.state == FAILED:
            return FAILED
        if member.left and not follows(member.process):
            return LEFT
        return STOPPED if member.stopped else ""

    def _pairs(self, group: Group) -> Iterator[Meeting]:
        waiting: dict[tuple[int, int], dict[str, list[CallRecord]]] = {}
        for member in group.members.values():
            for call in self._acting(member):
                if call.operation in ("send", "recv"):
                    pair = (member.rank, call.peer) if call.operation == "send" else (call.peer, member.rank)
                    waiting.setdefault(pair, {"send": [], "recv": []})[call.operation].append(call)
        room = _MOST_PAIRED
        for (source, target), calls in waiting.items():
            sends = yield from self._unmet(group, source, target, calls["send"])
            recvs = yield from self._unmet(group, target, source, calls["recv"])
            met = list(zip(sends, recvs, strict=False))[: min(room, _LOOKED_AT)]
            room -= len(met)
            sure = _counted(group, source, target)
            for send, recv in met:  # of a group one message may have arrived, while others are under way
                paired = sure or not (send.group or recv.group)
                yield Meeting(group, recv, {source: send, target: recv}, paired=paired)
            for rank, peer, more in ((source, target, sends[len(recvs) :]), (target, source, recvs[len(sends) :])):
                if not more:
                    continue
                meeting = Meeting(group, more[0], {rank: more[0]})
                yield meeting if _answered(group, rank, peer, more[0]) else self._for_peer(meeting, peer)

    def _unmet(
        self, group: Group, rank: int, peer: int, calls: list[CallRecord]
    ) -> Generator[Meeting, None, list[CallRecord]]:
        """Those calls of a rank, sends to the peer or recvs, whose other side is not over. The rest wait as a group."""
        over = _over(group, rank, peer, calls[0].operation) if calls else set()
        for call in calls:
            if id(call) in over:
                yield Meeting(group, call, {rank: call})
        return [call for call in calls if id(call) not in over]

    def _for_peer(self, meeting: Meeting, peer: int) -> Meeting:
        """The same, without the rank that it is for."""
        member = meeting.group.members.get(peer)
        if member is None:
            meeting.unknown = [(peer, peer)]
        elif why := self._gone(member, None):
            meeting.gone[peer] = why
        elif peer not in meeting.here:
            meeting.away.append(peer)
        return meeting

    def _others(self, group: Group) -> Iterator[Meeting]:
        found: dict[str, Meeting] = {}
        for member in group.members.values():
            for call in self._acting(member):
                if call.number > 0 or call.operation in ("send", "recv") or call.state == ISSUED:
                    continue
                if call.operation == "wait_signal" and call.peer >= 0:
                    yield self._for_peer(Meeting(group, call, {member.rank: call}), call.peer)
                    continue
                meeting = found.setdefault(call.operation, Meeting(group, call))
                meeting.here[member.rank] = call
        for operation, meeting in found.items():
            if operation in _TOGETHER:
                self._complete(meeting, operation)
            yield meeting

    def _complete(self, meeting: Meeting, operation: str) -> None:
        meeting.unknown = meeting.group.unknown
        for member in meeting.group.members.values():
            called = member.comm is not None and any(call.operation == operation for call in member.comm.calls)
            if member.rank in meeting.here or called or (member.left and operation in ("finalize", "destroy")):
                continue
            if why := self._gone(member, None):
                meeting.gone[member.rank] = why
            else:
                meeting.away.append(member.rank)

    def _order(self) -> None:
        """A call that its rank has issued after another one waits for that one."""
        for rows in self._at.values():
            if len(rows) > _OLDEST + _NEWEST:
                rows = sorted(rows, key=lambda row: (row[2].issued, row[2].entry))
                rows = rows[:_OLDEST] + rows[-_NEWEST:]
            for later, member, then in rows:
                for earlier, other, first in rows:
                    if later is earlier or not _before(first, then, other is member):
                        continue
                    certain = first.stream == then.stream
                    later.first.setdefault(earlier, []).append(Step(other, first, then, certain))

    def _link(self) -> None:
        """A meeting waits for those in which the ranks are that it lacks."""
        stuck = {meeting for meeting in self.meetings if meeting.blocked or meeting.first}
        for meeting in self.meetings:
            for rank in meeting.away:
                process = meeting.group.members[rank].process
                for other, member, call in self._at.get(id(process), []):
                    on_stream = member.comm is not None and call.issued < member.comm.waits_at
                    certain = call.state in (INSIDE, FAILED) or on_stream
                    if other is meeting or not (certain or other in stuck):
                        continue
                    meeting.held.add(rank)
                    step = Step(member, call, None, certain)
                    meeting.first.setdefault(other, []).append(step)


def _not_met(calls: Sequence[CallRecord]) -> list[Range]:
    """Who has not come to an init, where the library that the others have met in says so."""
    said = [found[1] for call in calls if call.operation == "init" and (found := _WAITS_FOR.search(call.error))]
    return ranges_of(int(rank) for rank in said[-1].split(",")) if said else []


def _last_issue(process: ProcessRecord) -> float:
    """When it issued its newest call."""
    return max((call.issued for comm in process.comms for call in comm.calls[-1:]), default=0.0)


def _gave_up(member: Member) -> list[CallRecord]:
    """The last call of a rank, with those that were issued with it, if others have made it fail."""
    last = member.comm.last() if member.comm else None
    if member.comm is None or last is None or last.state != FAILED or not consequence(last.error):
        return []
    together = member.comm.calls[-_MOST_TOGETHER:] if last.group else [last]
    return [call for call in together if call.state == FAILED and call.group == last.group]


def _forgotten(member: Member) -> CallRecord | None:
    """The call that a rank far ahead on its stream waits for, where so many came after it that its record is gone."""
    oldest = next((call for call in member.pending if call.number > 0), None)
    number = member.completed + 1
    if (
        oldest is None
        or oldest.number <= number
        or number in member.numbered
        or min(member.numbered, default=0) < number
    ):
        return None
    return CallRecord(0, number, "collective call", issued=oldest.issued, state=oldest.state)


def _before(first: CallRecord, then: CallRecord, same_comm: bool) -> bool:
    if first.group and first.group == then.group:
        return False
    if first.state == then.state and first.state in (INSIDE, FAILED):
        return False  # in two threads
    if same_comm:
        return first.entry < then.entry
    return 0 < first.issued < then.issued


def _over(group: Group, rank: int, peer: int, operation: str) -> set[int]:
    """By id(), the sends of a rank to the peer (or recvs) whose other side has completed, where all can be counted."""
    own, other = (group.members[one].comm if one in group.members else None for one in (rank, peer))
    if own is None or other is None or not _counted(group, rank, peer):
        return set()
    answer = "recv" if operation == "send" else "send"
    done = sum(one.operation == answer and one.peer == rank and one.state == COMPLETED for one in other.calls)
    asked = [one for one in own.calls if one.operation == operation and one.peer == peer]
    return {id(one) for one in asked[:done]}


def _counted(group: Group, *ranks: int) -> bool:
    """Whether all calls of these ranks are still recorded."""
    comms = [group.members[rank].comm for rank in ranks if rank in group.members]
    return len(comms) == len(ranks) and all(one is not None and one.calls and one.calls[0].entry == 1 for one in comms)


def _answered(group: Group, rank: int, peer: int, call: CallRecord) -> bool:
    """Whether the other side of this send or recv has come, or may have, though it was not seen to complete."""
    member, own = group.members.get(peer), group.members[rank]
    if member is None or member.comm is None:
        return False
    if member.comm.cut:
        return True  # who says that it has not come must have seen all that it did
    other = "recv" if call.operation == "send" else "send"
    answers = [one for one in member.comm.calls if one.operation == other and one.peer == rank]
    if own.comm is None or not answers:
        return False
    if own.comm.calls[0].entry == 1 == member.comm.calls[0].entry:  # all are there to be counted
        asked = [one for one in own.comm.calls if one.operation == call.operation and one.peer == peer]
        return len(answers) > next((index for index, one in enumerate(asked) if one is call), len(asked))
    # That a call on a stream has completed may have been noticed late.
    done = [one for one in answers if one.state == COMPLETED and (one.completed == one.returned or one.issued == 0)]
    return member.process.machine == own.process.machine and any(one.completed >= call.issued > 0 for one in done)


def _reversed(meetings: Sequence[Meeting]) -> dict[Meeting, list[Meeting]]:
    """For each meeting, those that wait for it."""
    above: dict[Meeting, list[Meeting]] = {}
    for one in meetings:
        for other in one.first:
            above.setdefault(other, []).append(one)
    return above


def _components(meetings: Sequence[Meeting]) -> list[list[Meeting]]:
    """The sets of meetings that all wait for each other."""
    left = set(meetings)
    above = _reversed(meetings)
    while ends := {one for one in left if left.isdisjoint(one.first) or left.isdisjoint(above.get(one, []))}:
        left -= ends  # in no circle
    parts = []
    for one in (one for one in meetings if one in left):  # and so not taken with another one
        part = _reached(one, left, lambda node: node.first) & _reached(one, left, lambda node: above[node])
        parts.append([node for node in meetings if node in part])
        left -= part
    return parts


def _reached(start: Meeting, among: set[Meeting], after: Callable[[Meeting], Iterable[Meeting]]) -> set[Meeting]:
    found, queue = {start}, [start]
    for node in queue:
        fresh = [one for one in after(node) if one in among and one not in found]
        found.update(fresh)
        queue += fresh
    return found


def _shortest(part: list[Meeting]) -> list[Meeting]:
    """A shortest circle through the first meeting of a component; each waits for the next one."""
    start, inside = part[0], set(part)
    came: dict[Meeting, Meeting] = {}
    queue = [start]
    for node in queue:
        for after in node.first:
            if after is start:
                path = [node]
                while path[-1] is not start:
                    path.append(came[path[-1]])
                return path[::-1]
            if after in inside and after not in came:
                came[after] = node
                queue.append(after)
    return part
