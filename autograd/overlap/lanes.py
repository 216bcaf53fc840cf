"""The streams of one overlapped operation: the caller's, one for communication, at most one more for matmuls.

Work is issued on a lane in order; between lanes there are events only. What is issued names the tensors that it reads
and those that it writes, so that a test can prove each dependency, and a timeline show it.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor

import pynccl
from pynccl import CollConfig, Communicator
from pynccl.comm.observers import observers, waiting
from pynccl.interop.streams import Handle

from ..streams import HIGH, Kept, is_capturing, side_stream


class Point(NamedTuple):
    """A moment in the order of a lane: all that it was given before."""

    lane: Lane
    issued: int  # how much that was
    event: Any
    seen: dict[Lane, int]  # of other lanes, how much had happened then


class Lane:
    """A stream of an overlapped operation: what is run here runs in order.

    name  "main", "comm" or "second" """

    def __init__(self, name: str, lanes: Lanes) -> None:
        self.name, self.lanes = name, lanes
        self.issued = 0  # how much it was given: work, and points
        self.seen: dict[Lane, int] = {}  # of other lanes, how much this one has waited for, also through others

    def run(self, work: Callable[..., object], *inputs: Any, out: Tensor) -> None:
        """Issue work(*inputs, out=out), which allocates nothing that outlives it."""
        if self is not self.lanes.main:  # whose memory it is: it would use it anew before this lane has got there
            self.lanes.kept.append((inputs, out))
        self.issued += 1
        if self.lanes.observers:
            self.lanes.observed(
                self, getattr(work, "__name__", "work"), inputs, out, partial(self._do, work, inputs, out)
            )
        else:
            self._do(work, inputs, out)

    def record(self) -> Point:
        self.issued += 1
        point = Point(self, self.issued, self._record(), dict(self.seen))
        for observer in self.lanes.observers:
            observer.recorded(self, point)
        return point

    def wait(self, point: Point) -> None:
        """What is issued from now on starts after the point; nothing is issued for that where it does so already."""
        if point.lane is self or self.seen.get(point.lane, 0) >= point.issued:
            return
        for observer in self.lanes.observers:
            observer.waited(self, point)
        for lane, issued in (*point.seen.items(), (point.lane, point.issued)):
            if lane is not self:
                self.seen[lane] = max(issued, self.seen.get(lane, 0))
        self._wait(point.event)

    def mark(self) -> Any:
        """A moment of this lane, for `seconds_between`."""
        raise NotImplementedError

    def _record(self) -> Any:
        raise NotImplementedError

    def _wait(self, event: Any) -> None:
        raise NotImplementedError

    def _do(self, work: Callable[..., object], inputs: Sequence[Any], out: Tensor) -> None:
        raise NotImplementedError


class CallerLane(Lane):
    """The caller of the host library: his work is done when it returns.

    blocked  seconds that he has spent waiting for the other lanes"""

    blocked = 0.0

    def _do(self, work: Callable[..., object], inputs: Sequence[Any], out: Tensor) -> None:
        work(*inputs, out=out)

    def _record(self) -> Any:
        return None

    def _wait(self, event: Any) -> None:
        if event is not None:
            begin = time.perf_counter()
            with waiting():
                event.synchronize()
            self.blocked += time.perf_counter() - begin

    def mark(self) -> Any:
        return time.perf_counter()


class HostLane(Lane):
    """A stream of the host library."""

    def __init__(self, name: str, lanes: Lanes, stream: Any) -> None:
        super().__init__(name, lanes)
        self.stream = stream

    def _do(self, work: Callable[..., object], inputs: Sequence[Any], out: Tensor) -> None:
        self.stream.submit(_as_here(partial(work, *inputs, out=out)))

    def _record(self) -> Any:
        return self.stream.record()

    def _wait(self, event: Any) -> None:
        if event is not None:
            self.stream.wait(event)

    def mark(self) -> Any:
        return self.stream.record()


def _as_here(work: Callable[[], object]) -> Callable[[], object]:
    """Without gradients, which the stream's thread records as every new thread does, and in the caller's inference
    mode: outside of it what he has made there cannot be changed."""
    inference = torch.is_inference_mode_enabled()

    def run() -> None:
        with torch.inference_mode(inference), torch.no_grad():
            work()

    return run


class _CudaLane(Lane):
    def __init__(self, name: str, lanes: Lanes, stream: Any) -> None:
        super().__init__(name, lanes)
        self.stream = stream

    def _do(self, work: Callable[..., object], inputs: Sequence[Any], out: Tensor) -> None:
        with torch.cuda.stream(self.stream):
            work(*inputs, out=out)

    def _record(self) -> Any:
        return self.stream.record_event(self.lanes.new_event())

    def _wait(self, event: Any) -> None:
        self.stream.wait_event(event)

    def mark(self) -> Any:
        return self.stream.record_event(torch.cuda.Event(enable_timing=True))


class _MainLane(_CudaLane):
    """The caller's stream, which is current."""

    def _do(self, work: Callable[..., object], inputs: Sequence[Any], out: Tensor) -> None:
        work(*inputs, out=out)

    def _wait(self, event: Any) -> None:
        with waiting():
            self.stream.wait_event(event)


def seconds_between(begin: Any, end: Any) -> float:
    """Between two marks of lanes of one operation, both of which have happened."""
    if hasattr(begin, "elapsed_time") and hasattr(end, "elapsed_time"):
        return float(begin.elapsed_time(end)) / 1e3
    return _moment(end) - _moment(begin)


def _moment(mark: Any) -> float:
    return float(mark if isinstance(mark, float) else mark.moment)


