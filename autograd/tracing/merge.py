"""Merge the records of all ranks into one trace: lanes, stragglers, exposed communication, arrows between ranks.

Each rank assigns its slices to lanes and computes its exposed communication (`RankTrace.of`). Rank 0 converts them to
one clock, and adds the information that needs all ranks (`events`).
"""

from __future__ import annotations

import gzip
import json
import os
import socket
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pynccl import chrome_trace as chrome
from pynccl.chrome_trace import Event
from pynccl.comm.collectives import bus_factor

from .recording import COMM, EXPOSED, FLOWS, HOST, KERNELS, LAUNCHES, Lane, Recording, Slice

_KINDS = ("steps", "thread", "gpu", "comm")  # of lanes, from top to bottom


class RankTrace(NamedTuple):
    """The trace of one rank, in the times of its own clock.

    begin, end  of the block
    raised      the exception that ended the block, or ""
    comms       uid -> name, rank, size
    lanes       the slices of each lane, from top to bottom: tid 1, 2, ..
    flows       the profiler's arrows: from an operator to its backward node, from a launch to its kernel
    summary     milliseconds of the block, of communication, and of exposed communication
    offset      seconds that this rank's clock is ahead of rank 0's"""

    rank: int
    host: str
    pid: int
    device: str
    begin: float
    end: float
    raised: str
    comms: Mapping[str, Sequence[Any]]
    lanes: list[list[Slice]]
    flows: list[Event]
    summary: dict[str, float]
    offset: float = 0.0

    @classmethod
    def of(cls, rank: int, recording: Recording, begin: float, end: float, raised: str, seconds: float) -> RankTrace:
        """seconds: maximum wait for streams"""
        slices, profiled = recording.finish(begin, end, seconds)
        comms = recording.comms
        lanes = in_lanes([*placed(slices, profiled), *_slices_of(profiled)], list(comms))
        found = [piece for lane in lanes for piece in lane]
        calls = [one for one in found if one.category == COMM]
        waits = covered([(one.begin, one.end) for one in found if one.category == EXPOSED])
        for one in calls:
            exposed = within(waits, one.begin, one.end)
            hidden = one.end - one.begin - exposed
            one.args |= {"exposed_us": round(exposed * 1e6, 3), "hidden_us": round(hidden * 1e6, 3)}
        busy = covered([(one.begin, one.end) for one in calls])
        summary = {
            "block_ms": round((end - begin) * 1e3, 3),
            "communication_ms": round(sum(stop - start for start, stop in busy) * 1e3, 3),
            "exposed_ms": round(sum(within(waits, *interval) for interval in busy) * 1e3, 3),
        }
        tids = {pieces[0].lane: tid for tid, pieces in enumerate(lanes, 1)}
        arrows = ((one, tids.get(_lane_of(one))) for one in profiled if one["cat"] in FLOWS)
        flows = [one | {"id": f"{rank}/{one['id']}", "tid": tid} for one, tid in arrows if tid is not None]
        where = socket.gethostname(), os.getpid(), str(recording.device)
        return cls(rank, *where, begin, end, raised, comms, lanes, flows, summary)

    def to_bytes(self) -> bytes:
        return gzip.compress(json.dumps(self, allow_nan=False, default=vars).encode(), 1)

    @classmethod
    def from_bytes(cls, data: bytes) -> RankTrace:
        found: Any = cls(*json.loads(gzip.decompress(data)))
        lanes = [[Slice(**one | {"lane": Lane(*one["lane"])}) for one in pieces] for pieces in found.lanes]
        result: RankTrace = found._replace(lanes=lanes)
        return result


# One rank.


def _lane_of(event: Event) -> Lane:
    return Lane("thread" if event["pid"] == os.getpid() else "gpu", int(event["tid"]))


def _slices_of(events: list[Event]) -> Iterator[Slice]:
    for one in events:
        if one["ph"] == "X":
            kept = one["args"] if one["cat"] == "kernel" else {}
            begin = one["ts"] / 1e6
            yield Slice(_lane_of(one), one["name"], one["cat"], begin, begin + one["dur"] / 1e6, kept, (), 0, 0.0)


