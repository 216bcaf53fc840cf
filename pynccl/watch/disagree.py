"""Ranks that made other calls than the others: another operation, count, type, operator or root; one left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from ..bindings.abi import ELEMENTS
from .findings import SHOWN, Case, Finding, concern, lines_of, waiting
from .formatting import Paths, call_name, call_text, called, clean, line_of, ranks_text
from .job import Group, Member, names_of
from .records import CallRecord
from .waits import Meeting

_UNCOMPARED = ("init", "split", "group plan", "barrier", "grow", "shrink")  # by their name alone
_ENOUGH = 2  # lines of code in a row, for a call that is like all others to be known as left out
_ITEMSIZE = {element.dtype.name: element.itemsize for element in ELEMENTS}

Key = tuple[str, int, str, str, int]


def difference(group: Group, calls: Mapping[int, CallRecord], paths: Paths) -> list[str]:
    """What the ranks call, those together that call the same: "rank 0 calls all_reduce(count=4, FLOAT32) at a.py:3"."""
    rows: dict[str, list[int]] = {}
    for rank, call in calls.items():
        rows.setdefault(call_text(call), []).append(rank)
    return [
        f"{group.names(ranks)} call{'s' if len(ranks) == 1 else ''} {text}{called(calls[ranks[0]], paths)}"
        for text, ranks in rows.items()
    ]


def disagreements(case: Case) -> list[Finding]:
    """A finding for each communicator whose ranks made different calls, and for sends and recvs of other sizes."""
    found = _ids(case)
    for group in case.job.groups:
        found += _sizes(group)
        if one := _disagreement(group):
            found.append(_mismatch(case, one))
    for meeting in case.waits.meetings:
        found += _checks(case, meeting) + _bytes(case, meeting)
    return found


# Collectives


@dataclass(eq=False)
class Disagreement:
    """Of one communicator, at the first number at which ranks differ.

    odd     the ranks that differ from the most; usual: the others, or those of the other half
    shift   "left out": the odd ranks left out the call `number`; "extra": they made one more; "": neither can be told
    earlier the number after which the odd ranks' call came in an earlier step, where that is how `shift` is known
    """

    group: Group
    number: int
    odd: dict[int, CallRecord]
    usual: dict[int, CallRecord]
    even: bool  # neither side has the majority
    shift: str = ""
    earlier: int = 0


def _disagreement(group: Group) -> Disagreement | None:
    """The first one of a communicator, if there is any that is still recorded."""
    keys: dict[int, set[Key]] = {}
    for member in group.members.values():
        for number, call in member.numbered.items():
            keys.setdefault(number, set()).add(_key(call))
    if differing := [number for number, found in keys.items() if len(found) > 1]:
        number = min(differing)
        return _explained(_divided(group, number, _calls(group, number), _key))
    return _compared(group) or _by_lines(group)


def _key(call: CallRecord) -> Key:
    """What the ranks must agree on."""
    if call.operation in _UNCOMPARED:
        return call.operation, -1, "", "", -1
    count = -1 if call.operation.endswith("_v") else call.count
    return call.operation, count, call.dtype, call.op, call.root


def _calls(group: Group, number: int) -> dict[int, CallRecord]:
    return {rank: member.numbered[number] for rank, member in group.members.items() if number in member.numbered}


def _divided(
    group: Group, number: int, calls: Mapping[int, CallRecord], of: Callable[[CallRecord], object]
) -> Disagreement:
    """The calls of this number by what `of` says of them: most ranks, and those that differ from them."""
    most, votes = Counter(map(of, calls.values())).most_common(1)[0]
    odd = {rank: call for rank, call in calls.items() if of(call) != most}
    usual = {rank: call for rank, call in calls.items() if of(call) == most}
    return Disagreement(group, number, odd, usual, even=2 * votes <= len(calls))


def _compared(group: Group) -> Disagreement | None:
    """Calls that PYNCCL_CHECK=1 is comparing now, which are not made yet."""
    checking: dict[int, dict[int, CallRecord]] = {}
    for rank, member in group.members.items():
        for call in member.pending:
            if member.checking and call.number == member.checking:
                checking.setdefault(member.checking, {})[rank] = call
    for number, calls in sorted(checking.items()):
        if len({call.detail for call in calls.values()}) > 1:
            return _divided(group, number, calls, lambda call: call.detail)
        name = next(iter(calls.values())).operation
        if other := {rank: call for rank, call in _calls(group, number).items() if call.operation != name}:
            odd, usual = (calls, other) if len(calls) <= len(other) else (other, calls)
            return Disagreement(group, number, odd, usual, even=len(odd) == len(usual))
    return None


def _explained(found: Disagreement) -> Disagreement:
    """With `shift`, where the calls around it tell the same one of all odd ranks."""
    if not found.even:
        usual = _longest(found)
        shifts = [_shift(found.group.members[rank], usual, found.number) for rank in found.odd]
        if len({how for how, _ in shifts}) == 1:
            found.shift, found.earlier = shifts[-1]
    return found


def _longest(found: Disagreement) -> Member:
    return max((found.group.members[rank] for rank in found.usual), key=lambda member: member.entered)


def _shift(odd: Member, usual: Member, number: int) -> tuple[str, int]:
    for how, ahead, behind in (("left out", usual, odd), ("extra", odd, usual)):
        pairs = list(_moved(behind, ahead, number))
        if pairs and all(_like(a, b) for a, b in pairs):
            return how, 0
    # The others are inside the call and have made none after it: what came after it in an earlier step?
    before, now, other = usual.numbered.get(number - 1), usual.numbered[number], odd.numbered[number]
    for earlier in sorted(usual.numbered, reverse=True):
        after = usual.numbered.get(earlier + 1)
        if earlier + 1 < number and after and _like(usual.numbered[earlier], now) and _like(after, other):
            previous = usual.numbered.get(earlier - 1)
            if before is None or previous is None or _like(previous, before):
                return "left out", earlier
    return "", 0


def _moved(behind: Member, ahead: Member, number: int) -> Iterator[tuple[CallRecord, CallRecord]]:
    """From `number` on: each call of the one with the call after it of the other."""
    while number in behind.numbered and number + 1 in ahead.numbered:
        yield behind.numbered[number], ahead.numbered[number + 1]
        number += 1


def _like(a: CallRecord, b: CallRecord) -> bool:
    return _key(a) == _key(b) and (not a.site or not b.site or a.site == b.site)


def _by_lines(group: Group) -> Disagreement | None:
    """Calls that are all alike: a rank that left one out is known by its lines of code, where they are recorded."""
    entered = [member.entered for member in group.members.values() if member.comm is not None]
    if len(entered) < 3 or min(entered) == max(entered):
        return None
    sites: dict[int, set[str]] = {}
    for member in group.members.values():
        for number, call in member.numbered.items():
            if call.site:
                sites.setdefault(number, set()).add(call.site)
    for number in sorted(number for number, found in sites.items() if len(found) > 1):
        found = _divided(group, number, _calls(group, number), lambda call: call.site)
        usual = _longest(found)
        pairs = [list(_moved(group.members[rank], usual, number)) for rank in found.odd]
        if not found.even and all(len(one) >= _ENOUGH and all(_like(a, b) for a, b in one) for one in pairs):
            found.shift = "left out"
            return found
    return None


def _mismatch(case: Case, one: Disagreement) -> Finding:
    group, sides = one.group, difference(one.group, {**one.odd, **one.usual}, case.paths)
    meetings = [found for found in case.waits.meetings if found.group is group and found.call.number == one.number]
    text = _sentence(case, one, sides)
    text += f"; {waiting(meetings[0])}" if meetings and meetings[0].here else ""
    details = [*sides[:SHOWN], "every rank must make the same collective calls in the same order"]
    ranks = {**one.odd, **one.usual} if one.even else one.odd
    culprits = [(group.uid, rank) for rank in sorted(ranks)]
    blamed = [ranks[rank] for rank in sorted(ranks)]
    if one.shift == "left out" and not one.even:
        blamed.append(next(iter(one.usual.values())))
    return concern(case, Finding("mismatch", text, 10, details, culprits, lines_of(blamed), [group.uid]), meetings)


def _sentence(case: Case, one: Disagreement, sides: list[str]) -> str:
    title, number = one.group.title(), one.number
    if one.even:
        return f"the ranks disagree about call #{number:,} ({title}): {', '.join(sides[:4])}"
    usual, odd = next(iter(one.usual.values())), next(iter(one.odd.values()))
    theirs, own = called(usual, case.paths), called(odd, case.paths)
    who, its = one.group.names(one.odd), "its" if len(one.odd) == 1 else "their"
    if one.shift == "left out":
        on_the_others = f",{theirs} on the others" if theirs else ""
        text = f"{who} left out {call_name(usual)} ({title}{on_the_others}): {its} #{number:,}"
        if one.earlier:
            return f"{text} is {clean(odd.operation, 60)}{own}, which came after it in #{one.earlier + 1:,}"
        return f"{text}, {clean(odd.operation, 60)}{own}, is the others' #{number + 1:,}"
    if one.shift == "extra":
        return (
            f"{who} made one call more than the others: {call_name(odd)} ({title}){own}; "
            f"{its} #{number + 1:,} is the others' #{number:,}"
        )
    alike = len({call_text(call) for call in one.odd.values()}) == 1
    what = f"{call_text(odd)}{own}" if alike else "other collectives"
    verb = "calls" if len(one.odd) == 1 else "call"
    return f"{who} {verb} {what} as #{number:,} ({title}), where the others call {call_text(usual)}{theirs}"


# What else the ranks must agree on


def _ids(case: Case) -> list[Finding]:
    """Ranks of one job that came to init with different unique ids."""
    inits = [one for one in case.stuck() if one.call.operation == "init" and one.call.number == 1]
    for size in {meeting.group.size for meeting in inits}:
        same = sorted((one for one in inits if one.group.size == size), key=lambda one: -len(one.here))
        ranks = [rank for one in same for rank in one.here]
        of_launch = all(one.group.members[rank].process.rank in (-1, rank) for one in same for rank in one.here)
        if len(same) < 2 or not of_launch or len(ranks) != size or set(ranks) != set(range(size)):
            continue
        who = ", ".join(f"{ranks_text(one.here)} with another" for one in same[1:4])
        text = (
            f"{ranks_text(same[0].here)} wait in init of {size:,} ranks with one unique id, {who}: "
            "all ranks need the one of rank 0"
        )
        found = Finding("mismatch", text, 8)
        found.culprits = [(one.group.uid, rank) for one in same[1:] for rank in one.here]
        found.lines = lines_of(call for one in same for call in one.here.values())
        return [concern(case, found, same)]
    return []


def _sizes(group: Group) -> list[Finding]:
    """Ranks that made their communicator for another number of ranks."""
    comms = {rank: member.comm for rank, member in group.members.items() if member.comm is not None}
    odd = {rank: comm for rank, comm in comms.items() if comm.size != group.size}
    if not odd or any(comm.aliases for comm in comms.values()):  # one that has grown
        return []
    size = next(iter(odd.values())).size
    text = f"{group.names(odd)} made comm '{group.name}' for {size:,} ranks, the others for {group.size:,}"
    lines = [line for comm in odd.values() if (line := line_of(comm.made_at))]
    return [Finding("mismatch", text, 9, [], [(group.uid, rank) for rank in odd], lines, [group.uid])]


def _checks(case: Case, meeting: Meeting) -> list[Finding]:
    """Ranks of which some compare their calls and some do not: the comparison waits for all."""
    members = [meeting.group.members[rank] for rank in meeting.here]
    checking = [one for one in members if one.checking and one.checking == meeting.call.number]
    others = [one for one in members if one.comm and not any(call.operation == "check" for call in one.comm.calls)]
    if not checking or not others or meeting.age() < case.patience:
        return []
    text = (
        f"{names_of(checking)} {'compares its' if len(checking) == 1 else 'compare their'} calls (PYNCCL_CHECK=1) and "
        f"{names_of(others)} {'does' if len(others) == 1 else 'do'} not, in {meeting.group.brief(meeting.call)}: "
        "set it on all ranks, or on none"
    )
    fewer = min(checking, others, key=len)
    return [
        concern(case, Finding("mismatch", text, 9, [], [(meeting.group.uid, one.rank) for one in fewer]), [meeting])
    ]


def _bytes(case: Case, meeting: Meeting) -> list[Finding]:
    """A send and its recv that are of other sizes."""
    calls = {call.operation: (rank, call) for rank, call in meeting.here.items()}
    if calls.keys() != {"send", "recv"} or not meeting.paired:
        return []
    group, (source, send), (target, recv) = meeting.group, calls["send"], calls["recv"]
    if send.count < 0 or recv.count < 0 or not {send.dtype, recv.dtype} <= _ITEMSIZE.keys():
        return []
    if send.count * _ITEMSIZE[send.dtype] == recv.count * _ITEMSIZE[recv.dtype]:
        return []
    text = (
        f"{group.names([source])} sends {send.dtype} x {send.count:,}{called(send, case.paths)} to "
        f"{group.names([target])}, which expects {recv.dtype} x {recv.count:,}{called(recv, case.paths)} "
        f"(comm '{group.name}')"
    )
    culprits = [(group.uid, source), (group.uid, target)]
    return [concern(case, Finding("mismatch", text, 10, [], culprits, lines_of([send, recv])), [meeting])]
