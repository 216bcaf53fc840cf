"""The records of all ranks as one trace: lanes, who came late to a collective, what was exposed, arrows between ranks.

Each rank places its own slices in lanes and says what of its communication is exposed (`RankTrace.of`); rank 0 brings
them to one clock, and adds what only all ranks together tell (`events`).
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

_KINDS = ("steps", "thread", "gpu", "comm")  # of lanes, from the top of a rank to its bottom


class RankTrace(NamedTuple):
    """What one rank contributes, with the times of its own clock.

    begin, end  of the block
    raised      the exception that ended the block, or ""
    comms       uid -> name, rank, size
    lanes       the slices of each, from the top to the bottom: tid 1, 2, ..
    flows       the profiler's arrows: from an operator to the node that it made, from a launch to its kernel
    summary     milliseconds of the block, of communication, and of that what was exposed
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
        """seconds: for which streams are waited for"""
        slices, profiled = recording.finish(begin, end, seconds)
        comms = recording.comms
        lanes = in_lanes([*placed(slices, profiled), *_slices_of(profiled)], list(comms))
        found = [one for same in lanes for one in same]
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
        tids = {same[0].lane: tid for tid, same in enumerate(lanes, 1)}
        arrows = ((one, tids.get(_lane_of(one))) for one in profiled if one["cat"] in FLOWS)
        flows = [one | {"id": f"{rank}/{one['id']}", "tid": tid} for one, tid in arrows if tid is not None]
        where = socket.gethostname(), os.getpid(), str(recording.device)
        return cls(rank, *where, begin, end, raised, comms, lanes, flows, summary)

    def to_bytes(self) -> bytes:
        return gzip.compress(json.dumps(self, allow_nan=False, default=vars).encode(), 1)

    @classmethod
    def from_bytes(cls, data: bytes) -> RankTrace:
        found: Any = cls(*json.loads(gzip.decompress(data)))
        lanes = [[Slice(**one | {"lane": Lane(*one["lane"])}) for one in same] for same in found.lanes]
        made: RankTrace = found._replace(lanes=lanes)
        return made


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
    """Lanes as they stand below each other, those of one kind in the order in which they were first used; in each the
    slices in order, each within the one around it: the profiler's clock is good to about a microsecond."""
    lanes: dict[Lane, list[Slice]] = defaultdict(list)
    for one in sorted(slices, key=lambda one: (one.begin, -one.end)):
        lanes[one.lane].append(one)
    for same in lanes.values():
        around: list[Slice] = []
        for one in same:
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
    """The slices, where the profiler's events say that they belong."""
    _name_backward(slices, events)
    return slices + list(_kernels(slices, events))


def _name_backward(slices: list[Slice], events: list[dict[str, Any]]) -> None:
    """A call that an autograd function makes in the backward pass belongs to the layer whose forward pass made it: the
    profiler links the node that ran last in its thread to the operator that made the node."""
    flows = [one for one in events if one["cat"] == "fwdbwd"]
    made = {one["id"]: one for one in flows if one["ph"] == "s"}
    ran = sorted((one["tid"], one["ts"], one["id"]) for one in flows if one["ph"] == "f" and one["id"] in made)
    layers = [one for one in events if one["cat"] == "user_annotation"]
    for call in slices:
        if call.category != COMM or call.args.get("phase") != "backward" or "function" not in call.args:
            continue
        number = bisect_right(ran, (call.thread, call.launched * 1e6, float("inf"))) - 1
        if number < 0 or ran[number][0] != call.thread:
            continue
        at = made[ran[number][2]]
        around = [one for one in layers if one["tid"] == at["tid"] and one["ts"] <= at["ts"] <= one["ts"] + one["dur"]]
        if around:
            layer = max(around, key=lambda one: float(one["ts"]))["name"].removesuffix(" recompute")
            call.args["layer"], call.name = layer, f"{call.args['operation']} {layer} backward"


