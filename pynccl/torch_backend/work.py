"""Lane: a group's communicator for one device type, with the side stream of its asynchronous calls. Work: one call."""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cached_property, partial
from typing import Any

import torch

from ..bindings.errors import NcclTimeout
from ..bindings.library import host_module
from ..bindings.workers import Flag, WorkerCall
from ..comm.base import explained
from ..comm.communicator import Communicator
from ..comm.groups import group
from ..interop.events import is_capturing, pooled
from ..interop.handles import DEFAULT_STREAMS, Handle, vouched
from ..interop.keepalive import Shelf
from ..interop.streams import create_stream
from . import c10d
from .tensors import Copy, copy_back

Call = Callable[..., object]  # (communicator, stream=); stream None: the current stream


@c10d.not_compiled
class Work(c10d.WorkBase):
    """A torch.distributed Work: the handle of one call.

    result  the tensors that it fills, the value of its future
    limit   default timeout of wait() in seconds; None: the group's timeout, enforced by the watchdog
    event   on CUDA: recorded after the call on the side stream; None: the call is on the current stream
    """

    source = -1  # source rank of a recv
    event: Any = None
    _done: Any = None  # a Flag; None: it has run, or is enqueued on a stream
    _stream = 0  # the stream that runs it (CPU), or on which it was issued (CUDA)
    _kept: list[Any] | None = None  # on CUDA: its buffers, until wait()
    _future_wait = 0  # of those who have its future: the number from begin_wait
    _error: BaseException | None = None
    _future: Any = None
    _settled = False

    def __init__(self, lane: Lane | None, result: Sequence[torch.Tensor], limit: float | None = None) -> None:
        c10d.WorkBase.__init__(self)
        self.lane, self._result, self._limit = lane, list(result), limit

    def begin(self, stream: int) -> Work:
        """Mark it as pending until `complete` is called.   stream: the host stream that runs it"""
        self._done, self._stream = Flag(), stream
        return self

    def complete(self, error: BaseException | None = None) -> None:
        """Mark it as done or failed. Callbacks of the future run in another thread: they can wait for later calls."""
        if (settle := self.end(error)) is not None:
            WorkerCall(settle, "future")

    def end(self, error: BaseException | None) -> Callable[[], None] | None:
        """Mark it as done or failed. Return a function that completes the future, if it has one."""
        assert self._done is not None
        self._error = error
        self._done.set()
        host_module().end_wait(self._future_wait)
        return None if self._future is None else self._settle

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
            stream = self.lane.join(self.event)
            if stream == self._stream and self._kept:
                self._kept.clear()  # their memory is used again in the order of this stream: after the call
        return True

    def _wait(self, limit: float | None) -> bool:
        assert self._done is not None
        if self._done.is_set():
            return True
        with host_module().waiting_for(self._stream):
            return self._block(limit)

    def _block(self, limit: float | None) -> bool:
        if limit is None and self.lane is not None and self.lane.is_host:
            self.lane.side.run_here(self._done.is_set)
        else:
            self._hurry()
        return bool(self._done.wait(limit))

    def _hurry(self) -> None:
        """On the CPU: have another thread make the call now."""
        if self.lane is not None and self.lane.is_host:
            self.lane.side.hurry()

    def is_completed(self) -> bool:
        if self._done is not None and not self._done.is_set():
            self._hurry()
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
        with self._lock():
            if self._future is None:
                on_cuda = bool(self._result) and self._result[0].is_cuda
                self._base_future: Any = torch.futures.Future(devices=[self._result[0].device] if on_cuda else None)
                # torch's set_exception() sets the exception as the result, which C++ (DDP's reducer) takes for tensors.
                self._future = self._base_future if on_cuda else self._base_future.then(self._outcome)
                if self._done is not None:  # DDP waits for the future, in C++
                    self._future_wait = host_module().begin_wait(self._stream)
                    if self._done.is_set():
                        host_module().end_wait(self._future_wait)
        if self._done is None or self._done.is_set():
            self._settle()
        else:  # who waits for the future does so in C++
            self._hurry()
        return self._future

    def _lock(self) -> Any:
        return self.__dict__.setdefault("_locked", threading.Lock())  # made when needed: most works have no future

    def _outcome(self, _: Any) -> list[torch.Tensor]:
        if self._error is not None:
            raise self._error
        return self._result

    def _settle(self) -> None:
        with self._lock():
            first, self._settled = not self._settled, True
        if first:
            if self.event is not None and self.lane is not None:
                self.lane.set_result(self._base_future, self._result)
            else:
                self._base_future.set_result(self._result)


