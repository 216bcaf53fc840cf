"""Ranks that live and hold up others: they are elsewhere, wait for each other in a circle, or do not go on."""

from __future__ import annotations

from collections.abc import Sequence

from .findings import SHOWN, Case, Finding, chain, concern, lines_of, standing, standings, waiting
from .formatting import Range, called, clean, have, ranks_text, seconds
from .gone import ending
from .job import Member, follows, names_of
from .records import FAILED
from .waits import Meeting, Step

NO_RECORD = "left no record here (another machine? another PYNCCL_WATCH_DIR?)"
_STALLED_SECONDS = 10.0  # a call that all ranks are inside of may take a while
_ASKED_SECONDS = 1.0  # the same where somebody asks, who has waited too long
_NOT_TO_BE_SEEN = ", a GPU, or the work before it on its stream"
_MOST_NAMED = 1 << 16
_SHOWN_CROSSED = 3
_SHOWN_HOSTS = 4

Edge = tuple[Meeting, Meeting, list[Step]]  # one that waits for the other, and why


# For ranks that are elsewhere


def missing(case: Case) -> list[Finding]:
    """A finding for each meeting that waits for ranks which wait for nothing themselves, or are not known."""
    found: list[Finding] = []
    known: dict[tuple[int, ...], Finding] = {}
    for meeting in case.stuck():
        idle = [meeting.group.members[rank] for rank in meeting.idle()]
        key = tuple(id(one.process) for one in idle)
        if key in known:  # in another communicator, or in a later call
            _add_communicator(known[key], meeting)
        elif idle:
            for members in ([one for one in idle if not one.silent], [one for one in idle if one.silent]):
                if members:
                    found.append(_away(case, meeting, members))
            known[key] = found[-1]
        if meeting.unknown:
            found.append(_unknown(case, meeting))
    return found


def _add_communicator(found: Finding, meeting: Meeting) -> None:
    if meeting.group.uid not in found.comms:
        verb = "has it" if len(found.culprits) == 1 else "have they"
        found.details.append(f"nor {verb} entered {meeting.group.brief(meeting.call)}, where {waiting(meeting, '')}")
        found.comms.append(meeting.group.uid)
        found.waiting += len(meeting.here)


def _away(case: Case, meeting: Meeting, members: Sequence[Member]) -> Finding:
    ranks, there = names_of(members), case.describe(meeting)
    if members[0].silent:
        hosts = sorted({clean(one.process.host, 60) for one in members})
        who = f"{ranks} on host {', '.join(hosts[:4])} cannot be asked, and as far as is known here"
        found = Finding("unreachable", f"{who} never entered {there}; {waiting(meeting)}", 50)
    elif meeting.collective:
        found = Finding("missing", f"{ranks} never entered {there}; {waiting(meeting)}", 40)
    else:
        lacks = f"{ranks} {have(len(members))} not called {_answer_to(meeting)}"
        found = Finding("unmatched", f"{lacks}: {waiting(meeting, '')} in {there}", 40)
    found.details = standings(case, members, meeting)
    if meeting.call.operation in ("shrink", "grow"):
        found.details.append("ranks that it leaves out need not call it")
    inside = {id(meeting.group.members[rank].process): rank for rank in meeting.here}
    if (rank := inside.get(id(members[0].process))) is not None:
        text = f"its process is inside as rank {rank}: calls of several ranks of one process go into a pynccl.group()"
        found.details.append(text)
    found.details += chain(case, meeting)
    found.culprits = [(meeting.group.uid, one.rank) for one in members]
    return concern(case, found, [meeting], members)


def _unknown(case: Case, meeting: Meeting) -> Finding:
    ranks = meeting.unknown
    single = _count(ranks) == 1
    why = f"{'its process has' if single else 'their processes have'} {NO_RECORD}"
    if meeting.call.operation in ("init", "grow"):  # where records begin
        why = f"{'it has' if single else 'they have'} not come to {meeting.call.operation}, or {why}"
    who = f"{ranks_text(ranks)}{_in_parent(case, meeting)}"
    text = f"nothing is known of {who}: {why}; {waiting(meeting, '')} in {case.describe(meeting)}"
    told = [ending(case, process) for process in case.job.processes if follows(process)][:1]  # who may have known more
    weight = 60 if meeting.away or meeting.gone else 55
    found = Finding("missing", text, weight, [*told, *chain(case, meeting)])
    for first, last in ranks:
        found.culprits += [(meeting.group.uid, rank) for rank in range(first, min(last, first + 1024) + 1)]
    return concern(case, found, [meeting])


