"""Streams and events of the host library: in-order queues, run by worker threads while there is work.

`HostStream` and `HostEvent` behave like CUDA streams and events, so that ordering bugs show without a GPU. The handle 0
(or None) is the caller's stream: its work runs in the calling thread before the call returns.

Failed work does not stop its stream. The error is raised once: by `synchronize()` of the stream or of an event recorded
after the work, or in a caller that waits for such an event.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial

from ..bindings.errors import NcclInvalidUsage
from ..bindings.resource import Shared
from .failure import exiting, invalid_argument
from .jobs import Job, Queue, Then

_handles = itertools.count(0x57AE0010, 0x10)
_streams: weakref.WeakValueDictionary[int, HostStream] = weakref.WeakValueDictionary()
_event_handles = itertools.count(0xE7E70010, 0x10)
_events: weakref.WeakValueDictionary[int, HostEvent] = weakref.WeakValueDictionary()


def new_handle() -> int:
    """Return a handle that no stream has, for work of another kind that the program may wait for: see `begin_wait`."""
    return next(_handles)


# Who waits now: number -> the stream that is waited for, the stream whose thread waits (0: a thread of the program),
# and since when, by time.monotonic(). For the watchdog: work that nobody waits for may take as long as it likes.
_waits: dict[int, tuple[int, int, float]] = {}
_wait_numbers = itertools.count(1)


def begin_wait(handle: int, waiter: int = 0) -> int:
    """Record that a thread waits for a stream from now on. Return the number for `end_wait`."""
    number = next(_wait_numbers)
    _waits[number] = (handle, waiter, time.monotonic())
    return number


def end_wait(number: int) -> None:
    _waits.pop(number, None)


@contextlib.contextmanager
def waiting_for(handle: int, waiter: int = 0) -> Iterator[None]:
    """Context manager: a thread waits for a stream; see `begin_wait`."""
    number = begin_wait(handle, waiter)
    try:
        yield
    finally:
        end_wait(number)


def awaited_since(handles: set[int]) -> float:
    """Return since when the program waits for one of these streams, also through streams that wait for them; 0.0: it
    does not."""
    waits, reached, size = list(_waits.values()), set(handles), -1
    while len(reached) > size:
        size = len(reached)
        reached |= {waiter for handle, waiter, _ in waits if handle in reached and waiter}
    return min((since for handle, waiter, since in waits if handle in reached and not waiter), default=0.0)


class _Completion:
    """One recording of an event on a stream; 0: the caller's."""

    def __init__(self, stream: int = 0) -> None:
        self.stream = stream
        self.happened = threading.Event()
        self.moment = 0.0
        self._failed: Queue | None = None

    def complete(self, queue: Queue | None = None) -> None:
        """Mark as completed. queue: of the stream on which it was recorded; None for the caller's."""
        self.moment = time.perf_counter()
        self._failed = queue if queue is not None and queue.error is not None else None
        self.happened.set()

    def wait(self, waiter: int) -> None:
        """Block the thread of the stream `waiter`."""
        with waiting_for(self.stream, waiter):
            # In slices, since an exiting process drops queued work and then never sets the event.
            while not self.happened.wait(0.2) and not exiting.is_set():
                pass

    def wait_and_raise(self) -> None:
        if not self.happened.is_set():
            with waiting_for(self.stream):
                self.happened.wait()
        if self._failed is not None:
            self._failed.raise_once()

    @property
    def failed(self) -> bool:
        return self._failed is not None


class HostEvent(Shared):
    """A point in a stream. As in CUDA, an event that was never recorded is complete; recording again replaces it."""

    def __init__(self) -> None:
        self._completion: _Completion | None = None
        self._handle = 0

    @property
    def handle(self) -> int:
        """The handle of this event for C functions, created on first use."""
        if not self._handle:
            self._handle = next(_event_handles)
            _events[self._handle] = self
        return self._handle

    def record(self, stream: _Stream | int | None = None) -> HostEvent:
        """Record the event after the work queued on `stream`. On 0 or None, the caller, it completes at once."""
        owner = find(stream)
        completion = _Completion(0 if owner is None else owner.handle)
        if owner is None:
            completion.complete()
        else:
            owner.submit(partial(completion.complete, owner._queue))
        self._completion = completion
        return self

    def wait(self, stream: _Stream | int | None = None) -> None:
        """Make later work of `stream` wait for this event. With the caller's stream (0 or None), block."""
        completion = self._completion
        owner = find(stream)
        if completion is None:
            return
        if owner is None:
            completion.wait_and_raise()
        elif not completion.happened.is_set():
            owner.submit(partial(completion.wait, owner.handle))

    def synchronize(self) -> None:
        """Block until the event is complete. Raise the error of preceding work, once."""
        if self._completion is not None:
            self._completion.wait_and_raise()

    def query(self) -> bool:
        return self._completion is None or self._completion.happened.is_set()

    @property
    def failed(self) -> bool:
        """Whether the event is complete and preceding work has failed."""
        return self._completion is not None and self._completion.failed

    @property
    def moment(self) -> float:
        """Completion time in seconds of time.perf_counter(), which all processes of a node share."""
        if self._completion is None or not self.query():
            raise ValueError("moment: the event is not recorded and completed; call record() and synchronize() first")
        return self._completion.moment

    def elapsed_time(self, end: HostEvent) -> float:
        """Return the milliseconds from this event to `end`. Both must be recorded and completed."""
        if not isinstance(end, HostEvent):
            raise TypeError(f"elapsed_time: end is of type {type(end).__name__}, expected an event of the host library")
        if self._completion is None or end._completion is None or not (self.query() and end.query()):
            raise ValueError("elapsed_time: both events must be recorded and completed; call synchronize() first")
        return (end._completion.moment - self._completion.moment) * 1e3


