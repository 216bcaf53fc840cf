"""Moments of a trace, and when they were: on the clock of time.perf_counter() of this rank, of whatever they are.

On the CPU a moment is the time itself. On a stream of the host library and on a GPU it is an event, of which the time
is asked at the end of the trace: nothing waits for it meanwhile. The clock of a GPU is tied to that of the CPU by an
event that the CPU waits for, before the trace and after it.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from pynccl import Communicator
from pynccl.bindings.library import host_module
from pynccl.interop.streams import Handle

from ..streams import is_capturing

now = time.perf_counter
OF_CPU = -1  # in place of a stream: what the CPU does itself, and waits for
_ROUNDS = 5  # of which the shortest ties the clocks
_POLL_SECONDS = 0.0005
_FAR_MILLISECONDS = 1000.0  # events give their distance as a float32, which is exact to a microsecond up to about here


class Anchor:
    """A moment of a GPU of which the time is known. uncertainty: seconds"""

    def __init__(self, device: torch.device) -> None:
        self.uncertainty = float("inf")
        with torch.cuda.device(device):
            for _ in range(_ROUNDS):
                torch.cuda.synchronize()
                event, before = torch.cuda.Event(enable_timing=True), now()
                event.record()
                event.synchronize()
                after = now()
                if (after - before) / 2 < self.uncertainty:
                    self.event, self.at, self.uncertainty = event, (before + after) / 2, (after - before) / 2


class Clock:
    """Marks of this rank, and their times.

    device  of torch, of the computation; other GPUs, if communicators use them, are tied when they are first met, and
            their times are good to the length of a launch"""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._anchors: dict[int, Anchor] = {}
        self._last: dict[int, tuple[Any, float]] = {}  # the event that distances are counted from, and its time
        if device.type == "cuda":
            self._anchor(device)

    def _anchor(self, device: torch.device) -> Anchor:
        index = _index(device)
        if index not in self._anchors:
            anchor = self._anchors[index] = Anchor(device)
            self._last[index] = (anchor.event, anchor.at)
        return self._anchors[index]

    def here(self) -> Any:
        """A moment of the computation that this thread issues now; None while it is captured into a CUDA graph."""
        if self.device.type != "cuda":
            return now()
        if is_capturing(self.device):
            return None
        return _event_on(torch.cuda.current_stream(self.device))

    def lane(self) -> int:
        """Where the computation that this thread issues runs: the number of the stream."""
        return int(torch.cuda.current_stream(self.device).cuda_stream) if self.device.type == "cuda" else 0

    def on(self, comm: Communicator, stream: int) -> Any:
        """A moment of a stream on which `comm` communicates; 0: of the caller, or of CUDA's default stream; OF_CPU."""
        if stream == OF_CPU:
            return now()
        if comm.library.is_host:
            found = stream.owner if type(stream) is Handle else host_module().made_here(stream) if stream else None
            return now() if found is None or not hasattr(found, "submit") else found.record()
        device = torch.device(comm.device)
        if is_capturing(device):
            return None
        default = torch.cuda.default_stream(device)
        return _event_on(torch.cuda.ExternalStream(int(stream), device=device) if stream else default)

    def blocks(self, comm: Communicator, stream: int) -> bool:
        """Whether the computation that this thread issues waits for what `comm` does on that stream, by its order."""
        if comm.library.is_host:
            return not stream
        here = torch.cuda.current_stream(torch.device(comm.device)).cuda_stream
        return stream != OF_CPU and int(here) == int(stream)

    def wait(self, marks: list[Any], seconds: float) -> bool:
        """Until all of these have happened, or it is late; whether they have."""
        end = now() + seconds
        for mark in marks:
            while not has_happened(mark):
                if now() >= end:
                    return False
                time.sleep(_POLL_SECONDS)
        return True

    def time(self, mark: Any) -> float | None:
        """When it was; None if it has not happened."""
        if isinstance(mark, float):
            return mark
        if mark is None or not has_happened(mark):
            return None
        if hasattr(mark, "moment"):
            return float(mark.moment)
        index = mark.device.index
        self._anchor(mark.device)
        base, at = self._last[index]
        distance = float(base.elapsed_time(mark))
        if distance > _FAR_MILLISECONDS:
            self._last[index] = (mark, at + distance / 1e3)
        return at + distance / 1e3

    def finish(self) -> None:
        """After the trace, with nothing under way: by how much the clocks of GPUs have gone another way than the CPU's
        is told by `uncertainty`."""
        for index, anchor in self._anchors.items():
            last = Anchor(torch.device("cuda", index))
            base, at = self._last[index]
            drift = abs(at + float(base.elapsed_time(last.event)) / 1e3 - last.at)
            anchor.uncertainty = max(anchor.uncertainty, last.uncertainty, drift)

    @property
    def uncertainty(self) -> float:
        """Seconds by which times of GPUs may be off the clock of the CPU; 0 without."""
        return max((anchor.uncertainty for anchor in self._anchors.values()), default=0.0)


def has_happened(mark: Any) -> bool:
    return mark is None or isinstance(mark, float) or bool(mark.query())


def _event_on(stream: Any) -> Any:
    return stream.record_event(torch.cuda.Event(enable_timing=True))


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index
