"""Order on CUDA streams: the current stream, side streams of torch and of pynccl, events, and graph capture."""

from __future__ import annotations

import pytest
import torch

import pynccl
from pynccl import Communicator

COUNT = 1 << 20
BUSY_CYCLES = 200_000_000  # about 100 ms: far longer than a launch takes


@pytest.fixture(autouse=True)
def connected(comm: Communicator) -> None:
    """NCCL connects the ranks in the first call of a kind, which takes long and cannot be captured."""
    comm.all_reduce(torch.zeros(COUNT, device=comm.device))
    torch.cuda.synchronize()


def total(comm: Communicator, each: float = 1.0) -> float:
    return each * comm.size * (comm.size + 1) / 2


def fill_late(x: torch.Tensor, value: float) -> None:
    """Set x after a long wait on the current stream: whoever does not wait for that stream reads the old values."""
    torch.cuda._sleep(BUSY_CYCLES)
    x.fill_(value)


def test_the_current_stream_orders_a_collective_after_what_made_its_input(comm: Communicator) -> None:
    x = torch.zeros(COUNT, device=comm.device)
    fill_late(x, comm.rank + 1)
    y = comm.all_reduce(x)
    y *= 2
    assert y.unique().tolist() == [total(comm, 2)]


def test_a_torch_side_stream_is_used_where_it_is_current(comm: Communicator) -> None:
    x = torch.zeros(COUNT, device=comm.device)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        fill_late(x, comm.rank + 1)
        y = comm.all_reduce(x)
        done = side.record_event()
    assert not done.query()  # the call returned while the stream was still busy
    done.synchronize()
    assert y.unique().tolist() == [total(comm)]


def test_stream_takes_a_torch_stream(comm: Communicator) -> None:
    x, y = torch.zeros(COUNT, device=comm.device), torch.zeros(COUNT, device=comm.device)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        fill_late(x, comm.rank + 1)
    comm.all_reduce(x, y, stream=side)
    side.synchronize()
    assert y.unique().tolist() == [total(comm)]


@pytest.mark.parametrize("priority", [None, -1])
def test_a_stream_of_pynccl_records_waits_and_answers(comm: Communicator, priority: int | None) -> None:
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


def test_timed_events_measure_what_lies_between_them(comm: Communicator) -> None:
    stream = pynccl.create_stream(comm.device, library=comm.library)
    start, end = (pynccl.create_event(comm.device, timing=True, library=comm.library) for _ in range(2))
    stream.record(start)
    with torch.cuda.stream(torch.cuda.ExternalStream(stream.handle)):
        torch.cuda._sleep(BUSY_CYCLES)
    stream.record(end)
    stream.synchronize()
    assert 5 < start.elapsed_time(end) < 5000  # milliseconds


def test_a_group_may_span_streams(comm: Communicator) -> None:
    a, b = torch.cuda.Stream(), torch.cuda.Stream()
    x, y = (torch.full((COUNT,), comm.rank + 1.0, device=comm.device) for _ in range(2))
    torch.cuda.synchronize()
    with pynccl.group():
        comm.all_reduce(x, x, stream=a)
        comm.all_reduce(y, y, "max", stream=b)
    torch.cuda.synchronize()
    assert x.unique().tolist() == [total(comm)]
    assert y.unique().tolist() == [comm.size]


def test_a_captured_graph_repeats_the_collective_on_new_data(comm: Communicator) -> None:
    x = torch.ones(COUNT, device=comm.device)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        y = comm.all_reduce(x * 2) + 1
    for each in (1.0, 3.0):
        x.fill_(each * (comm.rank + 1))
        graph.replay()
        torch.cuda.synchronize()
        assert y.unique().tolist() == [total(comm, 2 * each) + 1]


def test_numbers_of_a_raw_pointer_need_a_stream(comm: Communicator) -> None:
    x = torch.full((COUNT,), comm.rank + 1.0, device=comm.device)
    raw = (x.data_ptr(), COUNT, "float32")
    with pytest.raises(TypeError, match="stream="):
        comm.all_reduce(raw, raw)
    comm.all_reduce(raw, raw, stream=torch.cuda.current_stream())
    torch.cuda.synchronize()
    assert x.unique().tolist() == [total(comm)]
