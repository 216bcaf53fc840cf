"""Finding: one thing that is wrong, and the sentences that findings share: who waits, how a rank stands."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from .formatting import Paths, ago, call_name, clean, line_of, seconds
from .job import Job, Member, last_place, names_of, newest_call, seen_ago
from .records import DEAD, FAILED, INSIDE, STOPPED, UNKNOWN, CallRecord, ProcessRecord
from .waits import Meeting, Waits

CONSEQUENCE = 75  # the weight from which a finding is the consequence of something else
SHOWN = 8  # lines about single ranks in one finding
_SHOWN_CHAIN = 4
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
        """Meetings that lack somebody, those of communicator `uid` first, then the oldest."""
        found = [meeting for meeting in self.waits.meetings if meeting.blocked and meeting.age() >= self.patience]
        return sorted(found, key=lambda one: (one.group.uid != self.uid, -one.age()))

    def describe(self, meeting: Meeting) -> str:
        return meeting.group.describe(meeting.call, self.paths)


def lines_of(calls: Iterable[CallRecord | None]) -> list[str]:
    """The lines of code of these calls, as far as they are known."""
    return list(dict.fromkeys(line for call in calls if call and (line := line_of(call.site))))


def waiting(meeting: Meeting, where: str = "there") -> str:
    """ "3 ranks have waited 12.3 s there", "rank 0 gave up after 60.0 s"."""
    words = []
    for gave_up in (False, True):
        ranks = [rank for rank, call in meeting.here.items() if (call.state == FAILED) == gave_up]
        if ranks:
            who, have = (f"{len(ranks):,} ranks", "have") if len(ranks) > 1 else (meeting.group.names(ranks), "has")
            longest = seconds(max(meeting.group.members[rank].waited(meeting.here[rank]) for rank in ranks))
            words.append(
                f"{who} gave up after {longest}" if gave_up else f"{who} {have} waited {longest} {where}".rstrip()
            )
    return " and ".join(words)


def concern(case: Case, found: Finding, meetings: Sequence[Meeting], members: Iterable[Member] = ()) -> Finding:
    """The finding, with how many wait because of it, the communicators concerned, and its culprits' lines."""
    behind = case.waits.behind(*meetings)
    found.waiting = len({id(one.group.members[rank].process) for one in behind for rank in one.here})
    found.age = max((meeting.age() for meeting in meetings), default=0.0)
    found.comms = list(dict.fromkeys([*found.comms, *(meeting.group.uid for meeting in behind)]))
    places = [line_of(member.process.end_site or last_place(member.process)) for member in members]
    found.lines = list(dict.fromkeys(line for line in [*found.lines, *places] if line))
    found.culprits = found.culprits[:_NAMED]
    return found


def chain(case: Case, meeting: Meeting) -> list[str]:
    """A line for each rank that is blamed elsewhere only because it waits here."""
    lines = []
    for other in case.waits.behind(meeting)[1:]:
        for first, steps in other.first.items():
            held = [step for step in steps if step.then is None]
            if held:
                who = case.job.name(held[0].member.process, other.group)
                lines.append(
                    f"{who} has not entered {other.group.brief(other.call)}, where {waiting(other, '')}, "
                    f"because it is itself waiting in {first.group.brief(held[0].first)}"
                )
    return lines[:_SHOWN_CHAIN]


def standings(case: Case, members: Sequence[Member], meeting: Meeting) -> list[str]:
    """A line for each rank, or for several that stand alike."""
    rows: dict[str, list[Member]] = {}
    for member in members[: 8 * SHOWN]:
        rows.setdefault(standing(case, member, meeting), []).append(member)
    return [f"{names_of(same)}: {text}" for text, same in rows.items()][:SHOWN]


def standing(case: Case, member: Member, meeting: Meeting | None = None) -> str:
    """ "process alive, last completed #40; its main thread is in data.py:41 next_batch"."""
    words = [f"{_alive(case, member.process)}, {progress(member)}"]
    for other, call in case.waits.elsewhere(member, meeting)[:2]:
        how = "it waits itself in" if call.state == INSIDE else "not completed on its stream:"
        words.append(f"{how} {other.group.brief(call)}, for {seconds(member.waited(call))}")
    return "; ".join(word for word in (*words, _whereabouts(case, member.process), frozen(member.process)) if word)


def _alive(case: Case, process: ProcessRecord) -> str:
    several = len({one.host for one in case.job.processes}) > 1
    host = f" on host {clean(process.host, 60)}" if several else ""
    words = {STOPPED: "stopped", DEAD: "ended", UNKNOWN: "cannot be asked"}
    number = f" {process.pid}" if host or process.state in (STOPPED, UNKNOWN) else ""
    return f"process{number}{host} {words.get(process.state, 'alive')}"


def progress(member: Member) -> str:
    """ "last entered #41, last completed #40"."""
    if member.comm is None:
        return "has not come to the communicator's init"
    entered = f"last entered #{member.entered:,}, " if member.completed < member.entered else ""
    return entered + (f"last completed #{member.completed:,}" if member.completed > 0 else "completed none")


def _whereabouts(case: Case, process: ProcessRecord) -> str:
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
