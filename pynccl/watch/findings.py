"""Finding: one thing that is wrong, and the sentences that findings share: how a rank stands, why it is away."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, auto

from .formatting import ago, call_name, clean, line_of, place, seconds
from .job import Member, last_place, names_of, newest_call, seen_ago
from .records import DEAD, STOPPED, UNKNOWN, CallRecord, ProcessRecord
from .waits import Meeting, Waits

SHOWN = 8  # lines about single ranks in one finding


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

    def concern(self, waits: Waits, meetings: Sequence[Meeting]) -> Finding:
        """How many wait because of it, and in which communicators."""
        behind = waits.behind(meetings)
        self.waiting = len({id(one.group.members[rank].process) for one in behind for rank in one.here})
        self.age = max((meeting.age() for meeting in meetings), default=0.0)
        self.comms = list(dict.fromkeys([*self.comms, *(meeting.group.uid for meeting in behind)]))
        self.lines = list(dict.fromkeys(line for line in self.lines if line))
        self.culprits = list(dict.fromkeys(self.culprits))
        return self


def lines_of(calls: Iterable[CallRecord | None]) -> list[str]:
    """The lines of code of these calls."""
    return [line_of(call.site) for call in calls if call]


def places_of(members: Iterable[Member]) -> list[str]:
    """The lines of code at which the ranks are, or have ended."""
    return [line_of(member.process.end_site or last_place(member.process)) for member in members]


def standings(waits: Waits, members: Sequence[Member]) -> list[str]:
    """A line for each rank, or for several that stand alike."""
    rows: dict[str, list[Member]] = {}
    for member in members[: 8 * SHOWN]:
        rows.setdefault(standing(waits, member), []).append(member)
    return [f"{names_of(same)}: {text}" for text, same in rows.items()][:SHOWN]


def standing(waits: Waits, member: Member) -> str:
    """ "process alive, last completed #40; its main thread is in data.py:41 next_batch"."""
    text, where = f"{_alive(waits, member.process)}, {progress(member)}", _whereabouts(member.process)
    return f"{text}; {where}" if where else text


def _alive(waits: Waits, process: ProcessRecord) -> str:
    several = len({one.host for one in waits.job.processes}) > 1
    host = f" on host {clean(process.host, 60)}" if several else ""
    words = {STOPPED: "stopped", DEAD: "ended", UNKNOWN: "cannot be asked"}
    number = f" {process.pid}" if host or process.state in (STOPPED, UNKNOWN) else ""
    return f"process{number}{host} {words.get(process.state, 'alive')}"


def progress(member: Member) -> str:
    """ "last entered #41, last completed #40"."""
    if not member.came:
        return "has not come to the communicator's init"
    entered, completed = member.comm.entered, member.comm.completed
    text = f"last entered #{entered:,}, " if completed < entered else ""
    return text + (f"last completed #{completed:,}" if completed > 0 else "completed none")


def _whereabouts(process: ProcessRecord) -> str:
    """Where its main thread is, or was, and how long ago that was seen; or its newest call, where that came later."""
    newest, site, age = newest_call(process), last_place(process), seen_ago(process)
    if not site:
        return ""
    if newest is not None and site != process.where:
        return f"its last call was {call_name(newest)} at {place(site)}{ago(process, newest.issued)}"
    if process.state == DEAD:
        return f"its main thread was last in {place(site)}"
    return (
        f"its main thread was in {place(site)}, seen {seconds(age)} ago"
        if age
        else f"its main thread is in {place(site)}"
    )