def in_lanes(slices: list[Slice], uids: list[str]) -> list[list[Slice]]:
    """Return the lanes from top to bottom, each with its slices in order. Lanes of one kind are in order of first use.

    Truncate a slice that overlaps the end of the one around it: the profiler's clock is accurate to a microsecond."""
    lanes: dict[Lane, list[Slice]] = defaultdict(list)
    for one in sorted(slices, key=lambda one: (one.begin, -one.end)):
        lanes[one.lane].append(one)
    for pieces in lanes.values():
        around: list[Slice] = []
        for one in pieces:
            while around and around[-1].end <= one.begin:
                around.pop()
            if around:
                one.end = min(one.end, around[-1].end)
            around.append(one)

    def place(lane: Lane) -> tuple[Any, ...]:
        at = uids.index(lane.comm) if lane.comm else 0
        return _KINDS.index(lane.kind), at, lane.rank, lane.side, lane.number == HOST

    return [lanes[lane] for lane in sorted(lanes, key=place)]


def placed(slices: list[Slice], events: list[dict[str, Any]]) -> list[Slice]:
    """Return the slices, after using the profiler's events to name and place them."""
    _name_backward(slices, events)
    return slices + list(_kernels(slices, events))


def _name_backward(slices: list[Slice], events: list[dict[str, Any]]) -> None:
    """Set the layer of calls that an autograd function makes in the backward pass.

    The profiler links the node that ran last in the thread to the operator that created it in the forward pass."""
    flows = [one for one in events if one["cat"] == "fwdbwd"]
    created = {one["id"]: one for one in flows if one["ph"] == "s"}
    ran = sorted((one["tid"], one["ts"], one["id"]) for one in flows if one["ph"] == "f" and one["id"] in created)
    layers = [one for one in events if one["cat"] == "user_annotation"]
    for call in slices:
        if call.category != COMM or call.args.get("phase") != "backward" or "function" not in call.args:
            continue
        number = bisect_right(ran, (call.thread, call.launched * 1e6, float("inf"))) - 1
        if number < 0 or ran[number][0] != call.thread:
            continue
        at = created[ran[number][2]]
        around = [one for one in layers if one["tid"] == at["tid"] and one["ts"] <= at["ts"] <= one["ts"] + one["dur"]]
        if around:
            layer = max(around, key=lambda one: float(one["ts"]))["name"].removesuffix(" recompute")
            call.args["layer"], call.name = layer, f"{call.args['operation']} {layer} backward"


def _kernels(slices: list[Slice], events: list[dict[str, Any]]) -> Iterator[Slice]:
    """On a GPU, move calls to the times of their kernels. Yield slices where communication ran without computation."""
    launches = {one["args"].get("correlation"): one for one in events if one["cat"] in LAUNCHES}
    if not launches:
        return
    calls = sorted((one for one in slices if one.category == COMM), key=lambda one: (one.thread, one.launched))
    began = [(one.thread, one.launched) for one in calls]
    own: list[list[tuple[float, float]]] = [[] for _ in calls]
    computing, stream = [], 0
    for kernel in (one for one in events if one["cat"] in KERNELS):
        interval = kernel["ts"] / 1e6, (kernel["ts"] + kernel["dur"]) / 1e6
        launch = launches.get(kernel["args"].get("correlation"), {"tid": 0, "ts": 0.0})
        thread, at = int(launch["tid"]), launch["ts"] / 1e6
        number = bisect_right(began, (thread, at)) - 1
        if number >= 0 and calls[number].thread == thread and at <= calls[number].end:
            own[number].append(interval)
        else:
            computing.append(interval)
            stream = int(kernel["tid"])
    for call, ran in zip(calls, own, strict=True):
        if ran:
            call.begin, call.end = min(ran)[0], max(end for _, end in ran)
        else:
            call.lane = call.lane._replace(number=HOST, side=False)
    for begin, end in without([interval for ran in own for interval in ran], computing):
        yield Slice(Lane("gpu", stream), "waits for communication", EXPOSED, begin, end)