class Lanes:
    """The streams of one overlapped operation, of which `main` is the caller's.

        with Lanes(comm) as lanes:
            lanes.comm.wait(lanes.begun)                     # what the caller has made is there
            lanes.collective("all_gather", x, gathered)
            arrived = lanes.comm.record()
            lane = lanes.compute(arrived)
            lane.run(torch.mm, gathered, w, out=y)
                                                             # the caller's stream has waited for the others

    All memory is made on `main`, by the caller, and kept until the end: none of it is used anew while another lane
    works on it.   kept: what was enqueued, until the caller has waited for it"""

    def __init__(
        self,
        comm: Communicator,
        compute_streams: int = 1,
        priority: int = HIGH,
        config: CollConfig | None = None,
        owner: Any = None,
        decision: Any = None,
    ) -> None:
        self.nccl, self.config = comm, config
        self.observers = tuple(observers)  # who hears the begin of an operation hears its end
        self.owner, self.decision = owner, decision  # for whom they work and what was decided, for observers
        self.kept = Kept()
        self._events: list[Any] = []
        self.main, self.comm, self._computing = maker(self, comm, compute_streams, priority)
        self._stream = self._handle()
        self._turn = 0

    def __enter__(self) -> Lanes:
        self.begun = self.main.record()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and self.nccl.library.is_host:
            return  # whose streams keep their buffers; the peers may never come, of whom the error speaks
        others = [lane for lane in dict.fromkeys((*self._computing, self.comm)) if lane is not self.main]
        # First the lane that has waited for most: then main knows of the others through it.
        for lane in sorted(others, key=lambda lane: lane.issued + sum(lane.seen.values()), reverse=True):
            begun = lane.issued or lane.seen  # a lane that has only waited is part of a captured graph, too
            if begun and lane.issued > self.main.seen.get(lane, -1):
                self.main.wait(lane.record())
        for observer in self.observers:
            observer.closed(self)
        self.kept.clear()
        _spare(self.nccl).extend(self._events)  # nobody waits for them any more
        self._events.clear()

    def compute(self, after: Point | None = None) -> Lane:
        """The lane of the next piece of a matmul, which starts after the point: they take turns."""
        lane = self._computing[self._turn % len(self._computing)]
        self._turn += 1
        lane.wait(after or self.begun)
        return lane

    def collective(self, name: str, send: Tensor, recv: Tensor, *args: Any) -> None:
        """comm.<name>(send, recv, *args) on the lane of communication."""
        method = getattr(self.nccl, name)
        self._launch(name, send, recv, partial(method, send, recv, *args, stream=self._stream, config=self.config))

    def send_recv(self, send: Tensor, target: int, recv: Tensor, source: int) -> None:
        """One step of a ring."""

        def launch() -> None:
            with pynccl.group():
                self.nccl.send(send, target, stream=self._stream)
                self.nccl.recv(recv, source, stream=self._stream)

        self._launch("send_recv", send, recv, launch)

    def _launch(self, name: str, send: Tensor, recv: Tensor, launch: Callable[[], object]) -> None:
        self.comm.issued += 1
        if self.observers:
            self.observed(self.comm, name, (send,), recv, launch)
        else:
            launch()

    def observed(self, lane: Lane, name: str, reads: Sequence[Any], out: Tensor, issue: Callable[[], object]) -> None:
        """Issue something on a lane, and tell the observers."""
        timing = any(observer.timing for observer in self.observers)
        begin = lane.mark() if timing else None
        issue()
        end = lane.mark() if timing else None
        for observer in self.observers:
            observer.ran(lane, name, reads, (out,), begin, end)

    def _handle(self) -> Any:
        """That of the lane of communication; whose buffers are kept here."""
        stream = getattr(self.comm, "stream", None)
        if stream is None or isinstance(self.comm, HostLane):
            return stream
        handle = Handle(stream.cuda_stream)
        handle.owner = self.kept
        return handle

    def new_event(self) -> Any:
        """One of CUDA, of the communicator's device; of an operation that has ended, if there is one."""
        spare = _spare(self.nccl)
        self._events.append(spare.pop() if spare else torch.cuda.Event())
        return self._events[-1]


def make_lanes(lanes: Lanes, comm: Communicator, compute_streams: int, priority: int) -> tuple[Lane, Lane, list[Lane]]:
    """(main, comm, those of matmuls)"""
    side: Any = side_stream(comm, priority)
    if comm.library.is_host:
        main: Lane = CallerLane("main", lanes)
        return main, HostLane("comm", lanes, side.stream), [main]
    current = torch.cuda.current_stream(side.device)
    main = _MainLane("main", lanes, current)
    computing: list[Lane] = [main]
    if compute_streams > 1:
        computing.append(_CudaLane("second", lanes, _second_stream(side.device, current)))
    return main, _CudaLane("comm", lanes, side.stream), computing


maker = make_lanes  # which tests replace
_seconds: dict[tuple[torch.device, int | None], Any] = {}
_spares: weakref.WeakKeyDictionary[Communicator, list[Any]] = weakref.WeakKeyDictionary()


def _second_stream(device: torch.device, main: Any) -> Any:
    """The GPU's second stream for matmuls; made once, for all communicators: a process has 8 queues to a GPU. What is
    captured into a CUDA graph has another one for each stream that captures: a graph keeps cuBLAS's workspace of its
    streams, and may run beside other graphs and beside what is issued later."""
    key = device, main.cuda_stream if is_capturing(device) else None
    if key not in _seconds:
        _seconds[key] = torch.cuda.Stream(device)
    return _seconds[key]


def _spare(comm: Communicator) -> list[Any]:
    """Events of operations that have ended."""
    found = _spares.get(comm)
    if found is None:
        found = _spares[comm] = []
    return found
