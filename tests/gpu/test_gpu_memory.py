"""NCCL's memory on a GPU: views, registration, windows, torch's pool, one-sided writes; configuration; plans."""

from __future__ import annotations

import pytest
import torch

import pynccl
from pynccl import CollConfig, CommConfig, Communicator

COUNT = 1 << 16


def needs(comm: Communicator, function: str) -> None:
    """Skip the test if the loaded NCCL is older than `function`."""
    if not comm.library.supports(function):
        pytest.skip(f"{comm.library} has no {function}")


def total(comm: Communicator) -> float:
    return comm.size * (comm.size + 1) / 2


def test_torch_views_memory_of_nccl_without_a_copy(comm: Communicator) -> None:
    needs(comm, "ncclMemAlloc")
    with pynccl.mem_alloc((4, COUNT), "float32", device=comm.ordinal, library=comm.library) as memory:
        x = torch.from_dlpack(memory)
        assert (x.data_ptr(), tuple(x.shape), x.dtype) == (memory.pointer, (4, COUNT), torch.float32)
        y = torch.as_tensor(memory, device=comm.device)
        assert y.data_ptr() == memory.pointer
        x.fill_(comm.rank + 1)
        comm.all_reduce(x, x)
        assert y.unique().tolist() == [total(comm)]
        torch.cuda.synchronize()
        del x, y


@pytest.mark.parametrize("how", ["register", "window"])
def test_registered_memory_and_windows_are_reduced_in_place(comm: Communicator, how: str) -> None:
    needs(comm, {"register": "ncclCommRegister", "window": "ncclCommWindowRegister"}[how])
    with pynccl.mem_alloc(COUNT, "float32", device=comm.ordinal, library=comm.library) as memory:
        x = torch.from_dlpack(memory).fill_(comm.rank + 1)
        try:
            made = comm.register(memory) if how == "register" else comm.window(memory)
        except ValueError as declined:  # ranks that share a GPU, or GPUs that cannot reach each other
            pytest.skip(str(declined))
        with made:
            assert made.nbytes == 4 * COUNT
            comm.all_reduce(x, x)
            torch.cuda.synchronize()
        assert x.unique().tolist() == [total(comm)]
        del x


def test_a_put_arrives_in_the_window_of_the_peer_before_its_signal(comm: Communicator) -> None:
    needs(comm, "ncclPutSignal")
    if comm.size < 2:
        pytest.skip("needs two ranks")
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    stream = pynccl.create_stream(comm.device, library=comm.library)
    with pynccl.mem_alloc(COUNT, "float32", device=comm.ordinal, library=comm.library) as memory:
        x = torch.from_dlpack(memory).fill_(-1)
        source = torch.full((COUNT,), float(comm.rank), device=comm.device)
        torch.cuda.synchronize()
        try:
            window = comm.window(memory)
        except ValueError as declined:
            pytest.skip(str(declined))
        with window:
            comm.barrier()
            comm.put_signal(source, right, window, stream=stream)
            comm.wait_signal(left, stream=stream)
            stream.synchronize()
            assert x.unique().tolist() == [float(left)]
            comm.barrier()
        del x


def test_tensors_of_the_pool_use_nccls_memory(comm: Communicator) -> None:
    needs(comm, "ncclMemAlloc")
    pool = pynccl.mem_pool(comm.library)
    with torch.cuda.use_mem_pool(pool):
        x = torch.full((COUNT,), float(comm.rank + 1), device=comm.device)
    with comm.register(x):
        comm.all_reduce(x, x)
        torch.cuda.synchronize()
    assert x.unique().tolist() == [total(comm)]
    del x


@pytest.mark.parametrize(
    "config", [CommConfig(max_ctas=4, min_ctas=1), CommConfig(blocking=False)], ids=["ctas", "nonblocking"]
)
def test_a_configured_communicator_and_a_configured_call_work(comm: Communicator, config: CommConfig) -> None:
    child = comm.split(0, comm.rank, config)
    assert child is not None
    x = torch.full((COUNT,), float(comm.rank + 1), device=comm.device)
    y = x.clone()
    child.all_reduce(x, x)
    with pynccl.group():
        child.send(x, (comm.rank + 1) % comm.size)
        child.recv(x.clone(), (comm.rank - 1) % comm.size)
    torch.cuda.synchronize()
    assert x.unique().tolist() == [total(comm)]
    if comm.library.supports("ncclAllReduceConfig"):
        child.all_reduce(y, y, config=CollConfig(max_ctas=2))
        assert y.unique().tolist() == [total(comm)]
    child.destroy()


def test_a_plan_is_launched_on_any_stream_and_captured_in_a_graph(comm: Communicator) -> None:
    x = torch.full((COUNT,), float(comm.rank + 1), device=comm.device)
    y = torch.zeros_like(x)
    plan = comm.plan.all_reduce(x, y)
    plan()
    torch.cuda.synchronize()
    assert y.unique().tolist() == [total(comm)]
    side = torch.cuda.Stream()
    y.zero_()
    torch.cuda.synchronize()
    plan(side)
    side.synchronize()
    assert y.unique().tolist() == [total(comm)]
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            plan(torch.cuda.current_stream())
        y.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert y.unique().tolist() == [total(comm)]
    finally:
        graph.reset()  # NCCL's destroy waits for it
