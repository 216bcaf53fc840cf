"""Records of overlap: the timed work of each pass of a layer, and a table of how well the layers overlap.

`ad.trace` (tracing/) shows everything that a step does, and writes a file for Perfetto."""

from __future__ import annotations

import contextlib
import math
import statistics
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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
    begin, end  seconds since the operation began
    """

    lane: str
    what: str
    number: int
    begin: float
    end: float


@dataclass(frozen=True)
class Operation:
    """One completed pass of a layer. It holds plain values and can be pickled.

    owner     name of the layer's type; "" for a function called without a layer
    decision  the `Decision` of the pass: pattern, method, chunks; None for `CommOverlap.bulk`
    wall      seconds from the begin to the point where the caller's stream has waited for the other streams
    """

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


class Trace(Observer):
    """An observer that records the work of lanes.

        with recording() as trace:
            layer(x).sum().backward()
        for operation in trace.operations():
            print(operation.owner, operation.efficiency)

    It contains completed operations only, and keeps no tensor and no layer alive. Marks are events: on a
    GPU, timing events, which are cheap. It cannot record CUDA graph captures, since events of a graph have no
    times."""

    def __init__(self) -> None:
        # Passes run in several threads. They need no lock: a pass has its own list of work, and each change of what the
        # passes share is one operation on a list or a dict, which is atomic.
        # Begin and work of each pass that runs, with marks in place of seconds; weak, since a failed pass never closes.
        self._open: weakref.WeakKeyDictionary[Lanes, tuple[Any, list[Interval]]] = weakref.WeakKeyDictionary()
        self._closed: list[Callable[[], Operation]] = []

    def ran(self, lane: Lane, name: str, reads: Sequence[Any], writes: Sequence[Any], begin: Any, end: Any) -> None:
        """See Observer. Marks may be pending."""
        _, work = self._open[lane.lanes]
        work.append(Interval(lane.name, name, sum(one.what == name for one in work), begin, end))

    def name(self, owner: Any) -> str:
        """Return the name of a layer in the trace."""
        return "" if owner is None else type(owner).__name__

    def opened(self, lanes: Lanes) -> None:
        """See Observer. The mark comes before what other lanes wait for, so no work begins before it."""
        self._open[lanes] = lanes.main.mark(), []

    def closed(self, lanes: Lanes) -> None:
        """See Observer."""
        end = lanes.main.mark()
        begin, work = self._open.pop(lanes)
        self._closed.append(partial(_operation, self.name(lanes.owner), lanes.decision, begin, end, work))

    def operations(self) -> list[Operation]:
        """Return the completed operations in the order of their end, after waiting for them."""
        return [operation() for operation in list(self._closed)]


def _operation(owner: str, decision: Any, begin: Any, end: Any, work: Sequence[Interval]) -> Operation:
    """Return an operation with seconds in place of marks, after waiting for it."""
    end.synchronize()  # after it, all marks are complete
    seconds = partial(seconds_between, begin)
    intervals = tuple(one._replace(begin=seconds(one.begin), end=seconds(one.end)) for one in work)
    return Operation(owner, decision, seconds(end), intervals)


@contextlib.contextmanager
def recording() -> Iterator[Trace]:
    """Record the operations that begin in the block, in all threads."""
    trace = Trace()
    with observing(trace):
        yield trace


# ---------------------------------------------------------------------------------------------------- the table

_UNSEEN = "no overlap observed: not called, no backward pass, or compiled (torch.compile disables overlap)"
_HEADINGS = ("layer", "pass", "chosen", "calls", "comm us", "mm us", "wall us", "exposed us", "efficiency")
_LINE = "{:{width}}  {:8}  {:11}  {:>5}  {:>9}  {:>9}  {:>9}  {:>10}  {:>10}"


@dataclass(frozen=True)
class Row:
    """One pass of one layer. Times are medians over its calls in seconds; nan if the pass did not overlap.

    layer       name in the model, or type, sizes and a number
    what        "forward" or "backward"
    pattern     as in `Decision`
    decision    the latest `Decision`: method, chunks, reason, times of the race
    calls       number of calls, with or without overlap
    comm, mm    time of communication, and of matmuls
    wall        time from begin to end
    exposed     wall - mm: time that the communication adds
    efficiency  hidden time / time that can be hidden: 1.0 is ideal, 0.0 is no overlap; nan: nothing to hide
    """

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
    """The result of `report()`; print it after the block, or read `rows()`.

    Its `operations()` include passes without overlap, whose time is nan."""

    def __init__(self, model: torch.nn.Module | None = None) -> None:
        super().__init__()
        modules = {} if model is None else {plain_name(model, path): one for path, one in model.named_modules()}
        self._names = {id(module): name or "model" for name, module in modules.items()}
        self._overlapping = [self._names[id(module)] for module in modules.values() if _may_overlap(module)]
        self._others: dict[int, Any] = {}  # id -> layer that is not in the model: kept, so that its id stays unique

    def name(self, owner: Any) -> str:
        """Return the name of a layer: its name in the model, or its type, sizes and a number."""
        if owner is None:
            return "(function)"
        if id(owner) in self._names:
            return self._names[id(owner)]
        self._others.setdefault(id(owner), owner)
        number = list(self._others).index(id(owner)) + 1
        features = [attribute(owner, name) for name in ("in_features", "out_features")]
        sizes = ", ".join(str(size) for size in features if size is not None)
        return f"{type(owner).__name__}({sizes}) #{number}"

    def decided(self, owner: Any, decision: Decision) -> None:
        """See Observer. A pass without overlap has no lanes, so this is all that is known of it."""
        if decision.method == "off":
            self._closed.append(partial(Operation, self.name(owner), decision, math.nan, ()))

    def rows(self) -> list[Row]:
        """Return the passes of all layers in the order of their first calls, a forward pass before its backward pass.

        After the decision of a race, a row covers only the calls since then."""
        calls: dict[tuple[str, str], list[Operation]] = {}
        for one in self.operations():
            if one.decision is not None:
                calls.setdefault((one.owner, one.decision.pattern), []).append(one)
        rows = [_row(*key, operations) for key, operations in calls.items()]
        layers = [row.layer for row in rows]
        return sorted(rows, key=lambda row: (layers.index(row.layer), row.what == "backward"))

    def __str__(self) -> str:
        rows = self.rows()
        seen = {row.layer for row in rows}
        unseen = [f"  {name}: {_UNSEEN}" for name in self._overlapping if name not in seen]
        if not rows:
            return "\n".join(["overlap: no layer with overlap ran", *unseen])
        table = [_HEADINGS, *(_cells(row) for row in rows)]
        width = max(len(layer) for layer, *_ in table)
        lines = [_LINE.format(*cells, width=width) for cells in table]
        reasons = dict.fromkeys(_reason(row) for row in rows)
        return "\n".join([*lines, *reasons, *unseen])


def _row(layer: str, pattern: str, calls: Sequence[Operation]) -> Row:
    latest = calls[-1].decision
    if latest.settled:  # leave out the calls of the race
        calls = [one for one in calls if one.decision.settled and one.decision.schedule == latest.schedule]
    overlapped = [one for one in calls if one.intervals]
    calls = overlapped or calls
    what = "backward" if pattern.endswith("backward") else "forward"
    medians = (_median(overlapped, name) for name in ("comm", "compute", "wall", "exposed", "efficiency"))
    return Row(layer, what, pattern, calls[-1].decision, len(calls), *medians)


def _median(operations: Sequence[Operation], name: str) -> float:
    known = [value for one in operations if not math.isnan(value := getattr(one, name))]
    return statistics.median(known) if known else math.nan


def _cells(row: Row) -> tuple[str, ...]:
    times = (_number(1e6 * seconds, ",.0f") for seconds in (row.comm, row.mm, row.wall, row.exposed))
    return (row.layer, row.what, row.decision.schedule, str(row.calls), *times, _number(row.efficiency, ".2f"))


def _number(value: float, form: str) -> str:
    return "-" if math.isnan(value) else format(value, form)


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


@contextlib.contextmanager
def report(model: torch.nn.Module | None = None) -> Iterator[Report]:
    """Report the overlap of all layers of this process in the block.

        with ad.overlap.report(model) as report:
            for _ in range(10):
                train_step(model)
        print(report)

    model  names the layers; the report then also lists layers without observed overlap, for example because
           torch.compile has disabled it

    Each measurement takes some microseconds. The report shows medians over the calls."""
    instance(model, (torch.nn.Module, type(None)), "overlap.report: model", "a torch.nn.Module, or None")
    result = Report(model)
    with observing(result):
        yield result
