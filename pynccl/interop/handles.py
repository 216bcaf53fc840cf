"""CUDA stream handles, and where each came from.

A cudaStream_t is a pointer: the driver crashes on one that is not a stream's, even if it is only asked about it. So the
handle that a call gets says who vouches for it, and only `pynccl/watch/`, which asks the driver later, must look.
"""

from __future__ import annotations

import weakref
from typing import Any

from ..bindings.values import SIZE_MAX, attribute, integer

LASTING = object()  # a source: the stream lives as long as the process, or `streams.on_end` is called at its end
DEFAULT_STREAMS = 2  # handles up to this are CUDA's default streams: 0 and cudaStreamLegacy, 1; cudaStreamPerThread, 2
_LASTING_PACKAGES = ("torch", "pynccl")  # torch never destroys its streams, and pynccl's call `on_end`
_CUDA_PACKAGES = (*_LASTING_PACKAGES, "cuda", "cupy")


class Handle(int):
    """cudaStream_t as an integer.

    owner   keeps the buffers of the work on it: its stream object, or a list; None: nobody does
    source  who vouches for it: LASTING, or an object that has a CUDA stream, as long as it has; None: nobody"""

    owner: Any = None
    source: Any = None


def vouched(number: int, owner: Any = None) -> Handle:
    """Return the handle of a stream of torch or pynccl.   owner: see Handle"""
    handle = Handle(number)
    handle.owner, handle.source = owner, LASTING
    return handle


def handle_of(stream: Any) -> Handle | None:
    """Return the handle of a stream object of any library; None for other objects."""
    number = number_of(stream)
    if number is None:
        return None
    handle = Handle(integer(number, "stream", 0, SIZE_MAX, "a handle, 0..2**64-1"))
    package = _package_of(type(stream))
    handle.owner, handle.source = stream, LASTING if package in _LASTING_PACKAGES else stream if package else None
    return handle


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


_packages: weakref.WeakKeyDictionary[type, str] = weakref.WeakKeyDictionary()
