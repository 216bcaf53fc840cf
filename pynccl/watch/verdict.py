"""The verdict: from the records of all processes, which rank or call keeps the job from going on, in one sentence.

    verdict = judge(processes)
    print(render(verdict))

Times are taken from one record only, or from two of one machine: clocks of two machines are not compared.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from .dead_ranks import ending, gone
from .formatting import called, ranks_text, seconds
from .job import SHOWN, Job, Member, names_of
from .mismatches import disagreements
from .records import DEAD, FAILED, ProcessRecord
from .wait_graph import NO_RECORD, Finding, Meeting, Step, Waits, Weight

NOTHING_WRONG = ("running", "finished", "empty")
_HUNG_BEFORE = 5.0  # seconds that ranks had waited when all processes were killed, for the wait to be the reason
_SHOWN_FINDINGS = 4
_STALLED_SECONDS = 10.0  # a call that all ranks are inside of may take a while
_ASKED_SECONDS = 1.0  # the same where somebody asks, who has waited too long
_SHOWN_CROSSED = 3
_NOT_TO_BE_SEEN = "the network between them, a GPU, or the work before it on its stream"
_ANSWERS = {"send": "recv from", "recv": "send to", "wait_signal": "signal to"}


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
    found = [*gone(waits), *disagreements(waits), *_crossings(waits), *_missing(waits)]
    if not any(one.is_cause for one in found):  # what does not move may do so because of anything else
        found += _stalls(waits)
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
    silent = all(one.killed or one.ended_well or one.gave_up for one in waits.job.processes)
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


# Ranks that live and hold up others: they are elsewhere, wait for each other in a circle, or do not go on


def _missing(waits: Waits) -> list[Finding]:
    """A finding for each meeting that waits for ranks which wait for nothing themselves, or are not known."""
    found: list[Finding] = []
    known: dict[tuple[int, ...], Finding] = {}
    for meeting in waits.stuck():
        idle = meeting.idle()
        key = tuple(id(one.process) for one in idle)
        if key in known:  # in another communicator, or in a later call
            _add_communicator(known[key], meeting)
        elif idle:
            known[key] = _away(waits, meeting, idle)
            found.append(known[key])
        if NO_RECORD in meeting.lacks.values():
            found.append(_unknown(waits, meeting))
    return found


def _add_communicator(found: Finding, meeting: Meeting) -> None:
    if meeting.group.uid not in found.comms:
        found.details.append(f"nor entered: {meeting.brief()}, where {meeting.waiting()}")
        found.comms.append(meeting.group.uid)
        found.waiting += len(meeting.here)


def _away(waits: Waits, meeting: Meeting, members: Sequence[Member]) -> Finding:
    who, call = names_of(members), meeting.describe()
    if meeting.collective:
        kind, text = "missing", f"{who} never entered {call}; {meeting.waiting(' there')}"
    else:
        kind, text = "unmatched", f"{who} never called {_answer_to(meeting)}; {meeting.waiting()} in {call}"
    details = waits.job.standings(members)
    for rank in meeting.here:
        if meeting.group.members[rank].process is members[0].process:
            how = "calls of several ranks of one process go into a pynccl.group()"
            details.append(f"its process is inside as rank {rank}: {how}")
    return waits.finding(
        kind,
        Weight.AWAY,
        text,
        meetings=[meeting],
        details=details,
        culprits=[one.key for one in members],
        sites=[one.site for one in members],
    )


def _unknown(waits: Waits, meeting: Meeting) -> Finding:
    ranks = [rank for rank, why in meeting.lacks.items() if why == NO_RECORD]
    why = "no record here (another machine, another PYNCCL_WATCH_DIR, or it has not come to init)"
    text = f"nothing is known of {ranks_text(ranks)} of comm '{meeting.group.name}': {why}"
    text += f"; {meeting.waiting()} in {meeting.describe()}"
    ended = [process for process in waits.job.processes if process.gave_up]  # who may have known more
    ended.sort(key=lambda process: not process.end.startswith("NcclInvalidUsage"))
    details = [ending(waits, process) for process in ended[:1]]
    if ended and ended[0].end.startswith("NcclInvalidUsage"):  # it knew what is wrong: calls that disagree
        text, details[0] = details[0], text
    culprits = [(meeting.group.uid, rank) for rank in ranks]
    return waits.finding("missing", Weight.UNKNOWN, text, meetings=[meeting], details=details, culprits=culprits)


def _answer_to(meeting: Meeting) -> str:
    """What the other side of a message has to call."""
    waiter, call = next(iter(meeting.here.items()))
    return f"{_ANSWERS[call.operation]} rank {waiter}"


def _crossings(waits: Waits) -> Iterator[Finding]:
    """Circles of ranks that wait for each other."""
    for circle in waits.circles():
        if all(meeting.age() >= waits.patience for meeting in circle):
            yield _crossing(waits, circle)


def _crossing(waits: Waits, circle: Sequence[Meeting]) -> Finding:
    edges = [(one, one.first[other], other) for one, other in zip(circle, [*circle[1:], circle[0]], strict=True)]
    edges.reverse()
    texts = [_edge(*edge) for edge in edges[:_SHOWN_CROSSED]]
    more = f", and {len(edges) - _SHOWN_CROSSED:,} more in this circle" if len(edges) > _SHOWN_CROSSED else ""
    certain = all(any(step.certain for step in steps) for _, steps, _ in edges)
    details, sites = [], []
    for later, steps, _ in edges[:SHOWN]:
        if steps[0].then is None:
            lacks = f"entered {later.brief()}" if later.collective else f"called {_answer_to(later)}"
            details.append(f"{_who(steps)}: never {lacks}")
    for _, (step, *_), _ in edges[:SHOWN]:
        details.append(f"{waits.job.name(step.member.process)}: {waits.job.standing(step.member)}")
        sites += [call.site for call in (step.first, step.then) if call]
    return waits.finding(
        "crossed",
        Weight.CROSSED if certain else Weight.UNCERTAIN,
        f"ranks wait for each other: {', '.join(texts)}{more}",
        meetings=circle,
        details=details,
        culprits=[(earlier.group.uid, step.member.rank) for _, steps, earlier in edges for step in steps],
        sites=sites,
    )


def _edge(later: Meeting, steps: Sequence[Step], earlier: Meeting) -> str:
    """ "rank 0 in all_reduce #3 of comm 'tp' at a.py:1", "rank 0 in ... at a.py:1 before ... at a.py:2"."""
    first, then = steps[0].first, steps[0].then
    text = f"{_who(steps)} in {earlier.group.brief(first)}{called(first)}"
    return f"{text} before {later.group.brief(then)}{called(then)}" if then else text


def _who(steps: Sequence[Step]) -> str:
    members = {step.member.rank: step.member for step in steps}
    return names_of([members[rank] for rank in sorted(members)])


def _stalls(waits: Waits) -> Iterator[Finding]:
    """Calls that all ranks have entered, alike, and that do not go on, or not for all of them."""
    shortest = max(waits.patience, _ASKED_SECONDS if waits.uid else _STALLED_SECONDS)
    for meeting in waits.meetings:
        if not meeting.lacks and not meeting.first and meeting.age() >= shortest:
            yield _stalled(waits, meeting)


def _stalled(waits: Waits, meeting: Meeting) -> Finding:
    group = meeting.group
    members = [group.members[rank] for rank in meeting.here]
    gave_up = all(call.state == FAILED for call in meeting.here.values())
    how = f"{'gave up' if gave_up else 'not done'} after {seconds(meeting.age())}"
    others = [rank for rank in group.members if rank not in meeting.here] if meeting.collective else [meeting.call.peer]
    rest = "and nobody is missing" if meeting.complete() else f"which {group.names(others)} completed"
    text = f"{group.names(meeting.here)} in {meeting.describe()}, {how}, {rest}: {_NOT_TO_BE_SEEN}"
    # Of the messages of a group it is rather those between two machines, or containers, that do not arrive.
    several = len({(one.process.machine, one.process.host) for one in members[:4]}) > 1
    return waits.finding(
        "stalled",
        Weight.STALLED_BETWEEN_MACHINES if several else Weight.STALLED,
        text,
        meetings=[meeting],
        details=waits.job.standings(members[:4]),
        culprits=[] if meeting.complete() else [one.key for one in members],
    )
