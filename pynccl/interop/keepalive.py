"""What a CUDA stream keeps alive until it has run: the buffers of what was issued on it.

Nobody waits for that: whenever something is added, what has been passed since is let go. One event at a time stands for
all that was added before it was recorded, so a call costs a question to the driver, and an event only once the last one
has been passed. References that nobody drops are held no longer than the stream and its work.
"""

from __future__ import annotations

import threading
from typing import Any

from .devices import cuda_driver, on_device

_detached: list[KeepAlive] = []  # of streams that are gone, whose work may not be


class KeepAlive:
    """The references of one stream, cuda.core's, which it keeps as well.

    device  ordinal of its GPU, on which its events have to be made; None: the one that is current"""

    def __init__(self, core: Any, device: int | None = None) -> None:
        self._core, self._device = core, device
        self._lock = threading.Lock()
        self._event: Any = None  # behind all of _covered
        self._covered: list[Any] = []
        self._open: list[Any] = []

    def __len__(self) -> int:
        return len(self._covered) + len(self._open)

    def add(self, keep: Any) -> None:
        """Keep this until the work that was issued so far is done."""
        with on_device(self._device), relaxed():
            if capturing(self._core):  # nothing runs now; what runs later is the graph's, and so is its memory
                return
            self._open.append(keep)
            self.release_passed()
        for detached in _detached.copy() if _detached else ():
            with on_device(detached._device), relaxed():
                detached.release_passed()

    def release_passed(self) -> None:
        """Drop what has been passed, and see to the rest. Without references left, a detached one is forgotten."""
        done: list[Any] = []  # dropped outside the lock: what goes may run Python code
        with self._lock:
            if self._event is None or self._event.is_done:
                done, self._covered, self._open = self._covered, self._open, []
                self._event = self._core.record(self._event) if self._covered else None
        if not len(self) and self in _detached:
            _detached.remove(self)
        del done

    def close(self) -> None:
        """The stream is about to be closed: its last event is recorded now."""
        with self._lock:
            if len(self):
                self._covered, self._open = [*self._covered, *self._open], []
                self._event = self._core.record()
        self.detach()

    def detach(self) -> None:
        """The stream is gone. No call into CUDA here: garbage collection comes through."""
        if len(self) and self not in _detached:
            _detached.append(self)


def capturing(core: Any) -> bool:
    """Whether the stream is captured into a CUDA graph, when no event of it may be asked for."""
    code, status = cuda_driver().cuStreamIsCapturing(core.handle)[:2]
    return not code and bool(status)


class relaxed:
    """`with relaxed():` this thread may ask for events while other streams are captured into CUDA graphs. In CUDA's
    default mode, which is torch's too, a question breaks the capture of any stream of the process."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        driver = cuda_driver()
        _, self._before = driver.cuThreadExchangeStreamCaptureMode(
            driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        )

    def __exit__(self, *exc: object) -> None:
        cuda_driver().cuThreadExchangeStreamCaptureMode(self._before)
