"""Keep the buffers of enqueued work alive until a CUDA stream has run it.

Nothing blocks: each `add` also drops the references whose work has completed. One event at a time covers everything
added before it was recorded, so a call costs one driver query, plus a new event once the last one has completed.
References live no longer than the stream and its work.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

from .devices import cuda_driver, on_device
from .events import CudaEvent, number_passed, relaxed

_detached: list[KeepAlive] = []  # of streams that are gone but may have pending work


class KeepAlive:
    """The references held for one cuda.core stream, and the stream itself.

    device  ordinal of its GPU, where its events are created; None: the current one"""

    def __init__(self, core: Any, device: int | None = None) -> None:
        self._core, self._device = core, device
        self._lock = threading.Lock()
        self._event: Any = None  # recorded after the work of all of _before_event
        self._before_event: list[Any] = []
        self._after_event: list[Any] = []

    def __len__(self) -> int:
        return len(self._before_event) + len(self._after_event)

    def add(self, keep: Any) -> None:
        """Keep `keep` alive until the work issued so far is done."""
        with on_device(self._device), relaxed():
            if capturing(self._core):  # nothing runs now, and the graph owns the memory of its replays
                return
            self._after_event.append(keep)
            self.release_passed()
        for detached in _detached.copy() if _detached else ():
            with on_device(detached._device), relaxed():
                detached.release_passed()

    def release_passed(self) -> None:
        """Drop the references whose work is done, and record an event for the rest if needed."""
        done: list[Any] = []  # dropped outside the lock, since destructors may run Python code
        with self._lock:
            if self._event is None or self._event.is_done:
                done, self._before_event, self._after_event = self._before_event, self._after_event, []
                self._event = self._core.record(self._event) if self._before_event else None
        if not len(self) and self in _detached:
            _detached.remove(self)
        del done

    def close(self) -> None:
        """Record a last event; call this just before the stream is closed."""
        with self._lock:
            if len(self):
                self._before_event, self._after_event = [*self._before_event, *self._after_event], []
                self._event = self._core.record()
        self.detach()

    def detach(self) -> None:
        """Keep the references after the stream is gone. Makes no CUDA call, since garbage collection calls this."""
        if len(self) and self not in _detached:
            _detached.append(self)


class Shelf:
    """References that callers release, and those that nobody released until the work of a stream has passed.

    Events are queried only once there are twice as many entries as were left the last time."""

    def __init__(self) -> None:
        self._entries: deque[tuple[CudaEvent, list[Any]]] = deque()
        self._many = _FEW

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, event: CudaEvent, kept: list[Any]) -> None:
        """Keep what is in the list until it is cleared: by the caller, or here, since the event has passed.

        event  recorded behind the work that uses it, on the same stream as the others"""
        entries = self._entries
        entries.append((event, kept))
        full = len(entries) > self._many
        if full:
            known = list(entries)
            for _, passed in known[: number_passed([event for event, _ in known])]:
                passed.clear()
        try:  # popped before it is looked at, since another thread may do the same
            while not (first := entries.popleft())[1]:
                pass
            entries.appendleft(first)
        except IndexError:
            pass
        if full:
            self._many = 2 * len(entries) + _FEW


_FEW = 4


def capturing(core: Any) -> bool:
    """Return whether the stream is being captured into a CUDA graph, during which its events cannot be queried."""
    code, status = cuda_driver().cuStreamIsCapturing(core.handle)[:2]
    return not code and bool(status)
