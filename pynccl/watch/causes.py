"""Causes among ranks that live: who has not come, whose calls are crossed, differ or have failed."""

from __future__ import annotations

from collections.abc import Sequence

from .endings import ending
from .findings import (
    SHOWN,
    Case,
    Finding,
    ago,
    briefly,
    called,
    chain,
    concern,
    describe,
    standing,
    standings,
    waiting,
)
from .members import Group, Member, consequence, follows, names_of
from .records import FAILED, CallRecord
from .waits import LEFT, Meeting, Step
from .wording import Range, at, call_name, clean, have, line_of, ranks_text, seconds

NO_RECORD = "left no record here (another machine? another PYNCCL_WATCH_DIR?)"
_STALLED_SECONDS = 10.0  # a call that all ranks are inside of may take a while
_ASKED_SECONDS = 1.0  # the same where somebody asks, who has waited too long
_NOT_TO_BE_SEEN = ", a GPU, or the work before it on its stream"
_MOST_NAMED = 1 << 16
_SHOWN_CROSSED = 3
_SHOWN_HOSTS = 4


def missing(case: Case) -> list[Finding]:
    """A finding for each meeting that waits for ranks which wait for nothing themselves, or will never come."""
    found: list[Finding] = []
    known: dict[tuple[int, ...], Finding] = {}
    for meeting in sorted(case.stuck(), key=lambda one: (one.group.uid != case.uid, -one.age())):
        idle = [meeting.group.members[rank] for rank in meeting.idle()]
        key = tuple(id(one.process) for one in idle)
        if idle and key in known:  # in another communicator, or in a later call
            _too(known[key], meeting)
            idle = []
        found += _away(case, meeting, [one for one in idle if not one.silent], "missing")
        found += _away(case, meeting, [one for one in idle if one.silent], "unreachable")
        if idle:
            known[key] = found[-1]
        found += _left(case, meeting)
        if meeting.unknown:
            found.append(_unknown(case, meeting, only=not meeting.away and not meeting.gone))
    return found


def _too(found: Finding, meeting: Meeting) -> None:
    """Other ranks wait for the same processes in another communicator."""
    if meeting.group.uid not in found.comms:
        target = briefly(meeting.call, meeting.group)
        verb = "has it" if len(found.culprits) == 1 else "have they"
        found.details.append(f"nor {verb} entered {target}, where {waiting(meeting, '')}")
        found.comms.append(meeting.group.uid)
        found.waiting += len(meeting.here)


def _away(case: Case, meeting: Meeting, members: Sequence[Member], kind: str) -> list[Finding]:
    if not members:
        return []
    ranks, there = names_of(members), describe(meeting.call, meeting.group, case.paths)
    if kind == "unreachable":
        hosts = sorted({clean(one.process.host, 60) for one in members})
        text = (
            f"{ranks} on host {', '.join(hosts[:4])} cannot be asked, and as far as is known here never entered {there}"
        )
        text += f"; {waiting(meeting)}"
    elif meeting.collective:
        text = f"{ranks} never entered {there}; {waiting(meeting)}"
    else:
        kind = "unmatched"
        there = describe(meeting.call, meeting.group, case.paths)
        text = f"{ranks} {have(len(members))} not called {_answer_to(meeting)}: {waiting(meeting, '')} in {there}"
    found = Finding(kind, text, 50 if kind == "unreachable" else 40, standings(case, members, meeting))
    if meeting.call.operation in ("shrink", "grow"):
        found.details.append("ranks that it leaves out need not call it")
    inside = {id(meeting.group.members[rank].process): rank for rank in meeting.here}
    for member in members[:1]:
        if id(member.process) in inside:
            text = f"its process is inside as rank {inside[id(member.process)]}: calls of several ranks of one process"
            found.details.append(f"{text} go into a pynccl.group()")
    found.details += chain(case, meeting)
    found.culprits = [(meeting.group.uid, one.rank) for one in members]
    return [concern(case, found, [meeting], members)]


