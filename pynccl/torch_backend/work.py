"""Lane: a group's communicator for one device type, with the side stream of its asynchronous calls. Work: one call."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from ..bindings.errors import NcclTimeout
from ..bindings.library import host_module
from ..bindings.workers import WorkerCall
from ..comm.base import explained
from ..comm.communicator import Communicator
from ..comm.groups import group
from ..interop.streams import create_stream, current_stream
from . import c10d
from .tensors import Copy

Call = Callable[[Communicator, Any], object]  # (communicator, stream); stream None: the current stream


class Work(c10d.WorkBase):
    """A torch.distributed Work: the handle of one call.

    result  the tensors that it fills, the value of its future
    limit   default timeout of wait() in seconds; None: the group's timeout, enforced by the watchdog
    event   on CUDA: recorded after the call on the side stream; None: the call is on the current stream
    """

    def __init__(self, lane: Lane | None, result: Sequence[torch.Tensor], limit: float | None = None) -> None:
        super().__init__()
        self.lane, self._result, self._limit = lane, list(result), limit
        self.source = -1  # source rank of a recv
        self.event: Any = None
        self._done: Any = None  # an event, or a flag like one; None: it has run, or is enqueued on a stream
        self._stream = 0  # the host stream that runs it
        self._future_wait = 0  # of those who have its future: the number from begin_wait
        self._error: BaseException | None = None
        self._future: Any = None
        self._settled = False
        self._lock = threading.Lock()

    def begin(self, stream: int) -> Work:
        """Mark it as pending until `complete` is called.   stream: the host stream that runs it"""
        self._done, self._stream = threading.Event(), stream
        return self

    def complete(self, error: BaseException | None = None) -> None:
        """Mark it as done or failed. Callbacks of the future run in another thread: they can wait for later calls."""
        assert self._done is not None
        self._error = error
        self._done.set()
        host_module().end_wait(self._future_wait)
        if self._future is not None:
            WorkerCall(self._settle, "future")

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block until it is done (CPU), or make the current stream wait for it (CUDA). Raises its error if it failed.

        timeout  raise NcclTimeout after this time, while the call continues; 0: the group's timeout"""
        if self._done is not None:
            limit = timeout.total_seconds() if timeout else self._limit
            if not self._wait(limit):
                text = f"wait({limit:g} s) timed out; the collective, send or recv is still in progress"
                raise explained(NcclTimeout(text), self.lane.comm._track if self.lane else None)
            if self._error is not None:
                raise self._error
        if self.event is not None and self.lane is not None:
            self.lane.current().wait(self.event)
        return True

    def _wait(self, limit: float | None) -> bool:
        assert self._done is not None
        if self._done.is_set():
            return True
        with host_module().waiting_for(self._stream):
            return self._block(limit)

    def _block(self, limit: float | None) -> bool:
        return bool(self._done.wait(limit))

    def is_completed(self) -> bool:
        if self._done is not None and not self._done.is_set():
            return False
        return self.event is None or bool(self.event.query())

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> list[torch.Tensor]:
        self.wait()
        return self._result

    def source_rank(self) -> int:
        return self.source

    synchronize = block_current_stream = wait
    _source_rank = source_rank

    def get_future(self) -> Any:
        """Return a future of the tensors. On CUDA it completes in stream order, like torch's own."""
        with self._lock:
            if self._future is None:
                devices: Any = sorted({x.device for x in self._result if x.is_cuda}, key=str)
                self._base_future: Any = torch.futures.Future(devices=devices or None)
                # torch's set_exception() sets the exception as the result, which C++ (DDP's reducer) takes for tensors.
                self._future = self._base_future if devices else self._base_future.then(self._outcome)
                if self._done is not None:  # DDP waits for the future, in C++
                    self._future_wait = host_module().begin_wait(self._stream)
                    if self._done.is_set():
                        host_module().end_wait(self._future_wait)
        if self._done is None or self._done.is_set():
            self._settle()
        return self._future

    def _outcome(self, _: Any) -> list[torch.Tensor]:
        if self._error is not None:
            raise self._error
        return self._result

    def _settle(self) -> None:
        with self._lock:
            first, self._settled = not self._settled, True
        if first:
            with self.lane.on_side() if self.event is not None and self.lane else contextlib.nullcontext():
                self._base_future.set_result(self._result)


class Lane:
    """A communicator with a side stream. Its calls run on the caller's stream or on the side stream."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.is_host = comm.library.is_host
        self._device = None if self.is_host else comm.device
        self._side: Any = None
        # DDP.join() passes the Work of a one-element sum to C++, which keeps only its C++ half: keep the Python half.
        self._handed_out: deque[Work] = deque(maxlen=16)

    @property
    def side(self) -> Any:
        if self._side is None:
            self._side = create_stream(self._device, library=self.comm.library)
        return self._side

    def current(self) -> Any:
        return current_stream(self._device, library=self.comm.library)

    def on_side(self) -> Any:
        """Return a context manager in which torch's work runs on the side stream."""
        return torch.cuda.stream(torch.cuda.ExternalStream(self.side.handle, torch.device(self.comm.device)))

    def run(
        self, calls: Sequence[Call], result: Sequence[torch.Tensor], here: bool, copies: Sequence[Copy], limit: float
    ) -> Work:
        """Make the calls as one launch, then the copies.

        here   run on the caller's stream; on the CPU the calls have then run when this returns
        limit  default timeout of wait() in seconds, 0: none"""
        if here and not limit:
            self._issue(calls, None)
            for copy in copies:
                copy()
            return Work(self, result)
        side, work, track = self.side, Work(self, result, limit or None), self.comm._track
        if sum(x.numel() for x in result) == 1:
            self._handed_out.append(work)
        side.wait(self.current())
        with self.comm._lock:
            self._issue(calls, side)
            entry = 0 if track is None else track.head
        if self.is_host:
            for copy in copies:
                side.submit(copy)
            work.begin(side.handle)
            side.then(partial(self._complete, work, entry))
            return work
        if copies:
            with self.on_side():
                for copy in copies:
                    copy()
            side.hold((*copies, *result))
        work.event = side.record()
        return work

    def _issue(self, calls: Sequence[Call], stream: Any) -> None:
        with group() if len(calls) > 1 else contextlib.nullcontext():
            for call in calls:
                call(self.comm, stream)

    def _complete(self, work: Work, entry: int, error: BaseException | None) -> None:
        """On the CPU's side stream: record that the call is done, so that hang reports do not show it as pending."""
        if error is None and entry and self.comm._track is not None:
            self.comm._track.completed(entry)
        work.complete(error)
