"""Finding: one thing that is wrong, and the sentences that findings share: who waits, how a rank stands."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from .members import Group, Job, Member, last_place, names_of, newest_call, seen_ago
from .records import DEAD, FAILED, INSIDE, STOPPED, UNKNOWN, CallRecord, ProcessRecord
from .waits import Meeting, Waits
from .wording import Paths, at, call_name, clean, have, line_of, maker, seconds

CONSEQUENCE = 75  # the weight from which a finding is the consequence of something else
SHOWN = 8  # lines about single ranks in one finding
_SHOWN_CHAIN = 4
_STANDINGS = 64  # ranks that are looked at for such lines
_NAMED = 10_000  # culprits of one finding, for whoever reads the JSON
SILENT_SECONDS = 10.0  # a watchdog writes more often than this


@dataclass
class Finding:
    """As Verdict has it. A lower `weight` comes first. `waiting`: how many wait because of it; `age`: for how long."""

    kind: str
    sentence: str
    weight: int
    details: list[str] = field(default_factory=list)
    culprits: list[tuple[str, int]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    comms: list[str] = field(default_factory=list)
    waiting: int = 0
    age: float = 0.0


@dataclass(eq=False)
class Case:
    """What all findings are made from. Waits younger than `patience` seconds are no findings; `uid` comes first."""

    job: Job
    waits: Waits
    patience: float
    uid: str = ""

    @property
    def paths(self) -> Paths:
        return self.job.paths

    def stuck(self) -> list[Meeting]:
        return [meeting for meeting in self.waits.meetings if meeting.blocked and meeting.age() >= self.patience]


def describe(call: CallRecord, group: Group, paths: Paths) -> str:
    """ "all_reduce #41 (comm 'tp', 4 ranks, BFLOAT16 x 33,554,432, model.py:88)"."""
    count = f"{group.size:,} rank{'s' if group.size != 1 else ''}"
    words = [f"comm '{group.name}'", count]
    if call.count >= 0:
        words.append(f"{clean(call.dtype, 20)} x {call.count:,}".strip())
    words += [f"root {call.root}"] if call.root >= 0 else []
    if call.detail.startswith(f"{call.operation}("):  # compared by PYNCCL_CHECK=1, not made yet
        words.append(clean(call.detail[len(call.operation) + 1 :].rstrip(")")))
    made = maker(call, paths)
    if call.function and made:
        return f"{call_name(call)} ({made}; {', '.join(words)})"
    return f"{call_name(call)} ({', '.join([*words, made] if made else words)})"


def briefly(call: CallRecord, group: Group) -> str:
    """ "all_reduce #41 of comm 'tp'"."""
    return f"{call_name(call)} of comm '{group.name}'"


def waiting(meeting: Meeting, where: str = "there") -> str:
    """ "3 ranks have waited 12.3 s there", "rank 0 gave up after 60.0 s"."""
    rows: dict[bool, list[int]] = {True: [], False: []}
    for rank, call in meeting.here.items():
        rows[call.state == FAILED].append(rank)
    words = []
    for gave_up, ranks in rows.items():
        if not ranks:
            continue
        who = meeting.group.names(ranks) if len(ranks) == 1 else f"{len(ranks):,} ranks"
        if gave_up:
            calls = [meeting.here[rank] for rank in ranks]
            longest = max(call.returned - call.issued if call.returned and call.issued else 0.0 for call in calls)
            words.append(f"{who} gave up" + (f" after {seconds(longest)}" if longest > 0 else ""))
        else:
            longest = max(meeting.group.members[rank].waited(meeting.here[rank]) for rank in ranks)
            words.append(f"{who} {have(len(ranks))} waited {seconds(longest)}" + (f" {where}" if where else ""))
    return " and ".join(reversed(words))


def concern(case: Case, found: Finding, meetings: Sequence[Meeting], members: Iterable[Member]) -> Finding:
    """The finding, with how many wait because of it, the communicators concerned, and its culprits' lines."""
    behind = case.waits.behind(*meetings)
    found.waiting = len({id(one.group.members[rank].process) for one in behind for rank in one.here})
    found.age = max((meeting.age() for meeting in meetings), default=0.0)
    found.comms = list(dict.fromkeys([*found.comms, *(meeting.group.uid for meeting in behind)]))
    for member in members:
        if line := line_of(member.process.end_site or last_place(member.process)):
            found.lines.append(line)
    found.lines = list(dict.fromkeys(found.lines))
    found.culprits = found.culprits[:_NAMED]
    return found


