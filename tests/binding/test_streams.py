"""Streams of every kind are understood, and work on them happens in their order and in no other."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from libraries import Stub
from ranks import RankPool
from reference import expect, inputs, reduced

import pynccl
from pynccl import Communicator
from pynccl.interop import streams
from pynccl.interop.devices import device_ordinal
from pynccl.interop.streams import CudaEvent, CudaStream, Stream, stream_handle


class ByProtocol:
    """cuda.core's way: a method that returns (version, handle)."""

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, 0x77


STREAMS: dict[str, tuple[Any, int]] = {
    "handle": (0x55, 0x55),
    "default": (0, 0),
    "protocol": (ByProtocol(), 0x77),
    "protocol as attribute": (SimpleNamespace(__cuda_stream__=(0, 0x78)), 0x78),
    "torch": (SimpleNamespace(cuda_stream=0x79), 0x79),
    "cupy": (SimpleNamespace(ptr=0x80), 0x80),
}


def test_a_stream_of_any_library_reaches_c_as_its_handle_and_nothing_else_does() -> None:
    stub = Stub()
    comm, buffer = stub.comm(), (64, 4, "int8")
    for kind, (stream, handle) in STREAMS.items():
        stub.clear()
        comm.all_reduce(buffer, buffer, stream=stream)
        assert stream_handle(stream) == stub.calls()[0].args["stream"] == handle, kind
    for other in ("0", 1.0, True, NotImplemented, SimpleNamespace(ptr="x")):
        with pytest.raises(TypeError) as caught:
            stream_handle(other)
        name = f"{type(other).__module__}.{type(other).__name__}"
        assert f"a {name} is no stream; pass a handle (int)" in str(caught.value)


def test_devices_are_named_or_numbered() -> None:
    names = [3, "cuda:3", torch.device("cuda", 3), "cuda", "cpu", torch.device("cpu")]
    assert [device_ordinal(name) for name in names] == [3, 3, 3, 0, 0, 0]
    for name in ("gpu", "cuda:x", "cuda:-1", "tpu:0"):
        with pytest.raises(ValueError, match=f"device '{name}' is none; pass an ordinal"):
            device_ordinal(name)


def in_order(comm: Communicator) -> None:
    n, rank = comm.size, comm.rank
    stream = pynccl.create_stream(priority=-1)
    given = [inputs(torch.float64, "sum", 1001, n, seed) for seed in range(20)]
    results = [comm.all_reduce(xs[rank], stream=stream) for xs in given]
    stream.synchronize()
    for xs, result in zip(given, results, strict=True):
        expect(result, reduced(xs, "sum"), "all_reduce on a stream")
    x = torch.zeros(10_000)
    for _ in range(20):  # what README and docs/streams.md tell users to write
        x.add_(1)
        stream.wait(pynccl.current_stream(comm.device))
        comm.all_reduce(x, x, op="avg", stream=stream)
        pynccl.current_stream(comm.device).wait(stream)
    assert x.unique().tolist() == [20.0]


def independent(comm: Communicator) -> None:
    """Communicators on streams of their own do not hold each other up, whatever order the ranks issue them in."""
    other = comm.split(0)
    assert other is not None
    pair = [(comm, torch.ones(4)), (other, torch.full((4,), 2.0))]
    streams = [pynccl.create_stream() for _ in pair]
    for (one, x), stream in zip(pair if comm.rank else pair[::-1], streams, strict=True):
        one.all_reduce(x, x, stream=stream)
    for stream in streams:
        stream.synchronize()
    assert [x[0].item() for _, x in pair] == [comm.size, 2.0 * comm.size]
    token, x = torch.zeros(1), torch.ones(8)
    if comm.rank == 0:  # the others join only after rank 0 has returned from its call and told so
        comm.all_reduce(x, x, stream=streams[0])
        assert not streams[0].query() and not streams[0].record().query()
        other.broadcast(token, root=0)
    else:
        other.broadcast(token, root=0)
        comm.all_reduce(x, x, stream=streams[0])
    streams[0].synchronize()
    other.destroy()
    assert x.unique().tolist() == [comm.size]


def test_work_on_a_stream_is_done_in_its_order_and_in_no_other(ranks: RankPool) -> None:
    ranks.run(3, in_order)
    ranks.run(3, independent)


def test_the_current_stream_of_the_host_library_is_the_caller() -> None:
    current, side = pynccl.current_stream(), pynccl.create_stream()
    assert isinstance(current, Stream) and current.handle == stream_handle(current) == 0
    assert isinstance(side, Stream) and stream_handle(side) == side.handle != 0
    gate, order = threading.Event(), []
    side.submit(gate.wait)  # type: ignore[attr-defined]
    side.submit(lambda: order.append("side"))  # type: ignore[attr-defined]
    side.wait(current)  # does not block the caller
    assert current.query() and current.record().query() and order == []
    threading.Timer(0, gate.set).start()
    current.wait(side)
    order.append("caller")
    assert order == ["side", "caller"]
    current.wait(event := side.record())
    assert event.query()


class Core:
    """cuda.core's stream, as far as CudaStream needs it."""

    def __init__(self, handle: int) -> None:
        self.handle, self.waited = handle, list[Any]()

    def wait(self, other: Any) -> None:
        self.waited.append(other)

    @classmethod
    def from_handle(cls, handle: int) -> Core:
        return cls(handle)


def test_a_cuda_stream_waits_for_streams_and_events_of_other_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "_cuda_core", lambda: SimpleNamespace(Stream=Core))
    core, waits = Core(1), list[Any]()
    stream, other, event = CudaStream(core), CudaStream(Core(2)), CudaEvent(SimpleNamespace())
    stream.wait(other)
    stream.wait(event)
    assert core.waited == [other.core, event.core]
    stream.wait(SimpleNamespace(cuda_stream=0x79))
    stream.wait(ByProtocol())
    assert [found.handle for found in core.waited[2:]] == [0x79, 0x77]
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle: ("external", handle))
    stream.wait(SimpleNamespace(cuda_event=5, wait=waits.append))
    assert waits == [("external", 1)]


def test_the_current_stream_of_a_gpu_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimpleNamespace(device_id=1, set_current=lambda: None)
    monkeypatch.setattr(streams, "_core_device", lambda device_or_none: device)
    monkeypatch.setattr(streams, "_cuda_core", lambda: SimpleNamespace(Stream=Core))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda ordinal: 0x100 + ordinal, raising=False)
    assert pynccl.current_stream("cuda:1", library=Stub().library).handle == 0x101
