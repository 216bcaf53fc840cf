"""The traces of all ranks as one: lanes, who came late to a collective, what was exposed, arrows between ranks."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from pynccl import chrome_trace as chrome
from pynccl.chrome_trace import Event
from pynccl.comm.collectives import bus_factor

from .gather import RankTrace
from .recording import COMM, EXPOSED, HOST, Lane, Slice, covered

_KINDS = ("steps", "thread", "gpu", "comm")  # of lanes, from the top of a rank to its bottom
_FLOWS = ("fwdbwd", "ac2g")


class _Place(NamedTuple):
    """One rank's part of a collective."""

    begin: float
    end: float
    rank: int
    tid: int


class _Rank:
    """A rank's trace, with times from the begin of the merged one.   zero: that begin, by rank 0's clock"""

    def __init__(self, trace: RankTrace, zero: float) -> None:
        self.trace, self.shift = trace, -trace.offset - zero
        lanes: dict[Lane, list[Slice]] = defaultdict(list)
        for one in [*trace.slices, *self._profiled()]:
            lanes[one.lane].append(replace(one, begin=one.begin + self.shift, end=one.end + self.shift))
        self.lanes = {lane: _nested(lanes[lane]) for lane in sorted(lanes, key=lambda lane: self._order(lane, lanes))}
        self.tids = {lane: tid for tid, lane in enumerate(self.lanes, 1)}
        found = [one for same in self.lanes.values() for one in same]
        self.busy = covered([(one.begin, one.end) for one in found if one.category == COMM])
        self._exposed = covered([(one.begin, one.end) for one in found if one.category == EXPOSED])
        self._ends = [end for _, end in self._exposed]

    def _order(self, lane: Lane, lanes: Mapping[Lane, list[Slice]]) -> tuple[Any, ...]:
        """Of one kind in the order in which they were first used."""
        first = min(one.begin for one in lanes[lane])
        uids = list(self.trace.comms)
        at = uids.index(lane.comm) if lane.comm in uids else 0
        return _KINDS.index(lane.kind), at, lane.rank, lane.side, lane.number == HOST, first

    def _profiled(self) -> Iterator[Slice]:
        for one in self.trace.events:
            if one["ph"] == "X":
                kept = one["args"] if one["cat"] == "kernel" else {}
                begin = one["ts"] / 1e6
                yield Slice(self._lane(one), one["name"], one["cat"], begin, begin + one["dur"] / 1e6, kept, (), 0, 0.0)

    def _lane(self, event: Event) -> Lane:
        return Lane("thread" if event["pid"] == self.trace.pid else "gpu", int(event["tid"]))

    def flows(self) -> Iterator[Event]:
        """The profiler's arrows, from an operator to the node that it made and from a launch to its kernel."""
        for one in self.trace.events:
            if one["cat"] in _FLOWS and (tid := self.tids.get(self._lane(one))) is not None:
                at = chrome.micro(one["ts"] / 1e6 + self.shift)
                yield one | {"id": f"{self.trace.rank}/{one['id']}", "pid": self.trace.rank, "tid": tid, "ts": at}

    def exposed(self, begin: float, end: float) -> float:
        """In how many seconds between the two computation waits for communication."""
        total = 0.0
        for start, stop in self._exposed[bisect_right(self._ends, begin) :]:
            if start >= end:
                break
            total += min(stop, end) - max(start, begin)
        return total

    def summary(self) -> dict[str, float]:
        """Milliseconds of the block, of communication in it, and of that what was exposed."""
        times = {
            "block_ms": self.trace.end - self.trace.begin,
            "communication_ms": sum(end - begin for begin, end in self.busy),
            "exposed_ms": sum(self.exposed(*interval) for interval in self.busy),
        }
        return {name: round(value * 1e3, 3) for name, value in times.items()}


