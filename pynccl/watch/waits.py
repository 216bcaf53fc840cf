"""Who waits for whom: where ranks have to meet, who is there, who is not, and what has to go on first.

A meeting is a collective call of one number, or a send with its recv. It waits for another one where a rank that it
needs is inside that one, or issued that one first. Meetings that wait for each other in a circle are crossed calls; one
that waits for a rank which waits for nothing has that rank as its cause.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from .job import Group, Job, Member, consequence, follows, killed
from .records import COMPLETED, DEAD, FAILED, INSIDE, ISSUED, STOPPED, CallRecord

LEFT = "left"  # a rank whose communicator has ended, or (FAILED) whose call has raised: it will not come
_TOGETHER = ("finalize", "destroy", "shrink", "grow")  # not numbered, but calls of all ranks
_LOOKED_AT = 16  # numbers of one communicator, and sends from one rank to another: the first ones explain the others
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
    unknown: list[int] = field(default_factory=list)
    first: dict[Meeting, list[Step]] = field(default_factory=dict)
    held: set[int] = field(default_factory=set)  # those of `away` that wait elsewhere
    paired: bool = True  # of a send and a recv: whether they are sure to be the two ends of one message

    @property
    def blocked(self) -> bool:
        return bool(self.away or self.gone or self.unknown)

    @property
    def collective(self) -> bool:
        return self.call.operation not in ("send", "recv", "wait_signal")

    def age(self) -> float:
        """Seconds that the first one has waited, or had when it gave up."""
        return max((self.group.members[rank].waited(call) for rank, call in self.here.items()), default=0.0)

    def idle(self) -> list[Member]:
        """The ranks that have not come although they wait for nothing that is known: the causes."""
        return [self.group.members[rank] for rank in self.away if rank not in self.held]

    def complete(self) -> bool:
        """Whether all who have to come are here."""
        return len(self.here) >= (self.group.size if self.collective else 2)


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
                newest = max(comm.calls[-1].issued for comm in member.process.comms if comm.calls)
                if call.state != FAILED or call.returned >= newest:  # it has called nothing since
                    self._at.setdefault(id(member.process), []).append((meeting, member, call))
        self._order()
        self._link()
        self._above: dict[Meeting, list[Meeting]] = {}  # those that wait for it
        for one in self.meetings:
            for other in one.first:
                self._above.setdefault(other, []).append(one)

    def behind(self, *meetings: Meeting) -> list[Meeting]:
        """These, and the meetings that wait for them, directly or not, nearest first."""
        return _reached(meetings, self._above)

    def elsewhere(self, member: Member, meeting: Meeting | None = None) -> list[tuple[Meeting, CallRecord]]:
        """What the member's process waits in, other than `meeting`."""
        at = self._at.get(id(member.process), [])
        return [(one, call) for one, _, call in at if one is not meeting and call.state != FAILED]

    def circles(self) -> list[list[Meeting]]:
        """Meetings that wait for each other, each circle once, as short as it can be; each waits for the next one."""
        left, found = set(self.meetings), []
        after = {one: list(one.first) for one in self.meetings}
        while ends := {one for one in left if left.isdisjoint(one.first) or left.isdisjoint(self._above.get(one, []))}:
            left -= ends  # in no circle
        for start in (one for one in self.meetings if one in left):
            if start in left and (path := _shortest(start, after)):
                found.append(path)
                left -= set(_reached([start], after)) & set(_reached([start], self._above))
        return found

    def _of(self, group: Group) -> Iterator[Meeting]:
        yield from self._collectives(group)
        yield from self._messages(group)
        yield from self._others(group)

    def _acting(self, member: Member) -> list[CallRecord]:
        """The calls in which a rank waits, or waited until it gave up."""
        found = self._acts.get(id(member))
        if found is None:
            found, gave_up = [] if self._ended(member) else member.pending, _gave_up(member)
            if member.left and not self.post_mortem and not gave_up:  # what was on a stream went with the communicator
                found = [call for call in found if call.state == INSIDE]
            found = self._acts[id(member)] = found + gave_up
        return found

    def _ended(self, member: Member) -> bool:
        """Whether its process has ended: not because of a call that others made fail, where it counts as waiting there;
        nor, where all have ended, by what may have killed them all."""
        ended = member.dead and not follows(member.process)
        return ended and not (self.post_mortem and killed(member.process))

    def _gone(self, member: Member, call: CallRecord | None = None) -> str:
        """Why a rank will not come; "" if it may."""
        if self._ended(member):
            return DEAD
        if call and call.state == FAILED:
            return FAILED
        if member.left and not follows(member.process):
            return LEFT
        return STOPPED if member.stopped else ""

    def _lacks(self, meeting: Meeting, rank: int) -> None:
        """Put a rank that has not come where it is."""
        member = meeting.group.members.get(rank)
        if member is None:
            meeting.unknown.append(rank)
        elif why := self._gone(member):
            meeting.gone[rank] = why
        elif rank not in meeting.here:
            meeting.away.append(rank)

    def _collectives(self, group: Group) -> Iterator[Meeting]:
        numbers: set[int] = set()
        inside: set[int] = set()
        for member in group.members.values():
            waiting = [call.number for call in self._acting(member) if call.number > 0]
            inside |= set(waiting)
            numbers |= {min(waiting), max(waiting)} if waiting else set()
        lowest = min((member.entered for member in group.members.values()), default=0) + 1
        numbers |= {lowest} & inside
        for number in sorted(numbers)[:_LOOKED_AT]:
            meeting = Meeting(group, CallRecord(0, number, ""), unknown=group.unknown)
            for member in group.members.values():
                self._place(meeting, member, number)
            if meeting.here:
                meeting.call = next(iter(meeting.here.values()))
                yield meeting

    def _place(self, meeting: Meeting, member: Member, number: int) -> None:
        """Put the rank where it is, as seen from collective `number`."""
        call = next((one for one in self._acting(member) if one.number == number), None) or member.numbered.get(number)
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

    def _messages(self, group: Group) -> Iterator[Meeting]:
        """The n-th send from one rank to another meets the n-th recv, where all are still recorded; else the n-th of
        those that wait."""
        pairs: dict[tuple[int, int], dict[str, list[CallRecord]]] = {}
        recorded: dict[tuple[str, int, int], list[CallRecord]] = {}
        for member in group.members.values():
            for call in self._acting(member):
                if call.operation in ("send", "recv"):
                    pair = (member.rank, call.peer) if call.operation == "send" else (call.peer, member.rank)
                    pairs.setdefault(pair, {"send": [], "recv": []})[call.operation].append(call)
            for call in member.comm.calls if member.comm else ():
                if call.operation in ("send", "recv"):
                    recorded.setdefault((call.operation, member.rank, call.peer), []).append(call)
        for (source, target), calls in pairs.items():
            waiting = {id(call) for call in (*calls["send"], *calls["recv"])}
            all_known = _counted(group, source, target)
            if all_known:
                sends, recvs = recorded.get(("send", source, target), []), recorded.get(("recv", target, source), [])
            else:
                sends, recvs = calls["send"], calls["recv"]
            looked_at = 0
            for index in range(max(len(sends), len(recvs))):
                both = {rank: own[index] for rank, own in ((source, sends), (target, recvs)) if index < len(own)}
                here = {rank: call for rank, call in both.items() if id(call) in waiting}
                if not here or looked_at == _LOOKED_AT:
                    continue
                looked_at += 1
                rank, call = list(here.items())[-1]
                paired = all_known or not any(one.group for one in here.values())
                meeting = Meeting(group, call, here, paired=paired)
                if len(both) == 1 and (all_known or not _answered(group, rank, call, recorded)):
                    self._lacks(meeting, call.peer)
                yield meeting

    def _others(self, group: Group) -> Iterator[Meeting]:
        found: dict[str, Meeting] = {}
        for member in group.members.values():
            for call in self._acting(member):
                if call.number > 0 or call.operation in ("send", "recv") or call.state == ISSUED:
                    continue
                if call.operation == "wait_signal" and call.peer >= 0:
                    meeting = Meeting(group, call, {member.rank: call})
                    self._lacks(meeting, call.peer)
                    yield meeting
                else:
                    found.setdefault(call.operation, Meeting(group, call)).here[member.rank] = call
        for operation, meeting in found.items():
            for rank in (*group.members, *group.unknown) if operation in _TOGETHER else ():
                other = group.members.get(rank)
                ended = other is not None and other.left and operation in ("finalize", "destroy")
                called = other and other.comm and any(call.operation == operation for call in other.comm.calls)
                if not ended and not called:
                    self._lacks(meeting, rank)
            yield meeting

    def _order(self) -> None:
        """A call that its rank has issued after another one waits for that one."""
        for rows in self._at.values():
            if len(rows) > _OLDEST + _NEWEST:
                rows = sorted(rows, key=lambda row: (row[2].issued, row[2].entry))
                rows = rows[:_OLDEST] + rows[-_NEWEST:]
            for later, member, then in rows:
                for earlier, other, first in rows:
                    if later is not earlier and _before(first, then, other is member):
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
                    if other is not meeting and (certain or other in stuck):
                        meeting.held.add(rank)
                        meeting.first.setdefault(other, []).append(Step(member, call, None, certain))


