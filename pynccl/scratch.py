"""A little memory of a communicator's own, which both the host and NCCL can use: for barrier() and check.py."""

from __future__ import annotations

import ctypes
from typing import Any

from .library import Library
from .streams import create_stream


class Scratch:
    """Plain memory for the host library; pinned memory and a stream on a GPU."""

    def __init__(self, nbytes: int, ordinal: int, library: Library) -> None:
        self.nbytes = nbytes
        if library.is_host:
            self._stream: Any = None
            self._memory: Any = ctypes.create_string_buffer(nbytes)
            self.address = ctypes.addressof(self._memory)
            return
        from cuda.core import LegacyPinnedMemoryResource

        self._stream = create_stream(ordinal, library=library)
        self._memory = LegacyPinnedMemoryResource().allocate(nbytes)
        self.address = int(self._memory.handle)

    @property
    def stream(self) -> int:
        """Handle of the stream for operations on the memory."""
        return self._stream.handle if self._stream else 0

    def wait(self) -> None:
        """Block until the operations on the memory are done."""
        if self._stream:
            self._stream.synchronize()