class Merged:
    """The trace of some ranks.   missing: rank -> why it is not among them"""

    def __init__(self, traces: Sequence[RankTrace], missing: Mapping[int, str]) -> None:
        self.missing = dict(missing)
        ordered = sorted(traces, key=lambda trace: trace.rank)
        zero = min(min([one.begin, *(piece.begin for piece in one.slices)]) - one.offset for one in ordered)
        self._ranks = [_Rank(one, zero) for one in ordered]
        self._met: dict[str, set[_Place]] = defaultdict(set)
        for one in self._ranks:
            for lane, slices in one.lanes.items():
                for piece in slices:
                    for key in piece.keys:
                        self._met[key].add(_Place(piece.begin, piece.end, one.trace.rank, one.tids[lane]))
        self.summary = {f"rank {one.trace.rank}": one.summary() for one in self._ranks}

    def events(self) -> Iterator[Event]:
        """Names, then the slices of each rank, then arrows."""
        for one in self._ranks:
            trace = one.trace
            labels = f"{trace.device}, pid {trace.pid} on {trace.host}"
            yield from chrome.process(trace.rank, f"rank {trace.rank}", labels)
            for lane, tid in one.tids.items():
                yield from chrome.lane(trace.rank, tid, self._lane_name(one, lane))
            for lane, slices in one.lanes.items():
                for piece in slices:
                    yield self._event(one, piece, one.tids[lane])
            yield from one.flows()
            if trace.raised:
                yield chrome.moment(f"raised {trace.raised}", "end", trace.rank, 0, trace.end + one.shift)
        for number, (key, places) in enumerate(self._met.items(), 1):
            title = key.partition(" ")[2]
            yield from chrome.arrows(number, title, [(at.begin, at.rank, at.tid) for at in sorted(places)])

    def metadata(self) -> dict[str, Any]:
        """Of the file as a whole."""
        traces = [one.trace for one in self._ranks]
        found: dict[str, Any] = {"source": "pynccl_autograd.trace", "ranks": len(traces), "summary": self.summary}
        found["clock_offset_us"] = {f"rank {one.rank}": round(one.offset * 1e6, 3) for one in traces}
        if self.missing:
            found["missing"] = {f"rank {rank}": why for rank, why in self.missing.items()}
        if raised := {f"rank {one.rank}": one.raised for one in traces if one.raised}:
            found["raised"] = raised
        return found

    def _lane_name(self, one: _Rank, lane: Lane) -> str:
        if lane.kind == "steps":
            return "steps"
        if lane.kind == "gpu":
            return f"stream {lane.number}"
        same = [other for other in one.tids if other._replace(number=0) == lane._replace(number=0)]
        which = same.index(lane)
        number = f" {which + 1}" if which else ""
        if lane.kind == "thread":
            return f"cpu{number}"
        name, _, size = one.trace.comms[lane.comm]
        comms = {other.trace.rank: other.trace.comms for other in self._ranks}
        members = {found[lane.comm][1]: rank for rank, found in comms.items() if lane.comm in found}
        ranks = " ".join(str(members[at]) for at in sorted(members))
        name += f", ranks {ranks}" if len(members) == size else f", {size} ranks"
        if len({other.rank for other in one.tids if other.comm == lane.comm}) > 1:
            name += f", its rank {lane.rank}"
        if lane.number == HOST:
            return f"{name}, by the CPU"
        return name + (", side stream" if lane.side else "") + number

    def _event(self, one: _Rank, piece: Slice, tid: int) -> Event:
        args, begin, end = dict(piece.args), piece.begin, piece.end
        if piece.category == COMM:
            exposed = one.exposed(begin, end)
            args |= {"exposed_us": round(exposed * 1e6, 3), "hidden_us": round((end - begin - exposed) * 1e6, 3)}
            if len(piece.keys) == 1:
                args |= self._across_ranks(piece, _Place(begin, end, one.trace.rank, tid))
        return chrome.piece(piece.name, piece.category, one.trace.rank, tid, begin, end, args)

    def _across_ranks(self, piece: Slice, own: _Place) -> dict[str, Any]:
        """Of a collective: which rank came last, and the bandwidth from then on."""
        places = self._met[piece.keys[0]]
        if len(places) < 2 or piece.name.endswith("(has not ended)"):
            return {}
        first, last = min(places), max(places)
        found: dict[str, Any] = {
            "late_us": round((own.begin - first.begin) * 1e6, 3),
            "last_rank": last.rank,
            "waited_us": round(max(min(last.begin, own.end) - own.begin, 0.0) * 1e6, 3),
        }
        nbytes, seconds = piece.args.get("bytes", 0), own.end - max(own.begin, min(last.begin, own.end))
        if nbytes and seconds > 0 and "#" in piece.keys[0]:
            algbw = nbytes / seconds / 1e9
            busbw = algbw * bus_factor(piece.args["operation"], len(places))
            found |= {"algbw_GBps": float(f"{algbw:.4g}"), "busbw_GBps": float(f"{busbw:.4g}")}
        return found


def _nested(slices: list[Slice]) -> list[Slice]:
    """In the order of a lane, each within the one around it: the profiler's clock is good to about a microsecond."""
    around: list[Slice] = []
    slices.sort(key=lambda one: (one.begin, -one.end))
    for one in slices:
        while around and around[-1].end <= one.begin:
            around.pop()
        if around:
            one.end = min(one.end, around[-1].end)
        around.append(one)
    return slices
