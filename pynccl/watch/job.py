"""The records of all processes, grouped by communicator: which process is which rank, and the status of each rank."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from ..bindings.abi import Result
from ..bindings.errors import Outcome
from .formatting import ago, call_name, clean, global_rank, maker, place, ranks_text, seconds
from .layout import MESSAGES, CommEnd, Half, ProcessEnd
from .records import DEAD, FAILED, LAUNCHED, STOPPED, UNKNOWN, CallRecord, CommRecord, ProcessRecord

T = TypeVar("T", CallRecord, ProcessRecord)
MAX_LINES = 8  # about single ranks in one finding
_MAX_RANKS = 1 << 16  # of one communicator; a damaged file may contain any size


class Member:
    """One rank of one communicator.

    joined    whether its process has created the communicator; if not, `comm` is empty
    numbered  its collective calls, by number; pending: its calls that have not completed, oldest first
    """

    def __init__(self, group: Group, process: ProcessRecord, comm: CommRecord, joined: bool = True) -> None:
        self.group, self.process, self.comm, self.joined = group, process, comm, joined
        self.rank = comm.rank
        _number_messages(comm.calls)
        self.numbered = {call.number: call for call in comm.calls if call.number > 0}
        if (last := comm.last()) and last.operation == "check" and last.outcome == Outcome.MISMATCH:
            self.numbered[comm.entered + 1] = self.resolve_check(last)
        unfinished = [call for call in comm.calls if call.may_wait and not 0 < call.number <= comm.completed]
        self.pending = [self.resolve_check(call) for call in unfinished]

    def waits_for(self, call: CallRecord) -> bool:
        """Return whether the program waits for this call, as far as is known, if that has not completed."""
        return not call.posted or self.comm.awaited_at > 0

    def resolve_check(self, call: CallRecord) -> CallRecord:
        """Replace a "check" by the call that it compares, which the rank is about to enter."""
        if call.operation != "check":
            return call
        name = call.detail.partition("(")[0] or "check"
        return dataclasses.replace(call, number=self.comm.entered + 1, operation=name)

    @property
    def revoked(self) -> bool:
        """Whether it waited for the others until the communicator was revoked. It is no cause there: it is in the next
        generation now, or meets the others for it, which no record says."""
        return self.comm.ended == CommEnd.REVOKED

    @property
    def key(self) -> tuple[str, int]:
        """Its entry in `Verdict.culprits`."""
        return self.group.uid, self.rank

    @property
    def site(self) -> str:
        """The line of code at which it is, or at which it ended."""
        return self.process.end_site or self.process.last_place()

    def progress(self) -> str:
        """ "last entered #41, last completed #40"."""
        if not self.joined:
            return "has not entered the communicator's init"
        entered, completed = self.comm.entered, self.comm.completed
        if any(call.state == LAUNCHED and call.number > completed for call in self.comm.calls):
            return f"last entered #{entered:,}, not known which have run"
        text = f"last entered #{entered:,}, " if completed < entered else ""
        return text + (f"last completed #{completed:,}" if completed > 0 else "completed none")

    def waited(self, call: CallRecord) -> float:
        """Seconds that it waited in a call, up to its end or until the call raised, by the clock of its own node."""
        process = self.process
        end = process.now
        if call.state == FAILED:
            end = call.returned
        elif process.state == DEAD:
            end = process.end_at or process.heartbeat or process.now
        begin = max(call.issued, self.comm.awaited_at or end) if call.posted else call.issued
        return max(0.0, end - begin) if begin > 0 and end > 0 else 0.0


def _number_messages(calls: Sequence[CallRecord]) -> None:
    """Number the messages of a record that has no numbers for them, which is complete then."""
    counts: Counter[tuple[Half, int]] = Counter()
    for call in calls:
        if call.operation in MESSAGES:
            key = MESSAGES[call.operation], call.peer
            counts[key] = call.message = call.message or counts[key] + 1


@dataclass(eq=False)
class Group:
    """One communicator, from the records of its ranks.

    unknown  the ranks without a record
    ranks    global rank of each rank, for messages; []: not all are known, or several are in one process"""

    uid: str
    name: str
    size: int
    members: dict[int, Member] = field(default_factory=dict)
    unknown: list[int] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)

    def names(self, ranks: Iterable[int]) -> str:
        """ "ranks 0 and 2": the global ranks."""
        return ranks_text(self.number(rank) for rank in ranks)

    def number(self, rank: int) -> int:
        """Return the global rank, if known, else the rank in the communicator."""
        return global_rank(rank, self.ranks)

    def title(self) -> str:
        """ "comm 'tp', 4 ranks"."""
        return f"comm '{self.name}', {self.size:,} ranks"

    def short_name(self, call: CallRecord) -> str:
        """ "all_reduce #41 of comm 'tp'"."""
        return f"{self.call_name(call)} of comm '{self.name}'"

    def call_name(self, call: CallRecord) -> str:
        """ "all_reduce #41", "recv from rank 3"."""
        return call_name(call, self.ranks)

    def describe(self, call: CallRecord) -> str:
        """ "all_reduce #41 (comm 'tp', 4 ranks, BFLOAT16 x 33,554,432, model.py:88)"."""
        made = maker(call)
        words = [made, self.title()] if call.function and made else [self.title()]
        words += [f"{clean(call.dtype, 20)} x {call.count:,}".strip()] if call.count >= 0 else []
        words += [f"root {self.number(call.root)}"] if call.root >= 0 else []
        words += [made] if made and made not in words else []
        return f"{self.call_name(call)} ({', '.join(words)})"


class Job:
    """All communicators of the processes, and the rank of each process in them."""

    def __init__(self, processes: Sequence[ProcessRecord]) -> None:
        processes = _with_peers_blamed(processes)
        self.groups = _groups(processes)
        self.members: dict[int, list[Member]] = {}  # by id() of the process
        for group in self.groups:
            for member in group.members.values():
                self.members.setdefault(id(member.process), []).append(member)
        # Keep processes without communicators. Drop those of an earlier run, whose ranks all belong to newer processes.
        self.processes = [process for process in processes if not process.comms or id(process) in self.members]
        self._several_hosts = len({process.host for process in self.processes}) > 1

    def member_of(self, uid: str, rank: int) -> Member | None:
        """Return a rank of a communicator; None if it has no record."""
        return next((group.members.get(rank) for group in self.groups if group.uid == uid), None)

    def member(self, process: ProcessRecord, group: Group | None = None) -> Member | None:
        """Return the rank of a process in this communicator, else in its largest one."""
        places = self.members.get(id(process), [])
        inside = [place for place in places if place.group is group]
        return inside[0] if inside else max(places, key=lambda place: place.group.size, default=None)

    def name(self, process: ProcessRecord, group: Group | None = None) -> str:
        """Return "rank 2": its global rank, else its rank in the communicator, else "process PID"."""
        member = self.member(process, group)
        if member and member.group is group:
            return names_of([member])
        if process.rank >= 0:
            return f"rank {process.rank}"
        return f"rank {member.rank} of comm '{member.group.name}'" if member else f"process {process.pid}"

    def key(self, process: ProcessRecord, group: Group | None = None) -> tuple[str, int]:
        """Return (uid, rank) for `culprits`; the uid is "" if the process has no communicator."""
        member = self.member(process, group)
        return member.key if member else ("", process.rank)

    def status_lines(self, members: Sequence[Member]) -> list[str]:
        """Return a status line for each rank; ranks with the same status share one."""
        rows: dict[str, list[Member]] = {}
        for member in members[: 8 * MAX_LINES]:
            rows.setdefault(self.status(member), []).append(member)
        return [f"{names_of(same)}: {text}" for text, same in rows.items()][:MAX_LINES]

    def status(self, member: Member) -> str:
        """ "process alive, last completed #40; its main thread is in data.py:41 next_batch"."""
        process = member.process
        host = f" on host {clean(process.host, 60)}" if self._several_hosts else ""
        number = f" {process.pid}" if host or process.state in (STOPPED, UNKNOWN) else ""
        is_ = {STOPPED: "stopped", DEAD: "ended", UNKNOWN: "not reachable from here"}.get(process.state, "alive")
        text = f"process{number}{host} {is_}, {member.progress()}" if process.pid > 0 else member.progress()
        where = last_seen_at(member)
        return text + (f"; {where}" if where else "")


def names_of(members: Sequence[Member]) -> str:
    """ "ranks 0 and 2": the names of ranks of one communicator."""
    return ranks_text(member.group.number(member.rank) for member in members)


def last_seen_at(member: Member) -> str:
    """Return where its main thread is or was, and how long ago; or its newest call, if that is more recent."""
    process = member.process
    newest, site, age = process.newest_call(), process.last_place(), process.seen_ago
    if any(comm.uid == member.group.uid and comm is not member.comm for comm in process.comms):
        newest = member.comm.last()  # threads of one process are several ranks: the newest call may be another rank's
        site = newest.site if newest else ""
    if not site:
        return ""
    if newest is not None and site != process.where:
        return f"its last call was {_name_on(process, newest)} at {place(site)}{ago(process, newest.issued)}"
    if process.state == DEAD:
        return f"its main thread was last in {place(site)}"
    if age:
        return f"its main thread was in {place(site)}, seen {seconds(age)} ago"
    return f"its main thread is in {place(site)}"


def _name_on(process: ProcessRecord, call: CallRecord) -> str:
    return call_name(call, next((comm.ranks for comm in process.comms if comm.last() is call), ()))


# What NCCL's errors say


def _with_peers_blamed(processes: Sequence[ProcessRecord]) -> Sequence[ProcessRecord]:
    """Return the records. Errors by which NCCL also reports the end of a peer are PEER_LOST there, if another process
    has died, was stopped, or has failed by itself."""
    found = {id(process): process for process in processes}
    fallen = {key for key, process in found.items() if _has_fallen(process)}
    vague = {key: comms for key, process in found.items() if (comms := _vague_comms(process))}
    while blaming := [key for key, comms in vague.items() if any(_in(found[other], comms) for other in fallen - {key})]:
        for key in blaming:
            del vague[key]
            found[key] = _blaming(found[key])
        fallen |= {key for key in blaming if found[key].state == DEAD}  # then its peers may blame it
    return [*found.values()]


def _vague_comms(process: ProcessRecord) -> list[CommRecord]:
    return [comm for comm in process.comms if any(call.state == FAILED and _vague(call) for call in comm.calls)]


def _in(process: ProcessRecord, comms: Sequence[CommRecord]) -> bool:
    """Return whether a process is, or will be, in one of these communicators."""
    uids = process.uids()
    return any(comm.uid in uids or process.rank in comm.ranks or not (comm.ranks or uids) for comm in comms)


def _blaming(process: ProcessRecord) -> ProcessRecord:
    comms = [
        dataclasses.replace(comm, calls=[_of_peer(call) if _vague(call) else call for call in comm.calls])
        if any(map(_vague, comm.calls))
        else comm
        for comm in process.comms
    ]
    return dataclasses.replace(_of_peer(process) if _vague(process) else process, comms=comms)


def _of_peer(ended: T) -> T:
    return dataclasses.replace(ended, outcome=Outcome.PEER_LOST, code=-1)


def _vague(ended: CallRecord | ProcessRecord) -> bool:
    return ended.outcome == Outcome.NCCL_FAILED and ended.code in (Result.SYSTEM_ERROR, Result.INTERNAL_ERROR)


def _has_fallen(process: ProcessRecord) -> bool:
    ended = process.state == DEAD and process.ending != ProcessEnd.CALL_FAILED
    last = (comm.last() for comm in process.comms)
    failed = any(call.is_cause and not _vague(call) for call in last if call is not None)
    return ended or failed or process.state == STOPPED


# Assign records to ranks


def _groups(processes: Sequence[ProcessRecord]) -> list[Group]:
    found: dict[str, list[tuple[ProcessRecord, CommRecord]]] = {}
    for process in processes:
        for comm in process.comms:
            found.setdefault(comm.uid, []).append((process, comm))
    launched = {
        process.rank: process for process in sorted(processes, key=lambda process: process.started) if process.rank >= 0
    }
    return [_group(uid, rows, launched) for uid, rows in found.items()]


def _group(uid: str, rows: list[tuple[ProcessRecord, CommRecord]], launched: dict[int, ProcessRecord]) -> Group:
    """Create a group. If two processes claim the same rank, prefer a live one, then the newer one."""
    rows = sorted(rows, key=lambda row: (row[0].state != DEAD, row[0].started, row[1].made))
    chosen = {comm.rank: (process, comm) for process, comm in rows}
    size = Counter(comm.size for _, comm in chosen.values()).most_common(1)[0][0]
    name = clean(next((comm.name for _, comm in chosen.values() if comm.name), uid[:12]), 60)
    group = Group(uid, name, size)
    group.members = {rank: Member(group, *chosen[rank]) for rank in sorted(chosen)}
    group.ranks = next((comm.ranks for _, comm in chosen.values() if comm.ranks), [])
    _add_launched(group, launched)
    group.unknown = [rank for rank in range(min(size, _MAX_RANKS)) if rank not in group.members]
    known = [group.members[rank].process.rank for rank in sorted(group.members)]
    if not group.ranks and len(set(known)) == size and min(known) >= 0:
        group.ranks = known
    for _, comm in chosen.values():
        comm.ranks = group.ranks
    return group


def _add_launched(group: Group, launched: dict[int, ProcessRecord]) -> None:
    """Add ranks that have not created the communicator yet: those that its record lists. If it lists none, those of the
    same numbers, in a communicator without a parent that has all ranks of the launch."""
    present = {id(member.process) for member in group.members.values()}
    known = [member for member in group.members.values() if member.process.rank >= 0]
    all_launched = all(member.rank == member.process.rank and not member.comm.parent for member in known)
    same_numbers = all_launched and max(launched, default=0) < group.size
    ranks = enumerate(group.ranks) if group.ranks else zip(launched, launched, strict=True) if same_numbers else ()
    jobs = {member.process.job for member in known}
    for rank, number in ranks:
        process = launched.get(number)
        if process and rank not in group.members and process.job in jobs and id(process) not in present:
            group.members[rank] = Member(
                group, process, CommRecord(group.uid, group.name, rank, group.size), joined=False
            )