def _kernels(slices: list[Slice], events: list[dict[str, Any]]) -> Iterator[Slice]:
    """On a GPU calls are moved to where their kernels ran. Yields where communication ran and nothing was computed."""
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
    """The times that lie in at least one of the intervals, as intervals that do not touch."""
    found: list[tuple[float, float]] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def within(intervals: Sequence[tuple[float, float]], begin: float, end: float) -> float:
    """How many seconds between the two lie in intervals that do not touch."""
    total = 0.0
    for start, stop in intervals[bisect_right(intervals, begin, key=lambda one: one[1]) :]:
        if start >= end:
            break
        total += min(stop, end) - max(start, begin)
    return total


def without(
    intervals: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]]
) -> Iterator[tuple[float, float]]:
    """The times that lie in one of the intervals and in none of the others."""
    marks = [(at, change) for begin, end in covered(intervals) for at, change in ((begin, 1), (end, -1))]
    marks += [(at, change) for begin, end in covered(others) for at, change in ((begin, 2), (end, -2))]
    state, since = 0, 0.0
    for at, change in sorted(marks):
        if state == 1 and at > since:
            yield since, at
        state, since = state + change, at


# All ranks.


def events(traces: Sequence[RankTrace]) -> Iterator[Event]:
    """Names, then the slices of each rank, then arrows; from the first begin on, by rank 0's clock."""
    begins = [(one.begin, *(piece.begin for same in one.lanes for piece in same)) for one in traces]
    zero = min(min(found) - one.offset for found, one in zip(begins, traces, strict=True))
    met: dict[str, set[_Place]] = defaultdict(set)
    for trace in traces:
        for tid, same in enumerate(trace.lanes, 1):
            for piece in same:
                piece.begin, piece.end = piece.begin - trace.offset - zero, piece.end - trace.offset - zero
                for key in piece.keys:
                    met[key].add(_Place(piece.begin, piece.end, trace.rank, tid))
    for trace in traces:
        rank = trace.rank
        yield from chrome.process(rank, f"rank {rank}", f"{trace.device}, pid {trace.pid} on {trace.host}")
        for tid, same in enumerate(trace.lanes, 1):
            yield from chrome.lane(rank, tid, _name(same[0].lane, trace, traces))
            for piece in same:
                across = _across_ranks(piece, met[piece.keys[0]]) if len(piece.keys) == 1 else {}
                args = piece.args | across
                yield chrome.piece(piece.name, piece.category, rank, tid, piece.begin, piece.end, args)
        for one in trace.flows:
            yield one | {"pid": rank, "ts": chrome.micro(one["ts"] / 1e6 - trace.offset - zero)}
        if trace.raised:
            yield chrome.moment(f"raised {trace.raised}", "end", rank, 0, trace.end - trace.offset - zero)
    for number, (key, places) in enumerate(met.items(), 1):
        title = key.partition(" ")[2]
        yield from chrome.arrows(number, title, [(at.begin, at.rank, at.tid) for at in sorted(places)])


def metadata(traces: Sequence[RankTrace], missing: Mapping[int, str]) -> dict[str, Any]:
    """Of the file as a whole.   missing: rank -> why it is not in it"""
    found: dict[str, Any] = {"source": "pynccl_autograd.trace", "ranks": len(traces)}
    found["summary"] = {f"rank {one.rank}": one.summary for one in traces}
    found["clock_offset_us"] = {f"rank {one.rank}": round(one.offset * 1e6, 3) for one in traces}
    if missing:
        found["missing"] = {f"rank {rank}": why for rank, why in missing.items()}
    if raised := {f"rank {one.rank}": one.raised for one in traces if one.raised}:
        found["raised"] = raised
    return found


class _Place(NamedTuple):
    """One rank's part of a collective."""

    begin: float
    end: float
    rank: int
    tid: int


def _name(lane: Lane, trace: RankTrace, traces: Sequence[RankTrace]) -> str:
    if lane.kind in ("steps", "gpu"):
        return "steps" if lane.kind == "steps" else f"stream {lane.number}"
    lanes = [same[0].lane for same in trace.lanes]
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
    """Of a collective: which rank came last, and the bandwidth from then on."""
    if len(places) < 2 or piece.name.endswith("(has not ended)"):
        return {}
    first, last = min(places), max(places)
    moving = max(piece.begin, min(last.begin, piece.end))  # from when all ranks are there
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
