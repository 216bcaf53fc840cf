"""Streams and events of the host library: order, waiting, errors, and operations on them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from host_calls import Ranks, address, call, in_threads
from torch import Tensor

from pynccl.bindings import errors
from pynccl.bindings.abi import DataType, RedOp
from pynccl.host import HostEvent, HostStream
from pynccl.host.failure import HostFailure
from pynccl.host.stream import find

INT32, SUM = DataType.INT32, RedOp.SUM
SECONDS = 60


@pytest.fixture
def stream() -> Iterator[HostStream]:
    stream = HostStream()
    yield stream
    stream.close()


def fail() -> None:
    raise errors.NcclRemoteError("a peer died")


def test_work_runs_in_order_on_another_thread() -> None:
    stream, seen, gate = HostStream(priority=-1), [], threading.Event()
    assert stream.query()
    assert stream.__cuda_stream__() == (0, stream.handle) and find(stream.handle) is stream and find(0) is None
    stream.submit(partial(gate.wait, SECONDS))
    for i in range(100):
        stream.submit(partial(lambda i: seen.append((i, threading.get_ident())), i))
    event = stream.record()
    assert not stream.query() and not event.query()
    gate.set()
    stream.close()  # runs the queued work
    assert event.query()
    assert [i for i, _ in seen] == list(range(100))
    assert len(workers := {worker for _, worker in seen}) == 1 and threading.get_ident() not in workers
    stream.close()
    with pytest.raises(HostFailure, match="closed"):
        find(stream.handle)
    with pytest.raises(RuntimeError, match="closed"):
        stream.submit(fail)


def test_a_stream_waits_for_an_event_of_another(stream: HostStream) -> None:
    other, gate, never = HostStream(), threading.Event(), HostEvent()
    seen: list[str] = []
    other.submit(partial(gate.wait, SECONDS))
    other.submit(partial(seen.append, "first"))
    stream.wait(other.record())
    stream.submit(partial(seen.append, "second"))
    stream.wait(other)
    assert not stream.query()
    gate.set()
    stream.record().wait(0)  # blocks the caller
    assert seen == ["first", "second"]
    never.wait(None)  # never recorded: completed, as in CUDA
    assert never.query() and HostEvent().record(None).query()
    other.close()


def test_an_error_is_raised_once_and_the_worker_continues(stream: HostStream) -> None:
    seen: list[int] = []
    stream.submit(fail)
    event = stream.record()
    stream.submit(lambda: seen.append(1))
    with pytest.raises(errors.NcclRemoteError, match="a peer died"):
        event.synchronize()
    stream.synchronize()
    event.synchronize()
    assert seen == [1]
    stream.submit(fail)
    with pytest.raises(errors.NcclRemoteError):  # the stream raises it if no event did
        stream.synchronize()
    stream.synchronize()


# Operations on streams


def test_a_group_that_mixes_streams_joins_them(pair: Ranks) -> None:
    """The group runs on the first stream, after the work of the others. The others continue after it."""

    def body(rank: int) -> tuple[Tensor, Tensor]:
        first, second, gate = HostStream(), HostStream(), threading.Event()
        a, b, copy = torch.zeros(3, dtype=torch.int32), torch.zeros(3, dtype=torch.int32), torch.zeros(3)
        second.submit(lambda: (gate.wait(SECONDS), b.fill_(rank + 1)))
        call("ncclGroupStart")
        for tensor, stream in ((a, first), (b, second)):
            call("ncclAllReduce", address(tensor), address(tensor), 3, INT32, SUM, pair.comms[rank], stream.handle)
        call("ncclGroupEnd")
        gate.set()
        second.submit(lambda: copy.copy_(b))
        second.close()
        first.close()
        return b, copy

    for b, copy in in_threads(2, body):
        assert b.eq(3).all() and copy.eq(3).all()
