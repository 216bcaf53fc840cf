"""The parts of all ranks as one trace: lanes, who came late to a collective, what was exposed, arrows between ranks."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

from pynccl import chrome_trace as chrome
from pynccl.chrome_trace import Event

from .meeting import Offset
from .spans import COMM, COMPUTE, STEP, Lane, Part, Piece

_KINDS = (STEP, COMPUTE, COMM)
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
        self.begins: list[float] = []
        self.ends: list[float] = []
        for begin, end in sorted(intervals):
            if self.ends and begin <= self.ends[-1]:
                self.ends[-1] = max(self.ends[-1], end)
            else:
                self.begins.append(begin)
                self.ends.append(end)

    def within(self, begin: float, end: float) -> float:
        """Seconds of them between these two."""
        total, at = 0.0, bisect_right(self.ends, begin)
        while at < len(self.begins) and self.begins[at] < end:
            total += min(self.ends[at], end) - max(self.begins[at], begin)
            at += 1
        return max(total, 0.0)

    @property
    def seconds(self) -> float:
        return sum(end - begin for begin, end in zip(self.begins, self.ends, strict=True))


@dataclass
class _Rank:
    """A part with its times from the begin of the trace."""

    part: Part
    shift: float
    tids: dict[Lane, int]
    exposed: _Covered = field(init=False)
    busy: _Covered = field(init=False)

    def __post_init__(self) -> None:
        pieces = self.part.pieces
        self.exposed = _Covered([self.times(one) for one in pieces if one.blocks])
        self.busy = _Covered([self.times(one) for one in pieces if one.lane.kind == COMM])

    def times(self, piece: Piece) -> tuple[float, float]:
        return piece.begin + self.shift, piece.end + self.shift


class Merged:
    """The trace of some ranks.   missing: why others are not in it; offsets: of their clocks"""

    def __init__(self, parts: Sequence[Part], offsets: Mapping[int, Offset], missing: Mapping[int, str]) -> None:
        self.missing = dict(missing)
        self._offsets = offsets
        ordered = sorted(parts, key=lambda part: part.rank)
        shifts = {part.rank: -offsets.get(part.rank, Offset()).seconds for part in ordered}
        firsts = [
            begin + shifts[part.rank]
            for part in ordered
            for begin in chain([part.begin], (one.begin for one in part.pieces))
        ]
        zero = min(firsts, default=0.0)
        self._ranks = [_Rank(part, shifts[part.rank] - zero, _tids(part)) for part in ordered]
        self._met: dict[str, set[_Place]] = {}
        for one in self._ranks:
            for piece in one.part.pieces:
                place = _Place(*one.times(piece), one.part.rank, one.tids[piece.lane])
                for key in piece.keys:
                    self._met.setdefault(key, set()).add(place)

    def events(self) -> Iterator[Event]:
        """Names, then slices and counters of each rank, then arrows."""
        for one in self._ranks:
            yield from self._names(one)
            for piece in sorted(one.part.pieces, key=lambda piece: (piece.begin, -piece.end)):
                yield from self._slices(one, piece)
            yield from _in_flight(one)
            if one.part.raised:
                at = one.part.end + one.shift
                yield chrome.moment(f"raised {one.part.raised}", "end", one.part.rank, 0, at)
        for number, (key, places) in enumerate(self._met.items(), 1):
            title = key.partition(" ")[2]
            yield from chrome.arrows(number, title, [(at.begin, at.rank, at.tid) for at in sorted(places)])

    def metadata(self) -> dict[str, Any]:
        """What there is to know of the file as a whole."""
        said: dict[str, Any] = {"source": _SOURCE, "ranks": len(self._ranks), "clocks": self._clocks()}
        uncertain = {one.part.rank: self._uncertainty(one) for one in self._ranks}
        said["uncertainty_us"] = {f"rank {rank}": round(value * 1e6, 3) for rank, value in uncertain.items()}
        notes: dict[str, dict[int, Any]] = {
            "missing": self.missing,
            "raised": {one.part.rank: one.part.raised for one in self._ranks if one.part.raised},
            "dropped": {one.part.rank: one.part.dropped for one in self._ranks if one.part.dropped},
            "captured": {one.part.rank: one.part.captured for one in self._ranks if one.part.captured},
        }
        said |= {name: {f"rank {rank}": text for rank, text in found.items()} for name, found in notes.items() if found}
        return said | {"summary": self.summary()}

    def summary(self) -> dict[str, dict[str, float]]:
        """Of each rank, in milliseconds: the length of the block, in how much of it something travelled, and in how
        much of that what is computed waited for it."""
        found = {}
        for one in self._ranks:
            block = (one.part.end - one.part.begin) * 1e3
            travelled = one.busy.seconds * 1e3
            exposed = (
                sum(one.exposed.within(*times) for times in zip(one.busy.begins, one.busy.ends, strict=True)) * 1e3
            )
            times = {"block_ms": block, "communication_ms": travelled, "exposed_ms": exposed}
            found[f"rank {one.part.rank}"] = {name: round(value, 3) for name, value in times.items()}
        return found

    def _clocks(self) -> str:
        moved = {rank: offset for rank, offset in self._offsets.items() if offset.uncertainty}
        if not moved:
            return "all ranks have the clock of one machine"
        words = [f"rank {rank} {offset.seconds * 1e6:+.1f} us" for rank, offset in moved.items()]
        return "compared with that of rank 0 by questions and answers; ahead of it: " + ", ".join(words)

    def _uncertainty(self, one: _Rank) -> float:
        return one.part.uncertainty + self._offsets.get(one.part.rank, Offset()).uncertainty

    def _names(self, one: _Rank) -> Iterator[Event]:
        part = one.part
        yield from chrome.process(part.rank, f"rank {part.rank}", f"{part.device}, pid {part.pid} on {part.host}")
        for lane, tid in one.tids.items():
            yield from chrome.lane(part.rank, tid, self._lane_name(part, lane))

    def _lane_name(self, part: Part, lane: Lane) -> str:
        if lane.kind != COMM:
            several = f" {lane.number + 1}" if lane.number else ""
            return ("steps" if lane.kind == STEP else "compute") + several + (" beside" if lane.beside else "")
        name, _, size = part.comms.get(lane.comm, (lane.comm, 0, 0))
        members = sorted(
            (other.part.comms[lane.comm][1], other.part.rank) for other in self._ranks if lane.comm in other.part.comms
        )
        ranks = " ".join(str(rank) for _, rank in members)
        name += f", ranks {ranks}" if len(members) == size else f", {size} ranks"
        if len({other.rank for other in part_lanes(part) if other.comm == lane.comm}) > 1:
            name += f", its rank {lane.rank}"
        if lane.number < 0:
            return f"{name}, by the CPU"
        return name + (", side stream" if lane.beside else "") + (f" {lane.number + 1}" if lane.number else "")

    def _slices(self, one: _Rank, piece: Piece) -> Iterator[Event]:
        rank, tid = one.part.rank, one.tids[piece.lane]
        begin, end = one.times(piece)
        args = {name: value for name, value in piece.args.items() if name != "on"}
        name = piece.name if piece.done else f"{piece.name} (has not ended)"
        if piece.lane.kind != COMM:
            yield chrome.piece(name, "exposed" if piece.blocks else piece.lane.kind, rank, tid, begin, end, args)
            return
        exposed = one.exposed.within(begin, end)
        args |= {"exposed_us": round(exposed * 1e6, 3), "hidden_us": round((end - begin - exposed) * 1e6, 3)}
        if len(piece.keys) == 1:
            args |= self._of_all(piece, _Place(begin, end, rank, tid))
        yield chrome.piece(name, "comm", rank, tid, begin, end, args)
        on = piece.args.get("on")
        if on is not None and (waiting := one.tids.get(Lane(*on))) is not None:
            title = f"{piece.args.get('operation', name)} on {piece.args.get('comm', '')}"
            yield chrome.piece(title, "exposed", rank, waiting, begin, end, {"layer": piece.args.get("layer", "")})

    def _of_all(self, piece: Piece, own: _Place) -> dict[str, Any]:
        """Of a collective: who came late, and how quick it was from then on."""
        places = self._met[piece.keys[0]]
        if len(places) < 2 or not piece.done:
            return {}
        first, last = min(places), max(places)
        said: dict[str, Any] = {
            "late_us": round((own.begin - first.begin) * 1e6, 3),
            "last_rank": last.rank,
            "waited_us": round(max(min(last.begin, own.end) - own.begin, 0.0) * 1e6, 3),
        }
        nbytes, seconds = piece.args.get("bytes", 0), own.end - max(own.begin, min(last.begin, own.end))
        if nbytes and seconds > 0 and "#" in piece.keys[0]:
            from pynccl.tools.perf.operations import bus_factor  # what it imports is needed here alone

            factor = bus_factor(piece.args["operation"], len(places))
            said |= {
                "algbw_GBps": float(f"{nbytes / seconds / 1e9:.4g}"),
                "busbw_GBps": float(f"{nbytes * factor / seconds / 1e9:.4g}"),
            }
        return said


def part_lanes(part: Part) -> set[Lane]:
    return {piece.lane for piece in part.pieces}


def _tids(part: Part) -> dict[Lane, int]:
    """From above: steps, what is computed, communicators in the order in which they were first used."""
    uids = list(part.comms)
    lanes = part_lanes(part) | {Lane(*piece.args["on"]) for piece in part.pieces if "on" in piece.args}
    ordered = sorted(
        lanes,
        key=lambda lane: (
            _KINDS.index(lane.kind),
            uids.index(lane.comm) if lane.comm in uids else 0,
            lane.rank,
            lane.beside,
            lane.number,
        ),
    )
    return {lane: tid for tid, lane in enumerate(ordered, 1)}


def _in_flight(one: _Rank) -> Iterator[Event]:
    """The counter "bytes in flight": of what has begun, and has not ended."""
    steps = []
    for piece in one.part.pieces:
        if piece.lane.kind == COMM and (nbytes := piece.args.get("bytes", 0)):
            begin, end = one.times(piece)
            steps += [(begin, nbytes), (end, -nbytes)]
    total = 0
    for at, more in sorted(steps):
        total += more
        yield chrome.counter("bytes in flight", one.part.rank, at, total)
