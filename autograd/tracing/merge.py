"""The parts of all ranks as one trace: lanes, who came late to a collective, what was exposed, arrows between ranks."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pynccl import chrome_trace as chrome
from pynccl.chrome_trace import Event
from pynccl.comm.collectives import bus_factor

from .profiled import covered
from .spans import BY_CPU, COMM, COMPUTE, CPU, EXPOSED, STEP, Lane, RankPart, Slice

_KINDS = (STEP, COMPUTE, CPU, COMM)
_NAMES = {STEP: "steps", COMPUTE: "compute", CPU: "cpu"}
_SOURCE = "pynccl_autograd.trace"


class _Place(NamedTuple):
    """One rank's part of a collective: its times from the begin of the trace."""

    begin: float
    end: float
    rank: int
    tid: int


class _Covered:
    """Times that lie in at least one of the intervals."""

    def __init__(self, intervals: Sequence[tuple[float, float]]) -> None:
        self.intervals = covered(intervals)
        self._ends = [end for _, end in self.intervals]

    def within(self, begin: float, end: float) -> float:
        """Seconds of them between these two."""
        total, at = 0.0, bisect_right(self._ends, begin)
        while at < len(self.intervals) and self.intervals[at][0] < end:
            total += max(min(self.intervals[at][1], end) - max(self.intervals[at][0], begin), 0.0)
            at += 1
        return total


class _Rank:
    """A part with its times from the begin of the trace: `zero`, seconds of the clock of rank 0."""

    def __init__(self, part: RankPart, zero: float) -> None:
        self.part, self.shift = part, -part.offset - zero
        self.lanes: dict[Lane, list[Slice]] = defaultdict(list)
        for piece in part.pieces:
            self.lanes[piece.lane].append(piece._replace(begin=piece.begin + self.shift, end=piece.end + self.shift))
        self.lanes = {lane: _nested(self.lanes[lane]) for lane in sorted(self.lanes, key=self._order)}
        self.tids = {lane: tid for tid, lane in enumerate(self.lanes, 1)}
        pieces = [piece for found in self.lanes.values() for piece in found]
        self.exposed = _Covered([(one.begin, one.end) for one in pieces if one.category == EXPOSED])
        self.busy = _Covered([(one.begin, one.end) for one in pieces if one.category == COMM])

    def _order(self, lane: Lane) -> tuple[Any, ...]:
        """From above: steps, what is computed, communicators in the order in which they were first used."""
        uids = list(self.part.comms)
        at = uids.index(lane.comm) if lane.comm in uids else 0
        return _KINDS.index(lane.kind), at, lane.rank, lane.beside, lane.number == BY_CPU, lane.number

    def summary(self) -> dict[str, float]:
        """In milliseconds: the length of the block, in how much of it something travelled, and in how much of that
        what is computed waited for it."""
        times = {
            "block_ms": self.part.end - self.part.begin,
            "communication_ms": sum(end - begin for begin, end in self.busy.intervals),
            "exposed_ms": sum(self.exposed.within(*interval) for interval in self.busy.intervals),
        }
        return {name: round(value * 1e3, 3) for name, value in times.items()}