def _unknown(case: Case, meeting: Meeting, only: bool) -> Finding:
    there = describe(meeting.call, meeting.group, case.paths)
    ranks: list[Range] = meeting.unknown
    single = len(ranks) == 1 and ranks[0][0] == ranks[0][1]
    its = "its process has" if single else "their processes have"
    why = f"{its} {NO_RECORD}"
    if meeting.call.operation in ("init", "grow"):  # where records begin
        why = f"{'it has' if single else 'they have'} not come to {meeting.call.operation}, or {why}"
    text = (
        f"nothing is known of {ranks_text(ranks)}{_in_parent(case, meeting)}: {why}; {waiting(meeting, '')} in {there}"
    )
    told = [ending(case, process) for process in case.job.processes if follows(process)][:1]  # who may have known more
    found = Finding("missing", text, 55 if only else 60, [*told, *chain(case, meeting)])
    for first, last in ranks:
        found.culprits += [(meeting.group.uid, rank) for rank in range(first, min(last, first + 1024) + 1)]
    return concern(case, found, [meeting], [])


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


def _left(case: Case, meeting: Meeting) -> list[Finding]:
    """Ranks whose own end of the communicator has ended."""
    members = [meeting.group.members[rank] for rank, why in meeting.gone.items() if why == LEFT]
    if not members:
        return []
    members.sort(key=lambda one: one.comm.ended_at if one.comm else 0.0)
    comm = members[0].comm
    assert comm is not None
    who = names_of(members[:1])
    text = (
        f"{who}'s comm '{meeting.group.name}' was {clean(comm.ended)}{at(comm.ended_site, case.paths)}"
        f"{ago(members[0].process, comm.ended_at)}; {waiting(meeting, '')} in "
        f"{describe(meeting.call, meeting.group, case.paths)}, which it never entered"
    )
    if len(members) > 1:
        text += f"; {names_of(members[1:])} ended theirs, too"
    found = Finding("left", text, 35, [*standings(case, members, meeting), *chain(case, meeting)])
    found.culprits = [(meeting.group.uid, one.rank) for one in members]
    found.lines = [line for one in members if one.comm and (line := line_of(one.comm.ended_site))]
    return [concern(case, found, [meeting], [] if found.lines else members)]


def failures(case: Case) -> list[Finding]:
    """Calls that have raised on ranks which live on: a finding for each communicator."""
    found = []
    for group in case.job.groups:
        rows = []
        for member in group.members.values():
            last = member.comm.last() if member.comm and not member.dead else None
            if last and last.state == FAILED:
                rows.append((member, last))
        if rows:
            found.append(_failure(case, group, rows))
    return found


def _failure(case: Case, group: Group, rows: list[tuple[Member, CallRecord]]) -> Finding:
    several = len({member.process.machine for member, _ in rows}) > 1
    # Clocks of two machines are not compared.
    rows.sort(key=lambda row: (consequence(row[1].error), 0.0 if several else row[1].returned or row[1].issued))
    member, call = rows[0]
    meetings = [one for one in case.waits.meetings if one.group is group and one.gone.get(member.rank) == FAILED]
    text = f"{names_of([member])}'s {describe(call, group, case.paths)} raised {clean(call.error) or 'an exception'}"
    text += ago(member.process, call.returned)
    text += f"; {waiting(meetings[0])}" if meetings else ""
    # That calls disagree is the library's word, where the records do not show which.
    weight = 33 if not consequence(call.error) else 45 if "disagree" in call.error else 80
    found = Finding("failed", text, weight)
    for other, theirs in rows[1:SHOWN]:
        what = f"{call_name(theirs)}{called(theirs, case.paths)}"
        found.details.append(f"{names_of([other])}: {what} raised {clean(theirs.error) or 'an exception'}")
    if len(rows) > SHOWN:
        found.details.append(f"and {len(rows) - SHOWN:,} more ranks whose calls raised")
    found.culprits, found.comms = [(group.uid, member.rank)], [group.uid]
    found.lines = [line for line in [line_of(call.site)] if line]
    return concern(case, found, meetings, [])


