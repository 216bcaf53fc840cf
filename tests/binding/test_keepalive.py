"""Buffers may be dropped once the call has returned: the stream keeps them until it has run."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from libraries import Stub
from ranks import RankPool

import pynccl
from pynccl import Communicator
from pynccl.host import HostStream
from pynccl.interop import keepalive, streams
from pynccl.interop.streams import CudaStream

pytestmark = pytest.mark.usefixtures("unwatched")


class Blocked:
    """A host stream whose work waits until it is let go."""

    def __init__(self) -> None:
        self.stream = HostStream()
        self.gate = threading.Event()
        self.stream.submit(self.gate.wait)

    def finish(self) -> None:
        self.gate.set()
        self.stream.synchronize()


def alive(references: list[Any]) -> list[bool]:
    gc.collect()
    return [reference() is not None for reference in references]


WINDOW: Any = SimpleNamespace(handle=1, nbytes=64)
CALLS: dict[str, Callable[[Communicator, list[torch.Tensor], Any], Any]] = {
    "all_reduce": lambda comm, xs, at: comm.all_reduce(xs[0], xs[1], stream=at),
    "in place": lambda comm, xs, at: comm.all_reduce(xs[0], xs[0], stream=at),
    "send": lambda comm, xs, at: comm.send(xs[0], 0, stream=at),
    "recv": lambda comm, xs, at: comm.recv(xs[0], 0, stream=at),
    "reduce": lambda comm, xs, at: comm.reduce(xs[0], xs[1], stream=at),
    "all_gather_v": lambda comm, xs, at: comm.all_gather_v(xs[0], counts=[0, 2, 0, 0], stream=at),
    "gather_v": lambda comm, xs, at: comm.gather_v(xs[0], counts=[0, 2, 0, 0], stream=at),
    "plan": lambda comm, xs, at: comm.plan.all_reduce(xs[0], xs[1], stream=at)(),
    "plan on another": lambda comm, xs, at: comm.plan.all_reduce(xs[0], xs[1])(at),
    "group plan": lambda comm, xs, at: comm.plan.group([comm.plan.send(xs[0], 0, stream=at)])(),
    "put_signal": lambda comm, xs, at: comm.put_signal(xs[0], 0, WINDOW, stream=at),
    "scalar": lambda comm, xs, at: comm.all_reduce(torch.zeros(2), op=comm.pre_mul_sum(xs[2]), stream=at),
}


@pytest.mark.parametrize("by", ["stream", "handle"])
def test_a_host_stream_holds_the_buffers_until_it_has_run(by: str) -> None:
    comm = Stub().comm(cpu=True)
    blocked, references = {}, {}
    for name, call in CALLS.items():
        blocked[name] = Blocked()
        xs = [torch.zeros(2), torch.zeros(2), torch.zeros(1)]
        used = {"all_reduce": 2, "reduce": 1, "plan": 2, "plan on another": 2}.get(name, 1)
        references[name] = [weakref.ref(xs[2])] if name == "scalar" else [weakref.ref(x) for x in xs[:used]]
        call(comm, xs, blocked[name].stream if by == "stream" else blocked[name].stream.handle)
        del xs
    gc.collect()
    for name, held in references.items():
        assert all(reference() is not None for reference in held), name
        blocked[name].finish()
    gc.collect()
    assert [name for name, held in references.items() if any(reference() is not None for reference in held)] == []


def test_each_stream_of_a_group_holds_its_own() -> None:
    comm = Stub().comm(cpu=True)
    first, second = Blocked(), Blocked()
    xs = [torch.zeros(2), torch.zeros(2)]
    references = [weakref.ref(x) for x in xs]
    with pynccl.group():
        comm.send(xs[0], 0, stream=first.stream)
        comm.recv(xs[1], 0, stream=second.stream)
    xs.clear()
    second.finish()
    assert alive(references) == [True, False]
    first.finish()
    assert alive(references) == [False, False]


def test_a_result_that_nobody_took_is_held_and_a_stream_that_is_dropped_runs_to_its_end() -> None:
    comm = Stub().comm(cpu=True)
    blocked = Blocked()
    reference = weakref.ref(comm.all_reduce(torch.zeros(2), stream=blocked.stream))
    worker, gate = blocked.stream._worker, blocked.gate
    del blocked
    assert alive([reference]) == [True]
    gate.set()
    worker.join(30)
    assert not worker.is_alive() and alive([reference]) == [False]


def test_nothing_is_held_on_the_current_stream_or_after_a_call_that_failed() -> None:
    stub = Stub()
    comm = stub.comm(cpu=True)
    x = torch.zeros(2)
    reference = weakref.ref(x)
    comm.all_reduce(x)
    comm.all_reduce(x, stream=pynccl.current_stream())
    stream = HostStream()
    stub.fail("ncclSend", 5)
    with pytest.raises(pynccl.NcclInvalidUsage):
        comm.send(x, 0, stream=stream)
    stream.synchronize()
    del x
    assert alive([reference]) == [False]


# As on a GPU: cuda.core's streams and events, of which only the driver knows when they are done.


class Core:
    """What CudaStream needs of cuda.core's stream; `passed` is the number of calls that have run."""

    handle = 0xC0DE

    def __init__(self) -> None:
        self.issued = self.passed = self.records = 0

    def record(self, event: Any = None) -> Any:
        self.records += 1
        core, mark = self, self.issued

        class Event:
            @property
            def is_done(self) -> bool:
                return core.passed >= mark

        return Event()

    def close(self) -> None:
        pass


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> Core:
    monkeypatch.setattr(keepalive, "capturing", lambda core: getattr(core, "captured", False))
    monkeypatch.setattr(keepalive, "relaxed", contextlib.nullcontext)
    monkeypatch.setattr(keepalive, "_detached", [])
    return Core()


