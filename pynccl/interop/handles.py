"""CUDA stream handles, and where each came from.

A cudaStream_t is a pointer: the driver crashes on one that is not a stream's, even if it is only asked about it. So the
handle that a call gets says who vouches for it. What asks the driver about a call's stream looks there first: the
watchdog, and PYNCCL_CHECK before a capture.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any

from ..bindings.values import SIZE_MAX, attribute, integer

LASTING = object()  # a source: the stream lives as long as the process, or `streams.on_end` is called at its end
DEFAULT_STREAMS = 2  # handles up to this are CUDA's default streams: 0 and cudaStreamLegacy, 1; cudaStreamPerThread, 2
_CUDA_PACKAGES = ("torch", "pynccl", "cuda", "cupy")


class Handle(int):
    """cudaStream_t as an integer.

    owner   keeps the buffers of the work on it: its stream object, or a list; None: nobody does
    source  who vouches for it: LASTING, or an object that has a CUDA stream, as long as it has; None: nobody"""

    owner: Any = None
    source: Any = None


def vouched(number: int, owner: Any = None, source: Any = LASTING) -> Handle:
    """Return a handle with an owner and a source."""
    handle = Handle(number)
    handle.owner, handle.source = owner, source
    return handle


def source_of(handle: int) -> Any:
    """Return who vouches for a handle; None for a plain number."""
    return handle.source if type(handle) is Handle else None


def of_torch(number: int, device: int) -> int:
    """Return the handle of torch's current stream on a GPU. torch vouches for its own streams, which it never destroys,
    but not for an ExternalStream, whose id in torch is its handle."""
    found = _of_torch.get(number)
    if found is None:
        if sys.modules["torch"]._C._cuda_getCurrentStream(device)[0] == number:
            return number
        found = _of_torch[number] = vouched(number)
    return found


def handle_of(stream: Any) -> Handle | None:
    """Return the handle of a stream object of any library; None for other objects."""
    number = number_of(stream)
    if number is None:
        return None
    handle = integer(number, "stream", 0, SIZE_MAX, "a handle, 0..2**64-1")
    package = _package_of(type(stream))
    source = stream if package else None
    if package == "torch":
        source = LASTING
    elif package == "pynccl":
        source = attribute(stream, "source")
    return vouched(handle, stream, None if "External" in type(stream).__name__ else source)


def number_of(stream: Any) -> Any:
    """Return the cudaStream_t of a stream object; None for other objects."""
    protocol = attribute(stream, "__cuda_stream__")
    if protocol is not None:
        return (protocol() if callable(protocol) else protocol)[1]
    if is_cupy_event(stream):  # CuPy events have .ptr too
        return None
    handles = (attribute(stream, name) for name in ("cuda_stream", "ptr"))
    return next((handle for handle in handles if isinstance(handle, int)), None)


def is_cupy_event(x: Any) -> bool:
    return type(x).__name__ == "Event" and _package(type(x)) == "cupy"


def _package_of(kind: type) -> str:
    """Return the CUDA package that a class or a base of it is from; "": none."""
    if kind not in _packages:
        _packages[kind] = next((name for each in kind.__mro__ if (name := _package(each)) in _CUDA_PACKAGES), "")
    return _packages[kind]


def _package(kind: type) -> str:
    return kind.__module__.partition(".")[0]


_of_torch: dict[int, Handle] = {}  # torch's own streams: 32 of each priority and GPU
_packages: weakref.WeakKeyDictionary[type, str] = weakref.WeakKeyDictionary()
