"""Records of overlap: the timed work of each pass of a layer, and a table of how well the layers overlap.

`ad.trace` (tracing/) shows everything that a step does, and writes a file for Perfetto."""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
import weakref
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from pynccl.bindings.values import attribute, instance

from ..names import plain_name
from .keys import as_config
from .lanes import Lane, Lanes, Observer, observing, seconds_between
from .schedules import Decision


class Interval(NamedTuple):
    """A piece of work.

    lane        "main", "second" or "comm", which has all communication
    number      index among the work of the same name in the operation, from 0
    begin, end  seconds since the operation began"""

    lane: str
    what: str
    number: int
    begin: float
    end: float


class Operation(NamedTuple):
    """One completed pass of a layer. It holds plain values and can be pickled.

    owner     name of the layer's type; "" for a function called without a layer
    decision  the `Decision` of the pass: pattern, method, chunks; None for `CommOverlap.bulk`
    wall      seconds from the begin to the point where the caller's stream has waited for the other streams"""

    owner: str
    decision: Any
    wall: float
    intervals: tuple[Interval, ...]

    @property
    def comm(self) -> float:
        """Seconds of communication, including waits for peers."""
        return _covered(one for one in self.intervals if one.lane == "comm")

    @property
    def compute(self) -> float:
        """Seconds of computation."""
        return _covered(one for one in self.intervals if one.lane != "comm")

    @property
    def exposed(self) -> float:
        """Seconds without computation."""
        return self.wall - self.compute

    @property
    def efficiency(self) -> float:
        """Hidden time / time that can be hidden: 1.0 is ideal, 0.0 is no overlap. nan if the shorter of communication
        and computation takes less than 1% of the time: the gaps between pieces of work are longer."""
        hidden, hideable = self.comm + self.compute - self.wall, min(self.comm, self.compute)
        return hidden / hideable if hideable > self.wall / 100 else math.nan


def _covered(intervals: Iterable[Interval]) -> float:
    """Return the seconds that at least one of the intervals covers."""
    seconds = upto = 0.0
    for begin, end in sorted((one.begin, one.end) for one in intervals):
        seconds += max(0.0, end - max(begin, upto))
        upto = max(upto, end)
    return seconds


class Trace(Observer):
    """An observer that records the work of lanes: `with recording() as trace: layer(x)`, then `trace.operations()`.

    It contains completed operations only, and keeps no tensor and no layer alive. It cannot record CUDA graph captures,
    since events of a graph have no times."""

    def __init__(self) -> None:
        # Passes of several threads need no lock: each has its own list of work, and each change of what they share is
        # one operation on a list or a dict, which is atomic.
        # Begin and work of each running pass, with marks in place of seconds; weak: after an error it may not close.
        self._open: weakref.WeakKeyDictionary[Lanes, tuple[Any, list[Interval]]] = weakref.WeakKeyDictionary()
        self._closed: list[Operation | tuple[Any, ...]] = []  # the arguments of _timed, until the operation is read

    def opened(self, lanes: Lanes) -> None:
        """See Observer. The mark comes before what other lanes wait for, so no work begins before it."""
        self._open[lanes] = lanes.main.mark(), []

    def ran(self, lane: Lane, name: str, reads: Sequence[Any], writes: Sequence[Any], begin: Any, end: Any) -> None:
        _, work = self._open[lane.lanes]
        work.append(Interval(lane.name, name, sum(one.what == name for one in work), begin, end))

    def closed(self, lanes: Lanes) -> None:
        self._closed.append((lanes.main.mark(), self.name(lanes.owner), lanes.decision, *self._open.pop(lanes)))

    def name(self, owner: Any) -> str:
        return "" if owner is None else type(owner).__name__

    def operations(self) -> list[Operation]:
        """Return the completed operations in the order of their end, after waiting for them."""
        operations = [one if isinstance(one, Operation) else _timed(*one) for one in tuple(self._closed)]
        self._closed[: len(operations)] = operations  # frees the marks; other threads may have added more
        return operations


def _timed(end: Any, owner: str, decision: Any, begin: Any, work: Sequence[Interval]) -> Operation:
    """Return an operation with seconds in place of marks, after waiting for its end."""
    end.synchronize()  # after it, all marks are complete
    seconds = partial(seconds_between, begin)
    intervals = tuple(one._replace(begin=seconds(one.begin), end=seconds(one.end)) for one in work)
    return Operation(owner, decision, seconds(end), intervals)


@contextlib.contextmanager
def _observed_by(trace: Any) -> Iterator[Any]:
    with observing(trace):
        yield trace


def recording() -> contextlib.AbstractContextManager[Trace]:
    """Record the operations that begin in the block, in all threads."""
    return _observed_by(Trace())


_UNSEEN = "no overlap observed: not called, no backward pass, compiled, or too small under autocast"
_HEADINGS = ("layer", "pass", "chosen", "calls", "comm us", "mm us", "wall us", "exposed us", "efficiency")
_LINE = "{:{width}}  {:8}  {:12}  {:>5}  {:>9}  {:>9}  {:>9}  {:>10}  {:>10}"


