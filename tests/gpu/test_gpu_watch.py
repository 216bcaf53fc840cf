"""The flight recorder on a GPU: the watchdog's events show completed calls and leave graph captures intact."""

from __future__ import annotations

import time

import pytest
import torch
from test_gpu_streams import BUSY_CYCLES, COUNT

from pynccl import Communicator
from pynccl.watch import recorder
from pynccl.watch.reader import read_file
from pynccl.watch.records import COMPLETED, ISSUED, LAUNCHED, CallRecord

SOON = 5.0  # seconds: several polls of the watchdog


def last_call(comm: Communicator) -> CallRecord:
    """Return the newest call of this communicator from its file."""
    own = recorder.started()
    assert own is not None and comm._track is not None
    found = next(record for record in read_file(own.path).comms if record.uid == comm._track.uid)
    return found.calls[-1]


def wait_for(comm: Communicator, state: str) -> CallRecord:
    end = time.monotonic() + SOON
    while (call := last_call(comm)).state != state:
        assert time.monotonic() < end, call
        time.sleep(0.05)
    return call


@pytest.fixture(autouse=True)
def recorded(comm: Communicator) -> None:
    if not comm._is_recorded:
        pytest.skip("PYNCCL_WATCH=off")
    comm.all_reduce(torch.zeros(COUNT, device=comm.device))
    torch.cuda.synchronize()


def test_a_call_is_issued_while_its_stream_is_busy_and_then_completed(comm: Communicator) -> None:
    x = torch.zeros(COUNT, device=comm.device)
    for _ in range(20):  # about two seconds
        torch.cuda._sleep(BUSY_CYCLES)
    comm.all_reduce(x, x, "max")
    call = wait_for(comm, ISSUED)
    assert (call.operation, call.op, call.count) == ("all_reduce", "MAX", COUNT)
    torch.cuda.synchronize()
    assert wait_for(comm, COMPLETED).completed > 0


def test_of_a_call_on_a_number_it_is_not_known_whether_it_has_run(comm: Communicator) -> None:
    x, side = torch.zeros(COUNT, device=comm.device), torch.cuda.Stream()
    torch.cuda.synchronize()
    comm.all_reduce(x, x, stream=side.cuda_stream)
    side.synchronize()
    wait_for(comm, LAUNCHED)
    comm.all_reduce(x, x, stream=side)
    wait_for(comm, COMPLETED)


def test_the_watchdog_does_not_disturb_a_graph_capture(comm: Communicator) -> None:
    x, y = torch.full((COUNT,), comm.rank + 1.0, device=comm.device), torch.zeros(COUNT, device=comm.device)
    comm.all_reduce(x, y)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        comm.all_reduce(x, y)
        time.sleep(2.0)  # several polls of the watchdog during the capture
        y *= 2
    y.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert y.unique().tolist() == [comm.size * (comm.size + 1.0)]
    graph.reset()
