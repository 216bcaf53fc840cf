"""Scratch memory of a communicator that both the host and NCCL can access: for barrier() and consistency.py."""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any

from ..bindings.library import Library
from ..bindings.resource import destructor
from ..interop.devices import cuda_core, on_device
from ..interop.streams import create_stream


class Scratch:
    """Pinned memory and a stream on a GPU; ordinary memory with the host library.

    stream  handle of the stream for operations on the memory; 0 with the host library"""

    def __init__(self, nbytes: int, ordinal: int, library: Library) -> None:
        self.nbytes = nbytes
        self._ordinal = ordinal
        if library.is_host:
            self._stream: Any = None
            self.stream = 0
            self._memory: Any = ctypes.create_string_buffer(nbytes)
            self.address = ctypes.addressof(self._memory)
            return
        with on_device(ordinal):  # the pinned memory belongs to the context of this GPU
            self._stream = create_stream(ordinal, library=library)
            self._memory = cuda_core().LegacyPinnedMemoryResource().allocate(nbytes)
        self.address, self.stream = int(self._memory.handle), self._stream.handle

    @destructor
    def __del__(self) -> None:
        # The driver frees pinned memory only if a context is current; this thread may have none.
        if getattr(self, "_stream", None):
            with contextlib.suppress(Exception), on_device(self._ordinal):
                self._memory = None

    def wait(self) -> None:
        """Block until the operations on the memory are done."""
        if self._stream:
            self._stream.synchronize()
