"""Sync points: calls that need several ranks, who has entered them, and what blocks them. graph.py finds them."""

from __future__ import annotations

from dataclasses import dataclass, field

from .formatting import seconds
from .job import Group, Member
from .layout import MESSAGES
from .records import FAILED, LAUNCHED, NOT_KNOWN, CallRecord

# Why a rank is missing at a sync point. The other reasons are DEAD, STOPPED and FAILED.
NOT_ENTERED, COMM_ENDED, NO_RECORD = "not entered", "communicator ended", "no record"


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

    arrived     rank -> its call, for the ranks that have entered it; waits: those of them that wait for it
    missing     rank -> reason, for the ranks that it needs and that have not entered it
    failed      rank -> its call that raised, for the ranks that are missing because of it
    blocked_by  the sync points that must complete first, and why
    excluded    the ranks that a shrink excludes
    """

    group: Group
    call: CallRecord
    arrived: dict[int, CallRecord] = field(default_factory=dict)
    waits: dict[int, CallRecord] = field(default_factory=dict)
    missing: dict[int, str] = field(default_factory=dict)
    failed: dict[int, CallRecord] = field(default_factory=dict)
    blocked_by: dict[SyncPoint, list[Dependency]] = field(default_factory=dict)
    excluded: set[int] = field(default_factory=set)

    @property
    def collective(self) -> bool:
        return self.call.operation not in MESSAGES

    def age(self) -> float:
        """Seconds that the first rank has waited, or had waited when it gave up."""
        return max((self.group.members[rank].waited(call) for rank, call in self.waits.items()), default=0.0)

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
            ranks = [rank for rank, call in self.waits.items() if how.startswith(_how_it_waits(call))]
            if ranks:
                who, have = (f"{len(ranks):,} ranks", "have ") if len(ranks) > 1 else (self.group.names(ranks), "has ")
                longest = seconds(max(self.group.members[rank].waited(self.arrived[rank]) for rank in ranks))
                words.append(f"{who} {'' if how.startswith('gave') else have}{how.format(longest)}")
        return " and ".join(words) or f"{self.group.names(self.arrived)} issued it before other calls"


def _how_it_waits(call: CallRecord) -> str:
    return "gave up" if call.state == FAILED else "perhaps" if call.state == LAUNCHED else "waited"
