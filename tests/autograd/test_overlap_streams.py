"""Overlapped layers on CUDA streams: which stream waits for which, and how long memory is kept.

Fake streams log the calls; tests/gpu/test_gpu_overlap.py uses real streams."""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import pynccl
from pynccl_autograd.overlap import buffers, lanes
from pynccl_autograd.overlap.buffers import Buffers
from pynccl_autograd.overlap.config import OverlapConfig
from pynccl_autograd.overlap.lanes import Lanes
from pynccl_autograd.overlap.matmul import copy


class FakeStream:
    """A stand-in for torch.cuda.Stream that logs each wait."""

    log: list[str]
    device = torch.device("cuda", 0)

    def __init__(self, name: str) -> None:
        self.name, self.cuda_stream = name, id(self)

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name} waits for {event}")

    def record_event(self, event: Any = None) -> str:
        return f"an event of {self.name}"


class Comm:
    """A communicator of two ranks on a GPU."""

    library = SimpleNamespace(is_host=False, version=(2, 28, 0))
    device, rank, size = "cuda:0", 0, 2

    def __init__(self) -> None:
        self._attached: dict[type, Any] = {}


class Caller:
    """The caller's current stream, and whether it is capturing a graph."""

    def __init__(self) -> None:
        self.stream, self.capturing = FakeStream("main"), False

    @contextlib.contextmanager
    def under(self, stream: FakeStream) -> Iterator[None]:
        before, self.stream = self.stream, stream
        yield
        self.stream = before


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    log: list[str] = []
    monkeypatch.setattr(FakeStream, "log", log, raising=False)
    return log


@pytest.fixture
def caller(log: list[str], monkeypatch: pytest.MonkeyPatch) -> Caller:
    caller, numbers = Caller(), itertools.count(1)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: caller.stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: caller.capturing)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "stream", caller.under)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: FakeStream(f"second {next(numbers)}"))
    monkeypatch.setattr(torch.cuda, "Event", lambda: log.append("a new event"))
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: FakeStream("comm"))
    monkeypatch.setattr(pynccl, "create_stream", lambda *_, **__: SimpleNamespace(handle=0x51DE))
    monkeypatch.setattr(lanes, "_second_stream", functools.cache(lanes._second_stream.__wrapped__))
    return caller


def waits(log: list[str]) -> list[str]:
    return [line for line in log if line != "a new event"]


class TensorLike(SimpleNamespace):
    """Tensor properties that claim a GPU, with CPU memory."""

    is_cuda, dtype, device = True, torch.float32, torch.device("cpu")

    def new_empty(self, shape: tuple[int, ...], dtype: Any = None) -> Tensor:
        return torch.empty(shape, dtype=dtype)


TENSOR_LIKE: Any = TensorLike()


@pytest.mark.parametrize("lane", ["comm", "second"])
def test_buffers_of_another_lane_are_kept_until_the_caller_has_waited(
    caller: Caller, log: list[str], lane: str
) -> None:
    with Lanes(Comm(), OverlapConfig(compute_streams=2)) as opened:  # type: ignore[arg-type]
        opened.compute()
        other = opened.compute() if lane == "second" else opened.comm
        source, result = torch.ones(3), torch.zeros(3)
        other.run(copy, source, out=result)
        kept = [weakref.ref(source), weakref.ref(result)]
        del source, result
        assert all(reference() is not None for reference in kept)
        log.clear()
    assert waits(log) == [f"main waits for an event of {'comm' if lane == 'comm' else 'second 1'}"]
    assert all(reference() is None for reference in kept)


def test_captured_calls_use_a_separate_second_stream(caller: Caller) -> None:
    """Capturing and plain calls each reuse their own second stream."""
    comm: Any = Comm()
    names = []
    for capturing in (False, True, False, True):
        caller.capturing = capturing
        names.append(second_stream(comm))
    assert names == ["second 1", "second 2"] * 2
    with caller.under(FakeStream("other")):  # two graphs, replayed together, need separate cuBLAS workspaces
        assert second_stream(comm) == "second 3"
    caller.capturing = False
    assert second_stream(Comm()) == "second 1"  # shared by all communicators: a process has 8 queues to a GPU


def second_stream(comm: Any) -> Any:
    """Return the name of the second stream for matmuls."""
    return Lanes(comm, OverlapConfig(compute_streams=2))._all[1].stream.name


def buffer_of(work: Buffers) -> Tensor:
    with work.acquire(TENSOR_LIKE) as acquired:
        return acquired.empty("gathered", (100,), TENSOR_LIKE)


def test_torch_memory_is_reused_only_on_the_stream_that_allocated_it(
    caller: Caller, log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dropped memory returns to its stream, which can reuse it at once. So no pass records its end."""
    monkeypatch.setattr(FakeStream, "record_event", None)  # raises if it is called
    work = Buffers()
    first = buffer_of(work)
    assert buffer_of(work).data_ptr() == first.data_ptr()
    with caller.under(FakeStream("another")):
        second = buffer_of(work)
        assert second.data_ptr() != first.data_ptr()
        assert buffer_of(work).data_ptr() == second.data_ptr()
    assert work.nbytes == 400 and not log
    caller.capturing = True  # a captured call gets separate memory
    assert buffer_of(work).data_ptr() != second.data_ptr() and work.nbytes == 400


def test_a_buffer_is_freed_before_a_larger_one_is_allocated(caller: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    work, plain = Buffers(), buffers._torch_empty
    buffer_of(work)
    held, alive = weakref.ref(work._buffers["gathered"]), []

    def allocate(nbytes: int, device: torch.device) -> Tensor:
        alive.append(held() is not None)
        return plain(nbytes, device)

    monkeypatch.setattr(buffers, "_torch_empty", allocate)
    work.empty("gathered", (200,), TENSOR_LIKE)
    assert alive == [False]


def test_an_operation_ends_on_the_stream_where_it_began(caller: Caller, log: list[str]) -> None:
    """The last slice can be consumed, or garbage collected, under another stream."""
    work = Buffers("CommOverlap")
    work.reserve("gathered", 400, TENSOR_LIKE.device, buffers._torch_empty)
    acquired = work.acquire(TENSOR_LIKE)
    acquired.__enter__()
    with caller.under(FakeStream("another")):
        acquired.__exit__(None, None, None)
        buffer_of(work)
    assert log == ["another waits for an event of main"]
