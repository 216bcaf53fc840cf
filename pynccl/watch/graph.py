"""Who waits for whom: which calls need several ranks, which of these have entered, and what blocks the others.

A sync point is a call that needs several ranks, here P and Q:

    point                            needs                matched by                             reached when
    collective, init, split          all ranks            its number on the communicator         entered
    message                          source, target       n-th send s > t with n-th recv t < s   own half entered
    signal                           source               n-th signal s > t with n-th wait t < s source has called it
    finalize destroy shrink grow     all (not excluded)   the operation                          called, or closed

    W1  P waits for Q: a rank that P needs waits in Q, and is    certain: its thread or stream is known to be blocked
        not in P
    W2  P waits for Q: a rank issued Q before P                  certain on one stream, or one communicator; not within
                                                                 a group, and not between two threads
    W3  no wait: a posted call that nobody waits for, neither itself nor for one behind it (an early irecv)

A rank that has not reached P is missing there, for the first of these reasons that holds: its process is dead, is
stopped, its call raised, it has closed the communicator, it has not entered P (if that is because it waits in Q, see
W1, it is no cause), it has no record. A call that failed because of other ranks (records.WAITED) is a wait until then.
A rank whose communicator was revoked has waited there until then, and is not missing.

A cycle of sync points means that calls are crossed. Of the others, findings.py reports the first by Priority.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from ..bindings.errors import Outcome
from .job import Group, Job, Member
from .layout import MESSAGES, CommEnd
from .points import COMM_ENDED, NO_RECORD, NOT_ENTERED, Dependency, SyncPoint
from .records import COMPLETED, DEAD, FAILED, INSIDE, ISSUED, LAUNCHED, STOPPED, CallRecord

_CLOSING = ("finalize", "destroy")
_CALLED_BY_ALL_RANKS = ("finalize", "destroy", "shrink", "grow")  # not numbered, but all ranks call them
_MAX_POINTS = 16  # per communicator, and per pair of ranks: the first ones explain the later ones
_MAX_ORDERED_CALLS = 64  # per process: later calls wait for the same reasons


class WaitGraph:
    """All sync points of a job. Waits shorter than `min_wait` seconds are ignored; communicator `uid` comes first."""

    def __init__(self, job: Job, min_wait: float = 0.0, uid: str = "") -> None:
        self.job, self.min_wait, self.uid = job, min_wait, uid
        # If all processes have ended, the state before that is judged.
        self.post_mortem = all(process.state == DEAD for process in job.processes)
        members = [member for group in job.groups for member in group.members.values()]
        gave_up = (call.returned for member in members for call in member.comm.calls if call.gave_up)
        self._first_to_give_up = min(filter(None, gave_up), default=0.0)  # when
        self._calls = {member: self._calls_of(member) for member in members}
        points = [point for group in job.groups for point in self._sync_points(group)]
        self._calls_at: dict[int, list[tuple[SyncPoint, Member, CallRecord]]] = {}  # by id() of the process
        for point in points:
            for rank, call in point.arrived.items():
                member = point.group.members[rank]
                self._calls_at.setdefault(id(member.process), []).append((point, member, call))
        self._link_by_issue_order()
        self._link_by_missing_ranks(points)
        after = {point: list(point.blocked_by) for point in points}
        waited_for = set(_reachable([point for point in points if point.waits], after))
        self.points = [point for point in points if point in waited_for]
        self._dependents: dict[SyncPoint, list[SyncPoint]] = {}  # sync point -> those that wait for it
        for point in self.points:
            for other in point.blocked_by:
                self._dependents.setdefault(other, []).append(point)
        self.ages: dict[SyncPoint, float] = {}  # for how long a rank has waited there, or somewhere behind
        for age, oldest in sorted(((point.age(), point) for point in self.points), key=lambda pair: -pair[0]):
            behind = [oldest]
            for point in behind:
                if point not in self.ages:
                    self.ages[point] = age
                    behind += point.blocked_by

    def stuck(self) -> list[SyncPoint]:
        """Return the sync points with missing ranks: those of communicator `uid` first, then the oldest."""
        found = [point for point in self.points if point.missing and self.ages[point] >= self.min_wait]
        return sorted(found, key=lambda point: (point.group.uid != self.uid, -self.ages[point]))

    def behind(self, points: Sequence[SyncPoint]) -> list[SyncPoint]:
        """Return these sync points and all that wait for them."""
        return _reachable(points, self._dependents)

    def went_on(self, member: Member, call: CallRecord | None = None, without: Collection[str] = ()) -> bool:
        """Return whether a rank has left a call behind and does something else: it waits there no more, and the call
        does not explain what happens now.

        The call failed, or is a shrink, or the communicator was revoked, and the process has since made or called
        another communicator, none of the uids `without`. To close one is not to go on: an exception does that too. In
        the errors of communicator `uid`, no rank has gone on from there.

        call  if not given, the newest of the communicator that failed because of others, or is a shrink"""
        own, since = member.comm, 0.0
        call = call or next((one for one in reversed(own.calls) if one.gave_up or one.operation == "shrink"), None)
        if member.revoked:
            since = own.ended_at
        elif call is not None:
            since = call.returned if call.state == FAILED else call.issued if call.operation == "shrink" else 0.0
        others = [comm for comm in member.process.comms if comm.uid != own.uid and comm.uid not in without]
        used = [later.issued for comm in others for later in comm.calls if later.operation not in _CLOSING]
        return self.uid != own.uid and 0 < since < max([comm.made for comm in others] + used, default=0.0)

    def caught(self, group: Group, *calls: Mapping[int, CallRecord]) -> bool:
        """Return whether the program has caught the errors of all these calls (by rank): the ranks live, and have gone
        on or closed the communicator."""
        rows = [(group.members[rank], call) for by_rank in calls for rank, call in by_rank.items()]
        alive = self.uid != group.uid and all(member.process.state != DEAD for member, _ in rows)
        failed = alive and all(call.state == FAILED for _, call in rows)
        closed = {member for member, _ in rows if member.comm.ended and not member.revoked}
        return failed and all(member in closed or self.went_on(member, call) for member, call in rows)

    def cycles(self) -> list[list[SyncPoint]]:
        """Return the cycles of sync points, each once and as short as possible; each point waits for the next one.
        First those of certain dependencies, then all."""
        found: list[list[SyncPoint]] = []
        for certain in (True, False):
            after: dict[SyncPoint, list[SyncPoint]] = {}
            before: dict[SyncPoint, list[SyncPoint]] = {}
            for point in self.points:
                for other, why in point.blocked_by.items():
                    if not certain or any(dependency.certain for dependency in why):
                        after.setdefault(point, []).append(other)
                        before.setdefault(other, []).append(point)
            seen: set[SyncPoint] = set()
            for start in after:
                if start not in seen and (path := _shortest_cycle(start, after)):
                    found += [path] if set(path) not in map(set, found) else []
                    seen |= set(_reachable([start], after)) & set(_reachable([start], before))
        return found

    # Calls that wait

    def _calls_of(self, member: Member) -> list[CallRecord]:
        """Return the calls that a rank has entered and not completed, and those in which it waited until it gave up."""
        gone = member.process.state != DEAD and self.went_on(member)
        gave_up = [] if gone else self._gave_up(member)
        found = [] if self._ended(member) or (gone and member.revoked) else member.pending
        if self._left(member) and not self.post_mortem:  # calls on streams ended with it
            found = [call for call in found if call.state == INSIDE]
        return found + gave_up

    def _gave_up(self, member: Member) -> list[CallRecord]:
        """Return the calls in which a rank waited until they failed: the last one and the rest of its group, or all
        that the watchdog or a revoke aborted."""
        calls, last = member.comm.calls, member.comm.last()
        how = Outcome.PEER_LOST if member.revoked else Outcome.ABORTED_BY_WATCHDOG
        aborted = [call for call in calls if call.outcome == how]
        if aborted or last is None or not self._waited(last):
            return aborted
        if last.posted and not member.waits_for(last) and self.uid != member.group.uid and member.process.state != DEAD:
            return []
        together = calls if last.group else [last]
        return [member.resolve_check(call) for call in together if call.state == FAILED and call.group == last.group]

    def _waited(self, call: CallRecord) -> bool:
        """Return whether a rank waited in a call until it failed because of others, or by Ctrl-C as the job ended."""
        return call.gave_up or (self.post_mortem and call.outcome == Outcome.INTERRUPTED)

    def _ended(self, member: Member) -> bool:
        """Return whether its process has ended by itself. A process that ended because other ranks made its call fail
        still counts as waiting there; so does one that was killed with all others, but not long before they gave up."""
        process = member.process
        with_all = self.post_mortem and process.killed and not process.estimated_end < self._first_to_give_up
        return process.state == DEAD and not process.gave_up and not with_all

    def _left(self, member: Member) -> bool:
        """Return whether a rank has ended the communicator, other than because it gave up, there or elsewhere, or since
        that was revoked."""
        last, ended = member.comm.last(), member.comm.ended
        if ended in (CommEnd.DESTROYED, CommEnd.ABORTED):
            return last is None or not self._waited(last)
        waited = ended in (CommEnd.LIVE, CommEnd.ABORTED_BY_WATCHDOG, CommEnd.REVOKED)
        return not waited and not member.process.gave_up

    # Sync points

    def _sync_points(self, group: Group) -> Iterator[SyncPoint]:
        for point in chain(self._collectives(group), self._messages(group), self._other_calls(group)):
            known = any(call.state != LAUNCHED for call in point.arrived.values())
            if known or set(point.missing.values()) - {NO_RECORD}:  # else it may have run
                yield point

    def _point(
        self,
        group: Group,
        needs: Iterable[int],
        calls: Mapping[int, CallRecord],
        passed: Callable[[Member], bool],
    ) -> SyncPoint | None:
        """Return the sync point of these calls by rank; None if no rank has entered it.

        needs   the ranks that it needs
        passed  whether a rank whose call is not recorded has reached it nevertheless"""
        point = SyncPoint(group, CallRecord(0, 0, ""))
        for rank in needs:
            member, own = group.members.get(rank), calls.get(rank)
            if member is None:
                point.missing[rank] = NO_RECORD
            elif (own is not None and self._done(member, own)) or (own is None and passed(member)):
                continue
            elif why := self._why_missing(member, own):
                point.missing[rank] = why
                if why == FAILED and (cause := own or member.comm.last()) is not None:
                    point.failed[rank] = cause
            elif own is not None:
                point.arrived[rank] = own
        point.waits = {
            rank: own
            for rank, own in point.arrived.items()
            if (own in self._calls[group.members[rank]] if own.state == FAILED else group.members[rank].waits_for(own))
        }
        point.call = next(iter((point.waits or point.arrived).values()), point.call)
        return point if point.arrived else None

    def _done(self, member: Member, call: CallRecord) -> bool:
        """Return whether a call is known to have completed, or may have run although nothing tells whether it has."""
        if call.state == COMPLETED or 0 < call.number <= member.comm.completed:
            return True
        return call.state == LAUNCHED and (self._left(member) or not call.collective or self._ended(member))

    def _why_missing(self, member: Member, call: CallRecord | None) -> str:
        """Return why a rank is missing where it has made this call, or none; "" if it waits there, or is not needed."""
        found = call or member.comm.last()
        raised = found is not None and found.is_cause
        if (call is not None and self._waited(call)) or (member.revoked and not raised):
            return ""
        if self._ended(member):
            return DEAD
        if member.process.state == STOPPED:
            return STOPPED
        if raised:
            return FAILED
        if self._left(member):
            return COMM_ENDED
        return NOT_ENTERED if call is None else ""

    def _collectives(self, group: Group) -> Iterator[SyncPoint]:
        waiting = {
            rank: {call.number: call for call in self._calls[member] if call.collective}
            for rank, member in group.members.items()
        }
        numbers = {number for calls in waiting.values() if calls for number in (min(calls), max(calls))}
        next_one = min((member.comm.entered for member in group.members.values()), default=0) + 1
        numbers |= {next_one} & {number for calls in waiting.values() for number in calls}
        for number in sorted(numbers)[:_MAX_POINTS]:
            calls = {
                rank: call
                for rank, member in group.members.items()
                if (call := waiting[rank].get(number) or member.numbered.get(number))
            }

            def passed(member: Member, number: int = number) -> bool:
                entered = member.comm.entered >= number and not self._ended(member)
                return entered or number <= member.comm.completed

            if point := self._point(group, [*group.members, *group.unknown], calls, passed):
                yield point

    def _messages(self, group: Group) -> Iterator[SyncPoint]:
        """Yield a point for each message that one of its two ranks has not completed, and for each awaited signal."""
        made: dict[tuple[str, int, int], dict[int, dict[int, CallRecord]]] = {}  # channel, source, target; rank; number
        pending: dict[tuple[str, int, int], set[int]] = {}  # numbers
        for member in group.members.values():
            for recorded in (member.comm.calls, self._calls[member]):
                for call in (call for call in recorded if call.operation in MESSAGES and call.peer >= 0):
                    channel, sends = MESSAGES[call.operation]
                    key = (channel, *((member.rank, call.peer) if sends else (call.peer, member.rank)))
                    made.setdefault(key, {}).setdefault(member.rank, {})[call.message] = call
                    if recorded is not member.comm.calls and not (sends and channel == "signal"):
                        pending.setdefault(key, set()).add(call.message)
        for (channel, source, target), numbers in pending.items():
            halves = made[channel, source, target]
            for number in sorted(numbers)[:_MAX_POINTS]:
                calls = {rank: half[number] for rank, half in halves.items() if number in half}

                def passed(member: Member, number: int = number, halves: Any = halves) -> bool:
                    half = halves.get(member.rank, ())
                    return max(half, default=0) > number or (member.comm.cut and not half)

                if point := self._point(group, (source, target), calls, passed):
                    yield point

    def _other_calls(self, group: Group) -> Iterator[SyncPoint]:
        found: dict[str, dict[int, CallRecord]] = {}
        for member in group.members.values():
            for call in self._calls[member]:
                half = MESSAGES.get(call.operation)
                known = half in (None, MESSAGES["signal"]) and call.state != ISSUED
                if not call.collective and (known or (call.operation == "wait_signal" and call.peer < 0)):
                    found.setdefault(call.operation, {})[member.rank] = call
        for operation, calls in found.items():
            ranks, excluded = [*calls], set[int]()
            if operation in _CALLED_BY_ALL_RANKS:
                if operation == "shrink":
                    excluded = {rank for caller in calls for rank in group.members[caller].comm.excluded}
                ranks = [rank for rank in (*group.members, *group.unknown) if rank not in excluded]
                calls = {**{rank: own for rank in ranks if (own := _last_of(group, rank, operation))}, **calls}
            passed = self._left if operation in ("finalize", "destroy") else lambda member: False
            if point := self._point(group, ranks, calls, passed):
                point.excluded = excluded
                yield point

    # Dependencies

    def _link_by_issue_order(self) -> None:
        """W2: make each call wait for the calls that its rank issued before it."""
        for rows in self._calls_at.values():
            rows = sorted(rows, key=lambda row: (row[2].issued, row[2].entry))[:_MAX_ORDERED_CALLS]
            for later, member, then in rows:
                for earlier, other, first in rows:
                    if later is earlier or not _before(first, then, other is member, member):
                        continue
                    by_stream = member.comm.device == "cpu" and "wait_signal" in (first.operation, then.operation)
                    same_comm = other is member and not by_stream
                    certain = same_comm or (first.stream == then.stream and first.posted == then.posted)
                    if certain or other.waits_for(first):
                        later.blocked_by.setdefault(earlier, []).append(Dependency(other, first, then, certain))

    def _link_by_missing_ranks(self, points: Sequence[SyncPoint]) -> None:
        """W1: make each sync point wait for those in which its missing ranks wait."""
        stuck = {point for point in points if point.missing or point.blocked_by}
        for point in points:
            for absent in point.missing_because(NOT_ENTERED):
                rows = self._calls_at.get(id(absent.process), [])
                for other, member, call in rows:
                    caught = self.caught(member.group, {member.rank: call})
                    if other is point or member.rank not in other.waits or caught:
                        continue
                    on_stream = call.issued < member.comm.waits_at
                    certain = call.state in (INSIDE, FAILED) or on_stream or call.posted
                    # A recv on a stream, with nothing behind it, may be an early one (W3).
                    later = [row for row in rows if row[2].issued > call.issued]
                    behind = any(row[1] is member or row[2].stream == call.stream for row in later)
                    early = call.operation == "recv" and call.state == ISSUED and not call.posted and not behind
                    if certain or other in stuck:
                        why = Dependency(member, call, None, certain and not early)
                        point.blocked_by.setdefault(other, []).append(why)


def _last_of(group: Group, rank: int, operation: str) -> CallRecord | None:
    """Return the last call of a rank with this operation."""
    member = group.members.get(rank)
    calls = member.comm.calls if member else []
    return next((call for call in reversed(calls) if call.operation == operation), None)


def _before(first: CallRecord, then: CallRecord, same_comm: bool, member: Member) -> bool:
    """Return whether a rank made the first call before it could make the other one: not in one group, and not if two
    threads called them."""
    if first.group and first.group == then.group:
        return False
    on_host = member.comm.device == "cpu" or INSIDE in (first.state, then.state)
    if not first.stream and not then.stream and on_host and {first.state, then.state} <= {INSIDE, FAILED}:
        return False
    return first.entry < then.entry if same_comm else 0 < first.issued < then.issued


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
        for point in after.get(node, ()):
            if point is start:
                path = [node]
                while path[-1] is not start:
                    path.append(previous[path[-1]])
                return path[::-1]
            if point not in previous:
                previous[point] = node
                queue.append(point)
    return []
