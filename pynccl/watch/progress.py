"""How far the streams of a communicator have come: one event at a time, recorded by the watchdog, never by a call.

An event is recorded where nothing was issued for a while: a program that goes on issuing goes on, and one that waits,
also for a stream that hangs, does not. So the capture of a CUDA graph, which an event in its stream would spoil, would
have to begin in the very moment between a look at the stream and the event.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from ..bindings.library import Library, host_module
from ..interop.devices import cuda_core, cuda_driver, on_device
from ..interop.keepalive import relaxed
from ..interop.streams import CudaStream


class Mark(NamedTuple):
    """Behind the calls up to this one."""

    entry: int
    made: float
    events: list[Any]

    def passed(self) -> bool | None:
        """Whether all of the calls have completed; None: it cannot be told, and will not be."""
        try:
            passed = all(event.query() for event in self.events)
            return None if passed and any(getattr(event, "failed", False) for event in self.events) else passed
        except Exception:  # a capture, or an error of an earlier launch, which others report
            return None


def mark(library: Library, ordinal: int, entry: int, streams: set[int]) -> Mark | None:
    """A mark on these streams now; None where one of them cannot take any yet. One that is gone needs none."""
    events = []
    for handle in streams:
        try:
            event = _host_event(handle) if library.is_host else _cuda_event(handle, ordinal)
        except LookupError:
            continue
        except Exception:  # the driver refuses: the program may be closing it, or capturing a graph, this moment
            return None
        if event is None:
            return None
        events.append(event)
    return Mark(entry, time.monotonic(), events)


def _host_event(handle: int) -> Any:
    stream = host_module().made_here(handle)
    if stream is None:
        raise LookupError("the stream is gone: closed, or dropped")
    return stream.record()


def _cuda_event(handle: int, ordinal: int) -> Any:
    driver = cuda_driver()
    with on_device(ordinal), relaxed():
        code, status = driver.cuStreamIsCapturing(driver.CUstream(handle))[:2]
        if int(code) in _GONE:
            raise LookupError("the stream is gone: another library has destroyed it")
        if code or status:
            return None
        return CudaStream(cuda_core().Stream.from_handle(handle), ordinal).record()


_GONE = (400, 709)  # CUDA_ERROR_INVALID_HANDLE, CUDA_ERROR_CONTEXT_IS_DESTROYED
