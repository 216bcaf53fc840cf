"""The streams of one overlapped operation: the caller's, one for communication, optionally a second one for matmuls.

The work of a lane runs in order. Lanes synchronize only by events. Each piece of work declares the tensors that it
reads and writes, so that tests can verify dependencies and timelines can show them.
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
from pynccl.interop.handles import source_of, vouched
from pynccl.interop.streams import stream_handle

from ..streams import HIGH, KeepAliveList, is_capturing, side_stream


class Point(NamedTuple):
    """A point in the order of a lane, after all work issued before it."""

    lane: Lane
    issued: int  # the lane's count at this point
    event: Any
    seen: dict[Lane, int]  # other lane -> its count that is complete at this point


class Lane:
    """A stream of an overlapped operation.

    name  "main", "comm" or "second" """

    def __init__(self, name: str, lanes: Lanes) -> None:
        self.name, self.lanes = name, lanes
        self.issued = 0  # count of issued work and points
        self.seen: dict[Lane, int] = {}  # other lane -> its count that this lane has waited for, also transitively

    def run(self, work: Callable[..., object], *inputs: Any, out: Tensor) -> None:
        """Issue work(*inputs, out=out). It must not allocate memory that outlives it."""
        if self is not self.lanes.main:  # main owns the memory, and could reuse it before this lane runs
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
        """Let later work of this lane start after the point. No event is issued if that is already the case."""
        if point.lane is self or self.seen.get(point.lane, 0) >= point.issued:
            return
        for observer in self.lanes.observers:
            observer.waited(self, point)
        for lane, issued in (*point.seen.items(), (point.lane, point.issued)):
            if lane is not self:
                self.seen[lane] = max(issued, self.seen.get(lane, 0))
        self._wait(point.event)

    def mark(self) -> Any:
        """Record a time mark of this lane, for `seconds_between`."""
        raise NotImplementedError

    def _record(self) -> Any:
        raise NotImplementedError

    def _wait(self, event: Any) -> None:
        raise NotImplementedError

    def _do(self, work: Callable[..., object], inputs: Sequence[Any], out: Tensor) -> None:
        raise NotImplementedError


class CallerLane(Lane):
    """The calling thread, with the host library: work is complete when it returns.

    blocked  seconds that the thread has waited for other lanes"""

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
        self.stream.submit(_in_caller_mode(partial(work, *inputs, out=out)))

    def _record(self) -> Any:
        return self.stream.record()

    def _wait(self, event: Any) -> None:
        if event is not None:
            self.stream.wait(event)

    def mark(self) -> Any:
        return self.stream.record()


def _in_caller_mode(work: Callable[[], object]) -> Callable[[], object]:
    """Wrap work for the stream's thread: disable gradients, which a new thread records, and use the caller's inference
    mode, since inference tensors cannot be modified outside of it."""
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
    """The caller's current stream."""

    def _do(self, work: Callable[..., object], inputs: Sequence[Any], out: Tensor) -> None:
        work(*inputs, out=out)

    def _wait(self, event: Any) -> None:
        with waiting():
            self.stream.wait_event(event)


def seconds_between(begin: Any, end: Any) -> float:
    """Return the seconds between two completed marks of one operation's lanes."""
    if hasattr(begin, "elapsed_time") and hasattr(end, "elapsed_time"):
        return float(begin.elapsed_time(end)) / 1e3
    return _moment(end) - _moment(begin)


def _moment(mark: Any) -> float:
    return float(mark if isinstance(mark, float) else mark.moment)


