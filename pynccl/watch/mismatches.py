"""Ranks that made other calls than the others: another operation, count, type, operator or root."""

from __future__ import annotations

from collections import Counter

from ..bindings.abi import ELEMENTS
from .formatting import call_text, called
from .job import SHOWN, Group
from .records import CallRecord
from .wait_graph import Finding, Meeting, Waits, Weight

_UNCOMPARED = ("init", "split", "group plan", "barrier", "grow", "shrink")  # by their name alone
_ITEMSIZE = {element.dtype.name: element.itemsize for element in ELEMENTS}


def disagreements(waits: Waits) -> list[Finding]:
    """A finding for each communicator whose ranks made different calls, and for sends and recvs of other sizes."""
    found = [_mismatch(waits, group) for group in waits.job.groups]
    found += [_sizes(waits, meeting) for meeting in waits.meetings]
    return [one for one in found if one]


def _mismatch(waits: Waits, group: Group) -> Finding | None:
    """At the first number at which ranks differ: those that differ from the most, or all where neither are the most."""
    keys: dict[int, set[tuple[str | int, ...]]] = {}
    for member in group.members.values():
        for number, call in member.numbered.items():
            keys.setdefault(number, set()).add(_key(call))
    number = min((number for number, found in keys.items() if len(found) > 1), default=0)
    if not number:
        return None
    calls = {rank: member.numbered[number] for rank, member in group.members.items() if number in member.numbered}
    most, votes = Counter(map(_key, calls.values())).most_common(1)[0]
    odd = {rank: call for rank, call in calls.items() if _key(call) != most}
    usual = {rank: call for rank, call in calls.items() if _key(call) == most}
    sides, others = _sides(group, odd), _sides(group, usual)
    if 2 * votes > len(calls):
        theirs = next(iter(usual.values()))
        text = f"{', '.join(sides[:3])} as #{number:,} ({group.title()}), where the others call "
        text += f"{call_text(theirs)}{called(theirs)}"
    else:
        text = f"the ranks disagree about call #{number:,} ({group.title()}): {', '.join([*sides, *others][:4])}"
        odd |= usual
    meetings = [one for one in waits.meetings if one.group is group and one.call.number == number]
    text += f"; {meetings[0].waiting(' there')}" if meetings else ""
    details = [*[*sides, *others][:SHOWN], "every rank must make the same collective calls in the same order"]
    return waits.finding(
        "mismatch",
        Weight.MISMATCH,
        text,
        meetings=meetings,
        details=details,
        culprits=[(group.uid, rank) for rank in sorted(odd)],
        comms=[group.uid],
        sites=[odd[rank].site for rank in sorted(odd)],
    )


def _sides(group: Group, calls: dict[int, CallRecord]) -> list[str]:
    """What the ranks call, those together that call the same: "rank 0 calls all_reduce(count=4, FLOAT32) at a.py:3"."""
    rows: dict[str, list[int]] = {}
    for rank, call in calls.items():
        rows.setdefault(call_text(call), []).append(rank)
    return [
        f"{group.names(ranks)} call{'s' if len(ranks) == 1 else ''} {text}{called(calls[ranks[0]])}"
        for text, ranks in rows.items()
    ]


def _key(call: CallRecord) -> tuple[str | int, ...]:
    """What the ranks must agree on."""
    if call.operation in _UNCOMPARED:
        return (call.operation,)
    count = -1 if call.operation.endswith("_v") else call.count
    return call.operation, count, call.dtype, call.op, call.root


def _sizes(waits: Waits, meeting: Meeting) -> Finding | None:
    """A send and its recv that are of other sizes."""
    calls = {call.operation: (rank, call) for rank, call in meeting.here.items()}
    if calls.keys() != {"send", "recv"} or not meeting.paired:
        return None
    group, (source, send), (target, recv) = meeting.group, calls["send"], calls["recv"]
    sent, expected = (one.count * _ITEMSIZE.get(one.dtype, -1) for one in (send, recv))
    if sent == expected or min(sent, expected) < 0:
        return None
    text = (
        f"{group.names([source])} sends {send.dtype} x {send.count:,}{called(send)} to "
        f"{group.names([target])}, which expects {recv.dtype} x {recv.count:,}{called(recv)} (comm '{group.name}')"
    )
    culprits = [(group.uid, source), (group.uid, target)]
    sites = [send.site, recv.site]
    return waits.finding("mismatch", Weight.MISMATCH, text, meetings=[meeting], culprits=culprits, sites=sites)
