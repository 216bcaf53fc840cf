"""Callers may drop buffers when a call returns: the stream keeps them alive until the call has run."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from libraries import Stub
from ranks import RankPool

import pynccl
from pynccl import Communicator, Window
from pynccl.host import HostStream
from pynccl.interop import keepalive
from pynccl.interop.streams import CudaStream

pytestmark = pytest.mark.usefixtures("unwatched")


class Blocked:
    """A host stream whose work is blocked until finish()."""

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


WINDOW = Window.__new__(Window)
WINDOW._handle, WINDOW.nbytes = 1, 64
# Number of tensors used, and a call on a stream.
CALLS: dict[str, tuple[int, Callable[[Communicator, list[torch.Tensor], Any], Any]]] = {
    "all_reduce": (2, lambda comm, xs, at: comm.all_reduce(xs[0], xs[1], stream=at)),
    "send": (1, lambda comm, xs, at: comm.send(xs[0], 0, stream=at)),
    "recv": (1, lambda comm, xs, at: comm.recv(xs[0], 0, stream=at)),
    "gather_v": (1, lambda comm, xs, at: comm.gather_v(xs[0], counts=[0, 2, 0, 0], stream=at)),
    "plan on another": (2, lambda comm, xs, at: comm.plan.all_reduce(xs[0], xs[1])(at)),
    "group plan": (1, lambda comm, xs, at: comm.plan.group([comm.plan.send(xs[0], 0, stream=at)])()),
    "put_signal": (1, lambda comm, xs, at: comm.put_signal(xs[0], 0, WINDOW, stream=at)),
    "scalar": (1, lambda comm, xs, at: comm.all_reduce(torch.zeros(2), op=comm.pre_mul_sum(xs[0]), stream=at)),
}


def test_host_stream_keeps_buffers_alive_until_done() -> None:
    comm = Stub().comm(cpu=True)
    blocked, references = {}, {}
    for at, (name, (used, call)) in enumerate(CALLS.items()):
        blocked[name] = Blocked()
        xs = [torch.zeros(1 if name == "scalar" else 2), torch.zeros(2)]
        references[name] = [weakref.ref(x) for x in xs[:used]]
        call(comm, xs, blocked[name].stream if at % 2 else blocked[name].stream.handle)
        del xs
    for name, held in references.items():
        assert all(alive(held)), name
        blocked[name].finish()
    assert [name for name, held in references.items() if any(alive(held))] == []


# CUDA streams, with a fake of cuda.core's stream and events


class Core:
    """The part of cuda.core's stream that CudaStream uses; `passed` is the number of calls that have run."""

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
    """An object that supports weak references."""


def issue(stream: CudaStream, core: Core) -> weakref.ref[Buffer]:
    buffer = Buffer()
    core.issued += 1
    stream.hold((buffer, None))
    return weakref.ref(buffer)


def test_cuda_stream_releases_finished_buffers_with_few_events(core: Core) -> None:
    stream = CudaStream(core)
    references = [issue(stream, core) for _ in range(1000)]
    assert all(alive(references)) and core.records == 1
    core.passed = core.issued
    for _ in range(2):
        issue(stream, core)
        core.passed = core.issued
    assert not any(alive(references))
    largest = 0
    for _ in range(2000):
        issue(stream, core)
        core.passed = core.issued - 3
        largest = max(largest, len(stream._kept))
    assert largest < 12


def many_temporaries(comm: Communicator) -> None:
    stream = pynccl.create_stream()
    results = []
    for i in range(60):
        results.append((2.0 * i, comm.all_reduce(torch.full((20_000,), float(i)), stream=stream)))
        torch.full((20_000,), -1.0)  # reuses freed memory
        with pynccl.group():
            comm.send(torch.full((20_000,), float(i)), 1 - comm.rank, stream=stream)
            results.append((float(i), comm.recv(torch.empty(20_000), 1 - comm.rank, stream=stream)))
    stream.synchronize()
    assert all(bool((x == wanted).all()) for wanted, x in results)


def test_temporary_buffers_are_sent_correctly(ranks: RankPool) -> None:
    ranks.run(2, many_temporaries)
