"""CUDA events: each use is one plain call of the driver, and a dropped event is used again.

An event is in the pool only if nothing refers to it any more. So nobody asks it about an earlier call, and it may be
recorded again at once: what waits for it already has the point of that time. No event is queried to find a free one.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from ..bindings.errors import NcclUnhandledCudaError
from ..bindings.resource import Shared, destructor
from .devices import cuda_driver, described, on_device

_NOT_READY = 600  # CUDA_ERROR_NOT_READY
_DISABLE_TIMING = 2  # CU_EVENT_DISABLE_TIMING


class _Driver:
    """The driver's functions by name, without argtypes: the arguments are ctypes values. Opened at the first use."""

    def __getattr__(self, name: str) -> Any:
        function = getattr(ctypes.CDLL("libcuda.so.1"), name)
        setattr(self, name, function)
        return function


_calls = _Driver()


class CudaEvent(Shared):
    """A CUDA event, for any thread, whichever GPU is current there. Raises NcclUnhandledCudaError.

    device    ordinal of its GPU; None: the GPU that is current when it is made
    timing    whether `elapsed_time` can be used
    pointer   an event of the driver to be used; None: a new one
    captured  set by who records it in a CUDA graph capture: a query would then invalidate the capture"""

    def __init__(self, device: int | None, timing: bool = False, pointer: ctypes.c_void_p | None = None) -> None:
        self.device, self.timing, self.captured = device, timing, False
        self.pointer = _create(device, timing) if pointer is None else pointer

    @property
    def handle(self) -> int:
        return self.pointer.value or 0

    def record(self, stream: ctypes.c_void_p) -> None:
        """Record it on a stream of its GPU."""
        if _calls.cuEventRecord(self.pointer, stream):  # of the default stream of another GPU, or without a context
            _call_on(self.device, "cuEventRecord", self.pointer, stream)

    def block(self, stream: ctypes.c_void_p, default_of: int | None = None) -> None:
        """Make later work of a stream wait for the last record.

        default_of  the GPU, for a default stream: all have the same handles. None: the current one"""
        if default_of is not None:
            _call_on(default_of, "cuStreamWaitEvent", stream, self.pointer, 0)
        elif _calls.cuStreamWaitEvent(stream, self.pointer, 0):
            _call_on(self.device, "cuStreamWaitEvent", stream, self.pointer, 0)

    def synchronize(self) -> None:
        with on_device(self.device), relaxed():
            _call_on(self.device, "cuEventSynchronize", self.pointer)

    def query(self) -> bool:
        with on_device(self.device), relaxed():
            return not _call_on(self.device, "cuEventQuery", self.pointer, expected=_NOT_READY)

    def elapsed_time(self, end: CudaEvent) -> float:
        """Milliseconds from this event to `end`; both need create_event(timing=True)."""
        found = ctypes.c_float()
        _call_on(self.device, "cuEventElapsedTime", ctypes.byref(found), self.pointer, end.pointer)
        return found.value

    @destructor
    def __del__(self) -> None:  # makes no call of the driver: garbage collection may run this
        if (pointer := getattr(self, "pointer", None)) is not None:
            (_spent if self.captured or self.timing else _pools[self.device]).append(pointer)


def pooled(device: int | None) -> CudaEvent:
    """Return an event to be recorded next: until then it stands for some earlier point."""
    try:
        return CudaEvent(device, False, _pools[device].pop())
    except IndexError:
        return CudaEvent(device)


def is_capturing(stream: int) -> bool:
    """Return whether a stream is being captured into a CUDA graph."""
    status = ctypes.c_int()
    return not _calls.cuStreamIsCapturing(ctypes.c_void_p(stream), ctypes.byref(status)) and bool(status.value)


def number_passed(events: Sequence[CudaEvent]) -> int:
    """Return how many of these events have passed. They are in the order in which they were recorded on one stream."""
    with on_device(events[0].device), relaxed():
        for number, event in enumerate(events):
            if code := _calls.cuEventQuery(event.pointer):
                if code != _NOT_READY:
                    event.query()  # raises
                return number
    return len(events)


_pools: defaultdict[int | None, list[ctypes.c_void_p]] = defaultdict(list)  # by device
_spent: list[ctypes.c_void_p] = []  # to be destroyed


def _create(device: int | None, timing: bool) -> ctypes.c_void_p:
    with contextlib.suppress(IndexError):  # another thread may take the last one
        while _spent:
            _calls.cuEventDestroy_v2(_spent.pop())
    made = ctypes.c_void_p()
    _call_on(device, "cuEventCreate", ctypes.byref(made), 0 if timing else _DISABLE_TIMING)
    return made


def _call_on(device: int | None, name: str, *args: Any, expected: int = 0) -> int:
    """Call the driver with the GPU current. Return the result: 0, or `expected`."""
    with on_device(device):
        code = int(getattr(_calls, name)(*args))
    if code in (0, expected):
        return code
    text = described(cuda_driver().CUresult(code))
    raise NcclUnhandledCudaError(
        f"{name} on cuda:{device} failed: {text}\n"
        "  an earlier launch may have failed: run with CUDA_LAUNCH_BLOCKING=1 to see which one"
    )


class relaxed:
    """`with relaxed():` this thread may query events while other streams are captured into CUDA graphs.

    In CUDA's default capture mode, which torch uses too, such a query invalidates any capture in the process."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        driver = cuda_driver()
        _, self._before = driver.cuThreadExchangeStreamCaptureMode(
            driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        )

    def __exit__(self, *exc: object) -> None:
        cuda_driver().cuThreadExchangeStreamCaptureMode(self._before)