def _in_parent(case: Case, meeting: Meeting) -> str:
    """ " (rank 0 of comm 'world')", or " (one of ranks 0 and 1 of comm 'world')": who is unknown here is unknown in the
    communicators that this one was made of, too, maybe by another number; of those the outermost."""
    groups = {group.uid: group for group in case.job.groups}
    group, here, text = meeting.group, _count(meeting.unknown), ""
    groups.pop(group.uid, None)  # in a record that is damaged they may be a circle
    while True:
        uids = {member.comm.parent for member in group.members.values() if member.comm}
        parent = next((groups.pop(uid) for uid in uids if uid in groups), None)
        if parent is None:
            return text
        there = _count(parent.unknown)
        if here <= there:
            among = "" if here == there else "one of " if here == 1 else f"{here} of "
            text = f" ({among}{ranks_text(parent.unknown)} of comm '{parent.name}')"
        group = parent


def _count(ranks: Sequence[Range]) -> int:
    return sum(last - first + 1 for first, last in ranks)


def _answer_to(meeting: Meeting) -> str:
    """What the other side of a message has to call."""
    waiter, call = next(iter(meeting.here.items()))
    words = {"send": "recv from", "recv": "send to", "wait_signal": "signal to"}
    return f"{words.get(call.operation, 'its part for')} rank {waiter}"


# In a circle


def crossings(case: Case) -> list[Finding]:
    """Circles of ranks that wait for each other."""
    return [
        _crossing(case, circle)
        for circle in case.waits.circles()
        if all(meeting.age() >= case.patience for meeting in circle)
        and any(meeting.call.operation != "init" for meeting in circle)  # else they have different unique ids
    ]


def _crossing(case: Case, circle: Sequence[Meeting]) -> Finding:
    edges = [(one, other, one.first[other]) for one, other in zip(circle, [*circle[1:], circle[0]], strict=True)]
    texts = [_edge(case, edge) for edge in edges]
    more = f"; and {len(texts) - _SHOWN_CROSSED:,} more ranks in this circle" if len(texts) > _SHOWN_CROSSED else ""
    text = "ranks wait for each other: " + "; ".join(reversed(texts[:_SHOWN_CROSSED])) + more
    certain = all(any(step.certain for step in steps) for _, _, steps in edges)
    found = Finding("crossed", text, 20 if certain else 45)
    if len({meeting.collective for meeting in circle}) > 1:
        _left_out_message(case, edges, found)
    elif any(step.then for _, _, steps in edges for step in steps):
        found.details.append("every rank has to make the calls of two communicators in the same order")
    firsts = [steps[0] for _, _, steps in reversed(edges[:SHOWN])]
    for step in firsts:
        found.details.append(f"{case.job.name(step.member.process)}: {standing(case, step.member, None)}")
    found.lines = lines_of(call for step in firsts for call in (step.first, step.then))
    culprits = [(earlier.group.uid, step.member.rank) for _, earlier, steps in edges for step in steps]
    found.culprits = list(dict.fromkeys(culprits))
    return concern(case, found, circle)


def _edge(case: Case, edge: Edge) -> str:
    """ "rank 0 calls all_reduce #3 of comm 'tp' at a.py:1, then ...", "rank 1 waits in ... and has not entered ..."."""
    later, earlier, steps = edge
    members = list({step.member.rank: step.member for step in sorted(steps, key=lambda one: one.member.rank)}.values())
    who, one, step = names_of(members), len(members) == 1, steps[0]
    first = f"{earlier.group.brief(step.first)}{called(step.first, case.paths)}"
    if step.then is not None:
        then = f"{later.group.brief(step.then)}{called(step.then, case.paths)}"
        return f"{who} call{'s' if one else ''} {first}, then {then}"
    waits = f"{who} {'waits' if one else 'wait'} in {first}"
    if not later.collective:
        return f"{waits} before its {_answer_to(later)}"
    return f"{waits} and {have(len(members))} not entered {later.group.brief(later.call)}"


