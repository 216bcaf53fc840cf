"""Schedule, races: what overlapped layers issue on their lanes, and a proof that none of it can meet too early.

with deferred_lanes(), Schedule() as schedule:
    ad.all_gather_matmul(x, w, comm, overlap=ad.OverlapConfig("slices", chunks=4)).sum().backward()
for log in schedule.logs:                  # of each pass: forward, backward
    print("\\n".join(log.lines()))
    assert not races(log)
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

from deferred import DeferredLane
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from pynccl.comm.observing import Observer, observing
from pynccl_autograd.overlap.lanes import Lane, Lanes, Point

Span = tuple[int, int]  # bytes of a storage, from and up to


class Access(NamedTuple):
    """The memory of a tensor. spans: exactly the bytes of its elements, ascending."""

    storage: int
    spans: tuple[Span, ...]
    text: str

    def meets(self, other: Access) -> bool:
        """Whether there is a byte that is of both."""
        if self.storage != other.storage:
            return False
        mine, theirs = iter(self.spans), iter(other.spans)
        a, b = next(mine, None), next(theirs, None)
        while a is not None and b is not None:
            if a[0] < b[1] and b[0] < a[1]:
                return True
            if a[1] <= b[1]:
                a = next(mine, None)
            else:
                b = next(theirs, None)
        return False


def access(t: Tensor) -> Access:
    """The memory of a tensor, whatever its strides."""
    storage = t.untyped_storage().data_ptr()
    return Access(storage, _spans(t), f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}")


def _spans(t: Tensor) -> tuple[Span, ...]:
    if not t.numel():
        return ()
    item: int = t.element_size()
    # Innermost first: as long as dimensions follow each other without a gap, they are one run of bytes.
    dims = sorted((stride, size) for stride, size in zip(t.stride(), t.shape, strict=True) if stride and size > 1)
    run: int = 1
    while dims and dims[0][0] == run:
        run *= dims.pop(0)[1]
    begin = t.storage_offset()
    starts: list[int] = sorted(int(begin) + sum(at) for at in itertools.product(*(range(0, s * n, s) for s, n in dims)))
    spans: list[Span] = []
    for start in starts:
        first, last = start * item, (start + run) * item
        if spans and spans[-1][1] >= first:
            spans[-1] = (spans[-1][0], max(last, spans[-1][1]))
        else:
            spans.append((first, last))
    return tuple(spans)


class Event(NamedTuple):
    """What happened on a lane, in the order in which it was issued.

    kind   "ran"       work `name` was issued, with what it reads and writes
           "made"      the caller was given new memory: `writes`
           "recorded"  the point number `point`
           "waited"    for the point number `point`, which is of the lane `name`"""

    kind: str
    lane: str
    name: str = ""
    reads: tuple[Access, ...] = ()
    writes: tuple[Access, ...] = ()
    point: int = -1

    def __str__(self) -> str:
        if self.kind == "waited":
            return f"{self.lane} waits {self.name}"
        return f"{self.name} on {self.lane}" if self.kind == "ran" else f"{self.lane} {self.kind} {self.point}"


class Log:
    """One pass over the lanes: its events, in the order in which they were issued.

    freed   memory that another lane than the caller's worked on, and that was let go before the caller waited
    closed  whether the caller has waited for all lanes"""

    def __init__(self, events: Sequence[Event] = ()) -> None:
        self.events = list(events)
        self.freed: list[str] = []
        self.closed = False

    def lines(self) -> list[str]:
        """Work and waits, readable: ["comm waits main", "all_gather on comm", ...]."""
        return [str(event) for event in self.events if event.kind in ("ran", "waited")]

    @property
    def waits(self) -> list[int]:
        """Where in `events` a lane waits."""
        return [at for at, event in enumerate(self.events) if event.kind == "waited"]

    def without(self, at: int) -> Log:
        """The same but for one event: a schedule in which it was forgotten."""
        return Log(self.events[:at] + self.events[at + 1 :])


_CALLER = "main"


def races(log: Log) -> list[str]:
    """Pairs of operations that touch the same bytes, one of them writing, and that nothing puts in order.

    Happens-before by vector clocks: a lane runs in order, and a wait brings what the point's lane knew when the point
    was recorded. Before all else, the caller's lane has written every tensor; when the lanes are closed, it overwrites
    every tensor, since all memory is its own again: so a lane that nobody waited for is a race. Memory made in between
    was the caller's until then. What was let go too early is reported, too."""
    work = _work(log)
    return _unordered(log.events, _conflicts(work)) + log.freed