class Buffer:
    """Something that can be watched."""


def issue(stream: CudaStream, core: Core) -> weakref.ref[Buffer]:
    buffer = Buffer()
    core.issued += 1
    stream.hold((buffer, None))
    return weakref.ref(buffer)


def test_a_cuda_stream_lets_go_of_what_it_has_passed_at_the_next_call(core: Core) -> None:
    stream = CudaStream(core)
    references = [issue(stream, core) for _ in range(5)]
    assert all(alive(references))
    core.passed = 4
    issue(stream, core)
    assert alive(references)[0] is False and alive(references)[4] is True
    core.passed = core.issued
    for _ in range(2):
        issue(stream, core)
        core.passed = core.issued
    assert not any(alive(references))


def test_a_cuda_stream_does_not_grow_and_asks_for_few_events(core: Core) -> None:
    stream, most = CudaStream(core), 0
    for _ in range(20_000):
        issue(stream, core)
        core.passed = core.issued - 3
        most = max(most, len(stream._kept))
    assert most < 12
    busy = CudaStream(other := Core())
    references = [issue(busy, other) for _ in range(1000)]
    assert all(alive(references)) and other.records == 1


@pytest.mark.parametrize("end", ["drop", "close"])
def test_a_cuda_stream_that_is_gone_holds_until_its_work_is_done(core: Core, end: str) -> None:
    stream, other = CudaStream(core), CudaStream(idle := Core())
    references = [issue(stream, core) for _ in range(3)]
    if end == "close":
        stream.close()
    del stream
    assert all(alive(references))
    issue(other, idle)
    assert all(alive(references))
    core.passed = core.issued
    for _ in range(2):
        issue(other, idle)
    assert not any(alive(references)) and not keepalive._detached


def test_a_captured_call_is_the_graphs(core: Core) -> None:
    core.captured = True  # type: ignore[attr-defined]
    reference = issue(CudaStream(core), core)
    assert alive([reference]) == [False] and core.records == 0


def test_the_handle_of_a_stream_made_here_is_known_and_others_are_not(core: Core) -> None:
    stub = Stub()
    comm, stream = stub.comm(), CudaStream(core)
    streams._made[stream.handle] = stream
    core.issued = 1
    raw = (4096, 2, "float32")
    comm.all_reduce(raw, raw, stream=stream.handle)
    assert len(stream._kept) == 1
    comm.all_reduce(raw, raw, stream=0xBEEF)
    plan = comm.plan.all_reduce(raw, raw, stream=stream)
    plan()
    plan()
    assert len(stream._kept) == 3


class OnGpu:
    """What is asked of a torch tensor on a GPU: to tell the allocator of a stream."""

    is_cuda = True

    def __init__(self) -> None:
        self.streams: list[Any] = []

    def record_stream(self, stream: Any) -> None:
        self.streams.append(stream)


def test_the_allocator_is_told_of_torchs_side_streams() -> None:
    comm = Stub().comm()
    side = SimpleNamespace(cuda_stream=0x77, record_event=lambda: None)
    send, recv = OnGpu(), OnGpu()
    streams.hold(streams.stream_handle(side), comm.library, ((send, recv), None))
    streams.hold(0x77, comm.library, (send, recv))  # a number is nobody's stream
    assert send.streams == recv.streams == [side]


def many_temporaries(comm: Communicator) -> bool:
    stream = pynccl.create_stream()
    results = []
    for i in range(60):
        results.append(comm.all_reduce(torch.full((20_000,), float(i)), stream=stream))
        torch.full((20_000,), -1.0)  # takes the memory that is free
        with pynccl.group():
            comm.send(torch.full((20_000,), float(i)), 1 - comm.rank, stream=stream)
            results.append(comm.recv(torch.empty(20_000), 1 - comm.rank, stream=stream))
    stream.synchronize()
    sums = all(bool((x == 2.0 * i).all()) for i, x in enumerate(results[::2]))
    return sums and all(bool((x == float(i)).all()) for i, x in enumerate(results[1::2]))


def test_temporaries_are_right_and_reach_the_other_rank(ranks: RankPool) -> None:
    assert ranks.run(2, many_temporaries) == [True, True]