def covered(intervals: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the union of the intervals, as disjoint intervals."""
    found: list[tuple[float, float]] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def within(intervals: Sequence[tuple[float, float]], begin: float, end: float) -> float:
    """Return the seconds between begin and end that disjoint intervals cover."""
    total = 0.0
    for start, stop in intervals[bisect_right(intervals, begin, key=lambda one: one[1]) :]:
        if start >= end:
            break
        total += min(stop, end) - max(start, begin)
    return total


def without(
    intervals: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]]
) -> Iterator[tuple[float, float]]:
    """Yield the times in the intervals but not in the others."""
    marks = [(at, change) for begin, end in covered(intervals) for at, change in ((begin, 1), (end, -1))]
    marks += [(at, change) for begin, end in covered(others) for at, change in ((begin, 2), (end, -2))]
    state, since = 0, 0.0
    for at, change in sorted(marks):
        if state == 1 and at > since:
            yield since, at
        state, since = state + change, at


# All ranks.


def events(traces: Sequence[RankTrace]) -> Iterator[Event]:
    """Yield names and slices of each rank, then arrows. Times are those of rank 0's clock since the first begin."""
    begins = [(one.begin, *(piece.begin for pieces in one.lanes for piece in pieces)) for one in traces]
    zero = min(min(found) - one.offset for found, one in zip(begins, traces, strict=True))
    places_of: dict[str, set[_Place]] = defaultdict(set)
    for trace in traces:
        for tid, pieces in enumerate(trace.lanes, 1):
            for piece in pieces:
                piece.begin, piece.end = piece.begin - trace.offset - zero, piece.end - trace.offset - zero
                for key in piece.keys:
                    places_of[key].add(_Place(piece.begin, piece.end, trace.rank, tid))
    for trace in traces:
        rank = trace.rank
        yield from chrome.process(rank, f"rank {rank}", f"{trace.device}, pid {trace.pid} on {trace.host}")
        for tid, pieces in enumerate(trace.lanes, 1):
            yield from chrome.lane(rank, tid, _name(pieces[0].lane, trace, traces))
            for piece in pieces:
                across = _across_ranks(piece, places_of[piece.keys[0]]) if len(piece.keys) == 1 else {}
                args = piece.args | across
                yield chrome.piece(piece.name, piece.category, rank, tid, piece.begin, piece.end, args)
        for one in trace.flows:
            yield one | {"pid": rank, "ts": chrome.micro(one["ts"] / 1e6 - trace.offset - zero)}
        if trace.raised:
            yield chrome.moment(f"raised {trace.raised}", "end", rank, 0, trace.end - trace.offset - zero)
    for number, (key, places) in enumerate(places_of.items(), 1):
        title = key.partition(" ")[2]
        yield from chrome.arrows(number, title, [(at.begin, at.rank, at.tid) for at in sorted(places)])


def metadata(traces: Sequence[RankTrace], missing: Mapping[int, str]) -> dict[str, Any]:
    """Return the metadata of the file.   missing: rank -> why it is not in the file"""
    found: dict[str, Any] = {"source": "pynccl_autograd.trace", "ranks": len(traces)}
    found["summary"] = {f"rank {one.rank}": one.summary for one in traces}
    found["clock_offset_us"] = {f"rank {one.rank}": round(one.offset * 1e6, 3) for one in traces}
    if missing:
        found["missing"] = {f"rank {rank}": why for rank, why in missing.items()}
    if raised := {f"rank {one.rank}": one.raised for one in traces if one.raised}:
        found["raised"] = raised
    return found


class _Place(NamedTuple):
    """The slice of one rank in a collective."""

    begin: float
    end: float
    rank: int
    tid: int


def _name(lane: Lane, trace: RankTrace, traces: Sequence[RankTrace]) -> str:
    if lane.kind in ("steps", "gpu"):
        return "steps" if lane.kind == "steps" else f"stream {lane.number}"
    lanes = [pieces[0].lane for pieces in trace.lanes]
    which = [other for other in lanes if other._replace(number=0) == lane._replace(number=0)].index(lane)
    number = f" {which + 1}" if which else ""
    if lane.kind == "thread":
        return f"cpu{number}"
    name, _, size = trace.comms[lane.comm]
    members = {one.comms[lane.comm][1]: one.rank for one in traces if lane.comm in one.comms}
    ranks = " ".join(str(members[at]) for at in sorted(members))
    name += f", ranks {ranks}" if len(members) == size else f", {size} ranks"
    if len({other.rank for other in lanes if other.comm == lane.comm}) > 1:
        name += f", its rank {lane.rank}"
    if lane.number == HOST:
        return f"{name}, by the CPU"
    return name + (", side stream" if lane.side else "") + number


def _across_ranks(piece: Slice, places: set[_Place]) -> dict[str, Any]:
    """Return the arguments that compare ranks: delays, the last rank, and the bandwidth after it has begun."""
    if len(places) < 2 or piece.name.endswith("(not ended)"):
        return {}
    first, last = min(places), max(places)
    moving = max(piece.begin, min(last.begin, piece.end))  # all ranks have begun
    found: dict[str, Any] = {
        "late_us": round((piece.begin - first.begin) * 1e6, 3),
        "last_rank": last.rank,
        "waited_us": round((moving - piece.begin) * 1e6, 3),
    }
    nbytes, seconds = piece.args.get("bytes", 0), piece.end - moving
    if nbytes and seconds > 0 and "#" in piece.keys[0]:
        algbw = nbytes / seconds / 1e9
        busbw = algbw * bus_factor(piece.args["operation"], len(places))
        found |= {"algbw_GBps": float(f"{algbw:.4g}"), "busbw_GBps": float(f"{busbw:.4g}")}
    return found
