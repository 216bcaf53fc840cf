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
from .findings import Finding, Weight
from .gone import gone
from .job import Job, follows, killed, normal
from .records import DEAD, ProcessRecord
from .waits import Waits

NOTHING_WRONG = ("running", "finished", "empty")
_HUNG_BEFORE = 5.0  # seconds that ranks had waited when all processes were killed, for the wait to be the reason
_SHOWN_FINDINGS = 4


@dataclass
class Verdict(Finding):
    """What is wrong: the first of all findings, which is the cause.

    kind      "running", "finished", "empty": nothing is wrong. "missing": a rank has not entered a collective, or
              nothing is known of it; "unmatched": a send without recv, or the reverse; "crossed": ranks wait for each
              other; "mismatch": they made other calls; "dead", "stopped", "left" (its communicator has ended), "failed"
              (its call raised), "stalled" (all ranks are there, and it does not go on)
    sentence  what a person wants to know first; details: a line for each rank concerned
    culprits  (uid of the communicator, rank in it); lines: their lines of code, in full
    comms     the uids concerned
    findings  all that was found, the first one being this
    """

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
        return Verdict("empty", Weight.CONSEQUENCE, text)
    waits = Waits(Job(processes), patience, uid)
    found = _found(waits)
    if waits.post_mortem:
        _weigh_after_the_end(waits, found)
    found.sort(key=lambda one: (one.weight, -one.waiting, -one.age))
    found = _without_repeats(found) or [_going_on(waits.job)]
    for one in found:
        one.sentence = one.sentence.rstrip(".") + "."
    return Verdict(**vars(found[0]), findings=found)


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
    if own and own[0] is verdict.findings[0] and own[0].is_cause:
        return "\n".join(verdict.details[:3])
    if not others:
        return ""
    first, concerned = others[0], [one for one in others if uid in one.comms and one.is_cause]
    if concerned and first.kind != "mismatch":  # that counts in any communicator: its ranks may wait for nothing
        first = concerned[0]
        alike = [one for one in concerned if one.kind == first.kind and any(of == uid for of, _ in one.culprits)]
        if first.kind == "missing" and alike:  # of ranks that are away, those of this communicator: by its numbers
            first = alike[0]
    return "\n".join([first.sentence, *first.details[:3]])


def _found(waits: Waits) -> list[Finding]:
    found = [*gone(waits), *disagreements(waits), *crossings(waits), *missing(waits)]
    if not any(one.is_cause for one in found):  # what does not move may do so because of anything else
        found += stalled(waits)
    if any(one.is_cause for one in found):  # then that others ended because of it is no news
        found = [one for one in found if one.kind != "dead" or one.is_cause]
    return found


def _without_repeats(found: Sequence[Finding]) -> list[Finding]:
    """That a rank has not come is no news where it is named already, as dead for instance."""
    named: set[tuple[str, int]] = set()
    kept = []
    for one in found:
        if one.kind not in ("missing", "unmatched") or not named.issuperset(one.culprits):
            kept.append(one)
        named.update(one.culprits)
    return kept


def _weigh_after_the_end(waits: Waits, found: list[Finding]) -> None:
    """All have ended: what held them before is the cause if they gave up, or were killed after a wait."""
    if not any(one.kind == "dead" and one.is_cause for one in found):
        return
    silent = all(killed(one) or normal(one) or follows(one) for one in waits.job.processes)
    for one in found:
        if one.kind == "dead":
            one.weight = Weight.KILLED if silent else one.weight
        elif one.kind != "mismatch" and not (silent and one.age >= _HUNG_BEFORE):
            one.weight = Weight.BEFORE_THE_END


def _going_on(job: Job) -> Finding:
    ended = sum(process.state == DEAD for process in job.processes)
    running = len(job.processes) - ended
    if not running:
        return Finding("finished", Weight.CONSEQUENCE, f"all {ended:,} ranks have finished")
    return Finding("running", Weight.CONSEQUENCE, f"no rank is stuck: {running:,} running, {ended:,} finished")
