"""Streams of all libraries are accepted; each runs its work in order and independently of the others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from libraries import Stub
from ranks import RankPool
from reference import expect, inputs, reduced

import pynccl
from pynccl import Communicator
from pynccl.interop.buffers import TORCH
from pynccl.interop.streams import is_known, stream_handle


class ByProtocol:
    """A stream as in cuda.core: a method returns (version, handle)."""

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


def test_streams_of_other_libraries_pass_their_handle() -> None:
    stub = Stub()
    comm, buffer = stub.comm(), (64, 4, "int8")
    for kind, (stream, handle) in STREAMS.items():
        stub.clear()
        comm.all_reduce(buffer, buffer, stream=stream)
        assert stream_handle(stream) == stub.calls()[0].args["stream"] == handle, kind
    kinds = ("a str", "a float", "a bool", "a NotImplementedType", "a types.SimpleNamespace")
    for other, kind in zip(("0", 1.0, True, NotImplemented, SimpleNamespace(ptr="x")), kinds, strict=True):
        with pytest.raises(TypeError) as caught:
            stream_handle(other)
        assert f"stream is {kind}, expected a handle (int)" in str(caught.value)


def test_handles_say_whether_a_cuda_library_vouches_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/watch/test_progress.py has the streams of the driver; a number alone may be no stream."""
    x, number = torch.ones(1), 0x1230
    monkeypatch.setattr(TORCH, "raw_stream", lambda device: number * device)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentStream", lambda device: (number, device, 1), raising=False)
    assert TORCH.current_stream(x, 1) == number and not is_known(TORCH.current_stream(x, 1))  # an ExternalStream
    monkeypatch.setattr(torch._C, "_cuda_getCurrentStream", lambda device: (3, device, 1), raising=False)
    assert TORCH.current_stream(x, 1) == number and is_known(TORCH.current_stream(x, 1)) and not is_known(number)
    assert TORCH.current_stream(x, 0) == 0 and is_known(0)
    assert {kind for kind, (stream, _) in STREAMS.items() if is_known(stream_handle(stream))} == {"default"}


def check_order(comm: Communicator) -> None:
    n, rank = comm.size, comm.rank
    stream = pynccl.create_stream(priority=-1)
    batches = [inputs(torch.float64, "sum", 1001, n, seed) for seed in range(20)]
    results = [comm.all_reduce(xs[rank], stream=stream) for xs in batches]
    stream.synchronize()
    for xs, result in zip(batches, results, strict=True):
        expect(result, reduced(xs, "sum"), "all_reduce on a stream")
    x = torch.zeros(10_000)
    for _ in range(20):  # what README and docs/streams.md tell users to write
        x.add_(1)
        stream.wait(pynccl.current_stream(comm.device))
        comm.all_reduce(x, x, op="avg", stream=stream)
        pynccl.current_stream(comm.device).wait(stream)
    assert x.unique().tolist() == [20.0]


def check_independence(comm: Communicator) -> None:
    """Check that communicators on different streams do not block each other, for any order of calls on the ranks."""
    other = comm.split(0)
    assert other is not None
    pair = [(comm, torch.ones(4)), (other, torch.full((4,), 2.0))]
    streams = [pynccl.create_stream() for _ in pair]
    for (c, x), stream in zip(pair if comm.rank else pair[::-1], streams, strict=True):
        c.all_reduce(x, x, stream=stream)
    for stream in streams:
        stream.synchronize()
    assert [x[0].item() for _, x in pair] == [comm.size, 2.0 * comm.size]
    token, x = torch.zeros(1), torch.ones(8)
    if comm.rank == 0:  # the other ranks join only after rank 0's call has returned
        comm.all_reduce(x, x, stream=streams[0])
        assert not streams[0].query() and not streams[0].record().query()
        other.broadcast(token, root=0)
    else:
        other.broadcast(token, root=0)
        comm.all_reduce(x, x, stream=streams[0])
    streams[0].synchronize()
    other.destroy()
    assert x.unique().tolist() == [comm.size]


def test_streams_run_in_order_and_independently(ranks: RankPool) -> None:
    ranks.run(3, check_order)
    ranks.run(3, check_independence)
