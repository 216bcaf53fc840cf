"""Get the handle of any CUDA stream object; create streams and events.

Streams have the same four methods with every library: record, wait, synchronize, query. With a GPU they wrap cuda.core;
with the host library a `HostStream` is an in-order queue run by a worker thread. CUDA packages are imported only when a
stream or device is used.
"""

from __future__ import annotations

import ctypes
import sys
import weakref
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from ..bindings.errors import NcclInvalidUsage, NcclUnhandledCudaError
from ..bindings.library import Library, chosen, host_module
from ..bindings.resource import Shared, destructor
from ..bindings.values import INT_MAX, INT_MIN, SIZE_MAX, attribute, instance, integer, shown, type_of
from .devices import (
    core_device as _core_device,
    cuda_core as _cuda_core,
    cuda_driver,
    current_device,
    described,
    gpu_ordinal,
    on_device,
)
from .events import CudaEvent, pooled
from .handles import DEFAULT_STREAMS, LASTING, Handle, handle_of, is_cupy_event, number_of, of_torch, source_of
from .keepalive import KeepAlive, capturing


@runtime_checkable
class Event(Protocol):
    """A marker in a stream."""

    def synchronize(self) -> None:
        """Block the caller until the work before this point is done."""

    def query(self) -> bool:
        """Return whether the work before this point is done."""


@runtime_checkable
class Stream(Protocol):
    """An in-order queue of device work."""

    @property
    def handle(self) -> int:
        """cudaStream_t as an integer (with the host library, the number of a `HostStream`)."""

    def record(self, event: Any = None) -> Any:
        """Record an event at this point and return it."""

    def wait(self, event: Any) -> None:
        """Make work issued from now on wait for `event` (or for all the work of another stream).

        Without `wait`, streams are not ordered with each other or with the current stream: see docs/streams.md."""

    def synchronize(self) -> None:
        """Block the caller until all the work is done."""

    def query(self) -> bool:
        """Return whether all the work is done."""


class CudaStream(Shared):
    """A cuda.core stream with this module's methods. Works in any thread, whichever GPU is current.

    device  ordinal of its GPU; None: the GPU that is current at each use
    own     the CUDA stream is destroyed with this object
    source  see Handle"""

    def __init__(self, stream: Any, device: int | None = None, own: bool = False, source: Any = None) -> None:
        self.core, self.device, self._own = stream, device, own
        self.source = LASTING if own else source
        self.pointer = ctypes.c_void_p(int(stream.handle))
        self._kept = KeepAlive(stream, device)
        self._closed = False

    @property
    def handle(self) -> int:
        self._check_open()
        return int(self.core.handle)

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle

    def record(self, event: CudaEvent | None = None) -> CudaEvent:
        self._check_open()
        if event is None:
            event = pooled(self.device)
        instance(event, CudaEvent, "record: event", "an event of pynccl.create_event(), or None for a new one")
        event.record(self.pointer)
        return event

    def wait(self, event: Any) -> None:
        """Wait for an event or stream of pynccl, cuda.core, torch or CuPy, or for a stream of any other library."""
        self._check_open()
        if isinstance(event, CudaStream):
            event = event.record()
        if isinstance(event, CudaEvent):
            event.block(self.pointer, None if (self.pointer.value or 0) > DEFAULT_STREAMS else self.device)
        elif attribute(event, "cuda_event") is not None:
            with on_device(self.device):
                event.wait(sys.modules["torch"].cuda.ExternalStream(self.handle))
        elif is_cupy_event(event):
            with on_device(self.device):
                sys.modules["cupy"].cuda.ExternalStream(self.handle).wait_event(event)
        elif (number := number_of(event)) is not None:
            other = _cuda_core().Stream.from_handle(int(number))
            self.wait(CudaStream(other, _device_of(event, int(number), other, self.device)))
        elif attribute(event, "handle") is not None:  # an event of cuda.core
            with on_device(self.device):
                self.core.wait(event)
        else:
            raise TypeError(f"wait: event is {shown(event)}, expected an event or a stream, of any CUDA library")

    def synchronize(self) -> None:
        with self._open():
            self.core.sync()

    def query(self) -> bool:
        driver = cuda_driver()
        with self._open():
            if capturing(self.core):
                raise NcclInvalidUsage(
                    f"query: the stream {self.handle:#x} is being captured into a CUDA graph, which a query would "
                    "invalidate; query before or after the capture"
                )
            (code,) = driver.cuStreamQuery(driver.CUstream(self.handle))
        if code == driver.CUresult.CUDA_SUCCESS:
            return True
        if code == driver.CUresult.CUDA_ERROR_NOT_READY:
            return False
        raise NcclUnhandledCudaError(
            f"query: cuStreamQuery of the stream {self.handle:#x} on cuda:{self.device} failed: {described(code)}\n"
            "  an earlier launch failed: run with CUDA_LAUNCH_BLOCKING=1 to see which one"
        )

    def close(self) -> None:
        """Close the stream. Work already issued still runs. Closing twice is harmless."""
        if self._closed:
            return
        with on_device(self.device):
            self._kept.close()
            _created.pop(self.handle, None)
            self._notify_end()
            self._closed = True
            self.core.close()

    def _open(self) -> on_device:
        """Return a context in which the stream's GPU is current. Raises if the stream is closed."""
        self._check_open()
        return on_device(self.device)

    def _check_open(self) -> None:
        if self._closed:  # cuda.core would return handle 0, the default stream
            raise NcclInvalidUsage("this stream is closed; create another with pynccl.create_stream()")

    def hold(self, keep: Any) -> None:
        """Keep these objects alive until the work issued so far is done."""
        self._kept.add(keep)

    def _notify_end(self) -> None:
        if self._own and on_end is not None:
            on_end(int(self.core.handle))

    @destructor
    def __del__(self) -> None:
        kept = getattr(self, "_kept", None)
        if kept is not None:
            kept.detach()
            if not self._closed:
                self._notify_end()