class Row(NamedTuple):
    """One pass of one layer. Times are medians over its calls in seconds; nan if the pass did not overlap.

    layer       name in the model, or type, sizes and a number
    what        "forward" or "backward"
    pattern     as in `Decision`
    decision    the latest `Decision`: method, chunks, reason, times of the race
    calls       number of calls, with or without overlap
    comm, mm    time of communication, and of matmuls
    wall        time from begin to end
    exposed     wall - mm: time that the communication adds
    efficiency  hidden time / time that can be hidden: 1.0 is ideal, 0.0 is no overlap; nan: nothing to hide"""

    layer: str
    what: str
    pattern: str
    decision: Decision
    calls: int
    comm: float
    mm: float
    wall: float
    exposed: float
    efficiency: float


class Report(Trace):
    """The result of `report()`; print it after the block, or read `rows()`. Its `operations()` include passes without
    overlap, whose time is nan."""

    def __init__(self, model: torch.nn.Module | None = None) -> None:
        super().__init__()
        modules = {} if model is None else {plain_name(model, path): one for path, one in model.named_modules()}
        self._names = weakref.WeakKeyDictionary({module: name or "model" for name, module in modules.items()})
        self._overlapping = [self._names[module] for module in modules.values() if _may_overlap(module)]
        self._numbers = itertools.count(1)  # of layers that are not in the model
        self._called: set[str] = set()

    def name(self, owner: Any) -> str:
        """Return the name of a layer: its name in the model, or its type, sizes and a number."""
        if owner is not None and owner not in self._names:
            features = (attribute(owner, name) for name in ("in_features", "out_features"))
            sizes = ", ".join(str(size) for size in features if size is not None)
            self._names.setdefault(owner, f"{type(owner).__name__}({sizes}) #{next(self._numbers)}")
        return "(function)" if owner is None else self._names[owner]

    def decided(self, owner: Any, decision: Decision) -> None:
        """See Observer. A pass without overlap has no lanes, so this is all that is known of it."""
        self._called.add(self.name(owner))
        if decision.method == "off":
            self._closed.append(Operation(self.name(owner), decision, math.nan, ()))

    def rows(self) -> list[Row]:
        """Return the passes of all layers in the order of their first calls, a forward pass before its backward pass.
        After the decision of a race, a row covers only the calls since then."""
        calls: dict[str, dict[str, list[Operation]]] = {}  # layer -> pattern -> its calls
        for one in self.operations():
            if one.decision is not None:
                calls.setdefault(one.owner, {}).setdefault(one.decision.pattern, []).append(one)
        layers = [[_row(passes) for passes in patterns.values()] for patterns in calls.values()]
        return [row for rows in layers for row in sorted(rows, key=lambda row: row.what == "backward")]

    def __str__(self) -> str:
        rows = self.rows()
        unseen = [f"  {name}: {_UNSEEN}" for name in self._overlapping if name not in self._called]
        table = [_HEADINGS, *(_cells(row) for row in rows)]
        width = max(len(layer) for layer, *_ in table)
        lines = [_LINE.format(*one, width=width) for one in table] if rows else ["overlap: no layer with overlap ran"]
        return "\n".join([*lines, *dict.fromkeys(_reason(row) for row in rows), *unseen])


def _row(calls: Sequence[Operation]) -> Row:
    """calls: of one pass of one layer"""
    latest = calls[-1].decision
    if latest.settled:  # leave out the calls of the race
        calls = [one for one in calls if one.decision.settled and one.decision.schedule == latest.schedule]
    calls = [one for one in calls if one.intervals] or calls
    what = "backward" if latest.pattern.endswith("backward") else "forward"
    medians = (_median(calls, name) for name in ("comm", "compute", "wall", "exposed", "efficiency"))
    return Row(calls[-1].owner, what, latest.pattern, calls[-1].decision, len(calls), *medians)


def _median(calls: Sequence[Operation], name: str) -> float:
    known = [value for one in calls if one.intervals and not math.isnan(value := getattr(one, name))]
    return statistics.median(known) if known else math.nan


def _cells(row: Row) -> tuple[str, ...]:
    times = (f"{1e6 * seconds:,.0f}" for seconds in (row.comm, row.mm, row.wall, row.exposed))
    numbers = (number.replace("nan", "-") for number in (*times, f"{row.efficiency:.2f}"))
    return (row.layer, row.what, row.decision.schedule, str(row.calls), *numbers)


def _reason(row: Row) -> str:
    """Return the reason of the decision, and a hint if its schedule has become slower than "off" was in the race."""
    reason = f"  {row.layer}, {row.what}: {row.decision.reason}"
    if row.decision.settled and row.wall > row.decision.tried.get("off", math.inf):
        reason += f"; now {row.wall * 1e3:.3g} ms, slower than off was in the race: call ad.overlap.retry(layer)"
    return reason


def _may_overlap(module: torch.nn.Module) -> bool:
    """Return whether the module is a layer that overlaps when it is called directly."""
    kind, comm = (attribute(module, name) for name in ("kind", "comm"))
    if kind not in ("column", "row") or attribute(comm, "size") == 1 or attribute(module, "gather_input") is False:
        return False
    config = as_config("overlap.report", module.overlap, kind)
    return not config.method == config.backward.method == "off"


def report(model: torch.nn.Module | None = None) -> contextlib.AbstractContextManager[Report]:
    """Report the overlap of all layers of this process in the block.

        with ad.overlap.report(model) as report:
            for _ in range(10):
                train_step(model)
        print(report)

    model  names the layers; the report then also lists layers without observed overlap, for example because
           torch.compile has disabled it

    Each measurement takes some microseconds. The report shows medians over the calls."""
    instance(model, (torch.nn.Module, type(None)), "overlap.report: model", "a torch.nn.Module, or None")
    return _observed_by(Report(model))