def stalled(case: Case) -> list[Finding]:
    """Calls that all ranks have entered, alike, and that do not go on, or not for all of them."""
    found = []
    shortest = max(case.patience, _ASKED_SECONDS if case.uid else _STALLED_SECONDS)
    for meeting in case.waits.meetings:
        age = max((_lasted(meeting, rank) for rank in meeting.here), default=0.0)
        alone = meeting.shared and len(meeting.here) < (meeting.group.size if meeting.collective else 2)
        if meeting.blocked or meeting.first or age < shortest:
            continue
        members = [meeting.group.members[rank] for rank in list(meeting.here)[:4]]
        details = [f"{names_of([one])}: {standing(case, one, meeting)}" for one in members]
        gave_up = all(call.state == FAILED for call in meeting.here.values())
        text = (_unfinished if alone else _motionless)(case, meeting, age, gave_up)
        # Of the messages of a group it is rather those between two machines, or containers, that do not arrive.
        weight = 64 if len({(one.process.machine, one.process.host) for one in members}) > 1 else 65
        one = Finding("stalled", text, weight, details + chain(case, meeting), [], [], [meeting.group.uid])
        one.culprits = [(meeting.group.uid, rank) for rank in meeting.here] if alone else []
        found.append(concern(case, one, [meeting], []))
    return found


def _lasted(meeting: Meeting, rank: int) -> float:
    """Seconds that the rank has waited there, or had when it gave up."""
    call = meeting.here[rank]
    return call.returned - call.issued if call.state == FAILED else meeting.group.members[rank].waited(call)


def _motionless(case: Case, meeting: Meeting, age: float, gave_up: bool) -> str:
    count, there = len(meeting.here), describe(meeting.call, meeting.group, case.paths)
    is_in, is_missing = ("was" if count == 1 else "were", "was") if gave_up else ("is" if count == 1 else "are", "is")
    every = f"{meeting.group.names(meeting.here)} {is_in}{' both' if count == 2 else ''}"
    every = every if count <= 2 else f"all {count:,} ranks {is_in}"
    after = f"had not moved after {seconds(age)}" if gave_up else f"has not moved for {seconds(age)}"
    return f"{every} in {there} and nobody {is_missing} missing, but it {after}: {_network(meeting)}{_NOT_TO_BE_SEEN}"


def _unfinished(case: Case, meeting: Meeting, age: float, gave_up: bool) -> str:
    others = [meeting.call.peer]
    if meeting.collective:
        others = [rank for rank in range(min(meeting.group.size, _MOST_NAMED)) if rank not in meeting.here]
    there = describe(meeting.call, meeting.group, case.paths)
    waited = f"gave up after {seconds(age)}" if gave_up else f"{have(len(meeting.here))} waited {seconds(age)}"
    done = f"which {'it has' if len(others) == 1 else 'they have'} completed"
    who = f"{meeting.group.names(meeting.here)} {waited}, for {meeting.group.names(others)}"
    return f"{who}, in {there}, {done}: the network between them{_NOT_TO_BE_SEEN}"


def _network(meeting: Meeting) -> str:
    """ "the network between rank 0 (host a) and ranks 1 and 2 (host b)"."""
    hosts: dict[str, list[int]] = {}
    for rank in meeting.here:
        hosts.setdefault(meeting.group.members[rank].process.host, []).append(rank)
    if not 2 <= len(hosts) <= _SHOWN_HOSTS:
        return "the network between them"
    sides = [f"{meeting.group.names(ranks)} (host {clean(host, 60)})" for host, ranks in hosts.items()]
    return f"the network between {', '.join(sides[:-1])} and {sides[-1]}"


def crossings(case: Case) -> list[Finding]:
    """Circles of ranks that wait for each other."""
    found = list(_ids(case))
    for circle in case.waits.circles():
        if any(meeting.age() < case.patience for meeting in circle):
            continue
        if all(meeting.call.operation == "init" for meeting in circle):
            continue  # said by _ids
        found.append(_crossing(case, circle))
    return found