def _device_of(stream: Any, handle: int, core: Any, context_device: int | None) -> Any:
    """Return the GPU ordinal of another library's stream.

    The driver knows it, except for the default streams, whose handles are the same on every GPU: for these, use torch's
    device_index or CuPy's device_id (-1 for the current GPU)."""
    if handle > DEFAULT_STREAMS:
        with on_device(context_device):  # the query needs some context
            return attribute(attribute(core, "device"), "device_id")
    named = attribute(stream, "device_index", attribute(stream, "device_id"))
    return named if isinstance(named, int) and named >= 0 else current_device()


def create_stream(
    device: int | str | None = None, *, priority: int | None = None, library: Library | None = None
) -> Stream:
    """Create a stream on `device` ("cuda:1", 1; None: the current device; ignored by the host library).

    priority  lower numbers run first, as in CUDA; None is the device's default, -1 the usual "high".

    The stream is not ordered with any other. Call `stream.wait(pynccl.current_stream(device))` before it uses results
    of the current stream, and `pynccl.current_stream(device).wait(stream)` (or stream.synchronize()) before the current
    stream uses its results. pynccl keeps the buffers of its calls on this stream alive until they have run, so you can
    drop your references at once.
    """
    library = chosen(library, "create_stream")
    if priority is not None:
        priority = integer(priority, "create_stream: priority", INT_MIN, INT_MAX)
    if library.is_host:
        stream: Stream = host_module().HostStream(priority=priority or 0)
        return stream
    core_device = _core_device(device)
    ordinal = int(core_device.device_id)
    options = {} if priority is None else {"priority": priority}
    with on_device(ordinal):
        core_device.set_current()  # cuda.core requires it, even if the GPU is current already
        made = CudaStream(core_device.create_stream(options=_cuda_core().StreamOptions(**options)), ordinal, True)
    _created[made.handle] = made
    return made


