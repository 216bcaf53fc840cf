"""The streams of one pass: the caller's, one for communication, optionally a second one for matmuls.

The work of a lane runs in order. Lanes synchronize only by events. Each piece of work declares the tensors that it
reads and writes, so that tests can verify dependencies and timelines can show them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from functools import cache, cached_property, partial
from itertools import cycle
from typing import Any, NamedTuple

import torch
from torch import Tensor

import pynccl
from pynccl import CollConfig, Communicator
from pynccl.comm import observers as binding

from ..state import state_of
from ..streams import KeepAliveList, is_capturing, side_stream
from .buffers import FRESH, Buffers, Fresh
from .config import OverlapConfig
from .schedules import Decision


class Observer:
    """Callbacks for the passes of overlapped layers: override those you need. They run in the thread that does the
    work, and must not raise, since the exception would reach the program."""

    def ran(self, lane: Lane, name: str, reads: Sequence[Any], writes: Sequence[Any], begin: Any, end: Any) -> None:
        """Called after work was issued on a lane.   reads, writes: its tensors   begin, end: marks of the lane"""

    def opened(self, lanes: Lanes) -> None:
        """Called at the begin of a pass, before anything is issued."""

    def waited(self, lane: Lane, point: Point) -> None:
        """Called when the lane waits for the point."""

    def closed(self, lanes: Lanes) -> None:
        """Called when the caller's stream waits for all work on the lanes; not after an error on the CPU."""

    def decided(self, owner: Any, decision: Any) -> None:
        """Called with the decision for a layer's pass, before the pass. A pass that needed no decision has none."""


observers: list[Observer] = []
os.register_at_fork(after_in_child=observers.clear)


def observing(observer: Observer) -> contextlib.AbstractContextManager[None]:
    """Call the observer for all passes in the block, in all threads. A forked child has no observers."""
    return binding.observing(observer, observers)


class Point(NamedTuple):
    """A point in the order of a lane, after all work issued before it."""

    lane: str
    event: Any
    seen: dict[str, int]  # of the lane, at this point


class Lane:
    """A stream of a pass. This class is the calling thread with the host library: work is complete when it returns.

    name    "main", "comm" or "second"
    stream  what the work is issued on; None: the calling thread
    handle  the argument `stream=` of collectives
    seen    lane -> count of its work and points that are done before later work of this lane: those issued on this
            lane, and those waited for, also transitively"""

    def __init__(self, name: str, lanes: Lanes, stream: Any = None, handle: Any = None) -> None:
        self.name, self.lanes, self.stream, self.handle = name, lanes, stream, handle
        self.seen = {name: 0}

    def run(self, work: Callable[..., object], *inputs: Any, out: Tensor) -> None:
        """Issue work(*inputs, out=out). It must not allocate memory that outlives it."""
        if self is not self.lanes.main:  # main owns the memory, and could reuse it before this lane runs
            self.lanes.kept.append((inputs, out))
        self.issue(work.__name__, inputs, out, partial(self._do, partial(work, *inputs, out=out)))

    def issue(self, name: str, reads: Sequence[Any], out: Tensor, launch: Callable[[], object]) -> None:
        """Launch work, and notify the observers."""
        self.seen[self.name] += 1
        begin = self.mark() if self.lanes.observers else None
        launch()
        end = self.mark() if self.lanes.observers else None
        for observer in self.lanes.observers:
            observer.ran(self, name, reads, (out,), begin, end)

    def record(self) -> Point:
        self.seen[self.name] += 1
        return Point(self.name, self._record(), dict(self.seen))

    def wait(self, point: Point | None) -> None:
        """Let later work of this lane start after the point. No wait is issued if that is already the case."""
        if point is None or self.seen.get(point.lane, 0) >= point.seen[point.lane]:
            return
        for observer in self.lanes.observers:
            observer.waited(self, point)
        for lane, count in point.seen.items():
            self.seen[lane] = max(count, self.seen.get(lane, 0))
        if point.event is not None:
            with binding.waiting() if self is self.lanes.main else contextlib.nullcontext():  # for ad.trace
                self._wait(point.event)

    def wait_lane(self, lane: Any) -> None:
        """Let later work of this lane start after all work issued on another one so far."""
        if lane is not self:
            self.wait(lane.record())

    def mark(self) -> Any:
        """Record a time mark of this lane, for `seconds_between`."""
        return pynccl.create_event(library=self.lanes.nccl.library).record()

    def _do(self, work: Callable[[], object]) -> None:
        work()

    def _record(self) -> Any:
        return None

    def _wait(self, event: Any) -> None:
        event.synchronize()


