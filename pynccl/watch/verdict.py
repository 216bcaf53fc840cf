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
from .findings import CONSEQUENCE, Case, Finding, frozen
from .formatting import line_of
from .gone import gone
from .job import Job, follows, killed, normal
from .records import DEAD, ProcessRecord
from .waits import Waits

NOTHING_WRONG = ("running", "finished", "empty")
_HUNG_BEFORE = 5.0  # seconds that ranks had waited when all processes were killed, for the wait to be the reason
_SHOWN_FINDINGS = 4


@dataclass
class Verdict:
    """What is wrong, the cause first.

    kind      "running", "finished", "empty": nothing is wrong. "missing": a rank has not entered a collective, or
              nothing is known of it; "unmatched": a send without recv, or the reverse; "crossed": ranks wait for each
              other; "mismatch": they made other calls; "dead", "stopped", "left" (its communicator has ended), "failed"
              (its call raised), "frozen" (it runs, but shows no life), "stalled" (all ranks are there, and it does not
              go on)
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
    if all_dead:
        _weigh_after_the_end(case, found)
    found.sort(key=lambda one: (one.weight, -one.waiting, -one.age))
    if not found:
        found = [_going_on(job)]
    for one in found:
        one.sentence = one.sentence.rstrip(".") + "."
    first = found[0]
    return Verdict(first.kind, first.sentence, first.details, first.culprits, first.lines, first.comms, found)


def render(verdict: Verdict) -> str:
    """All of it as text."""
    lines = [verdict.sentence, *verdict.details]
    for one in verdict.findings[1:_SHOWN_FINDINGS]:
        lines += [f"also: {one.sentence}", *(f"  {detail}" for detail in one.details[:4])]
    if len(verdict.findings) > _SHOWN_FINDINGS:
        lines.append(f"and {len(verdict.findings) - _SHOWN_FINDINGS:,} more findings")
    return "\n".join(lines)


def about(verdict: Verdict, uid: str, rank: int) -> str:
    """What an exception of this rank of this communicator should say too; "" where there is nothing to say."""
    own = [one for one in verdict.findings if one.kind == "failed" and one.culprits == [(uid, rank)]]
    others = [one for one in verdict.findings if one.kind not in NOTHING_WRONG and one not in own]
    if own and own[0] is verdict.findings[0] and own[0].weight < CONSEQUENCE:  # its own error is the cause
        return "\n".join(verdict.details[:3])
    concerned = [one for one in others if uid in one.comms and one.weight < CONSEQUENCE]
    if others and others[0].kind == "mismatch":  # in whichever communicator: its ranks may wait for nothing
        concerned = others
    if not (concerned or others):
        return ""
    first = (concerned or others)[0]
    alike = [one for one in concerned if one.kind == first.kind and any(of == uid for of, _ in one.culprits)]
    if first.kind == "missing" and alike:  # of ranks that are away, those of this communicator: by its numbers
        first = alike[0]
    return "\n".join([first.sentence, *first.details[:3]])


def _found(case: Case) -> list[Finding]:
    found = [*gone(case), *disagreements(case), *crossings(case), *missing(case)]
    if all(one.weight >= CONSEQUENCE for one in found):  # what does not move may do so because of anything else
        found += stalled(case)
    if any(one.weight < CONSEQUENCE for one in found):  # then that others ended because of it is no news
        found = [one for one in found if one.kind != "dead" or one.weight < CONSEQUENCE]
    return found + _frozen(case, {culprit for one in found for culprit in one.culprits})


def _weigh_after_the_end(case: Case, found: list[Finding]) -> None:
    """All have ended: what held them before is the cause if they gave up, or were killed after a wait."""
    if not any(one.kind == "dead" and one.weight < CONSEQUENCE for one in found):
        return
    silent = all(killed(one) or normal(one) or follows(one) for one in case.job.processes)
    for one in found:
        if one.kind not in ("dead", "mismatch"):
            one.weight += 0 if silent and one.age >= _HUNG_BEFORE else 100
        elif one.kind == "dead" and silent:
            one.weight = 50


def _frozen(case: Case, named: set[tuple[str, int]]) -> list[Finding]:
    """Processes that run and show no life, other than those that are named already."""
    found = []
    for process in case.job.processes:
        keys = {(group.uid, place.rank) for group, place in case.job.members.get(id(process), [])}
        if (why := frozen(process)) and not keys & named:
            text = f"{case.job.name(process)}'s process {process.pid} runs, but {why}"
            lines, culprit = [line for line in [line_of(process.where)] if line], case.job.key(process)
            found.append(Finding("frozen", text, 70, [], [culprit], lines, [culprit[0]]))
    return found


def _going_on(job: Job) -> Finding:
    ended = sum(process.state == DEAD for process in job.processes)
    if ended == len(job.processes):
        return Finding("finished", f"all {ended:,} ranks have finished", 0)
    return Finding("running", f"no rank is stuck: {len(job.processes) - ended:,} running, {ended:,} finished", 0)