def redundant_waits(log: Log) -> list[str]:
    """The waits without which there would be no race either: "comm waits main (event 3)"."""
    conflicts = _conflicts(_work(log))
    return [f"{log.events[at]} (event {at})" for at in log.waits if not _unordered(log.without(at).events, conflicts)]


class _Conflict(NamedTuple):
    """Two operations that meet in memory, by their places in `_work`."""

    first: int
    second: int
    text: str


def _work(log: Log) -> list[Event]:
    """What touches memory, between what came before and what comes after."""
    touched = {a.storage for event in log.events for a in (*event.reads, *event.writes) if a.spans}
    everything = tuple(Access(storage, ((0, 1 << 62),), "all memory") for storage in touched)
    before = Event("ran", _CALLER, "what came before", writes=everything)
    after = Event("ran", _CALLER, "what comes after", writes=everything)
    return [before, *(event for event in log.events if event.kind in ("ran", "made")), after]


def _conflicts(work: list[Event]) -> list[_Conflict]:
    """All pairs on different lanes, in order of issue."""
    by_storage: dict[int, list[tuple[int, bool, Access]]] = {}
    found: dict[tuple[int, int], _Conflict] = {}
    for at, event in enumerate(work):
        for touched, writes in [(a, True) for a in event.writes] + [(a, False) for a in event.reads]:
            for earlier, wrote, other in by_storage.setdefault(touched.storage, []):
                apart = work[earlier].lane != event.lane and (wrote or writes) and (earlier, at) not in found
                if apart and other.meets(touched):
                    text = (
                        f"{work[earlier]} {'writes' if wrote else 'reads'} {other.text}, {event} "
                        f"{'writes' if writes else 'reads'} {touched.text} of the same memory, and no wait puts them "
                        "in order"
                    )
                    found[earlier, at] = _Conflict(earlier, at, text)
            by_storage[touched.storage].append((at, writes, touched))
    return list(found.values())


def _unordered(events: Sequence[Event], conflicts: Sequence[_Conflict]) -> list[str]:
    """The conflicts whose operations could change places."""
    clocks: dict[str, dict[str, int]] = {_CALLER: {_CALLER: 1}}
    points: dict[int, dict[str, int]] = {}
    steps = [(_CALLER, 1, {_CALLER: 1})]  # of each operation its lane, its number there, what it knows of others
    for event in (*events, Event("ran", _CALLER)):
        clock = clocks.setdefault(event.lane, {})
        if event.kind == "recorded":
            points[event.point] = dict(clock)
        elif event.kind == "waited":
            for lane, number in points[event.point].items():
                clock[lane] = max(number, clock.get(lane, 0))
        else:
            # Memory is made when the caller's lane had been given what it has: which is no work of its own.
            clock[event.lane] = clock.get(event.lane, 0) + (event.kind == "ran")
            steps.append((event.lane, clock[event.lane], dict(clock)))
    return [
        conflict.text
        for conflict in conflicts
        if steps[conflict.first][1] > steps[conflict.second][2].get(steps[conflict.first][0], 0)
    ]