class HostLane(Lane):
    """A stream of the host library."""

    def _do(self, work: Callable[[], object]) -> None:
        """In the stream's thread, disable gradients, which a new thread records, and use the caller's inference mode,
        since inference tensors cannot be modified outside of it."""
        inference = torch.is_inference_mode_enabled()

        def run() -> None:
            with torch.inference_mode(inference), torch.no_grad():
                work()

        self.stream.submit(run)

    def _record(self) -> Any:
        return self.stream.record()

    mark = _record

    def _wait(self, event: Any) -> None:
        self.stream.wait(event)


class _CudaLane(Lane):
    """A CUDA stream; of "main" the caller's current one."""

    def _do(self, work: Callable[[], object]) -> None:
        with contextlib.nullcontext() if self is self.lanes.main else torch.cuda.stream(self.stream):
            work()

    def _record(self) -> Any:
        try:
            event = state_of(self.lanes.nccl, SpareEvents).pop()
        except IndexError:
            event = torch.cuda.Event()
        self.lanes.events.append(event)
        return self.stream.record_event(event)

    def _wait(self, event: Any) -> None:
        self.stream.wait_event(event)

    def mark(self) -> Any:
        return self.stream.record_event(torch.cuda.Event(enable_timing=True))


def seconds_between(begin: Any, end: Any) -> float:
    """Return the seconds between two completed marks of one operation's lanes."""
    return float(begin.elapsed_time(end)) / 1e3


class SpareEvents(list[Any]):
    """CUDA events of a communicator's completed passes, for reuse."""


class Lanes:
    """The streams and buffers of one pass; `main` is the caller's stream.

        with Lanes(comm, config) as lanes:
            lanes.comm.wait(lanes.start)                     # after the caller's earlier work
            lanes.collective("all_gather", x, gathered)
            arrived = lanes.comm.record()
            lane = lanes.compute(arrived)
            lane.run(torch.mm, gathered, w, out=y)
                                                             # here the caller's stream waits for the others

    decision  the schedule; None: one collective, beside the caller's work
    limit     configuration of each collective
    owner     for observers
    kept      tensors of enqueued work, until the caller's stream, which allocated them, has waited for the work"""

    def __init__(
        self, comm: Communicator, config: OverlapConfig, decision: Decision | None = None,
        limit: CollConfig | None = None, buffers: Buffers | Fresh = FRESH, owner: Any = None,
    ) -> None:  # fmt: skip
        self.nccl, self.rank, self.size, self.limit, self.buffers = comm, comm.rank, comm.size, limit, buffers
        self.owner, self.decision, self.aggregate = owner, decision, config.aggregate
        self.method, self.chunks, compute_streams = "bulk", 1, config.compute_streams or 1
        if decision is not None:
            self.method, self.chunks, compute_streams = decision.method, decision.chunks, decision.compute_streams
        self.kept = KeepAliveList()
        self.events: list[Any] = []  # recorded CUDA events
        self.observers = tuple(observers)  # a copy: each observer sees the begin and the end of the pass
        self._all = make_lanes(self, comm, compute_streams, config.priority)
        self.main, *second, self.comm = self._all
        self._computing = cycle([self.main, *second])

    def __enter__(self) -> Lanes:
        for observer in self.observers:
            observer.opened(self)
        return self

    @cached_property
    def start(self) -> Point:
        """The point after the work of the caller, and the allocation of buffers, which fills them if torch is to be
        deterministic. Recorded at its first use."""
        return self.main.record()

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            # On the CPU, do not wait after an error: peers may have failed, and host streams keep their buffers alive.
            if kind is None or not self.nccl.library.is_host:
                self._join()
        finally:
            for lane in self._all:
                del lane.lanes  # else the two would refer to each other, until the garbage collector finds them

    def _join(self) -> None:
        """Let the caller's stream wait for the other lanes. First for the lane that has waited for the most work: main
        then needs no wait for what that lane has waited for."""
        for lane in sorted(self._all[1:], key=lambda lane: sum(lane.seen.values()), reverse=True):
            used = any(lane.seen.values())  # a lane that has only waited is part of a captured graph, too
            if used and lane.seen[lane.name] > self.main.seen.get(lane.name, -1):
                self.main.wait(lane.record())
        for observer in self.observers:
            observer.closed(self)
        self.kept.clear()
        state_of(self.nccl, SpareEvents).extend(self.events)  # no lane waits for them any more

    def compute(self, after: Point | None = None) -> Lane:
        """Return the lane for the next piece of a matmul, which starts after the point. The compute lanes alternate."""
        lane = next(self._computing)
        lane.wait(after or self.start)
        return lane

    def collective(self, name: str, send: Tensor, recv: Tensor, *args: Any) -> None:
        """Issue comm.<name>(send, recv, *args) on the communication lane."""
        method, options = getattr(self.nccl, name), {"stream": self.comm.handle, "config": self.limit}
        self.comm.issue(name, (send,), recv, partial(method, send, recv, *args, **options))

    def send_recv(self, send: Tensor, recv: Tensor) -> None:
        """Issue one step of a ring: send to the next rank, and receive from the previous one."""

        def launch() -> None:
            with pynccl.group():
                self.nccl.send(send, (self.rank + 1) % self.size, stream=self.comm.handle)
                self.nccl.recv(recv, (self.rank - 1) % self.size, stream=self.comm.handle)

        self.comm.issue("send_recv", (send,), recv, launch)