class Lanes:
    """The streams of one overlapped operation; `main` is the caller's stream.

        with Lanes(comm) as lanes:
            lanes.comm.wait(lanes.start)                     # after the caller's earlier work
            lanes.collective("all_gather", x, gathered)
            arrived = lanes.comm.record()
            lane = lanes.compute(arrived)
            lane.run(torch.mm, gathered, w, out=y)
                                                             # here the caller's stream waits for the others

    All memory is allocated on `main` by the caller, and kept until the end, so that it is not reused while another lane
    uses it.

    kept  tensors of enqueued work, until the caller's stream has waited for the work"""

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
        self.observers = tuple(observers)  # a copy: each observer sees the begin and the end of the operation
        self.owner, self.decision = owner, decision  # for observers
        self.kept = KeepAliveList()
        self._events: list[Any] = []
        self.main, self.comm, self._computing = maker(self, comm, compute_streams, priority)
        self._stream = self._handle()
        self._next = 0

    def __enter__(self) -> Lanes:
        self.start = self.main.record()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and self.nccl.library.is_host:
            return  # do not wait: peers may have failed. Host streams keep their buffers alive
        others = [lane for lane in dict.fromkeys((*self._computing, self.comm)) if lane is not self.main]
        # First the lane that has waited for the most work: main then needs no wait for what that lane has waited for.
        for lane in sorted(others, key=lambda lane: lane.issued + sum(lane.seen.values()), reverse=True):
            used = lane.issued or lane.seen  # a lane that has only waited is part of a captured graph, too
            if used and lane.issued > self.main.seen.get(lane, -1):
                self.main.wait(lane.record())
        for observer in self.observers:
            observer.closed(self)
        self.kept.clear()
        _spare(self.nccl).extend(self._events)  # no lane waits for them any more
        self._events.clear()

    def compute(self, after: Point | None = None) -> Lane:
        """Return the lane for the next piece of a matmul, which starts after the point. The compute lanes alternate."""
        lane = self._computing[self._next % len(self._computing)]
        self._next += 1
        lane.wait(after or self.start)
        return lane

    def collective(self, name: str, send: Tensor, recv: Tensor, *args: Any) -> None:
        """Issue comm.<name>(send, recv, *args) on the communication lane."""
        method = getattr(self.nccl, name)
        self._launch(name, send, recv, partial(method, send, recv, *args, stream=self._stream, config=self.config))

    def send_recv(self, send: Tensor, target: int, recv: Tensor, source: int) -> None:
        """Issue one step of a ring."""

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
        """Issue work on a lane, and notify the observers."""
        timing = any(observer.timing for observer in self.observers)
        begin = lane.mark() if timing else None
        issue()
        end = lane.mark() if timing else None
        for observer in self.observers:
            observer.ran(lane, name, reads, (out,), begin, end)

    def _handle(self) -> Any:
        """Return the handle of the communication stream; its buffers are kept in `kept`."""
        stream = getattr(self.comm, "stream", None)
        if stream is None or isinstance(self.comm, HostLane):
            return stream
        handle = stream_handle(stream)
        return vouched(int(handle), self.kept, source_of(handle))

    def new_event(self) -> Any:
        """Return a CUDA event of the communicator's device, if possible one of an earlier operation."""
        spare = _spare(self.nccl)
        self._events.append(spare.pop() if spare else torch.cuda.Event())
        return self._events[-1]


def make_lanes(lanes: Lanes, comm: Communicator, compute_streams: int, priority: int) -> tuple[Lane, Lane, list[Lane]]:
    """Return (main, comm, lanes of matmuls)."""
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


maker = make_lanes  # tests replace it
_seconds: dict[tuple[torch.device, int | None], Any] = {}
_spares: weakref.WeakKeyDictionary[Communicator, list[Any]] = weakref.WeakKeyDictionary()


def _second_stream(device: torch.device, main: Any) -> Any:
    """Return the second stream for matmuls of a GPU.

    All communicators share it, since a process has 8 queues to a GPU. For CUDA graphs, each capturing stream has its
    own: a graph keeps the cuBLAS workspace of its streams, and may run concurrently with other graphs or later work."""
    key = device, main.cuda_stream if is_capturing(device) else None
    if key not in _seconds:
        _seconds[key] = torch.cuda.Stream(device)
    return _seconds[key]


def _spare(comm: Communicator) -> list[Any]:
    """Return the events of completed operations, for reuse."""
    found = _spares.get(comm)
    if found is None:
        found = _spares[comm] = []
    return found
