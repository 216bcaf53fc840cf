"""Streams and events of the host library: in-order queues, each run by a worker thread.

`HostStream` and `HostEvent` behave like their CUDA namesakes, so that ordering bugs show without a GPU. The handle 0
(or None) stands for the caller: work on it runs in the calling thread before the call returns.

Work that fails does not stop its stream. The error is raised once, by `synchronize()` of the stream or of an event
recorded after it, or by a caller that waits for such an event.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial

from ..bindings.errors import NcclInvalidUsage, from_result
from ..bindings.resource import Shared
from .failure import REASONS, HostFailure, exiting, invalid_argument

Job = Callable[[], object]

_handles = itertools.count(0x57AE0010, 0x10)
_streams: weakref.WeakValueDictionary[int, HostStream] = weakref.WeakValueDictionary()
_event_handles = itertools.count(0xE7E70010, 0x10)
_events: weakref.WeakValueDictionary[int, HostEvent] = weakref.WeakValueDictionary()


def explain(error: BaseException) -> BaseException:
    """An error that a stream is about to raise, with what is known about it. Replaced by whoever knows more."""
    return error


def as_error(failure: BaseException) -> BaseException:
    """The exception that users see: NcclError for what the C function would return as a code."""
    if isinstance(failure, HostFailure):
        return from_result(failure.code, "an operation on a host stream", REASONS[failure.code], failure.text)
    return failure


class _Queue:
    """What the thread of a stream needs; holds no reference to the stream, so one that is dropped ends its thread."""

    def __init__(self) -> None:
        self.jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self.done = 0
        self.error: BaseException | None = None  # the first one that nobody has seen yet
        self._lock = threading.Lock()

    def work(self) -> None:
        while (job := self.jobs.get()) is not None:
            if not exiting.is_set():
                try:
                    job()
                except BaseException as error:  # the thread must live on, whatever a job raises
                    with self._lock:
                        self.error = self.error or as_error(error)
            del job  # with it go the buffers that its closure holds
            self.done += 1

    def take_error(self) -> BaseException | None:
        """The error that nobody has seen yet, which counts as seen from now on."""
        with self._lock:
            error, self.error = self.error, None
        return explain(error) if error is not None else None

    def raise_once(self) -> None:
        if (error := self.take_error()) is not None:
            raise error


class _Completion:
    """One recording of an event."""

    def __init__(self) -> None:
        self.happened = threading.Event()
        self.moment = 0.0
        self._failed: _Queue | None = None

    def complete(self, queue: _Queue | None = None) -> None:
        """Of what was queued there, if not of the caller."""
        self.moment = time.perf_counter()
        self._failed = queue if queue is not None and queue.error is not None else None
        self.happened.set()

    def wait(self) -> None:
        # In slices only because a process that exits drops queued work, and then nobody sets the event.
        while not self.happened.wait(0.2) and not exiting.is_set():
            pass

    def wait_and_raise(self) -> None:
        self.happened.wait()
        if self._failed is not None:
            self._failed.raise_once()

    @property
    def failed(self) -> bool:
        return self._failed is not None


class HostEvent(Shared):
    """A point in a stream. Never recorded, it counts as completed, as in CUDA; recorded again, it forgets the first."""

    def __init__(self) -> None:
        self._completion: _Completion | None = None
        self._handle = 0

    @property
    def handle(self) -> int:
        """What C functions call this event. Made when it is first asked for: most events never cross into C."""
        if not self._handle:
            self._handle = next(_event_handles)
            _events[self._handle] = self
        return self._handle

    def record(self, stream: _Stream | int | None = None) -> HostEvent:
        """Mark the work that is queued on `stream` now. On the caller (0 or None) it completes at once."""
        completion = _Completion()
        owner = find(stream)
        if owner is None:
            completion.complete()
        else:
            owner.submit(partial(completion.complete, owner._queue))
        self._completion = completion
        return self

    def wait(self, stream: _Stream | int | None = None) -> None:
        """Make later work of `stream` wait for this event; the caller (0 or None) blocks."""
        completion = self._completion
        owner = find(stream)
        if completion is None:
            return
        if owner is None:
            completion.wait_and_raise()
        elif not completion.happened.is_set():
            owner.submit(completion.wait)

    def synchronize(self) -> None:
        """Block until the event has happened; raise the error of the work before it, once."""
        if self._completion is not None:
            self._completion.wait_and_raise()

    def query(self) -> bool:
        return self._completion is None or self._completion.happened.is_set()

    @property
    def failed(self) -> bool:
        """Whether it has happened though work before it has failed."""
        return self._completion is not None and self._completion.failed

    @property
    def moment(self) -> float:
        """When it was completed, in seconds of time.perf_counter(), which all processes of a machine share."""
        if self._completion is None or not self.query():
            raise ValueError("moment: the event has to be recorded and completed; call synchronize() first")
        return self._completion.moment

    def elapsed_time(self, end: HostEvent) -> float:
        """Milliseconds from this event to `end`; both have to be recorded and completed."""
        if not isinstance(end, HostEvent):
            raise TypeError(f"elapsed_time: end is a {type(end).__name__}, expected another event of the host library")
        if self._completion is None or end._completion is None or not (self.query() and end.query()):
            raise ValueError("elapsed_time: both events have to be recorded and completed; call synchronize() first")
        return (end._completion.moment - self._completion.moment) * 1e3


class _Stream(Shared):
    """The verbs of a stream; of one that runs everything at once."""

    handle = 0

    def __cuda_stream__(self) -> tuple[int, int]:
        """(version, handle): the protocol of cuda.core. The handle means something to the host library alone."""
        return 0, self.handle

    def record(self, event: HostEvent | None = None) -> HostEvent:
        """Record `event`, or a new one, after all that is queued now."""
        if event is not None and not isinstance(event, HostEvent):
            raise TypeError(
                f"record: event is a {type(event).__name__}, expected one of pynccl.create_event() with the host "
                "library, or None for a new one"
            )
        return (event or HostEvent()).record(self)

    def wait(self, other: HostEvent | _Stream) -> None:
        """Make later work wait for an event, or for all that is queued on another stream now. The caller blocks."""
        if not isinstance(other, (HostEvent, _Stream)):
            raise TypeError(
                f"wait: event is a {type(other).__name__}, expected an event or a stream of the host library, such as "
                "pynccl.create_event() and pynccl.create_stream() make"
            )
        (other if isinstance(other, HostEvent) else other.record()).wait(self)

    def synchronize(self) -> None:
        """Block until all that is queued now has run; raise the first error of that work, once."""
        self.record().synchronize()

    def query(self) -> bool:
        """Whether all work that was queued has run."""
        return True


class CallerStream(_Stream):
    """The caller, whom the handle 0 stands for. His work is done when he asks."""


class HostStream(_Stream):
    """An in-order queue of work, run by a daemon thread. `priority` is accepted and does nothing."""

    def __init__(self, priority: int = 0) -> None:
        self.priority = priority
        self.handle = next(_handles)
        self._queue = _Queue()
        self._queued = 0
        self._lock = threading.Lock()
        self._closed = False
        self._worker = threading.Thread(target=self._queue.work, name=f"pynccl-stream-{self.handle:#x}", daemon=True)
        self._worker.start()
        _streams[self.handle] = self

    def __repr__(self) -> str:
        return f"HostStream(handle={self.handle:#x})"

    def submit(self, fn: Job) -> None:
        """Run `fn()` on the worker, after all that is queued now; what it returns is dropped."""
        with self._lock:
            if self._closed:
                raise NcclInvalidUsage(f"{self!r} is closed; make another with pynccl.create_stream()")
            self._queued += 1
            self._queue.jobs.put(fn)

    def then(self, fn: Callable[[BaseException | None], object]) -> None:
        """Run `fn(error)` after all that is queued now: the error of it that nobody has seen yet, or None."""
        queue = self._queue
        self.submit(lambda: fn(queue.take_error()))

    def hold(self, keep: object) -> None:
        """Keep an object until all that is queued now has run: the worker drops it when it comes to it."""
        with self._lock:
            self._queued += 1
            self._queue.jobs.put(lambda: keep)  # also of a closed stream: what is queued is run, and goes, in order

    def query(self) -> bool:
        return self._queue.done == self._queued

    def close(self) -> None:
        """Run what is queued, then end the worker. The handle is invalid at once."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._queue.jobs.put(None)
        _streams.pop(self.handle, None)
        if threading.current_thread() is not self._worker:
            self._worker.join()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            self._queue.jobs.put(None)