class Serial:
    """A pass without overlap, and its only lane, the caller's stream. It has no event and no kept buffer."""

    __slots__ = ("nccl", "rank", "size")
    method, chunks, start, buffers = "off", 1, None, FRESH

    def __init__(self, comm: Communicator) -> None:
        self.nccl, self.rank, self.size = comm, comm.rank, comm.size

    def __enter__(self) -> Serial:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is to be waited for."""

    @property
    def main(self) -> Serial:
        return self

    comm = main

    def compute(self, after: object = None) -> Serial:
        return self

    def run(self, work: Callable[..., object], *inputs: Any, out: Tensor) -> None:
        work(*inputs, out=out)

    def record(self) -> None:
        """Return None: later work runs later."""

    def wait(self, point: object) -> None:
        """See `record`."""

    wait_lane = wait

    def collective(self, name: str, send: Tensor, recv: Tensor) -> None:
        getattr(self.nccl, name)(send, recv)


Pass = Lanes | Serial


def make_lanes(lanes: Lanes, comm: Communicator, compute_streams: int, priority: int) -> list[Lane]:
    """Return the lane "main", the lane "second" if there are two for matmuls, and the lane "comm"."""
    side: Any = side_stream(comm, priority)
    handle = side.handle(lanes.kept)
    if comm.library.is_host:
        return [Lane("main", lanes), HostLane("comm", lanes, side.stream, handle)]
    current = torch.cuda.current_stream(side.device)
    made: list[Lane] = [_CudaLane("main", lanes, current)]
    if compute_streams > 1:
        capturing = current.cuda_stream if is_capturing(side.device) else None
        made.append(_CudaLane("second", lanes, _second_stream(side.device, capturing)))
    return [*made, _CudaLane("comm", lanes, side.stream, handle)]


@cache
def _second_stream(device: torch.device, capturing: int | None) -> Any:
    """Return the second stream for matmuls of a GPU.

    All communicators share it, since a process has 8 queues to a GPU. For CUDA graphs, each capturing stream has its
    own: a graph keeps the cuBLAS workspace of its streams, and may run concurrently with other graphs or later work."""
    return torch.cuda.Stream(device)
