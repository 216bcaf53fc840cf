"""What overlapped operations did, and when: their events as intervals on lanes, and totals of each.

`ad.trace` (tracing/) shows these, too, beside all else that a step does, and writes a file for Perfetto."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pynccl.comm.observers import Observer, observing

from .lanes import Lane, Lanes, Point, seconds_between

COMM = "comm"
# Work of these names is communication also where it runs on the caller's stream, one thing after the other.
_COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send_recv")


class Interval(NamedTuple):
    """A piece of work.

    lane        "main", "second" or "comm": all communication is there
    number      the how many-th of its name in the operation, from 0
    begin, end  seconds from the operation's begin
    shape       of what it writes, and its bytes
    """

    lane: str
    what: str
    number: int
    begin: float
    end: float
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class Operation:
    """One pass of a layer that has ended. Plain values: it can be pickled.

    owner    name of the layer's type; "" of a function that was called by itself
    pattern  as `Decision` calls it; "" where nothing was decided
    start    seconds: of time.perf_counter() on the CPU, on a GPU from the begin of the trace's first operation
    wall     seconds from the caller's begin to where his stream has waited for all the others
    decision by what, with its reason
    """

    owner: str
    pattern: str
    method: str
    chunks: int
    start: float
    wall: float
    intervals: tuple[Interval, ...]
    decision: Any = None

    @property
    def comm(self) -> float:
        """Seconds in which something travels, waits for peers included."""
        return _covered(one for one in self.intervals if one.lane == COMM)

    @property
    def compute(self) -> float:
        """Seconds in which something is computed."""
        return _covered(one for one in self.intervals if one.lane != COMM)

    @property
    def exposed(self) -> float:
        """Seconds in which nothing is computed."""
        return self.wall - self.compute

    @property
    def efficiency(self) -> float:
        """The part of what can be hidden that was: 1.0 is the ideal, 0.0 one after the other."""
        comm, compute = self.comm, self.compute
        can = min(comm, compute)
        return (comm + compute - self.wall) / can if can > 0 else 0.0


def _covered(intervals: Iterator[Interval]) -> float:
    """Seconds that lie in at least one of the intervals."""
    seconds = upto = 0.0
    for begin, end in sorted((one.begin, one.end) for one in intervals):
        seconds += max(0.0, end - max(begin, upto))
        upto = max(upto, end)
    return seconds


@dataclass
class _Record:
    """An operation whose marks may not have happened yet. No layer is kept."""

    begin: Any
    work: list[Interval]
    owner: str = ""
    decision: Any = None
    end: Any = None


class Trace(Observer):
    """Records what runs on lanes.

        with recording() as trace:
            layer(x).sum().backward()
        for operation in trace.operations():
            print(operation.owner, operation.efficiency)

    Operations that have not ended, or were broken off, are not in it. On a GPU its marks are events with times, which
    cost little; on the CPU they are moments of one clock. Not for what is captured into a CUDA graph: the events of a
    graph have no times."""

    timing = True

    def __init__(self) -> None:
        self._open: weakref.WeakKeyDictionary[Lanes, _Record] = weakref.WeakKeyDictionary()
        self._ended: list[_Record] = []
        self._resolved: list[Operation] = []
        self._first: Any = None  # mark at which the first operation began
        self._lock = threading.Lock()  # a backward pass runs in threads of its own

    def ran(self, lane: Lane, name: str, reads: Sequence[Any], writes: Sequence[Any], begin: Any, end: Any) -> None:
        """See Observer. Marks of the lane may not have happened yet; no tensor is kept."""
        work = self._record(lane.lanes).work
        row = COMM if name in _COLLECTIVES else lane.name
        number = sum(one.what == name for one in work)
        shape = tuple(writes[0].shape) if writes else ()
        work.append(Interval(row, name, number, begin, end, shape, sum(one.nbytes for one in writes)))

    def name(self, owner: Any) -> str:
        """What a layer is called in the trace."""
        return "" if owner is None else type(owner).__name__

    def recorded(self, lane: Lane, point: Point) -> None:
        """See Observer. The first point of all is the caller's, at which the operation begins."""
        self._record(lane.lanes)

    def closed(self, lanes: Lanes) -> None:
        """See Observer."""
        record = self._record(lanes)
        record.owner = self.name(lanes.owner)
        record.decision, record.end = lanes.decision, lanes.main.mark()
        with self._lock:
            self._open.pop(lanes, None)
            self._ended.append(record)

    def _record(self, lanes: Lanes) -> _Record:
        with self._lock:
            found = self._open.get(lanes)
            if found is None:
                found = self._open[lanes] = _Record(lanes.main.mark(), [])
                self._first = found.begin if self._first is None else self._first
            return found

    def operations(self) -> list[Operation]:
        """Those that have ended, in the order in which they did. Waits for them."""
        with self._lock:
            ended, self._ended = self._ended, []
            for record in ended:
                if hasattr(record.end, "synchronize"):
                    record.end.synchronize()  # the caller's stream has waited for the others: all marks have happened
                self._resolved.append(_resolve(record, self._first))
            return list(self._resolved)


@contextlib.contextmanager
def recording() -> Iterator[Trace]:
    """Record the operations that begin in the block, of all threads."""
    trace = Trace()
    with observing(trace):
        yield trace


def _resolve(record: _Record, first: Any) -> Operation:
    """first: mark at which the first operation began"""
    start = record.begin if isinstance(record.begin, float) else seconds_between(first, record.begin)
    intervals = []
    for one in record.work:
        begin, end = (seconds_between(record.begin, mark) for mark in (one.begin, one.end))
        intervals.append(one._replace(begin=begin, end=end))
    said = record.decision
    return Operation(
        record.owner,
        getattr(said, "pattern", ""),
        getattr(said, "method", ""),
        getattr(said, "chunks", 1),
        start,
        seconds_between(record.begin, record.end),
        tuple(intervals),
        said,
    )
