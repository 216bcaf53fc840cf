"""CuPy's arrays on CuPy's current stream. CuPy needs a GPU, so a stand-in with its signatures is asked."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from bad_calls import CudaArray
from libraries import Stub

from pynccl.interop import buffers, streams


class Array(CudaArray):
    """What is asked of a cupy.ndarray."""

    def __init__(self, device: int | None) -> None:
        super().__init__(shape=(4,))
        self.shape, self.dtype = (4,), "float32"
        if device is not None:
            self.device = SimpleNamespace(id=device)


class Event:
    """What is asked of a cupy.cuda.Event."""

    ptr = 0x7000


Array.__module__ = Event.__module__ = "cupy"


def get_current_stream(device_id: int = -1) -> Any:
    """As CuPy has it, typed in Cython: -1 is the current GPU, and None is no integer."""
    if not isinstance(device_id, int):
        raise TypeError("an integer is required")
    return SimpleNamespace(ptr=0x200 + device_id)


@pytest.fixture(autouse=True)
def cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("cupy")
    module.cuda = SimpleNamespace(get_current_stream=get_current_stream)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cupy", module)
    monkeypatch.setattr(buffers, "adapters", dict(buffers.adapters))


def test_an_array_is_launched_on_cupys_current_stream_of_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for device, handle in ((0, 0x200), (3, 0x203), (buffers.ANY_DEVICE, 0x1FF)):
        x = Array(None if device == buffers.ANY_DEVICE else device)
        kind = buffers.adapter(x)
        assert (kind.describe(x)[3], kind.current_stream(x, device)) == (device, handle)
    stub = Stub()
    stub.comm().all_reduce(Array(0), Array(None))
    assert stub.calls()[0].args["stream"] == 0x200
    monkeypatch.delattr(torch._C, "_cuda_getCurrentRawStream", raising=False)
    assert streams._current_handle(2) == 0x202


def test_an_event_is_no_stream_but_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match=r"a cupy\.Event is no stream"):
        streams.stream_handle(Event())
    waits: list[tuple[int, Any]] = []

    def external(handle: int) -> Any:
        return SimpleNamespace(wait_event=lambda event: waits.append((handle, event)))

    monkeypatch.setattr(sys.modules["cupy"].cuda, "ExternalStream", external, raising=False)
    stream, event = streams.CudaStream(SimpleNamespace(handle=0x90)), Event()
    stream.wait(event)
    assert waits == [(0x90, event)]