class _Stream(Shared):
    """The stream interface, for a stream that runs all work immediately."""

    handle = 0

    def __cuda_stream__(self) -> tuple[int, int]:
        """Return (version, handle), as in the protocol of cuda.core. Only the host library knows the handle."""
        return 0, self.handle

    def record(self, event: HostEvent | None = None) -> HostEvent:
        """Record `event`, or a new event, after all work queued so far. Return it."""
        if event is not None and not isinstance(event, HostEvent):
            raise TypeError(
                f"record: event is of type {type(event).__name__}, expected a host event from create_event(), or None "
                "for a new event"
            )
        return (event or HostEvent()).record(self)

    def wait(self, other: HostEvent | _Stream) -> None:
        """Make later work wait for an event, or for another stream's queued work. The caller's stream blocks."""
        if not isinstance(other, (HostEvent, _Stream)):
            raise TypeError(
                f"wait: event is of type {type(other).__name__}, expected a host event or stream, from "
                "pynccl.create_event() or pynccl.create_stream()"
            )
        (other if isinstance(other, HostEvent) else other.record()).wait(self)

    def synchronize(self) -> None:
        """Block until all work queued so far has run. Raise its first error, once."""
        self.record().synchronize()

    def query(self) -> bool:
        """Return whether all queued work has run."""
        return True


class CallerStream(_Stream):
    """The caller's stream, with handle 0. Its work has always completed."""


class HostStream(_Stream):
    """An in-order queue of work, run by a worker thread, or by threads in `run_here`. `priority` has no effect.

    patient  while callers of `run_here` run the work, the worker begins 2 ms late, so as not to be woken in vain, or
             with `hurry`"""

    def __init__(self, priority: int = 0, patient: bool = False) -> None:
        self.priority = priority
        self.handle = next(_handles)
        self._queue = Queue(patient)
        self._lock = threading.Lock()
        self._closed = False
        _streams[self.handle] = self

    def __repr__(self) -> str:
        return f"HostStream(handle={self.handle:#x})"

    def submit(self, fn: Job) -> None:
        """Run `fn()` after all work queued so far. Its return value is ignored."""
        with self._lock:
            if self._closed:
                raise NcclInvalidUsage(f"{self!r} is closed; create a new one with pynccl.create_stream()")
            self._queue.put(fn)

    def then(self, fn: Callable[[BaseException | None], Job | None]) -> None:
        """Run `fn(error)` after all work queued so far: its first error that was not raised yet, or None. If it returns
        a function, call that while later work runs: it may wait for it."""
        self.submit(Then(self._queue, fn))

    def hold(self, keep: object) -> None:
        """Keep an object alive until all work queued so far has run."""
        with self._lock:
            self._queue.put(lambda: keep)  # even if closed: queued work still runs in order

    def run_here(self, over: Callable[[], bool]) -> None:
        """Run queued work in the calling thread, which is faster than to wait for the worker, until `over()`, or until
        the worker has taken over. For work that may run in any thread. An exception of a signal handler fails what
        runs, as in a call on the caller's stream, and is raised."""
        self._queue.run(over)

    def hurry(self) -> None:
        """Wake the worker if it has not been."""
        self._queue.hurry()

    def query(self) -> bool:
        return not self._queue.jobs

    def close(self) -> None:
        """Return once the queued work has run. The stream takes no further work."""
        last = _Completion(self.handle)
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._queue.put(partial(last.complete, self._queue))
        try:
            if not self._queue.is_mine:
                last.wait(0)
        finally:
            _streams.pop(self.handle, None)


def stream_from_handle(handle: int) -> HostStream | None:
    """Return the HostStream of a handle; None if there is none."""
    return _streams.get(handle)


def find(stream: _Stream | int | None) -> HostStream | None:
    """Return the stream of a handle; None for the caller's. Unknown handles raise HostFailure(ncclInvalidArgument)."""
    if isinstance(stream, HostStream):
        return stream
    if not stream or isinstance(stream, _Stream):
        return None
    if not isinstance(stream, int):
        raise TypeError(
            f"stream is of type {type(stream).__name__}, expected one from pynccl.create_stream(), or its handle"
        )
    found = _streams.get(stream)
    if found is None:
        raise invalid_argument(
            f"stream is {stream:#x}; expected a HostStream that is not closed, or 0 for the caller's stream"
        )
    return found


def synchronize() -> None:
    """Block until all work queued so far on any stream has run. Raise its first error, once."""
    for done in [stream.record() for stream in list(_streams.values()) if not stream._closed]:
        done.synchronize()


def find_event(handle: int) -> HostEvent:
    """Return the event of a handle. Unknown handles raise HostFailure(ncclInvalidArgument)."""
    found = _events.get(handle)
    if found is None:
        raise invalid_argument(f"event is {handle:#x}; expected the handle of a live HostEvent")
    return found


def after_fork() -> None:
    """In a forked child, which has none of the workers: close the parent's streams."""
    for stream in list(_streams.values()):
        stream._lock = threading.Lock()
        stream._closed = True
    _streams.clear()
    _waits.clear()
