"""Ranks that live and hold up others: they are elsewhere, wait for each other in a circle, or do not go on."""

from __future__ import annotations

from collections.abc import Sequence

from .findings import SHOWN, Case, Finding, chain, concern, lines_of, standing, standings, waiting
from .formatting import called, clean, ranks_text, seconds
from .gone import ending
from .job import Member, follows, names_of
from .records import FAILED
from .waits import Meeting, Step

_STALLED_SECONDS = 10.0  # a call that all ranks are inside of may take a while
_ASKED_SECONDS = 1.0  # the same where somebody asks, who has waited too long
_NOT_TO_BE_SEEN = "the network between {}, a GPU, or the work before it on its stream"
_SHOWN_CROSSED = 3
_SHOWN_HOSTS = 4


def missing(case: Case) -> list[Finding]:
    """A finding for each meeting that waits for ranks which wait for nothing themselves, or are not known."""
    found: list[Finding] = []
    known: dict[tuple[int, ...], Finding] = {}
    for meeting in case.stuck():
        idle = meeting.idle()
        key = tuple(id(one.process) for one in idle)
        if key in known:  # in another communicator, or in a later call
            _add_communicator(known[key], meeting)
        elif idle:
            found.append(_away(case, meeting, idle))
            known[key] = found[-1]
        if meeting.unknown:
            found.append(_unknown(case, meeting))
    return found


def _add_communicator(found: Finding, meeting: Meeting) -> None:
    if meeting.group.uid not in found.comms:
        found.details.append(f"nor entered: {meeting.group.brief(meeting.call)}, where {waiting(meeting, '')}")
        found.comms.append(meeting.group.uid)
        found.waiting += len(meeting.here)


def _away(case: Case, meeting: Meeting, members: Sequence[Member]) -> Finding:
    if meeting.collective:
        text = f"{names_of(members)} never entered {case.describe(meeting)}; {waiting(meeting)}"
    else:
        text = f"{names_of(members)} never called {_answer_to(meeting)}"
        text += f"; {waiting(meeting, '')} in {case.describe(meeting)}"
    found = Finding("missing" if meeting.collective else "unmatched", text, 40)
    found.details = standings(case, members, meeting)
    inside = {id(meeting.group.members[rank].process): rank for rank in meeting.here}
    if (rank := inside.get(id(members[0].process))) is not None:
        text = f"its process is inside as rank {rank}: calls of several ranks of one process go into a pynccl.group()"
        found.details.append(text)
    found.details += chain(case, meeting)
    found.culprits = [(meeting.group.uid, one.rank) for one in members]
    return concern(case, found, [meeting], members)


def _unknown(case: Case, meeting: Meeting) -> Finding:
    why = "no record here (another machine, another PYNCCL_WATCH_DIR, or it has not come to init)"
    text = f"nothing is known of {ranks_text(meeting.unknown)} of comm '{meeting.group.name}': {why}"
    text += f"; {waiting(meeting, '')} in {case.describe(meeting)}"
    ended = [process for process in case.job.processes if follows(process)]  # who may have known more
    ended.sort(key=lambda process: not process.end.startswith("NcclInvalidUsage"))
    details = [*(ending(case, process) for process in ended[:1]), *chain(case, meeting)]
    if ended and ended[0].end.startswith("NcclInvalidUsage"):  # it knew what is wrong: calls that disagree
        text, details[0] = details[0], text
    found = Finding("missing", text, 60 if meeting.away or meeting.gone else 55, details)
    found.culprits = [(meeting.group.uid, rank) for rank in meeting.unknown]
    return concern(case, found, [meeting])


def _answer_to(meeting: Meeting) -> str:
    """What the other side of a message has to call."""
    waiter, call = next(iter(meeting.here.items()))
    words = {"send": "recv from", "recv": "send to", "wait_signal": "signal to"}
    return f"{words[call.operation]} rank {waiter}"


def crossings(case: Case) -> list[Finding]:
    """Circles of ranks that wait for each other."""
    return [
        _crossing(case, circle)
        for circle in case.waits.circles()
        if all(meeting.age() >= case.patience for meeting in circle)
    ]