class Merged:
    """The trace of some ranks.   missing: why others are not in it"""

    def __init__(self, parts: Sequence[RankPart], missing: Mapping[int, str]) -> None:
        self.missing = dict(missing)
        ordered = sorted(parts, key=lambda part: part.rank)
        zero = min(min([part.begin, *(one.begin for one in part.pieces)]) - part.offset for part in ordered)
        self._ranks = [_Rank(part, zero) for part in ordered]
        self._met: dict[str, set[_Place]] = {}
        for one in self._ranks:
            for lane, pieces in one.lanes.items():
                for piece in pieces:
                    place = _Place(piece.begin, piece.end, one.part.rank, one.tids[lane])
                    for key in piece.keys:
                        self._met.setdefault(key, set()).add(place)
        self.summary = {f"rank {one.part.rank}": one.summary() for one in self._ranks}

    def events(self) -> Iterator[Event]:
        """Names, then slices of each rank, then arrows."""
        for one in self._ranks:
            part = one.part
            yield from chrome.process(part.rank, f"rank {part.rank}", f"{part.device}, pid {part.pid} on {part.host}")
            for lane, tid in one.tids.items():
                yield from chrome.lane(part.rank, tid, self._lane_name(part, lane))
            for lane, pieces in one.lanes.items():
                for piece in pieces:
                    yield self._slice(one, piece, one.tids[lane])
            if part.raised:
                yield chrome.moment(f"raised {part.raised}", "end", part.rank, 0, part.end + one.shift)
        for number, (key, places) in enumerate(self._met.items(), 1):
            title = key.partition(" ")[2]
            yield from chrome.arrows(number, title, [(at.begin, at.rank, at.tid) for at in sorted(places)])

    def metadata(self) -> dict[str, Any]:
        """What there is to know of the file as a whole."""
        parts = [one.part for one in self._ranks]
        told: dict[str, Any] = {"source": _SOURCE, "ranks": len(parts), "clocks": _clocks(parts)}
        told["uncertainty_us"] = {f"rank {part.rank}": round(part.uncertainty * 1e6, 3) for part in parts}
        if self.missing:
            told["missing"] = {f"rank {rank}": why for rank, why in self.missing.items()}
        for name in ("raised", "dropped", "captured"):
            if found := {f"rank {part.rank}": getattr(part, name) for part in parts if getattr(part, name)}:
                told[name] = found
        return told | {"summary": self.summary}

    def _lane_name(self, part: RankPart, lane: Lane) -> str:
        if lane.kind != COMM:
            return _NAMES[lane.kind] + (f" {lane.number + 1}" if lane.number else "")
        name, _, size = part.comms.get(lane.comm, (lane.comm, 0, 0))
        found = [other.part for other in self._ranks if lane.comm in other.part.comms]
        members = [other.rank for other in sorted(found, key=lambda other: other.comms[lane.comm][1])]
        name += f", ranks {' '.join(map(str, members))}" if len(members) == size else f", {size} ranks"
        if len({piece.lane.rank for piece in part.pieces if piece.lane.comm == lane.comm}) > 1:
            name += f", its rank {lane.rank}"
        if lane.number == BY_CPU:
            return f"{name}, by the CPU"
        return name + (", side stream" if lane.beside else "") + (f" {lane.number + 1}" if lane.number else "")

    def _slice(self, one: _Rank, piece: Slice, tid: int) -> Event:
        args, begin, end = dict(piece.args), piece.begin, piece.end
        if piece.category == COMM:
            exposed = one.exposed.within(begin, end)
            args |= {"exposed_us": round(exposed * 1e6, 3), "hidden_us": round((end - begin - exposed) * 1e6, 3)}
            if len(piece.keys) == 1:
                args |= self._of_all(piece, _Place(begin, end, one.part.rank, tid))
        return chrome.piece(piece.name, piece.category, one.part.rank, tid, begin, end, args)

    def _of_all(self, piece: Slice, own: _Place) -> dict[str, Any]:
        """Of a collective: who came late, and how quick it was from then on."""
        places = self._met[piece.keys[0]]
        if len(places) < 2 or piece.name.endswith("(has not ended)"):
            return {}
        first, last = min(places), max(places)
        told: dict[str, Any] = {
            "late_us": round((own.begin - first.begin) * 1e6, 3),
            "last_rank": last.rank,
            "waited_us": round(max(min(last.begin, own.end) - own.begin, 0.0) * 1e6, 3),
        }
        nbytes, seconds = piece.args.get("bytes", 0), own.end - max(own.begin, min(last.begin, own.end))
        if nbytes and seconds > 0 and "#" in piece.keys[0]:
            factor = bus_factor(piece.args["operation"], len(places))
            told |= {
                "algbw_GBps": float(f"{nbytes / seconds / 1e9:.4g}"),
                "busbw_GBps": float(f"{nbytes * factor / seconds / 1e9:.4g}"),
            }
        return told


def _clocks(parts: list[RankPart]) -> str:
    words = [f"rank {part.rank} {part.offset * 1e6:+.1f} us" for part in parts if part.uncertainty]
    if not words:
        return "all ranks have the clock of one machine"
    return "compared with that of rank 0 by collectives; ahead of it: " + ", ".join(words)


def _nested(pieces: list[Slice]) -> list[Slice]:
    """In the order of a lane, each within the one around it: the profiler's clock is good to about a microsecond."""
    found: list[Slice] = []
    around: list[Slice] = []
    for piece in sorted(pieces, key=lambda piece: (piece.begin, -piece.end)):
        while around and around[-1].end <= piece.begin:
            around.pop()
        end = min(piece.end, around[-1].end) if around else piece.end
        around.append(piece._replace(end=end))
        found.append(around[-1])
    return found
