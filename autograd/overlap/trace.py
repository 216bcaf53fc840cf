"""Timings of overlapped operations: their work as intervals on lanes, and totals of each.

`ad.trace` (tracing/) shows everything that a step does, and writes a file for Perfetto."""

from __future__ import annotations

import contextlib
import math
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from .lanes import Lane, Lanes, Observer, observing, seconds_between

COMM = "comm"
# Work with these names is communication, even if it runs on the caller's stream without overlap.
_COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send_recv")


class Interval(NamedTuple):
    """A piece of work.

    lane        "main", "second" or "comm", which has all communication
    number      index among the work of the same name in the operation, from 0
    begin, end  seconds since the operation began
    shape       of the output;  nbytes: its size
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
    """One completed pass of a layer. It holds plain values and can be pickled.

    owner    name of the layer's type; "" for a function called without a layer
    pattern  as in `Decision`; "" if there was no decision
    start    seconds: time.perf_counter() on the CPU; on a GPU, since the begin of the trace's first operation
    wall     seconds from the begin to the point where the caller's stream has waited for the other streams
    decision the `Decision` of the pass
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
        """Seconds of communication, including waits for peers."""
        return _covered(one for one in self.intervals if one.lane == COMM)

    @property
    def compute(self) -> float:
        """Seconds of computation."""
        return _covered(one for one in self.intervals if one.lane != COMM)

    @property
    def exposed(self) -> float:
        """Seconds without computation."""
        return self.wall - self.compute

    @property
    def efficiency(self) -> float:
        """Hidden time / time that can be hidden: 1.0 is ideal, 0.0 is no overlap.

        nan if the shorter of communication and computation takes less than 1% of the time: the gaps between pieces of
        work are longer."""
        comm, compute = self.comm, self.compute
        hideable = min(comm, compute)
        return (comm + compute - self.wall) / hideable if hideable > self.wall / 100 else math.nan


def _covered(intervals: Iterator[Interval]) -> float:
    """Return the seconds that at least one of the intervals covers."""
    seconds = upto = 0.0
    for begin, end in sorted((one.begin, one.end) for one in intervals):
        seconds += max(0.0, end - max(begin, upto))
        upto = max(upto, end)
    return seconds


@dataclass
class _Record:
    """An operation that may still be running. It holds no reference to the layer."""

    begin: Any
    work: list[Interval]
    owner: str = ""
    decision: Any = None
    end: Any = None


class Trace(Observer):
    """An observer that records the work of lanes.

        with recording() as trace:
            layer(x).sum().backward()
        for operation in trace.operations():
            print(operation.owner, operation.efficiency)

    It contains completed operations only. On a GPU, marks are timing events, which are cheap; on the CPU, clock times.
    It cannot record CUDA graph captures, since events of a graph have no times."""

    timing = True

    def __init__(self) -> None:
        self._open: weakref.WeakKeyDictionary[Lanes, _Record] = weakref.WeakKeyDictionary()
        self._ended: list[_Record] = []
        self._resolved: list[Operation] = []
        self._first: Any = None  # mark at which the first operation began
        self._lock = threading.Lock()  # the backward pass runs in other threads

    def ran(self, lane: Lane, name: str, reads: Sequence[Any], writes: Sequence[Any], begin: Any, end: Any) -> None:
        """See Observer. Marks may be pending. No tensor is kept alive."""
        with self._lock:
            work = self._open[lane.lanes].work
        row = COMM if name in _COLLECTIVES else lane.name
        number = sum(one.what == name for one in work)
        shape = tuple(writes[0].shape) if writes else ()
        work.append(Interval(row, name, number, begin, end, shape, sum(one.nbytes for one in writes)))

    def name(self, owner: Any) -> str:
        """Return the name of a layer in the trace."""
        return "" if owner is None else type(owner).__name__

    def opened(self, lanes: Lanes) -> None:
        """See Observer. The mark comes before what other lanes wait for, so no work begins before it."""
        begin = lanes.main.mark()
        with self._lock:
            self._open[lanes] = _Record(begin, [])
            self._first = begin if self._first is None else self._first

    def closed(self, lanes: Lanes) -> None:
        """See Observer."""
        end = lanes.main.mark()
        with self._lock:
            record = self._open.pop(lanes)
            record.owner, record.decision, record.end = self.name(lanes.owner), lanes.decision, end
            self._ended.append(record)

    def operations(self) -> list[Operation]:
        """Return the completed operations in the order of their end, after waiting for them."""
        with self._lock:
            ended, self._ended = self._ended, []
            for record in ended:
                if hasattr(record.end, "synchronize"):
                    record.end.synchronize()  # after it, all marks are complete
                self._resolved.append(_resolve(record, self._first))
            return list(self._resolved)


@contextlib.contextmanager
def recording() -> Iterator[Trace]:
    """Record the operations that begin in the block, in all threads."""
    trace = Trace()
    with observing(trace):
        yield trace


def _resolve(record: _Record, first: Any) -> Operation:
    """first: mark of the begin of the first operation"""
    start = record.begin if isinstance(record.begin, float) else seconds_between(first, record.begin)
    intervals = []
    for one in record.work:
        begin, end = (seconds_between(record.begin, mark) for mark in (one.begin, one.end))
        intervals.append(one._replace(begin=begin, end=end))
    decision = record.decision
    return Operation(
        record.owner,
        getattr(decision, "pattern", ""),
        getattr(decision, "method", ""),
        getattr(decision, "chunks", 1),
        start,
        seconds_between(record.begin, record.end),
        tuple(intervals),
        decision,
    )
