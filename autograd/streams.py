"""The side stream of a communicator, and how the caller's stream and it wait for each other.

The one place in this package that knows CUDA from the host library. On a GPU the caller's stream is torch's current
one, and waiting is queued there; with the host library the caller is this thread, which works at once and so blocks.

The caller may have another current stream when he waits than when he started. Memory that was made on the first goes
back to it when it is dropped, and is used anew there: so the first one waits too, and the allocator is told of the
second.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

import pynccl
from pynccl import Communicator
from pynccl.bindings.values import shown
from pynccl.comm.observers import waiting
from pynccl.interop.streams import Handle, stream_handle

HIGH = -1  # the priority of communication


class Kept(list[Any]):
    """A keeper that keeps what was enqueued for as long as it lives."""

    hold = list.append


def wait_for(streams: Iterable[Any]) -> None:
    """Let the caller's streams wait for these, as `made_on` returned them."""
    for stream in streams:
        if stream is not None and stream != (here := torch.cuda.current_stream(stream.device)):
            here.wait_stream(stream)


class SideStream:
    """Where collectives run beside the caller's work: of the host library, whose caller works at once and so blocks."""

    def __init__(self, comm: Communicator, stream: Any = None) -> None:
        self.stream = stream or pynccl.create_stream(library=comm.library)

    def handle(self, keeper: Any) -> Any:
        """For `stream=`; keeper.hold is given what is enqueued there, and keeps it until `wait` or `wait_on`. The host
        library's streams keep it themselves."""
        return self.stream

    def wait_for_caller(self) -> Any:
        """Work launched here from now on starts after what the caller has launched so far. Returns his stream."""

    def record(self) -> Any:
        """The end of what was launched here so far: an event for `wait`."""
        return self.stream.record()

    def wait(self, event: Any) -> Any:
        """What the caller launches from now on starts after the event. Raises what went wrong before it. Returns the
        caller's stream."""
        with waiting():
            event.synchronize()

    def wait_on(self, home: Any, event: Any) -> None:
        """The same for the stream `home`, whoever the caller is."""
        event.synchronize()

    def release(self, home: Any, here: Any, result: Tensor | None) -> None:
        """The buffers of the stream `home` are free after what was launched on `here` so far, and the result, which may
        be one of them, is used on `here`."""

    def share(self, made: Tensor, on: Any) -> None:
        """The caller may use what was made on the stream `on`, and drop it."""


class _CudaSide(SideStream):
    """Buffers belong, with torch's allocator, to the stream that was current when they were made: at start(). The
    allocator need not be told of the side stream, since they are kept until that one has waited for it."""

    def __init__(self, comm: Communicator, stream: Any = None, priority: int = HIGH) -> None:
        self.device = torch.device(comm.device)
        # Of a high priority: a collective must be resident before a large matmul fills the GPU.
        self.owner = (
            pynccl.create_stream(comm.device, priority=priority, library=comm.library) if stream is None else stream
        )
        self._number = int(self.owner.handle if stream is None else stream_handle(stream))
        self.stream: Any = torch.cuda.ExternalStream(self._number, device=self.device)

    def handle(self, keeper: Any) -> Any:
        handle = Handle(self._number)
        handle.owner = keeper
        return handle

    def wait_for_caller(self) -> Any:
        home = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(home)
        return home

    def record(self) -> Any:
        return self.stream.record_event()

    def wait(self, event: Any) -> Any:
        here = torch.cuda.current_stream(self.device)
        with waiting():
            here.wait_event(event)
        return here

    def wait_on(self, home: Any, event: Any) -> None:
        home.wait_event(event)

    def release(self, home: Any, here: Any, result: Tensor | None) -> None:
        if here != home:
            home.wait_stream(here)
            if result is not None:
                result.record_stream(here)

    def share(self, made: Tensor, on: Any) -> None:
        share(made, on)


def is_capturing(device: torch.device) -> bool:
    """Whether the caller's work on a GPU is captured into a CUDA graph."""
    with torch.cuda.device(device):  # torch asks the current stream of the current GPU
        return torch.cuda.is_current_stream_capturing()


def made_on(x: Tensor) -> Any:
    """The stream on which the caller makes something of x now; None for what is done when it is made."""
    return torch.cuda.current_stream(x.device) if x.is_cuda else None


def share(made: Tensor, on: Any) -> None:
    """The caller's stream waits for what was made on the stream `on`, and torch's allocator for the caller's stream:
    both only where that is another stream."""
    here = torch.cuda.current_stream(on.device)
    if here != on:
        here.wait_stream(on)
        made.record_stream(here)


_sides: weakref.WeakKeyDictionary[Communicator, dict[int, SideStream]] = weakref.WeakKeyDictionary()


def side_stream(comm: Communicator, priority: int = HIGH) -> SideStream:
    """The communicator's side stream of a priority; made on first use, and once. Below 0 they are one, and from 0 on:
    a process has 8 queues to a GPU, and streams that share one wait for each other."""
    priority = HIGH if priority < 0 else 0
    sides = _sides.setdefault(comm, {})
    side = sides.get(priority)
    if side is None:
        side = sides[priority] = SideStream(comm) if comm.library.is_host else _CudaSide(comm, priority=priority)
    return side


def share_side_streams(comm: Communicator, child: Communicator) -> None:
    """Let another communicator of the same GPU use the side streams of `comm`: what is issued on both runs in one
    order, on every rank. Two communicators at work at once may wait for each other's multiprocessors for ever."""
    _sides[child] = _sides.setdefault(comm, {})


def set_side_stream(comm: Communicator, stream: Any) -> None:
    """Let start() and overlapped layers communicate on a stream of the caller's: of torch, of cuda.core, of pynccl.

    Call it before the first of them on every rank; RuntimeError afterwards, when work may be under way on another one.
    The stream has to be of the communicator's device, and to live as long as the communicator."""
    if _sides.get(comm):
        raise RuntimeError("set_side_stream: the communicator has used its own side stream; call it before that")
    if comm.library.is_host:
        if not isinstance(stream, pynccl.Stream) or not hasattr(stream, "submit"):
            raise TypeError(
                f"set_side_stream: stream is {shown(stream)}, expected one that pynccl.create_stream() made"
            )
        side = SideStream(comm, stream)
    else:
        side = _CudaSide(comm, stream)
    _sides.setdefault(comm, {}).update({HIGH: side, 0: side})
