"""The side stream of a communicator, and how the caller's stream and it wait for each other.

The one place in this package that knows CUDA from the host library. On a GPU the caller's stream is torch's current
one, and waiting is queued there; with the host library the caller is this thread, which works at once and so blocks.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch

import pynccl
from pynccl import Communicator


class SideStream(Protocol):
    """Where collectives run beside the caller's work."""

    handle: Any  # for `stream=`

    def follow(self) -> None:
        """Work launched here from now on starts after what the caller has launched so far."""

    def mark(self) -> Any:
        """The end of what was launched here so far: an event for `join`."""

    def join(self, event: Any) -> None:
        """What the caller launches from now on starts after the event. Raises what went wrong before it."""


class _HostSide:
    def __init__(self, comm: Communicator) -> None:
        self.handle: Any = pynccl.create_stream(library=comm.library)

    def follow(self) -> None:
        """The caller's work is done when it returns."""

    def mark(self) -> Any:
        return self.handle.record()

    def join(self, event: Any) -> None:
        event.synchronize()


class _CudaSide:
    def __init__(self, comm: Communicator) -> None:
        self.device = torch.device(comm.device)
        # Of the highest priority: a collective must be resident before a large matmul fills the GPU.
        self.owner = pynccl.create_stream(comm.device, priority=-1, library=comm.library)
        self.handle: Any = torch.cuda.ExternalStream(self.owner.handle, device=self.device)

    def follow(self) -> None:
        self.handle.wait_stream(torch.cuda.current_stream(self.device))

    def mark(self) -> Any:
        return self.handle.record_event()

    def join(self, event: Any) -> None:
        torch.cuda.current_stream(self.device).wait_event(event)


_sides: weakref.WeakKeyDictionary[Communicator, SideStream] = weakref.WeakKeyDictionary()


def side_stream(comm: Communicator) -> SideStream:
    """The communicator's side stream; made on first use, and once."""
    side = _sides.get(comm)
    if side is None:
        side = _sides[comm] = _HostSide(comm) if comm.library.is_host else _CudaSide(comm)
    return side