class Schedule(Observer):
    """An observer of the lanes of this process: `logs`, one for each pass. Use it as a context.

    Under `deferred_lanes` it also sees what the caller does between the pieces that he issues, which on a GPU is work
    of his stream: copies, fills, and memory that he makes."""

    def __init__(self) -> None:
        self.logs: list[Log] = []
        self._open: dict[int, _Recording] = {}

    def __enter__(self) -> Schedule:
        self._observing = observing(self)
        self._observing.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._observing.__exit__(None, None, None)
        for recording in self._open.values():
            recording.end()
        self._open.clear()

    def recorded(self, lane: Lane, point: Point) -> None:
        self._of(lane).recorded(lane, point)

    def waited(self, lane: Lane, point: Point) -> None:
        self._of(lane).waited(lane, point)

    def ran(self, lane: Lane, name: str, reads: Sequence[Any], writes: Sequence[Any], begin: Any, end: Any) -> None:
        self._of(lane).ran(lane, name, reads, writes)

    def closed(self, lanes: Lanes) -> None:
        recording = self._open.pop(id(lanes), None)
        if recording is not None:
            recording.end()
            recording.log.freed = recording.freed()
            recording.log.closed = True

    def _of(self, lane: Lane) -> _Recording:
        found = self._open.get(id(lane.lanes))
        if found is None:
            found = self._open[id(lane.lanes)] = _Recording(lane.lanes)
            self.logs.append(found.log)
        return found


class _Recording:
    """A log that is being written."""

    def __init__(self, lanes: Lanes) -> None:
        self.log, self._lanes = Log(), lanes  # kept, so that its id stays its own
        self._points: list[Point] = []
        self._off_main: list[tuple[str, StorageWeakRef]] = []
        self._callers: _CallersWork | None = None
        if isinstance(lanes.main, DeferredLane):
            self._callers = _CallersWork(self.log.events)
            self._callers.enter()

    def end(self) -> None:
        if self._callers is not None:
            self._callers.leave()
            self._callers = None

    def recorded(self, lane: Lane, point: Point) -> None:
        self._points.append(point)
        self.log.events.append(Event("recorded", lane.name, point=len(self._points) - 1))

    def waited(self, lane: Lane, point: Point) -> None:
        number = next(at for at, known in enumerate(self._points) if known is point)
        self.log.events.append(Event("waited", lane.name, point.lane.name, point=number))

    def ran(self, lane: Lane, name: str, reads: Sequence[Any], writes: Sequence[Any]) -> None:
        read, written = ([t for t in some if isinstance(t, Tensor)] for some in (reads, writes))
        event = Event("ran", lane.name, name, tuple(map(access, read)), tuple(map(access, written)))
        self.log.events.append(event)
        if lane is not self._lanes.main:
            for t in (*read, *written):
                text = f"{access(t).text} was let go while {event} could still be at work on it"
                self._off_main.append((text, StorageWeakRef(t.untyped_storage())))

    def freed(self) -> list[str]:
        return [text for text, storage in self._off_main if storage.expired()]


class _CallersWork(TorchDispatchMode):
    """What the caller runs himself while lanes are deferred, all of which run in threads of their own."""

    def __init__(self, events: list[Event]) -> None:
        super().__init__()
        self._events, self._thread = events, threading.get_ident()

    def enter(self) -> None:
        self.__enter__()

    def leave(self) -> None:
        if threading.get_ident() == self._thread:
            self.__exit__(None, None, None)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        name = str(func.overloadpacket).rpartition(".")[2]
        given = _tensors((*args, *(kwargs or {}).values()))
        made = _tensors([found])
        old = {t.untyped_storage().data_ptr() for t in given}
        changed = _changed(func, args, kwargs or {})
        fresh = [t for t in made if t.untyped_storage().data_ptr() not in old]
        if name == "set_":  # gives a tensor other memory, and works on none
            return found
        if name.startswith(("empty", "new_empty")):
            self._events.append(Event("made", _CALLER, name, writes=tuple(map(access, fresh))))
        elif changed or fresh:  # else a view, which is no work
            self._events.append(
                Event("ran", _CALLER, name, tuple(map(access, given)), tuple(map(access, changed + fresh)))
            )
        return found


def _tensors(tree: Sequence[Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for leaf in tree:
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif isinstance(leaf, (list, tuple)):
            found.extend(_tensors(leaf))
    return found


def _changed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The arguments that the operation writes to, as its schema says."""
    schema = func._schema.arguments
    given = {argument.name: value for argument, value in zip(schema, args, strict=False)} | kwargs
    written = [arg.name for arg in schema if arg.alias_info is not None and arg.alias_info.is_write]
    return _tensors([given[name] for name in written if name in given])