def _left_out_message(case: Case, edges: Sequence[Edge], found: Finding) -> None:
    """A circle of messages and collectives: somebody has left a message out, or has one too many."""
    inside, messages, lacks = [], [], []
    for later, earlier, steps in edges:
        first, members = steps[0].first, [step.member for step in steps]
        who, one = names_of(members), len(members) == 1
        what = f"{earlier.group.brief(first)}{called(first, case.paths)}"
        if earlier.collective:
            inside.append(f"{who} {'is' if one else 'are'} in {what}")
        else:
            messages.append(f"{who} {'waits' if one else 'wait'} in {what}")
        if not later.collective:
            lacks.append(f"{who} {have(len(members))} not called {_answer_to(later)}")
    found.sentence = ", ".join([*inside, *messages][:SHOWN])
    found.details = [*lacks[:SHOWN], "either this is left out, or the call that waits for it is one too many"]


# For nobody


def stalled(case: Case) -> list[Finding]:
    """Calls that all ranks have entered, alike, and that do not go on, or not for all of them."""
    found = []
    shortest = max(case.patience, _ASKED_SECONDS if case.uid else _STALLED_SECONDS)
    for meeting in case.waits.meetings:
        age = max((meeting.lasted(rank) for rank in meeting.here), default=0.0)
        if meeting.blocked or meeting.first or age < shortest:
            continue
        alone = meeting.shared and len(meeting.here) < (meeting.group.size if meeting.collective else 2)
        members = [meeting.group.members[rank] for rank in list(meeting.here)[:4]]
        details = [f"{names_of([one])}: {standing(case, one, meeting)}" for one in members]
        text = (_unfinished if alone else _motionless)(case, meeting, age)
        # Of the messages of a group it is rather those between two machines, or containers, that do not arrive.
        weight = 64 if len({(one.process.machine, one.process.host) for one in members}) > 1 else 65
        culprits = [(meeting.group.uid, rank) for rank in meeting.here] if alone else []
        one = Finding("stalled", text, weight, details + chain(case, meeting), culprits, [], [meeting.group.uid])
        found.append(concern(case, one, [meeting]))
    return found


def _motionless(case: Case, meeting: Meeting, age: float) -> str:
    count = len(meeting.here)
    every = f"all {count:,} ranks" if count > 2 else meeting.group.names(meeting.here)
    verb = "is" if count == 1 else "are both" if count == 2 else "are"
    text = f"{every} {verb} in {case.describe(meeting)} and nobody is missing, but it has not moved for {seconds(age)}"
    if _gave_up(meeting):
        verb = verb.replace("is", "was").replace("are", "were")
        text = f"{every} {verb} in {case.describe(meeting)} and nobody was missing, but it had not moved after "
        text += seconds(age)
    return f"{text}: {_network(meeting)}{_NOT_TO_BE_SEEN}"


def _unfinished(case: Case, meeting: Meeting, age: float) -> str:
    others = [meeting.call.peer]
    if meeting.collective:
        others = [rank for rank in range(min(meeting.group.size, _MOST_NAMED)) if rank not in meeting.here]
    how = f"gave up after {seconds(age)}" if _gave_up(meeting) else f"{have(len(meeting.here))} waited {seconds(age)}"
    who = f"{meeting.group.names(meeting.here)} {how}, for {meeting.group.names(others)}"
    done = f"which {'it has' if len(others) == 1 else 'they have'} completed"
    return f"{who}, in {case.describe(meeting)}, {done}: the network between them{_NOT_TO_BE_SEEN}"


def _gave_up(meeting: Meeting) -> bool:
    return all(call.state == FAILED for call in meeting.here.values())


def _network(meeting: Meeting) -> str:
    """ "the network between rank 0 (host a) and ranks 1 and 2 (host b)"."""
    hosts: dict[str, list[int]] = {}
    for rank in meeting.here:
        hosts.setdefault(meeting.group.members[rank].process.host, []).append(rank)
    if not 2 <= len(hosts) <= _SHOWN_HOSTS:
        return "the network between them"
    sides = [f"{meeting.group.names(ranks)} (host {clean(host, 60)})" for host, ranks in hosts.items()]
    return f"the network between {', '.join(sides[:-1])} and {sides[-1]}"
