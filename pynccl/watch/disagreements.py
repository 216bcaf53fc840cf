"""Ranks that made other calls than the others: another operation, count, type, operator or root; one left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from .findings import SHOWN, Case, Finding, briefly, called, concern, waiting
from .members import Group, Member, names_of
from .records import CallRecord
from .waits import Meeting
from .wording import ITEMSIZE, call_name, call_text, clean, line_of

_UNCOMPARED = ("init", "split", "group plan", "barrier", "grow", "shrink")  # by their name alone
_ENOUGH = 2  # lines of code in a row, for a call that is like all others to be known as left out

Key = tuple[str, int, str, str, int]


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


def disagreement(group: Group) -> Disagreement | None:
    """The first one of a communicator, if there is any that is still recorded."""
    keys: dict[int, set[Key]] = {}
    for member in group.members.values():
        for number, call in member.numbered.items():
            keys.setdefault(number, set()).add(key(call))
    for number in sorted(number for number, found in keys.items() if len(found) > 1):
        return _at(group, number)
    return _compared_text(group) or _by_lines(group)


def key(call: CallRecord) -> Key:
    """What the ranks must agree on."""
    if call.operation in _UNCOMPARED:
        return call.operation, -1, "", "", -1
    count = -1 if call.operation.endswith("_v") else call.count
    return call.operation, count, call.dtype, call.op, call.root


def sizes(group: Group) -> tuple[dict[int, int], int] | None:
    """(the sizes that some ranks gave, the one that most gave), where they differ."""
    given = {rank: member.comm.size for rank, member in group.members.items() if member.comm is not None}
    grown = any(member.comm and member.comm.aliases for member in group.members.values())
    odd = {rank: size for rank, size in given.items() if size != group.size}
    return (odd, group.size) if odd and not grown else None


def other_bytes(send: CallRecord, recv: CallRecord) -> bool:
    """Whether a send and its recv are of other sizes."""
    if send.count < 0 or recv.count < 0 or not {send.dtype, recv.dtype} <= ITEMSIZE.keys():
        return False
    return send.count * ITEMSIZE[send.dtype] != recv.count * ITEMSIZE[recv.dtype]


def _at(group: Group, number: int) -> Disagreement:
    calls = {rank: member.numbered[number] for rank, member in group.members.items() if number in member.numbered}
    return _explained(_divided(group, number, calls, key))


def _divided(
    group: Group, number: int, calls: Mapping[int, CallRecord], of: Callable[[CallRecord], object]
) -> Disagreement:
    """The calls of this number by what `of` says of them: most ranks, and those that differ from them."""
    most, votes = Counter(map(of, calls.values())).most_common(1)[0]
    odd = {rank: call for rank, call in calls.items() if of(call) != most}
    usual = {rank: call for rank, call in calls.items() if of(call) == most}
    return Disagreement(group, number, odd, usual, even=2 * votes <= len(calls))


def _compared_text(group: Group) -> Disagreement | None:
    """Calls that PYNCCL_CHECK=1 is comparing now, which are not made yet."""
    checking: dict[int, dict[int, CallRecord]] = {}
    for rank, member in group.members.items():
        for call in member.pending:
            if member.checking and call.number == member.checking:
                checking.setdefault(member.checking, {})[rank] = call
    for number, calls in sorted(checking.items()):
        if len({call.detail for call in calls.values()}) > 1:
            return _divided(group, number, calls, lambda call: call.detail)
        rest = {rank: one.numbered[number] for rank, one in group.members.items() if number in one.numbered}
        name = next(iter(calls.values())).operation
        if other := {rank: call for rank, call in rest.items() if call.operation != name}:
            odd, usual = (calls, other) if len(calls) <= len(other) else (other, calls)
            return Disagreement(group, number, odd, usual, even=len(odd) == len(usual))
    return None


def _explained(found: Disagreement) -> Disagreement:
    """With `shift`, where the calls around it tell one."""
    if found.even:
        return found
    usual = _longest(found.group, found.usual)
    for rank in found.odd:
        how, earlier = _shift(found.group.members[rank], usual, found.number)
        if not how or (found.shift and how != found.shift):
            found.shift = ""
            return found
        found.shift, found.earlier = how, earlier
    return found


def _longest(group: Group, ranks: Mapping[int, CallRecord]) -> Member:
    return max((group.members[rank] for rank in ranks), key=lambda member: member.entered)


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
    return key(a) == key(b) and (not a.site or not b.site or a.site == b.site)


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
        calls = {rank: one.numbered[number] for rank, one in group.members.items() if number in one.numbered}
        found = _divided(group, number, calls, lambda call: call.site)
        usual = _longest(group, found.usual)
        pairs = [list(_moved(group.members[rank], usual, number)) for rank in found.odd]
        alike = all(len(one) >= _ENOUGH and all(_like(a, b) for a, b in one) for one in pairs)
        if not found.even and alike:
            found.shift = "left out"
            return found
    return None


# In sentences


def disagreements(case: Case) -> list[Finding]:
    """A finding for each communicator whose ranks made different calls, and for sends and recvs of other sizes."""
    found = []
    for group in case.job.groups:
        if differ := sizes(group):
            found.append(_sizes(group, *differ))
        if one := disagreement(group):
            found.append(_mismatch(case, one))
    for meeting in case.waits.meetings:
        found += _checks(case, meeting)
    for meeting in case.waits.meetings:
        if meeting.call.operation in ("send", "recv") and len(meeting.here) == 2:
            calls = {call.operation: (rank, call) for rank, call in meeting.here.items()}
            both = calls.keys() == {"send", "recv"} and meeting.paired
            if both and other_bytes(calls["send"][1], calls["recv"][1]):
                found.append(_bytes(case, meeting, *calls["send"], *calls["recv"]))
    return found


def _checks(case: Case, meeting: Meeting) -> list[Finding]:
    """Ranks of which some compare their calls and some do not: the comparison waits for all."""
    members = [meeting.group.members[rank] for rank in meeting.here]
    checking = [one for one in members if one.checking and one.checking == meeting.call.number]
    others = [one for one in members if one.comm and not any(call.operation == "check" for call in one.comm.calls)]
    if not checking or not others or meeting.age() < case.patience:
        return []
    text = (
        f"{names_of(checking)} {'compares its' if len(checking) == 1 else 'compare their'} calls (PYNCCL_CHECK=1) and "
        f"{names_of(others)} {'does' if len(others) == 1 else 'do'} not, in {briefly(meeting.call, meeting.group)}: "
        "set it on all ranks, or on none"
    )
    fewer = min(checking, others, key=len)
    found = Finding("mismatch", text, 9, [], [(meeting.group.uid, one.rank) for one in fewer])
    return [concern(case, found, [meeting], [])]


def _sizes(group: Group, odd: dict[int, int], usual: int) -> Finding:
    size = next(iter(odd.values()))
    text = f"{group.names(odd)} made comm '{group.name}' for {size:,} ranks, the others for {usual:,}"
    lines = [line for one in odd if (comm := group.members[one].comm) and (line := line_of(comm.made_at))]
    return Finding("mismatch", text, 9, [], [(group.uid, one) for one in odd], lines, [group.uid])


def _bytes(case: Case, meeting: Meeting, source: int, send: CallRecord, target: int, recv: CallRecord) -> Finding:
    group = meeting.group
    text = (
        f"{group.names([source])} sends {send.dtype} x {send.count:,}{called(send, case.paths)} to "
        f"{group.names([target])}, which expects {recv.dtype} x {recv.count:,}{called(recv, case.paths)} "
        f"(comm '{group.name}')"
    )
    found = Finding("mismatch", text, 10, [], [(meeting.group.uid, source), (meeting.group.uid, target)])
    found.lines = [line for call in (send, recv) if (line := line_of(call.site))]
    return concern(case, found, [meeting], [])


def _mismatch(case: Case, one: Disagreement) -> Finding:
    sentence = {"left out": _left_out, "extra": _extra}.get(one.shift, _other_call)(case, one)
    group = one.group
    meetings = [
        meeting for meeting in case.waits.meetings if meeting.group is group and meeting.call.number == one.number
    ]
    if meetings and meetings[0].here:
        sentence += f"; {waiting(meetings[0])}"
    found = Finding("mismatch", sentence, 10, _sides(case, one))
    ranks = {**one.odd, **one.usual} if one.even else one.odd
    found.culprits, found.comms = [(group.uid, rank) for rank in sorted(ranks)], [group.uid]
    found.lines = [line for rank in sorted(ranks) if (line := line_of(ranks[rank].site))]
    if one.shift == "left out" and not one.even:
        found.lines += [line for line in [line_of(next(iter(one.usual.values())).site)] if line]
    return concern(case, found, meetings, [])


def _rows(one: Disagreement) -> list[tuple[list[int], CallRecord]]:
    """The ranks of each kind of call, the odd ones first."""
    rows: dict[str, tuple[list[int], CallRecord]] = {}
    for calls in (one.odd, one.usual):
        for rank, call in calls.items():
            rows.setdefault(call_text(call), ([], call))[0].append(rank)
    return list(rows.values())


def _side(case: Case, group: Group, ranks: list[int], call: CallRecord) -> str:
    verb = "calls" if len(ranks) == 1 else "call"
    return f"{group.names(ranks)} {verb} {call_text(call)}{called(call, case.paths)}"


def _sides(case: Case, one: Disagreement) -> list[str]:
    lines = [_side(case, one.group, ranks, call) for ranks, call in _rows(one)[:SHOWN]]
    return [*lines, "every rank must make the same collective calls in the same order"]


def _where(one: Disagreement) -> str:
    count = f"{one.group.size:,} rank{'s' if one.group.size != 1 else ''}"
    return f"comm '{one.group.name}', {count}"


def _other_call(case: Case, one: Disagreement) -> str:
    if one.even:
        sides = ", ".join(_side(case, one.group, ranks, call) for ranks, call in _rows(one)[:4])
        return f"the ranks disagree about call #{one.number:,} ({_where(one)}): {sides}"
    odd = next(iter(one.odd.values()))
    alike = len({call_text(call) for call in one.odd.values()}) == 1
    verb = "calls" if len(one.odd) == 1 else "call"
    what = f"{call_text(odd)}{called(odd, case.paths)}" if alike else "other collectives"
    usual = next(iter(one.usual.values()))
    return (
        f"{one.group.names(one.odd)} {verb} {what} as #{one.number:,} ({_where(one)}), "
        f"where the others call {call_text(usual)}{called(usual, case.paths)}"
    )


def _left_out(case: Case, one: Disagreement) -> str:
    usual, odd = next(iter(one.usual.values())), next(iter(one.odd.values()))
    its = "its" if len(one.odd) == 1 else "their"
    text = f"{one.group.names(one.odd)} left out {call_name(usual)} ({_where(one)}{_on_the_others(case, usual)}): "
    if one.earlier:
        return (
            text
            + f"{its} #{one.number:,} is {_operation(odd)}{called(odd, case.paths)}, "
            + f"which came after it in #{one.earlier + 1:,}"
        )
    return (
        text + f"{its} #{one.number:,}, {_operation(odd)}{called(odd, case.paths)}, is the others' #{one.number + 1:,}"
    )


def _extra(case: Case, one: Disagreement) -> str:
    odd = next(iter(one.odd.values()))
    its = "its" if len(one.odd) == 1 else "their"
    return (
        f"{one.group.names(one.odd)} made one call more than the others: {call_name(odd)} ({_where(one)})"
        f"{called(odd, case.paths)}; {its} #{one.number + 1:,} is the others' #{one.number:,}"
    )


def _on_the_others(case: Case, call: CallRecord) -> str:
    where = called(call, case.paths)
    return f",{where} on the others" if where else ""


def _operation(call: CallRecord) -> str:
    return clean(call.operation, 60)
