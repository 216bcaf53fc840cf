"""Lane: a group's communicator for one kind of device, and the stream of its asynchronous calls. Work: such a call."""

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
from ..bindings.workers import Begun
from ..comm.base import explained
from ..comm.communicator import Communicator
from ..comm.groups import group
from ..interop.streams import create_stream, current_stream
from . import c10d
from .tensors import Copy

Call = Callable[[Communicator, Any], object]  # of a communicator, on a stream; None is the caller's


class Work(c10d.WorkBase):
    """One call, as torch.distributed has it.

    result  the tensors that it fills, which its future gives
    limit   seconds that wait() takes at most where it is not told; None: the group's timeout, which the watchdog keeps
    event   on CUDA: behind it on the side stream; None: it is in the order of the current stream
    """

    def __init__(self, lane: Lane | None, result: Sequence[torch.Tensor], limit: float | None = None) -> None:
        super().__init__()
        self.lane, self._result, self._limit = lane, list(result), limit
        self.source = -1  # of a recv
        self.event: Any = None
        self._happened: threading.Event | None = None  # None: it has run, or is in a stream's order
        self._error: BaseException | None = None
        self._future: Any = None
        self._settled = False
        self._lock = threading.Lock()

    def begin(self) -> Work:
        """It has not happened yet: `complete` will say so."""
        self._happened = threading.Event()
        return self

    def complete(self, error: BaseException | None = None) -> None:
        """It has run, or failed. What waits for its future goes on in another thread: it may wait for later calls."""
        assert self._happened is not None
        self._error = error
        self._happened.set()
        if self._future is not None:
            Begun(self._settle, "future")

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait on the CPU; order the current stream behind it on CUDA. Raises what it has failed with.

        timeout  NcclTimeout after so long, and the call goes on; 0: the group's"""
        if self._happened is not None:
            limit = timeout.total_seconds() if timeout else self._limit
            if not self._happened.wait(limit):
                text = f"a collective or message was not complete after wait({limit:g} s)"
                raise explained(NcclTimeout(text), self.lane.comm._track if self.lane else None)
            if self._error is not None:
                raise self._error
        if self.event is not None and self.lane is not None:
            self.lane.current().wait(self.event)
        return True

    def is_completed(self) -> bool:
        if self._happened is not None and not self._happened.is_set():
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
        """A future of the tensors; on CUDA it is complete in the order of streams, as those of torch are."""
        with self._lock:
            if self._future is None:
                devices: Any = sorted({x.device for x in self._result if x.is_cuda}, key=str)
                self._began: Any = torch.futures.Future(devices=devices or None)
                # set_exception() of torch sets a result, which C++ takes for one: DDP's reducer for tensors.
                self._future = self._began if devices else self._began.then(self._outcome)
        if self._happened is None or self._happened.is_set():
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
                self._began.set_result(self._result)


class Lane:
    """A communicator, and how its calls run: at once on the caller's stream, or on a stream beside that."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.is_host = comm.library.is_host
        self._device = None if self.is_host else comm.device
        self._side: Any = None
        # DDP.join() hands the Work of a sum of one number to C++, which keeps the C++ half of it alone.
        self._handed_out: deque[Work] = deque(maxlen=16)

    @property
    def side(self) -> Any:
        if self._side is None:
            self._side = create_stream(self._device, library=self.comm.library)
        return self._side

    def current(self) -> Any:
        return current_stream(self._device, library=self.comm.library)

    def on_side(self) -> Any:
        """torch's work goes to the side stream within."""
        return torch.cuda.stream(torch.cuda.ExternalStream(self.side.handle, torch.device(self.comm.device)))

    def run(
        self, calls: Sequence[Call], result: Sequence[torch.Tensor], here: bool, copies: Sequence[Copy], limit: float
    ) -> Work:
        """The calls, as one launch, then the copies.

        here   on the caller's stream: on the CPU it has run when this returns
        limit  seconds that wait() takes at most, 0: none"""
        if here and not limit:
            self._issue(calls, None)
            for copy in copies:
                copy()
            return Work(self, result)
        side, work, track = self.side, Work(self, result, limit or None), self.comm._track
        if sum(x.numel() for x in result) == 1:
            self._handed_out.append(work)
        side.wait(self.current())
        with self.comm.lock:
            self._issue(calls, side)
            entry = 0 if track is None else track.head
        if self.is_host:
            for copy in copies:
                side.submit(copy)
            work.begin()
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
        """In the side stream, on the CPU: the call has run. The record says so, for who asks what a rank waits for."""
        if error is None and entry and self.comm._track is not None:
            self.comm._track.completed(entry)
        work.complete(error)
