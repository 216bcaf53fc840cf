"""Find ranks whose calls do not match those of the other ranks: operation, count, data type, operator or root."""

from __future__ import annotations

from collections import Counter

from ..bindings.abi import ELEMENTS
from .formatting import call_site, call_text
from .graph import Finding, Priority, SyncPoint, WaitGraph
from .job import MAX_LINES, Group
from .records import CallRecord

_COMPARED_BY_NAME = ("init", "split", "group plan", "barrier", "grow", "shrink")  # only the operation is compared
_ITEMSIZE = {element.dtype.name: element.itemsize for element in ELEMENTS}


def find_mismatches(graph: WaitGraph) -> list[Finding]:
    """Return a finding for each communicator whose ranks made different calls, and for each send and recv that differ
    in size."""
    found = [_mismatch(graph, group) for group in graph.job.groups]
    found += [_size_mismatch(graph, point) for point in graph.points]
    return [finding for finding in found if finding]


def _mismatch(graph: WaitGraph, group: Group) -> Finding | None:
    """Report the first collective that differs. Culprits: the minority, or all ranks if there is no majority."""
    keys: dict[int, set[tuple[str | int, ...]]] = {}
    for member in group.members.values():
        for number, call in member.numbered.items():
            keys.setdefault(number, set()).add(_key(call))
    number = min((number for number, found in keys.items() if len(found) > 1), default=0)
    if not number:
        return None
    calls = {rank: member.numbered[number] for rank, member in group.members.items() if number in member.numbered}
    points = [point for point in graph.points if point.group is group and point.call.number == number]
    if graph.was_handled(group, calls, points):
        return None
    majority, votes = Counter(map(_key, calls.values())).most_common(1)[0]
    odd = {rank: call for rank, call in calls.items() if _key(call) != majority}
    usual = {rank: call for rank, call in calls.items() if _key(call) == majority}
    sides, others = _texts_by_call(group, odd), _texts_by_call(group, usual)
    if 2 * votes > len(calls):
        theirs = next(iter(usual.values()))
        text = f"{', '.join(sides[:3])} as #{number:,} ({group.title()}), where the others call "
        text += f"{call_text(theirs)}{call_site(theirs)}"
    else:
        text = f"the ranks disagree about call #{number:,} ({group.title()}): {', '.join([*sides, *others][:4])}"
        odd |= usual
    text += f"; {points[0].waiting(' there')}" if points else ""
    details = [*[*sides, *others][:MAX_LINES], "every rank must make the same collective calls in the same order"]
    return graph.finding(
        "mismatch",
        Priority.MISMATCH,
        text,
        points=points,
        details=details,
        culprits=[(group.uid, rank) for rank in sorted(odd)],
        comms=[group.uid],
        sites=[odd[rank].site for rank in sorted(odd)],
    )


def _texts_by_call(group: Group, calls: dict[int, CallRecord]) -> list[str]:
    """Return a text per distinct call: "rank 0 calls all_reduce(count=4, FLOAT32) at a.py:3"."""
    rows: dict[str, list[int]] = {}
    for rank, call in calls.items():
        rows.setdefault(call_text(call), []).append(rank)
    return [
        f"{group.names(ranks)} call{'s' if len(ranks) == 1 else ''} {text}{call_site(calls[ranks[0]])}"
        for text, ranks in rows.items()
    ]


def _key(call: CallRecord) -> tuple[str | int, ...]:
    """Return the properties of a call that must match on all ranks."""
    if call.operation in _COMPARED_BY_NAME:
        return (call.operation,)
    count = -1 if call.operation.endswith("_v") else call.count
    return call.operation, count, call.dtype, call.op, call.root


def _size_mismatch(graph: WaitGraph, point: SyncPoint) -> Finding | None:
    """Compare the sizes of a send and its recv."""
    calls = {call.operation: (rank, call) for rank, call in point.arrived.items()}
    if calls.keys() != {"send", "recv"}:
        return None
    group, (source, send), (target, recv) = point.group, calls["send"], calls["recv"]
    sent, expected = (call.count * _ITEMSIZE.get(call.dtype, -1) for call in (send, recv))
    if sent == expected or min(sent, expected) < 0:
        return None
    text = (
        f"{group.names([source])} sends {send.dtype} x {send.count:,}{call_site(send)} to "
        f"{group.names([target])}, which expects {recv.dtype} x {recv.count:,}{call_site(recv)} (comm '{group.name}')"
    )
    culprits = [(group.uid, source), (group.uid, target)]
    sites = [send.site, recv.site]
    return graph.finding("mismatch", Priority.MISMATCH, text, points=[point], culprits=culprits, sites=sites)
