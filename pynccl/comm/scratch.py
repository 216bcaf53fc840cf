"""A little memory of a communicator, which both the host and NCCL can use: for barrier() and consistency.py."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from typing import Any

from ..bindings.library import Library
from ..interop.devices import cuda_core, on_device
from ..interop.streams import create_stream


class Scratch:
    """Plain memory for the host library; pinned memory and a stream on a GPU."""

    def __init__(self, nbytes: int, ordinal: int, library: Library) -> None:
        self.nbytes = nbytes
        self._ordinal = ordinal
        if library.is_host:
            self._stream: Any = None
            self._memory: Any = ctypes.create_string_buffer(nbytes)
            self.address = ctypes.addressof(self._memory)
            return
        with on_device(ordinal):  # whose context the pinned memory belongs to
            self._stream = create_stream(ordinal, library=library)
            self._memory = cuda_core().LegacyPinnedMemoryResource().allocate(nbytes)
        self.address = int(self._memory.handle)

    def __del__(self) -> None:
        # The driver frees pinned memory only where a context is current, and this may be a thread without one.
        if getattr(self, "_stream", None) and not sys.is_finalizing():
            with contextlib.suppress(Exception), on_device(self._ordinal):
                self._memory = None

    @property
    def stream(self) -> int:
        """Handle of the stream for operations on the memory."""
        return self._stream.handle if self._stream else 0

    def wait(self) -> None:
        """Block until the operations on the memory are done."""
        if self._stream:
            self._stream.synchronize()