def current_stream(device: int | str | None = None, *, library: Library | None = None) -> Stream:
    """Return the stream that `stream=None` uses for tensors on `device`.

    This is torch's current stream if torch is imported, otherwise CuPy's, otherwise the default stream. With the host
    library, work on it runs synchronously in the calling thread.

    Use it to order other streams: `side.wait(pynccl.current_stream(comm.device))`, and vice versa."""
    library = chosen(library, "current_stream")
    if library.is_host:
        caller: Stream = host_module().CallerStream()
        return caller
    ordinal = gpu_ordinal(device)
    handle = _current_handle(ordinal)
    known = _current.get((ordinal, handle))
    if known is not None and not known._closed:
        return known
    _core_device(ordinal)  # raises if there is no such GPU
    found = CudaStream(_cuda_core().Stream.from_handle(int(handle)), ordinal, source=source_of(handle))
    if not handle or found.source is LASTING:
        _current[ordinal, int(handle)] = found
    return found


# By GPU and handle: torch's own streams and the default streams, whose handles never become those of other streams. An
# object is not kept for the handle of a stream that somebody may destroy.
_current: dict[tuple[int, int], CudaStream] = {}


def _current_handle(ordinal: int) -> int:
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    if torch is not None and hasattr(torch._C, "_cuda_getCurrentRawStream"):
        handle = int(torch._C._cuda_getCurrentRawStream(ordinal))
        return of_torch(handle, ordinal) if handle else 0
    return handle_of(cupy.cuda.get_current_stream(ordinal)) or 0 if cupy is not None else 0


def create_event(device: int | str | None = None, *, timing: bool = False, library: Library | None = None) -> Any:
    """Create an event on `device`. Pass timing=True to use `elapsed_time`."""
    library = chosen(library, "create_event")
    if library.is_host:
        return host_module().HostEvent()
    return CudaEvent(int(_core_device(device).device_id), timing)


def stream_handle(stream: Any, name: str = "stream") -> int:
    """Return the cudaStream_t of a stream object as an integer.

    Accepts an integer handle, a torch.cuda.Stream (`.cuda_stream`), a CuPy stream (`.ptr`), and objects with
    `__cuda_stream__`: cuda.core streams, `create_stream` streams, `HostStream`. Raises TypeError for anything else, and
    ValueError for an integer that is not a handle."""
    if type(stream) is int and 0 <= stream <= SIZE_MAX:
        return stream
    if hasattr(type(stream), "__index__") and not isinstance(stream, bool):
        return stream if type(stream) is Handle else integer(stream, name, 0, SIZE_MAX, "a handle, 0..2**64-1")
    handle = handle_of(stream)
    if handle is not None:
        return handle
    raise TypeError(
        f"{name} is {type_of(stream)}, expected a handle (int), a torch.cuda.Stream, a CuPy stream, "
        "an object with __cuda_stream__, or pynccl.create_stream()"
    )


_created: weakref.WeakValueDictionary[int, CudaStream] = weakref.WeakValueDictionary()  # by handle
on_end: Callable[[int], None] | None = None  # flight recorder's callback: a created stream is closed or dropped


def is_known(stream: int) -> bool:
    """Return whether a handle is known to be a CUDA stream's, so that the driver may be asked about it: see handles.py.
    A plain number is only if it is that of a default stream or of an open stream of `create_stream`."""
    return stream <= DEFAULT_STREAMS or source_of(stream) is not None or stream in _created


def hold(stream: int, library: Library, keep: Any) -> None:
    """Keep `keep` (nested tuples of buffers and related objects) alive until the work issued on `stream` has run.

    pynccl streams hold the references themselves, even if only their handle was passed. For torch streams, this calls
    record_stream. For the handle of any other stream, the caller must keep the buffers alive.
    """
    if type(stream) is Handle and stream.owner is not None:
        owner = stream.owner
    elif not stream:
        return
    else:
        owner = host_module().stream_from_handle(stream) if library.is_host else _created.get(stream)
    if hasattr(owner, "hold"):
        owner.hold(keep)
    elif hasattr(owner, "cuda_stream") and hasattr(owner, "record_event"):
        for x in _tensors(keep):
            if x.is_cuda:
                x.record_stream(owner)


def _tensors(keep: Any) -> list[Any]:
    if isinstance(keep, tuple):
        return [x for part in keep for x in _tensors(part)]
    return [keep] if hasattr(keep, "record_stream") else []
