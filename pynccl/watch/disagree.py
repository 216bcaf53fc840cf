"""Ranks that made other calls than the others: another operation, count, type, operator or root."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from ..bindings.abi import ELEMENTS
from .findings import SHOWN, Case, Finding, concern, lines_of, waiting
from .formatting import Paths, call_text, called
from .job import Group
from .records import CallRecord
from .waits import Meeting

_UNCOMPARED = ("init", "split", "group plan", "barrier", "grow", "shrink")  # by their name alone
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
    found = [one for group in case.job.groups if (one := _mismatch(case, group))]
    return found + [one for meeting in case.waits.meetings if (one := _sizes(case, meeting))]


def _mismatch(case: Case, group: Group) -> Finding | None:
    """At the first number at which ranks differ: those that differ from the most, or all where neither are the most."""
    keys: dict[int, set[Key]] = {}
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
    even = 2 * votes <= len(calls)
    sides, others = difference(group, odd, case.paths), difference(group, usual, case.paths)
    text = f"the ranks disagree about call #{number:,} ({group.title()}): {', '.join([*sides, *others][:4])}"
    if not even:
        theirs = others[0].partition(" call")[2].removeprefix("s").strip()
        text = f"{', '.join(sides[:3])} as #{number:,} ({group.title()}), where the others call {theirs}"
    meetings = [found for found in case.waits.meetings if found.group is group and found.call.number == number]
    text += f"; {waiting(meetings[0])}" if meetings and meetings[0].here else ""
    blamed = {**odd, **usual} if even else odd
    finding = Finding("mismatch", text, 10, [*sides, *others][:SHOWN])
    finding.details.append("every rank must make the same collective calls in the same order")
    finding.culprits = [(group.uid, rank) for rank in sorted(blamed)]
    finding.lines, finding.comms = lines_of(blamed[rank] for rank in sorted(blamed)), [group.uid]
    return concern(case, finding, meetings)


def _key(call: CallRecord) -> Key:
    """What the ranks must agree on."""
    if call.operation in _UNCOMPARED:
        return call.operation, -1, "", "", -1
    count = -1 if call.operation.endswith("_v") else call.count
    return call.operation, count, call.dtype, call.op, call.root


def _sizes(case: Case, meeting: Meeting) -> Finding | None:
    """A send and its recv that are of other sizes."""
    calls = {call.operation: (rank, call) for rank, call in meeting.here.items()}
    if calls.keys() != {"send", "recv"} or not meeting.paired:
        return None
    group, (source, send), (target, recv) = meeting.group, calls["send"], calls["recv"]
    if min(send.count, recv.count) < 0 or not {send.dtype, recv.dtype} <= _ITEMSIZE.keys():
        return None
    if send.count * _ITEMSIZE[send.dtype] == recv.count * _ITEMSIZE[recv.dtype]:
        return None
    text = (
        f"{group.names([source])} sends {send.dtype} x {send.count:,}{called(send, case.paths)} to "
        f"{group.names([target])}, which expects {recv.dtype} x {recv.count:,}{called(recv, case.paths)} "
        f"(comm '{group.name}')"
    )
    culprits = [(group.uid, source), (group.uid, target)]
    return concern(case, Finding("mismatch", text, 10, [], culprits, lines_of([send, recv])), [meeting])