def _crossing(case: Case, circle: Sequence[Meeting]) -> Finding:
    edges = [(one, other, one.first[other]) for one, other in zip(circle, [*circle[1:], circle[0]], strict=True)]
    texts = [_edge(case, later, earlier, steps) for later, earlier, steps in edges]
    more = f"; and {len(texts) - _SHOWN_CROSSED:,} more ranks in this circle" if len(texts) > _SHOWN_CROSSED else ""
    text = "ranks wait for each other: " + "; ".join(reversed(texts[:_SHOWN_CROSSED])) + more
    certain = all(any(step.certain for step in steps) for _, _, steps in edges)
    found = Finding("crossed", text, 20 if certain else 45)
    if len({meeting.collective for meeting in circle}) > 1:
        _left_out_message(case, edges, found)
    elif any(step.then for _, _, steps in edges for step in steps):
        found.details.append("every rank has to make the calls of two communicators in the same order")
    for _, _, steps in reversed(edges[:SHOWN]):
        step = steps[0]
        found.details.append(f"{case.job.name(step.member.process)}: {standing(case, step.member, None)}")
        found.lines += [line for call in (step.first, step.then) if call and (line := line_of(call.site))]
    for _, earlier, steps in edges:
        found.culprits += [(earlier.group.uid, step.member.rank) for step in steps]
    found.culprits = list(dict.fromkeys(found.culprits))
    return concern(case, found, circle, [])


def _left_out_message(case: Case, edges: Sequence[tuple[Meeting, Meeting, list[Step]]], found: Finding) -> None:
    """A circle of messages and collectives: somebody has left a message out, or has one too many."""
    texts, lacks = [], []
    for later, earlier, steps in edges:
        first, members = steps[0].first, [step.member for step in steps]
        how = (
            ("is in" if len(members) == 1 else "are in")
            if earlier.collective
            else ("waits in" if len(members) == 1 else "wait in")
        )
        texts.append(f"{names_of(members)} {how} {briefly(first, earlier.group)}{called(first, case.paths)}")
        if not later.collective:
            lacks.append(f"{names_of(members)} {have(len(members))} not called {_answer_to(later)}")
    texts.sort(key=lambda one: " waits in " in one or " wait in " in one)
    found.sentence = ", ".join(texts[:SHOWN])
    found.details = [*lacks[:SHOWN], "either this is left out, or the call that waits for it is one too many"]


def _answer_to(meeting: Meeting) -> str:
    """What the other side of a message has to call."""
    waiter, call = next(iter(meeting.here.items()))
    words = {"send": "recv from", "recv": "send to", "wait_signal": "signal to"}
    return f"{words.get(call.operation, 'its part for')} rank {waiter}"


def _edge(case: Case, later: Meeting, earlier: Meeting, steps: Sequence[Step]) -> str:
    step = steps[0]
    names = sorted({one.member.rank: one.member for one in steps}.items())
    who = names_of([member for _, member in names])
    first = f"{briefly(step.first, earlier.group)}{called(step.first, case.paths)}"
    if step.then is not None:
        then = f"{briefly(step.then, later.group)}{called(step.then, case.paths)}"
        return f"{who} call{'s' if len(names) == 1 else ''} {first}, then {then}"
    verb = "waits" if len(names) == 1 else "wait"
    target = briefly(later.call, later.group)
    if not later.collective:
        return f"{who} {verb} in {first} before its {_answer_to(later)}"
    return f"{who} {verb} in {first} and {'has' if len(names) == 1 else 'have'} not entered {target}"


def _ids(case: Case) -> list[Finding]:
    """Ranks of one job that came to init with different unique ids."""
    waiting_in = [one for one in case.stuck() if one.call.operation == "init" and one.call.number == 1]
    for size in {meeting.group.size for meeting in waiting_in}:
        same = [one for one in waiting_in if one.group.size == size]
        ranks = [rank for one in same for rank in one.here]
        of_launch = all(one.group.members[rank].process.rank in (-1, rank) for one in same for rank in one.here)
        if len(same) < 2 or not of_launch or len(ranks) != size or set(ranks) != set(range(size)):
            continue
        same.sort(key=lambda one: -len(one.here))
        who = ", ".join(f"{ranks_text(one.here)} with another" for one in same[1:4])
        text = (
            f"{ranks_text(same[0].here)} wait in init of {size:,} ranks with one unique id, {who}: "
            "all ranks need the one of rank 0"
        )
        found = Finding("mismatch", text, 8)
        found.culprits = [(one.group.uid, rank) for one in same[1:] for rank in one.here]
        found.lines = [line for one in same for call in one.here.values() if (line := line_of(call.site))]
        return [concern(case, found, same, [])]
    return []
