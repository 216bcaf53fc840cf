"""start and wait() on different CUDA streams: memory is reused only after all streams have finished with it.

Fake streams record which stream waits for which; tests/gpu runs the same cases on real streams."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import pynccl
from pynccl.interop.streams import hold
from pynccl_autograd.wire import Prepared
from pynccl_autograd.work import Work, _start


class FakeStream:
    """A stand-in for torch.cuda.Stream that logs each wait."""

    log: list[str]
    device = torch.device("cuda", 0)

    def __init__(self, name: str) -> None:
        self.name = name

    def wait_stream(self, other: FakeStream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name} waits for {event}")

    def record_event(self) -> str:
        self.log.append(f"an event of {self.name}")
        return f"the event of {self.name}"


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    log: list[str] = []
    current = [FakeStream("default")]

    @contextlib.contextmanager
    def under(name: str) -> Iterator[None]:
        current.append(FakeStream(name))
        yield
        current.pop()

    monkeypatch.setattr(FakeStream, "log", log, raising=False)
    monkeypatch.setattr(FakeStream, "__eq__", lambda self, other: self.name == other.name)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[-1])
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: FakeStream("side"))
    monkeypatch.setattr(pynccl, "create_stream", lambda *_, **__: SimpleNamespace(handle=0x51DE))
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda x, on: log.append(f"the allocator knows of {on.name}"))
    monkeypatch.setattr(torch.cuda, "stream", under)
    return log


class Comm:
    """A communicator of two ranks on a GPU."""

    library = SimpleNamespace(is_host=False)
    device, size, checking, _is_recorded = "cuda:0", 2, False, False

    def __init__(self) -> None:
        self._attached: dict[type, Any] = {}


def start_identity(log: list[str]) -> Work:
    """Start an identity operation that logs its launch and its result."""

    def prepare(x: torch.Tensor, comm: Any, *params: Any) -> Prepared:
        def launch(stream: Any) -> None:
            log.append("launch")
            hold(stream, comm.library, (x, None))  # as every call of a communicator does

        def result() -> torch.Tensor:
            log.append("result")
            return x.clone()

        return Prepared(launch, result)

    call = (SimpleNamespace(name="identity", prepare=prepare), torch.ones(3), ())
    return _start(Comm(), call)  # type: ignore[arg-type]


def launch_log(stream: str) -> list[str]:
    return [f"side waits for {stream}", "launch", "an event of side"]


def test_the_start_stream_waits_for_another_stream_that_called_wait(log: list[str]) -> None:
    handle = start_identity(log)
    with torch.cuda.stream("second"):  # type: ignore[arg-type]
        handle.wait()
    waits = ["second waits for the event of side", "result", "default waits for second"]
    assert log == [*launch_log("default"), *waits, "the allocator knows of second"]


def test_the_start_stream_waits_for_an_operation_that_is_never_waited_for(log: list[str]) -> None:
    with torch.cuda.stream("first"):  # type: ignore[arg-type]
        cycle: list[Any] = [start_identity(log)]
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert log == [*launch_log("first"), "first waits for the event of side"]