def chain(case: Case, meeting: Meeting) -> list[str]:
    """A line for each rank that is blamed elsewhere only because it waits here."""
    lines = []
    for other in case.waits.behind(meeting)[1:]:
        for first, steps in other.first.items():
            held = [step for step in steps if step.then is None]
            if not held:
                continue
            who = case.job.name(held[0].member.process, other.group)
            more = f" (and {len(held) - 1:,} more)" if len(held) > 1 else ""
            target = call_name(other.call) if other.collective else f"its side of {call_name(other.call)}"
            lines.append(
                f"{who}{more} has not entered {target} of comm '{other.group.name}', "
                f"where {waiting(other, '')}, because it is itself waiting in {briefly(held[0].first, first.group)}"
            )
    left = len(lines) - _SHOWN_CHAIN
    return lines[:_SHOWN_CHAIN] + ([f"and {left:,} more waits behind these"] if left > 0 else [])


def standings(case: Case, members: Sequence[Member], meeting: Meeting) -> list[str]:
    """A line for each rank, or for several that stand alike."""
    rows: dict[str, list[Member]] = {}
    for member in members[:_STANDINGS]:
        rows.setdefault(standing(case, member, meeting), []).append(member)
    lines = [f"{names_of(same)}: {text}" for text, same in rows.items()][:SHOWN]
    left = len(members) - sum(len(same) for same in list(rows.values())[:SHOWN])
    return lines + ([f"and {left:,} more ranks"] if left > 0 else [])


def standing(case: Case, member: Member, meeting: Meeting | None) -> str:
    """ "process alive, last completed #40; its main thread is in data.py:41 next_batch"."""
    words = [f"{alive(case, member.process)}, {progress(member)}"]
    for other, call in case.waits.elsewhere(member, meeting)[:2]:
        how = "it waits itself in" if call.state == INSIDE else "not completed on its stream:"
        words.append(f"{how} {briefly(call, other.group)}, for {seconds(member.waited(call))}")
    where = whereabouts(case, member.process)
    if not where and len(words) == 1 and meeting and member.rank in meeting.away:
        where = "where its main thread is, is not known"
    words += [one for one in (where, frozen(member.process)) if one]
    return "; ".join(words)


def alive(case: Case, process: ProcessRecord) -> str:
    if process.state == STOPPED:
        return f"process {process.pid} stopped"
    if process.state == UNKNOWN:
        return f"process {process.pid} on host {clean(process.host, 60) or '?'}, from which there is no answer"
    if process.state == DEAD:
        return "process ended"
    hosts = {one.host for one in case.job.processes}
    return f"process {process.pid} on host {clean(process.host, 60)} alive" if len(hosts) > 1 else "process alive"


def progress(member: Member) -> str:
    if member.comm is None:
        return "has not come to the communicator's init"
    if 0 < member.completed < member.entered:
        return f"last entered #{member.entered:,}, last completed #{member.completed:,}"
    if member.completed < member.entered:
        return f"last entered #{member.entered:,}, completed none"
    return f"last completed #{member.completed:,}" if member.completed > 0 else "has completed none"


def whereabouts(case: Case, process: ProcessRecord) -> str:
    """Where its main thread is, or was, and how long ago that was seen; or its newest call, where that came later."""
    newest, site = newest_call(process), last_place(process)
    where, age = case.paths.short(site), seen_ago(process)
    if not site:
        return ""
    if newest is not None and site != process.where:
        return f"its last call was {call_name(newest)} at {where}{ago(process, newest.issued)}"
    if process.state == DEAD:
        return f"its main thread was last in {where}"
    return f"its main thread was in {where}, seen {seconds(age)} ago" if age else f"its main thread is in {where}"


def frozen(process: ProcessRecord) -> str:
    """Says so where a process runs and yet does not write its heartbeat."""
    age = process.now - process.heartbeat
    if process.state in (DEAD, STOPPED, UNKNOWN) or process.heartbeat <= 0 or age <= SILENT_SECONDS:
        return ""
    return f"its watchdog has not written for {seconds(age)}: a C call holds the GIL, or the machine is overloaded"


def ago(process: ProcessRecord, when: float) -> str:
    """ " 3.1 s ago" by the clock of the process's machine, or nothing."""
    return f" {seconds(process.now - when)} ago" if 0 < when <= process.now else ""


def called(call: CallRecord, paths: Paths) -> str:
    """ " at model.py:88" """
    made = maker(call, paths)
    return f" ({made})" if call.function and made else at(call.site, paths)
