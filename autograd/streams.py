"""The side stream of a communicator, and its synchronization with the caller's stream.

Only this file distinguishes CUDA from the host library. On a GPU the caller's stream is torch's current stream, and
waits are enqueued there. With the host library the caller is the current thread, which works synchronously and blocks.

The current stream at wait() may differ from that at start(). The allocator returns memory to the stream of start() when
it is freed, and reuses it there. That stream therefore waits too, and the allocator records the stream of wait().
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

import pynccl
from pynccl import Communicator
from pynccl.bindings.values import attribute, shown
from pynccl.comm.observers import waiting
from pynccl.interop.handles import source_of, vouched
from pynccl.interop.streams import stream_handle

from .arguments import check_comm
from .state import state_of

HIGH = -1  # priority of communication streams


class KeepAliveList(list[Any]):
    """A keeper that keeps enqueued buffers alive for as long as it lives."""

    hold = list.append


def wait_for(streams: Iterable[Any]) -> None:
    """Make the caller's streams wait for these streams, which `producer_stream` returned."""
    for stream in streams:
        if stream is not None and stream != (here := torch.cuda.current_stream(stream.device)):
            here.wait_stream(stream)


class SideStream:
    """A stream on which collectives overlap with the caller's work. This class is for the host library, whose caller
    works synchronously and blocks."""

    def __init__(self, comm: Communicator, stream: Any = None) -> None:
        self.stream = stream or pynccl.create_stream(library=comm.library)

    def handle(self, keeper: Any) -> Any:
        """Return the argument `stream=` for launches. keeper.hold gets each enqueued buffer and must keep it alive
        until `wait` or `wait_on`. The streams of the host library keep buffers themselves."""
        return self.stream

    def wait_for_caller(self) -> Any:
        """Make later work on this stream wait for what the caller has launched so far. Returns the caller's stream."""

    def record(self) -> Any:
        """Record an event after what was launched here so far, for `wait`."""
        return self.stream.record()

    def wait(self, event: Any) -> Any:
        """Make the caller's stream wait for the event, and return that stream. Raises errors that occurred before
        it."""
        with waiting():
            event.synchronize()

    def wait_on(self, stream: Any, event: Any) -> None:
        """Make the given stream wait for the event."""
        event.synchronize()

    def release(self, start_stream: Any, wait_stream: Any, result: Tensor | None) -> None:
        """Let the allocator reuse the buffers of `start_stream` after what was launched on `wait_stream` so far. The
        result, which may be one of the buffers, is used on `wait_stream`."""

    def share(self, made: Tensor, on: Any) -> None:
        """Let the caller's stream use, and free, a tensor that was made on the stream `on`."""


class _CudaSide(SideStream):
    """The side stream on a GPU. torch's allocator assigns buffers to the stream that was current when they were made,
    at start(). It need not know the side stream, because the buffers are kept until the stream of start() has
    waited."""

    def __init__(self, comm: Communicator, stream: Any = None, priority: int = HIGH) -> None:
        self.device = torch.device(comm.device)
        # High priority: a collective must be resident before a large matmul fills the GPU.
        self.owner = (
            pynccl.create_stream(comm.device, priority=priority, library=comm.library) if stream is None else stream
        )
        handle = vouched(self.owner.handle) if stream is None else stream_handle(stream)
        self._number, self._source = int(handle), source_of(handle)
        self.stream: Any = torch.cuda.ExternalStream(self._number, device=self.device)

    def handle(self, keeper: Any) -> Any:
        return vouched(self._number, keeper, self._source)

    def wait_for_caller(self) -> Any:
        caller = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(caller)
        return caller

    def record(self) -> Any:
        return self.stream.record_event()

    def wait(self, event: Any) -> Any:
        caller = torch.cuda.current_stream(self.device)
        with waiting():
            caller.wait_event(event)
        return caller

    def wait_on(self, stream: Any, event: Any) -> None:
        stream.wait_event(event)

    def release(self, start_stream: Any, wait_stream: Any, result: Tensor | None) -> None:
        if wait_stream != start_stream:
            start_stream.wait_stream(wait_stream)
            if result is not None:
                result.record_stream(wait_stream)

    def share(self, made: Tensor, on: Any) -> None:
        share(made, on)


def is_capturing(device: torch.device) -> bool:
    """Return whether the caller's work on a GPU is being captured into a CUDA graph."""
    with torch.cuda.device(device):  # torch checks the current stream of the current GPU
        return torch.cuda.is_current_stream_capturing()


def producer_stream(x: Tensor) -> Any:
    """Return the stream on which work of the caller on x runs now; None on the CPU."""
    return torch.cuda.current_stream(x.device) if x.is_cuda else None


def share(made: Tensor, on: Any) -> None:
    """Let the current stream use a tensor that was made on the stream `on`: if the two differ, the current stream waits
    for `on`, and torch's allocator records it."""
    current = torch.cuda.current_stream(on.device)
    if current != on:
        current.wait_stream(on)
        made.record_stream(current)


class SideStreams(dict[int, SideStream]):
    """Those of a communicator by priority: HIGH or 0."""


def side_stream(comm: Communicator, priority: int = HIGH) -> SideStream:
    """Return the communicator's side stream of a priority, created at first use. There are two: one for priorities
    below 0, one for the others. A process has 8 queues to a GPU, and streams that share a queue wait for each other."""
    priority = HIGH if priority < 0 else 0
    sides = state_of(comm, SideStreams)
    side = sides.get(priority)
    if side is None:
        side = sides[priority] = SideStream(comm) if comm.library.is_host else _CudaSide(comm, priority=priority)
    return side


def share_side_streams(comm: Communicator, child: Communicator) -> None:
    """Let another communicator of the same GPU use the side streams of `comm`, so that the work of both runs in the
    same order on every rank. Concurrent collectives of two communicators may deadlock waiting for each other's SMs."""
    child._attached[SideStreams] = state_of(comm, SideStreams)


def set_side_stream(comm: Communicator, stream: Any) -> None:
    """Set the stream on which `start` and overlapped layers communicate.

    comm    communicator
    stream  a stream of torch, cuda.core or pynccl, on the communicator's device; it must live as long as `comm`

    Call it on every rank before the first `start` or overlapped layer; RuntimeError afterwards, because work may be in
    progress on another stream. TypeError for a wrong stream."""
    check_comm("set_side_stream", comm, stream=stream)
    if comm.library.is_host:
        if attribute(stream, "submit") is None or not isinstance(stream, pynccl.Stream):
            raise TypeError(
                f"set_side_stream: stream is {shown(stream)}, expected a stream of pynccl.create_stream() for the host "
                "library (on a GPU, also a torch or cuda.core stream)"
            )
        side = SideStream(comm, stream)
    else:
        side = _CudaSide(comm, stream)
    sides = state_of(comm, SideStreams)
    if sides:
        raise RuntimeError(
            "set_side_stream: the communicator has already used its side stream; call it before start() and overlapped "
            "layers"
        )
    sides.update({HIGH: side, 0: side})
