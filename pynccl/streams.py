"""Anything that is a CUDA stream -> its handle; create streams and events, choose the device.

`create_stream` gives the same four verbs on every library: record, wait, synchronize, query. With a GPU they are
cuda.core's; with the host library a `HostStream` is an in-order queue run by a worker thread. Nothing here is imported
from CUDA until a stream or a device is asked for.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from .errors import NcclSystemError
from .library import Library, gpu_problem, host_module, load


@runtime_checkable
class Event(Protocol):
    """A point in a stream's order."""

    def synchronize(self) -> None:
        """Block the caller until the work before this point is done."""

    def query(self) -> bool:
        """Whether the work before this point is done."""


@runtime_checkable
class Stream(Protocol):
    """An in-order queue of device work."""

    @property
    def handle(self) -> int:
        """cudaStream_t as an integer (a `HostStream`'s number with the host library)."""

    def record(self, event: Any = None) -> Any:
        """Mark this point; returns the event."""

    def wait(self, event: Any) -> None:
        """Work issued from now on starts after `event` (or after all the work of another stream)."""

    def synchronize(self) -> None:
        """Block the caller until all the work is done."""

    def query(self) -> bool:
        """Whether all the work is done."""


class CudaEvent:
    """cuda.core's event with this module's verbs."""

    def __init__(self, event: Any) -> None:
        self.core = event

    @property
    def handle(self) -> int:
        return int(self.core.handle)

    def synchronize(self) -> None:
        self.core.sync()

    def query(self) -> bool:
        return bool(self.core.is_done)

    def elapsed_time(self, end: CudaEvent) -> float:
        """Milliseconds from this event to `end`; both need create_event(timing=True)."""
        return float(end.core - self.core)


class CudaStream:
    """cuda.core's stream with this module's verbs."""

    def __init__(self, stream: Any) -> None:
        self.core = stream

    @property
    def handle(self) -> int:
        return int(self.core.handle)

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle

    def record(self, event: CudaEvent | None = None) -> CudaEvent:
        if event is None:
            return CudaEvent(self.core.record())
        self.core.record(event.core)
        return event

    def wait(self, event: Any) -> None:
        self.core.wait(getattr(event, "core", event))

    def synchronize(self) -> None:
        self.core.sync()

    def query(self) -> bool:
        return bool(self.core.record().is_done)

    def close(self) -> None:
        self.core.close()


def create_stream(
    device: int | str | None = None, *, priority: int | None = None, library: Library | None = None
) -> Stream:
    """A new stream on `device` ("cuda:1", 1; None: the current device; ignored by the host library).

    priority  lower numbers run first, as in CUDA; None is the device's default, -1 the usual "high".
    """
    library = library or load()
    if library.is_host:
        stream: Stream = host_module().HostStream(priority=priority or 0)
        return stream
    core_device = _core_device(device)
    core_device.set_current()
    options = {} if priority is None else {"priority": priority}
    return CudaStream(core_device.create_stream(options=_cuda_core().StreamOptions(**options)))


def create_event(device: int | str | None = None, *, timing: bool = False, library: Library | None = None) -> Any:
    """A new event on `device`; `timing` lets `elapsed_time` be asked of it."""
    library = library or load()
    if library.is_host:
        return host_module().HostEvent()
    core_device = _core_device(device)
    core_device.set_current()
    options = _cuda_core().EventOptions
    # The field was called enable_timing before cuda.core 1.0.
    field = "timing_enabled" if hasattr(options, "timing_enabled") else "enable_timing"
    return CudaEvent(core_device.create_event(options=options(**({field: True} if timing else {}))))


def stream_handle(stream: Any) -> int:
    """cudaStream_t of anything that is a stream, as an integer.

    Accepts an integer handle, torch.cuda.Stream (`.cuda_stream`), CuPy's (`.ptr`), and whatever follows the
    `__cuda_stream__` protocol: cuda.core's streams, `create_stream`'s, `HostStream`."""
    if type(stream) is int:
        return stream
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        return int((protocol() if callable(protocol) else protocol)[1])
    for name in ("cuda_stream", "ptr"):
        handle = getattr(stream, name, None)
        if isinstance(handle, int):
            return handle
    raise TypeError(
        f"a {type(stream).__module__}.{type(stream).__name__} is no stream; pass a handle (int), a torch.cuda.Stream, "
        "a CuPy stream, an object with __cuda_stream__, or pynccl.create_stream()"
    )


def device_ordinal(device: Any) -> int:
    """1 for 1, "cuda:1", torch.device("cuda", 1); 0 for "cuda" and "cpu"."""
    if isinstance(device, int):
        return device
    kind, _, index = str(device).partition(":")
    if kind not in ("cuda", "cpu", "hip") or (index and not index.isdigit()):
        raise ValueError(f"device {device!r} is none; pass an ordinal (1) or a name ('cuda:1', 'cpu')")
    return int(index or 0)


def set_device(ordinal: int) -> None:
    """Make a GPU the current device of this thread, as ncclCommInitRank expects.

    Raises NcclSystemError, with the remedy, where there is no usable driver."""
    _core_device(ordinal).set_current()


def current_device() -> int:
    """Ordinal of this thread's current GPU, 0 where there is no usable driver."""
    return 0 if gpu_problem() else int(_core_device(None).device_id)


def _core_device(device: int | str | None) -> Any:
    problem = gpu_problem()
    if problem:
        raise NcclSystemError(
            f"{problem}\n  install the driver (nvidia-smi must work), or set PYNCCL_LIBRARY=host to run on the CPU"
        )
    return _cuda_core().Device(None if device is None else device_ordinal(device))


def _cuda_core() -> Any:
    """cuda.core, wherever this version keeps it."""
    try:
        import cuda.core as core

        core.Device  # noqa: B018  before 0.5 the package was there, empty but for `experimental`
    except AttributeError:
        import cuda.core.experimental as core
    return core