def _gave_up(member: Member) -> list[CallRecord]:
    """The last call of a rank, with those that were issued with it, if others have made it fail."""
    last = member.last()
    if member.comm is None or last is None or last.state != FAILED or not consequence(last.error):
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
    return len(comms) == len(ranks) and all(one is not None and one.calls and one.calls[0].entry == 1 for one in comms)


def _answered(
    group: Group, rank: int, call: CallRecord, recorded: Mapping[tuple[str, int, int], Sequence[CallRecord]]
) -> bool:
    """Whether the other side of this send or recv has come, or may have, though not all is recorded."""
    peer = group.members.get(call.peer)
    if peer is None or peer.comm is None:
        return False
    if peer.comm.cut:
        return True  # who says that it has not come must have seen all that it did
    # That a call on a stream has completed may have been noticed late.
    answers = recorded.get(("recv" if call.operation == "send" else "send", call.peer, rank), [])
    done = [one.completed for one in answers if one.state == COMPLETED and one.completed == one.returned]
    return peer.process.machine == group.members[rank].process.machine and max(done, default=0) >= call.issued > 0


def _reached(starts: Iterable[Meeting], after: Mapping[Meeting, Sequence[Meeting]]) -> list[Meeting]:
    found = dict.fromkeys(starts)
    queue = list(found)
    for node in queue:
        fresh = [one for one in after.get(node, ()) if one not in found]
        found |= dict.fromkeys(fresh)
        queue += dict.fromkeys(fresh)
    return queue


def _shortest(start: Meeting, after: Mapping[Meeting, Sequence[Meeting]]) -> list[Meeting]:
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
