"""Order on CUDA streams: the current stream, side streams of torch and of pynccl, events, and graph capture."""

from __future__ import annotations

import pytest
import torch

import pynccl
import pynccl_autograd as ad
from pynccl import Communicator

COUNT = 1 << 20
BUSY_CYCLES = 200_000_000  # about 100 ms: much longer than a launch


@pytest.fixture(autouse=True)
def connected(comm: Communicator) -> None:
    """NCCL connects the ranks in the first call of a kind, which takes long and cannot be captured."""
    comm.all_reduce(torch.zeros(COUNT, device=comm.device))
    torch.cuda.synchronize()


def total(comm: Communicator, each: float = 1.0) -> float:
    return each * comm.size * (comm.size + 1) / 2


def fill_late(x: torch.Tensor, value: float) -> None:
    """Set x after a long delay on the current stream: work that does not wait for that stream reads the old values."""
    torch.cuda._sleep(BUSY_CYCLES)
    x.fill_(value)


def test_the_current_stream_orders_a_collective_after_what_made_its_input(comm: Communicator) -> None:
    x = torch.zeros(COUNT, device=comm.device)
    fill_late(x, comm.rank + 1)
    y = comm.all_reduce(x)
    y *= 2
    assert y.unique().tolist() == [total(comm, 2)]


@pytest.mark.parametrize("how", ["current", "passed"])
def test_a_torch_side_stream_is_used_if_current_or_passed(comm: Communicator, how: str) -> None:
    x, y = torch.zeros(COUNT, device=comm.device), torch.zeros(COUNT, device=comm.device)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        fill_late(x, comm.rank + 1)
        if how == "current":
            comm.all_reduce(x, y)  # into y: the first allocation of a stream may take longer than the sleep
    if how == "passed":
        comm.all_reduce(x, y, stream=side)
    done = side.record_event()
    assert not done.query()  # the call returned while the stream was still busy
    done.synchronize()
    assert y.unique().tolist() == [total(comm)]


@pytest.mark.parametrize("priority", [None, -1])
def test_a_pynccl_stream_records_waits_and_can_be_queried(comm: Communicator, priority: int | None) -> None:
    library = comm.library
    producer = pynccl.create_stream(comm.device, library=library)
    consumer = pynccl.create_stream(comm.device, priority=priority, library=library)
    x, y = torch.zeros(COUNT, device=comm.device), torch.zeros(COUNT, device=comm.device)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.ExternalStream(producer.handle)):
        fill_late(x, comm.rank + 1)
    filled = producer.record()
    consumer.wait(filled)
    comm.all_reduce(x, y, stream=consumer)
    done = consumer.record()
    assert not done.query()
    done.synchronize()
    assert filled.query() and done.query() and consumer.query()
    assert y.unique().tolist() == [total(comm)]


def reuse(x: torch.Tensor) -> None:
    """Allocate the memory that was just freed, and write to it on the current stream."""
    for _ in range(8):
        torch.empty_like(x).fill_(-1.0)


@pytest.mark.parametrize("kind", ["pynccl", "handle", "torch"])
def test_buffers_may_be_dropped_while_a_side_stream_uses_them(comm: Communicator, kind: str) -> None:
    made = pynccl.create_stream(comm.device)
    side = torch.cuda.Stream() if kind == "torch" else torch.cuda.ExternalStream(made.handle, device=comm.device)
    stream = {"pynccl": made, "handle": made.handle, "torch": side}[kind]
    results = []
    for i in range(10):
        x = torch.full((COUNT,), float(i), device=comm.device)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(BUSY_CYCLES // 20)
        results.append(comm.all_reduce(x, stream=stream))
        del x
        reuse(results[-1])
    side.synchronize()
    assert [result.unique().tolist() for result in results] == [[float(i * comm.size)] for i in range(10)]


def test_streams_wait_for_the_current_stream_and_vice_versa(comm: Communicator) -> None:
    side = pynccl.create_stream(comm.device)
    x = torch.zeros(COUNT, device=comm.device)
    torch.cuda.synchronize()
    fill_late(x, comm.rank + 1)
    side.wait(pynccl.current_stream(comm.device))
    comm.all_reduce(x, x, stream=side)
    pynccl.current_stream(comm.device).wait(side)
    x *= 2
    assert x.unique().tolist() == [total(comm, 2)]
    with torch.cuda.stream(other := torch.cuda.Stream()):
        fill_late(x, comm.rank + 1)
        assert pynccl.current_stream(comm.device).handle == other.cuda_stream
        side.wait(other.record_event())
        comm.all_reduce(x, x, stream=side)
    side.synchronize()
    assert x.unique().tolist() == [total(comm)]


@pytest.mark.parametrize("stream", ["current", "pynccl"])
def test_a_captured_graph_repeats_the_collective_on_new_data(comm: Communicator, stream: str) -> None:
    made = pynccl.create_stream(comm.device)
    side = torch.cuda.ExternalStream(made.handle, device=comm.device) if stream == "pynccl" else None
    x = torch.ones(COUNT, device=comm.device)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
        y = comm.all_reduce(x * 2, stream=made if side else None) + 1
    for each in (1.0, 3.0):
        x.fill_(each * (comm.rank + 1))
        graph.replay()
        torch.cuda.synchronize()
        assert y.unique().tolist() == [total(comm, 2 * each) + 1]
    del graph


@pytest.mark.parametrize("ranks", ["all", "one"])
def test_a_started_collective_may_be_waited_for_on_other_streams(comm: Communicator, ranks: str) -> None:
    """Its memory belongs to the stream of start(), which must not reuse it before the other streams are done."""
    group = comm if ranks == "all" else comm.split(comm.rank)
    assert group is not None
    second, third = torch.cuda.Stream(), torch.cuda.Stream()
    results = []
    for i in range(10):
        x = torch.full((COUNT,), float(i), device=comm.device)
        handle = ad.start(ad.all_reduce, x, group, grad="sum")
        for side in (second, third):
            with torch.cuda.stream(side):
                y = handle.wait()
                torch.cuda._sleep(BUSY_CYCLES // 40)
                results.append((float(i * group.size), y + 0))
        del x, y, handle
        reuse(torch.empty(COUNT, device=comm.device))
    torch.cuda.synchronize()
    assert [result.unique().tolist() for _, result in results] == [[value] for value, _ in results]
    if group is not comm:
        group.destroy()
