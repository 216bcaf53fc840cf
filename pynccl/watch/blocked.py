"""Ranks that live and hold up others: they are elsewhere, wait for each other in a circle, or do not go on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .findings import SHOWN, Finding, Weight, lines_of, places_of, standing, standings
from .formatting import called, ranks_text, seconds
from .gone import ending
from .job import Member, follows, names_of
from .records import FAILED
from .waits import NO_RECORD, Meeting, Step, Waits

_STALLED_SECONDS = 10.0  # a call that all ranks are inside of may take a while
_ASKED_SECONDS = 1.0  # the same where somebody asks, who has waited too long
_SHOWN_CROSSED = 3
_NOT_TO_BE_SEEN = "the network between them, a GPU, or the work before it on its stream"
_ANSWERS = {"send": "recv from", "recv": "send to", "wait_signal": "signal to"}


def missing(waits: Waits) -> list[Finding]:
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
    found = Finding(kind, Weight.AWAY, text, standings(waits, members))
    for rank in meeting.here:
        if meeting.group.members[rank].process is members[0].process:
            how = "calls of several ranks of one process go into a pynccl.group()"
            found.details.append(f"its process is inside as rank {rank}: {how}")
    found.culprits, found.lines = [one.key for one in members], places_of(members)
    return found.concern(waits, [meeting])


def _unknown(waits: Waits, meeting: Meeting) -> Finding:
    ranks = [rank for rank, why in meeting.lacks.items() if why == NO_RECORD]
    why = "no record here (another machine, another PYNCCL_WATCH_DIR, or it has not come to init)"
    text = f"nothing is known of {ranks_text(ranks)} of comm '{meeting.group.name}': {why}"
    text += f"; {meeting.waiting()} in {meeting.describe()}"
    ended = [process for process in waits.job.processes if follows(process)]  # who may have known more
    ended.sort(key=lambda process: not process.end.startswith("NcclInvalidUsage"))
    details = [ending(waits, process) for process in ended[:1]]
    if ended and ended[0].end.startswith("NcclInvalidUsage"):  # it knew what is wrong: calls that disagree
        text, details[0] = details[0], text
    culprits = [(meeting.group.uid, rank) for rank in ranks]
    return Finding("missing", Weight.UNKNOWN, text, details, culprits).concern(waits, [meeting])


def _answer_to(meeting: Meeting) -> str:
    """What the other side of a message has to call."""
    waiter, call = next(iter(meeting.here.items()))
    return f"{_ANSWERS[call.operation]} rank {waiter}"


def crossings(waits: Waits) -> Iterator[Finding]:
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
    weight = Weight.CROSSED if certain else Weight.UNCERTAIN
    found = Finding("crossed", weight, f"ranks wait for each other: {', '.join(texts)}{more}")
    for later, steps, _ in edges[:SHOWN]:
        if steps[0].then is None:
            lacks = f"entered {later.brief()}" if later.collective else f"called {_answer_to(later)}"
            found.details.append(f"{_who(steps)}: never {lacks}")
    for _, (step, *_), _ in edges[:SHOWN]:
        found.details.append(f"{waits.job.name(step.member.process)}: {standing(waits, step.member)}")
        found.lines += lines_of([step.first, step.then])
    found.culprits = [(earlier.group.uid, step.member.rank) for _, steps, earlier in edges for step in steps]
    return found.concern(waits, circle)


def _edge(later: Meeting, steps: Sequence[Step], earlier: Meeting) -> str:
    """ "rank 0 in all_reduce #3 of comm 'tp' at a.py:1", "rank 0 in ... at a.py:1 before ... at a.py:2"."""
    first, then = steps[0].first, steps[0].then
    text = f"{_who(steps)} in {earlier.group.brief(first)}{called(first)}"
    return f"{text} before {later.group.brief(then)}{called(then)}" if then else text


def _who(steps: Sequence[Step]) -> str:
    members = {step.member.rank: step.member for step in steps}
    return names_of([members[rank] for rank in sorted(members)])


def stalled(waits: Waits) -> Iterator[Finding]:
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
    found = Finding("stalled", Weight.STALLED_BETWEEN_MACHINES if several else Weight.STALLED, text)
    found.details = standings(waits, members[:4])
    found.culprits = [] if meeting.complete() else [one.key for one in members]
    return found.concern(waits, [meeting])
