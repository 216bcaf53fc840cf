"""The verdict: from the records of all processes, which rank or call keeps the job from going on, in one sentence.

    verdict = judge(processes)
    print(render(verdict))

Times are taken from one record only, or from two of one machine: clocks of two machines are not compared.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .blocked import crossings, missing, stalled
from .disagree import disagreements
from .findings import CONSEQUENCE, Case, Finding, frozen, standing
from .formatting import clean, line_of, seconds
from .gone import gone
from .job import Job, follows, killed, names_of, normal
from .records import DEAD, ProcessRecord
from .waits import Waits

NOTHING_WRONG = ("running", "finished", "straggling", "empty")
_HUNG_BEFORE = 5.0  # seconds that ranks had waited when all processes were killed, for the wait to be the reason
_SHOWN_FINDINGS = 4


@dataclass
class Verdict:
    """What is wrong, the cause first.

    kind      "running", "straggling", "finished", "empty": nothing is wrong. "missing": a rank has not entered a
              collective; "unmatched": a send without recv, or the reverse; "crossed": ranks wait for each other;
              "mismatch": they made other calls; "dead", "stopped", "left" (its communicator has ended), "failed" (its
              call raised), "unreachable" (on another machine), "duplicate" (two processes are one rank), "frozen" (it
              runs, but shows no life), "stalled" (all ranks are there, and it does not go on)
    sentence  what a person wants to know first; details: a line for each rank concerned
    culprits  (uid of the communicator, rank in it); lines: their lines of code, in full
    comms     the uids concerned
    findings  all that was found, the first one being this
    """

    kind: str
    sentence: str
    details: list[str] = field(default_factory=list)
    culprits: list[tuple[str, int]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    comms: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def wrong(self) -> bool:
        return self.kind not in NOTHING_WRONG

    def to_json(self) -> dict[str, Any]:
        """As plain values for json.dumps."""
        return dataclasses.asdict(self)


def judge(processes: Sequence[ProcessRecord], *, patience: float = 0.0, uid: str = "") -> Verdict:
    """What keeps the ranks from going on. A wait younger than `patience` seconds is none.

    uid  the communicator of which it is asked: of several that wait for the same rank, the one to be named first"""
    if not processes:
        text = "there are no records: no process has written any here (another machine? another PYNCCL_WATCH_DIR?)"
        return Verdict("empty", text)
    job = Job(processes)
    all_dead = all(process.state == DEAD for process in job.processes)
    case = Case(job, Waits(job, post_mortem=all_dead), patience, uid)
    found = _found(case)
    found += _frozen(case, {culprit for one in found for culprit in one.culprits})
    if all_dead:
        _weigh_after_the_end(case, found)
    found.sort(key=lambda one: (one.weight, -one.waiting, -one.age))
    if not found:
        found = [_going_on(case)]
    for one in found:
        one.sentence = one.sentence.rstrip(".") + "."
    notes = [clean(note) for group in job.groups for note in group.stale]
    first = found[0]
    return Verdict(
        first.kind, first.sentence, first.details, first.culprits, first.lines, first.comms, found, notes[:4]
    )


def render(verdict: Verdict) -> str:
    """All of it as text."""
    lines = [verdict.sentence, *verdict.details]
    for one in verdict.findings[1:_SHOWN_FINDINGS]:
        lines += [f"also: {one.sentence}", *(f"  {detail}" for detail in one.details[:4])]
    if len(verdict.findings) > _SHOWN_FINDINGS:
        lines.append(f"and {len(verdict.findings) - _SHOWN_FINDINGS:,} more findings")
    return "\n".join([*lines, *verdict.notes])


def about(verdict: Verdict, uid: str, rank: int) -> str:
    """What an exception of this rank of this communicator should say too; "" where there is nothing to say."""
    others = [
        one
        for one in verdict.findings
        if one.kind not in NOTHING_WRONG and not (one.kind == "failed" and one.culprits == [(uid, rank)])
    ]
    concerned = [one for one in others if uid in one.comms and one.weight < CONSEQUENCE]
    if others and others[0].kind == "mismatch":  # in whichever communicator: its ranks may wait for nothing
        concerned = others
    own = verdict.findings[0] if verdict.wrong and verdict.findings[0] not in others else None
    if own is not None and own.weight < CONSEQUENCE:  # its own error is the cause
        return "\n".join(verdict.details[:3])
    concerned = concerned or others
    if not concerned:
        return ""
    return "\n".join([concerned[0].sentence, *concerned[0].details[:3]])


def _found(case: Case) -> list[Finding]:
    found = [*_duplicates(case), *gone(case), *disagreements(case), *crossings(case), *missing(case)]
    if all(one.weight >= CONSEQUENCE for one in found):  # what does not move may do so because of anything else
        found += stalled(case)
    if any(one.weight < CONSEQUENCE for one in found):  # then that others ended because of it is no news
        found = [one for one in found if one.kind != "dead" or one.weight < CONSEQUENCE]
    return found


def _weigh_after_the_end(case: Case, found: list[Finding]) -> None:
    """All have ended: what held them before is the cause if they gave up, or were killed after a wait."""
    if not any(one.kind == "dead" and one.weight < CONSEQUENCE for one in found):
        return
    silent = all(killed(one) or normal(one) or follows(one) for one in case.job.processes)
    for one in found:
        if one.kind not in ("dead", "mismatch", "duplicate"):
            one.weight += 0 if silent and one.age >= _HUNG_BEFORE else 100
        elif one.kind == "dead" and silent:
            one.weight = 50


def _duplicates(case: Case) -> list[Finding]:
    found = []
    for group in case.job.groups:
        for rank, older, newer in group.claimed[:1]:
            more = f" (and {len(group.claimed) - 1:,} more ranks are claimed twice)" if len(group.claimed) > 1 else ""
            who = f"rank {rank} of comm '{group.name}'"
            text = f"{who} is claimed by two processes, {older.pid} and {newer.pid}{more}"
            lines = [line for line in (line_of(older.where), line_of(newer.where)) if line]
            found.append(Finding("duplicate", text, 5, [], [(group.uid, rank)], lines, [group.uid]))
    return found


def _frozen(case: Case, named: set[tuple[str, int]]) -> list[Finding]:
    """Processes that run and show no life, other than those that are named already."""
    places = case.job.members
    silent = [process for process in case.job.processes if frozen(process)]
    silent = [
        one for one in silent if not any((group.uid, place.rank) in named for group, place in places.get(id(one), []))
    ]
    if not silent:
        return []
    lines = [f"{case.job.name(process)}: {frozen(process)}" for process in silent[:8]]
    more = f" (and {len(silent) - 1:,} more processes)" if len(silent) > 1 else ""
    text = f"{case.job.name(silent[0])}'s process {silent[0].pid} runs, but {frozen(silent[0])}{more}"
    culprits = [case.job.key(process) for process in silent]
    where = [line for process in silent[:8] if (line := line_of(process.where))]
    return [Finding("frozen", text, 70, lines[1:], culprits, where, [uid for uid, _ in culprits])]


def _going_on(case: Case) -> Finding:
    processes = case.job.processes
    ended = sum(process.state == DEAD for process in processes)
    who = f"{len(processes):,} ranks" if len(processes) > 1 else case.job.name(processes[0])
    if ended == len(processes):
        return Finding("finished", f"all {who} have finished" if ended > 1 else f"{who} has finished", 0)
    if late := _straggler(case):
        return late
    rest = f"; {ended:,} of them {'has' if ended == 1 else 'have'} finished" if ended else ""
    return Finding("running", f"no rank is stuck: {who} {'are' if len(processes) > 1 else 'is'} running{rest}", 0)


def _straggler(case: Case) -> Finding | None:
    """The communicator whose ranks are furthest apart; one call apart is no news, unless others are waiting."""
    best: Finding | None = None
    widest = 0
    for group in case.job.groups:
        living = [one for one in group.members.values() if one.comm is not None and not one.left and not one.dead]
        if len(living) < 2:
            continue
        first, last = max(one.entered for one in living), min(one.entered for one in living)
        meeting = next((one for one in case.waits.meetings if one.group is group and one.away), None)
        if first - last <= (0 if meeting else 1) or first - last <= widest:
            continue
        widest = first - last
        behind = [one for one in living if one.entered == last]
        since = f", for {seconds(meeting.age())}" if meeting else ""
        text = (
            f"no rank is stuck, but {names_of(behind)} of comm '{group.name}' "
            f"{'is' if len(behind) == 1 else 'are'} {widest:,} call{'s' if widest != 1 else ''} behind{since}: "
            f"last entered #{last:,}, the first rank #{first:,}"
        )
        details = [f"{names_of([one])}: {standing(case, one, meeting)}" for one in behind[:4]]
        lines = [line for one in behind[:8] if (line := line_of(one.process.where))]
        best = Finding("straggling", text, 0, details, [(group.uid, one.rank) for one in behind], lines, [group.uid])
    return best
