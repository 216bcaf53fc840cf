"""start and wait under different CUDA streams: the memory is used anew only after whoever works on it has passed.

torch's streams stand in here, and write down who waits for whom; tests/gpu has the same on real ones."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import pynccl
from pynccl.interop.streams import hold
from pynccl_autograd import streams
from pynccl_autograd.wire import Prepared
from pynccl_autograd.work import Work, _start


class FakeStream:
    """torch.cuda.Stream, as far as it is used."""

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


class Collective:
    """The identity; its communication is noted."""

    name = "identity"
    log: list[str]
    fails = ""

    @classmethod
    def prepare(cls, x: torch.Tensor, comm: Any, *params: Any) -> Prepared:
        def launch(stream: Any) -> None:
            cls.log.append("launch")
            hold(stream, comm.library, (x, params[0] if params else None))  # as every call of a communicator does
            if cls.fails == "launch":
                raise RuntimeError("launch")

        def result() -> torch.Tensor:
            cls.log.append("result")
            if cls.fails == "result":
                raise RuntimeError("result")
            return x.clone()

        return Prepared(launch, result)


class Comm:
    """A communicator of two ranks on a GPU."""

    library = SimpleNamespace(is_host=False)
    device, size, checking, recorded = "cuda:0", 2, False, False


class Current(threading.local):
    """The current stream of each thread."""

    stream: FakeStream | None = None


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    log: list[str] = []
    current = Current()
    default = FakeStream("default")

    @contextlib.contextmanager
    def under(name: str) -> Iterator[None]:
        before, current.stream = current.stream, FakeStream(name)
        yield
        current.stream = before

    monkeypatch.setattr(FakeStream, "log", log, raising=False)
    monkeypatch.setattr(FakeStream, "__eq__", lambda self, other: self.name == other.name)
    monkeypatch.setattr(Collective, "log", log, raising=False)
    monkeypatch.setattr(Collective, "fails", "")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current.stream or default)
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: FakeStream("side"))
    monkeypatch.setattr(pynccl, "create_stream", lambda *_, **__: SimpleNamespace(handle=0x51DE))
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda x, on: log.append(f"the allocator knows of {on.name}"))
    monkeypatch.setattr(streams, "_sides", weakref.WeakKeyDictionary())
    monkeypatch.setattr(torch.cuda, "stream", under)
    return log


def started() -> Work:
    return _start(Comm(), (Collective, torch.ones(3), ()))  # type: ignore[arg-type]


def beginning(stream: str) -> list[str]:
    return [f"side waits for {stream}", "launch", "an event of side"]


def test_the_stream_of_start_waits_for_another_one_that_has_waited(log: list[str]) -> None:
    handle = started()
    with torch.cuda.stream("second"):  # type: ignore[arg-type]
        handle.wait()
    assert log == [
        *beginning("default"),
        "second waits for the event of side",
        "result",
        "default waits for second",
        "the allocator knows of second",
    ]
    log.clear()
    with torch.cuda.stream("third"):  # type: ignore[arg-type]
        handle.wait()
    assert log == ["third waits for second", "the allocator knows of third"]


def test_the_stream_of_start_waits_for_what_nobody_has_waited_for(log: list[str]) -> None:
    with torch.cuda.stream("first"):  # type: ignore[arg-type]
        cycle: list[Any] = [started()]
    cycle.append(cycle)
    del cycle
    thread = threading.Thread(target=gc.collect)
    thread.start()
    thread.join(30)
    assert log == [*beginning("first"), "first waits for the event of side"]


@pytest.mark.parametrize("where", ["launch", "result"])
def test_after_an_error_the_memory_is_safe_all_the_same(
    log: list[str], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setattr(Collective, "fails", where)
    with pytest.raises(RuntimeError, match=where):
        handle = started()
        with torch.cuda.stream("second"):  # type: ignore[arg-type]
            handle.wait()
    gc.collect()
    expected = {
        "launch": ["default waits for the event of side"],
        "result": ["second waits for the event of side", "result", "default waits for second"],
    }
    assert log == [*beginning("default"), *expected[where]]