class Lane:
    """A communicator with a side stream. Its calls run on the caller's stream or on the side stream."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.is_host, self._ordinal = comm.library.is_host, comm.ordinal
        self._made: tuple[Any, Handle] | None = None
        self._shelf = Shelf()  # on CUDA: the buffers of calls for which nobody may have waited
        # DDP.join() passes the Work of a one-element sum to C++, which keeps only its C++ half: keep the Python half.
        self._handed_out: deque[Work] = deque(maxlen=16)

    @property
    def side(self) -> Any:
        return self._side()[0]

    def _side(self) -> tuple[Any, Handle]:
        """Return the side stream and its handle. On CUDA the works keep the buffers, not the stream."""
        if self._made is None:
            if self.is_host:
                stream: Any = host_module().HostStream(patient=True)
            else:
                stream = create_stream(self._ordinal, library=self.comm.library)
            with self.comm._lock:  # another thread may have been faster
                self._made = self._made or (stream, vouched(stream.handle, stream if self.is_host else []))
        return self._made

    @cached_property
    def _torchs_side(self) -> Any:
        return torch.cuda.ExternalStream(self.side.handle, torch.device("cuda", self._ordinal))

    def on_side(self) -> Any:
        """Return a context manager in which torch's work runs on the side stream."""
        return torch.cuda.stream(self._torchs_side)

    def join(self, event: Any) -> int:
        """Make torch's current stream wait for an event. Return the stream's handle."""
        stream: int = torch._C._cuda_getCurrentRawStream(self._ordinal)
        is_clear = stream > DEFAULT_STREAMS or torch._C._cuda_getDevice() == self._ordinal
        event.block(ctypes.c_void_p(stream), None if is_clear else self._ordinal)
        return stream

    def set_result(self, future: Any, result: list[torch.Tensor]) -> None:
        """Complete a future on the side stream: who waits for it, waits for what was issued there."""
        current, before = torch._C._cuda_getDevice(), torch._C._cuda_getCurrentStream(self._ordinal)
        side = self._torchs_side
        torch._C._cuda_setStream(side.stream_id, side.device_index, side.device_type)  # and makes its GPU current
        try:
            future.set_result(result)
        finally:
            torch._C._cuda_setStream(*before)
            if current != self._ordinal:
                torch.cuda.set_device(current)

    def run(
        self, calls: Sequence[Call], result: Sequence[torch.Tensor], here: bool, copies: Sequence[Copy], limit: float
    ) -> Work:
        """Make the calls as one launch, then the copies.

        here   run on the caller's stream; on the CPU the calls have then run when this returns
        limit  default timeout of wait() in seconds, 0: none"""
        if here and not limit:
            if self.is_host and self._made is not None:
                self.side.run_here(self.side.query)  # the earlier calls
            self._issue(calls, None)
            for copy in copies:
                copy()
            return Work(self, result)
        work = Work(self, result, limit or None)
        if len(result) == 1 and result[0].numel() == 1:
            self._handed_out.append(work)
        if self.is_host:
            self._run_on_host(work, calls, copies)
        else:
            self._run_on_cuda(work, calls, copies)
        return work

    def _run_on_host(self, work: Work, calls: Sequence[Call], copies: Sequence[Copy]) -> None:
        (side, handle), track = self._side(), self.comm._track
        with self.comm._lock:
            self._issue(calls, handle)
            entry = 0 if track is None else track.head
        work.begin(side.handle)
        side.then(partial(self._complete, work, copies, entry))

    def _run_on_cuda(self, work: Work, calls: Sequence[Call], copies: Sequence[Copy]) -> None:
        """Make four calls of CUDA. The side stream waits for the point at which the event is recorded first."""
        (side, handle), track = self._side(), self.comm._track
        work._stream = stream = torch._C._cuda_getCurrentRawStream(self._ordinal)
        work.event = event = pooled(self._ordinal)
        # CUDA cannot capture the default stream, 0.
        event.captured = stream > 1 and self._is_capturing(stream)
        entry = 0 if track is None else track.head + len(calls)
        event.record(ctypes.c_void_p(stream))
        event.block(side.pointer)
        self._issue(calls, handle)
        if copies:
            with self.on_side():
                for copy in copies:
                    copy()
        event.record(side.pointer)
        work._kept = kept = [calls, copies]
        if not event.captured:  # nothing runs now, and a graph owns the memory of its replays
            self._shelf.add(event, kept)
            if track is not None:
                track.recorded = entry, handle, event

    def _is_capturing(self, stream: int) -> bool:
        if torch._C._cuda_getDevice() == self._ordinal:  # then torch asks the runtime about this stream
            return bool(torch.cuda.is_current_stream_capturing())
        return is_capturing(stream)

    def _issue(self, calls: Sequence[Call], stream: Any) -> None:
        if len(calls) == 1:
            calls[0](self.comm, stream=stream)
            return
        with group():
            for call in calls:
                call(self.comm, stream=stream)

    def _complete(
        self, work: Work, copies: Sequence[Copy], entry: int, error: BaseException | None
    ) -> Callable[[], None] | None:
        """On the CPU's side stream: record that the call is done, so that hang reports do not show it as pending."""
        error = error or copy_back(copies)
        if error is None and entry and self.comm._track is not None:
            self.comm._track.completed(entry)
        return work.end(error)
