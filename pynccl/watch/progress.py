"""The progress of a communicator's streams: the watchdog records one event at a time; calls never record any.

The watchdog records an event only if no call was issued for a while: a program that keeps issuing calls makes
progress, and one that waits, even for a hanging stream, issues none. An event would invalidate a CUDA graph capture on
its stream, but only if the capture began between the check of the stream and the recording of the event.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

from ..bindings.library import Library, host_module
from ..interop.devices import cuda_driver, on_device
from ..interop.events import pooled, relaxed


def awaited_since(streams: set[int]) -> float:
    """Return since when the program waits for one of these host streams; 0.0: it does not."""
    return float(host_module().awaited_since(streams))


class Mark(NamedTuple):
    """Events recorded on the streams after the calls up to `entry`."""

    entry: int
    made: float
    events: list[Any]

    def passed(self) -> bool | None:
        """Return whether all of those calls have completed; None: this mark cannot tell and never will."""
        try:
            passed = all(event.query() for event in self.events)
            return None if passed and any(getattr(event, "failed", False) for event in self.events) else passed
        except Exception:  # a capture, or an error of an earlier launch, which is reported elsewhere
            return None


def mark(
    library: Library, ordinal: int, entry: int, streams: Iterable[int], recorded: tuple[int, int, Any] = (0, 0, None)
) -> Mark | None:
    """Record a mark on these streams; None if one of them does not accept an event yet. Closed streams are skipped.

    recorded  see Track: on that stream, its event does if no later call was made"""
    events = []
    for handle in streams:
        if recorded[:2] == (entry, handle):
            events.append(recorded[2])
            continue
        try:
            event = _host_event(handle) if library.is_host else _cuda_event(handle, ordinal)
        except LookupError:
            continue
        except Exception:  # the program may be closing the stream, or capturing a graph, right now
            return None
        if event is None:
            return None
        events.append(event)
    return Mark(entry, time.monotonic(), events)


def _host_event(handle: int) -> Any:
    stream = host_module().stream_from_handle(handle)
    if stream is None:
        raise LookupError("the stream is gone: closed, or dropped")
    return stream.record()


def _cuda_event(handle: int, ordinal: int) -> Any:
    driver = cuda_driver()
    with on_device(ordinal), relaxed():
        code, status = driver.cuStreamIsCapturing(driver.CUstream(handle))[:2]
        if int(code) in _INVALID_STREAM:
            raise LookupError("the stream is gone: another library has destroyed it")
        if code or status:
            return None
        event = pooled(ordinal)
        event.record(ctypes.c_void_p(handle))
        return event


_INVALID_STREAM = (400, 709)  # CUDA_ERROR_INVALID_HANDLE, CUDA_ERROR_CONTEXT_IS_DESTROYED