def _crossing(case: Case, circle: Sequence[Meeting]) -> Finding:
    edges = [(one, one.first[other], other) for one, other in zip(circle, [*circle[1:], circle[0]], strict=True)]
    edges.reverse()
    texts = [_edge(case, *edge) for edge in edges[:_SHOWN_CROSSED]]
    more = f", and {len(edges) - _SHOWN_CROSSED:,} more in this circle" if len(edges) > _SHOWN_CROSSED else ""
    certain = all(any(step.certain for step in steps) for _, steps, _ in edges)
    found = Finding("crossed", f"ranks wait for each other: {', '.join(texts)}{more}", 20 if certain else 45)
    for later, steps, _ in edges[:SHOWN]:
        who = names_of(list({step.member.rank: step.member for step in steps}.values()))
        if steps[0].then is None:
            lacks = "entered" if later.collective else "called"
            what = later.group.brief(later.call) if later.collective else _answer_to(later)
            found.details.append(f"{who}: never {lacks} {what}")
    firsts = [steps[0] for _, steps, _ in edges[:SHOWN]]
    found.details += [f"{case.job.name(one.member.process)}: {standing(case, one.member)}" for one in firsts]
    found.lines = lines_of(call for step in firsts for call in (step.first, step.then))
    culprits = [(earlier.group.uid, step.member.rank) for _, steps, earlier in edges for step in steps]
    found.culprits = list(dict.fromkeys(culprits))
    return concern(case, found, circle)


def _edge(case: Case, later: Meeting, steps: Sequence[Step], earlier: Meeting) -> str:
    """ "rank 0 in all_reduce #3 of comm 'tp' at a.py:1", "rank 0 in ... at a.py:1 before ... at a.py:2"."""
    members = {step.member.rank: step.member for step in sorted(steps, key=lambda one: one.member.rank)}
    step = steps[0]
    first = f"{names_of(list(members.values()))} in {earlier.group.brief(step.first)}{called(step.first, case.paths)}"
    return f"{first} before {later.group.brief(step.then)}{called(step.then, case.paths)}" if step.then else first


def stalled(case: Case) -> list[Finding]:
    """Calls that all ranks have entered, alike, and that do not go on, or not for all of them."""
    found = []
    shortest = max(case.patience, _ASKED_SECONDS if case.uid else _STALLED_SECONDS)
    for meeting in case.waits.meetings:
        age, group = meeting.age(), meeting.group
        if meeting.blocked or meeting.first or age < shortest:
            continue
        who, there = group.names(meeting.here), case.describe(meeting)
        gave_up = all(call.state == FAILED for call in meeting.here.values())
        how = f"{'gave up' if gave_up else 'not done'} after {seconds(age)}"
        cause = _NOT_TO_BE_SEEN.format(_between([group.members[rank] for rank in meeting.here]))
        if meeting.complete():
            text = f"{who} in {there}, {how}, and nobody is missing: {cause}"
        else:
            others = (
                [rank for rank in group.members if rank not in meeting.here]
                if meeting.collective
                else [meeting.call.peer]
            )
            text = f"{who} in {there}, {how}, which {group.names(others)} completed: {cause}"
        members = [group.members[rank] for rank in list(meeting.here)[:4]]
        details = [f"{names_of([one])}: {standing(case, one, meeting)}" for one in members] + chain(case, meeting)
        # Of the messages of a group it is rather those between two machines, or containers, that do not arrive.
        weight = 64 if len({(one.process.machine, one.process.host) for one in members}) > 1 else 65
        culprits = [] if meeting.complete() else [(group.uid, rank) for rank in meeting.here]
        found.append(concern(case, Finding("stalled", text, weight, details, culprits, [], [group.uid]), [meeting]))
    return found


def _between(members: Sequence[Member]) -> str:
    """ "them"; of several machines "rank 0 on host a and ranks 1-3 on host b"."""
    hosts: dict[str, list[Member]] = {}
    for one in members:
        hosts.setdefault(clean(one.process.host, 60), []).append(one)
    if not 1 < len(hosts) <= _SHOWN_HOSTS:
        return "them"
    return " and ".join(f"{names_of(same)} on host {host}" for host, same in hosts.items())