def made_here(handle: int) -> HostStream | None:
    """The stream of a handle, if it is one."""
    return _streams.get(handle)


def find(stream: _Stream | int | None) -> HostStream | None:
    """The stream of a handle; None for the caller. Unknown handles raise HostFailure(ncclInvalidArgument)."""
    if isinstance(stream, HostStream):
        return stream
    if not stream or isinstance(stream, _Stream):
        return None
    if not isinstance(stream, int):
        raise TypeError(f"stream is a {type(stream).__name__}, expected one of pynccl.create_stream(), or its handle")
    found = _streams.get(stream)
    if found is None:
        raise invalid_argument(f"stream is {stream:#x}, which is no HostStream or was closed; 0 stands for the caller")
    return found


def find_event(handle: int) -> HostEvent:
    """The event of a handle. Unknown ones raise HostFailure(ncclInvalidArgument)."""
    found = _events.get(handle)
    if found is None:
        raise invalid_argument(f"event is {handle:#x}, which is the handle of no HostEvent that lives")
    return found


def drop_queued_work() -> list[threading.Thread]:
    """At exit: let every worker discard what it has not begun; returns the workers' threads."""
    streams = list(_streams.values())
    for stream in streams:
        stream._queue.jobs.put(None)
    return [stream._worker for stream in streams]


def after_fork() -> None:
    """In a forked child, where no worker came along: streams of the parent are closed."""
    for stream in list(_streams.values()):
        stream._lock = threading.Lock()
        stream._closed = True
    _streams.clear()
