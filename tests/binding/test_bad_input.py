"""Bad input is an error that says what was passed, what was expected and what to do, and nothing is launched.

The stub library records what reaches C; a communicator of rank 1 of 4 on GPU 0, or one on CPU memory.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from bad_calls import BAD, F4, CudaArray, refuse
from libraries import Stub
from ranks import RankPool

import pynccl
from pynccl import Communicator


@pytest.mark.parametrize("name", BAD)
def test_a_bad_call_is_refused_before_anything_is_launched(name: str) -> None:
    stub = Stub()
    comm = stub.comm(nranks=4, rank=1, cpu=True)
    refuse(comm, BAD[name])
    assert stub.names() == []
    comm.all_reduce(torch.zeros(4))  # and the communicator is none the worse for it
    assert stub.names() == ["ncclAllReduce"]


def test_cpu_memory_is_refused_by_a_communicator_of_a_gpu() -> None:
    stub = Stub()
    comm = stub.comm()
    for name, call in {
        "all_reduce: send": lambda: comm.all_reduce(torch.zeros(4)),
        "all_gather: send": lambda: comm.all_gather(np.zeros(4)),
        "recv: buf": lambda: comm.recv(torch.zeros(4), 0),
    }.items():
        with pytest.raises(ValueError) as caught:
            call()
        assert f"{name} is on cpu, the communicator on cuda:0; move it there" in str(caught.value)
    assert stub.names() == []


def test_memory_of_another_gpu_is_refused() -> None:
    on_gpu_1 = CudaArray(stream=1)
    on_gpu_1.device = SimpleNamespace(id=1)  # type: ignore[attr-defined]
    stub = Stub()
    with pytest.raises(ValueError, match="send is on cuda:1, the communicator on cuda:0; move it there"):
        stub.comm().all_reduce(on_gpu_1, on_gpu_1)
    assert stub.names() == []


BAD_INITS: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "rank too high": ((2, bytes(128), 2), {}, "rank is 2, expected 0..1 for 2 ranks"),
    "rank negative": ((2, bytes(128), -1), {}, "rank is -1, expected 0..1 for 2 ranks"),
    "no ranks": ((0, bytes(128), 0), {}, "nranks is 0, expected a number of ranks >= 1"),
    "size a text": (("2", bytes(128), 0), {}, "nranks is '2', expected a number of ranks"),
    "short id": ((2, bytes(127), 0), {}, "unique_id is bytes of 127 bytes, expected what get_unique_id() returned"),
    "no id": ((2, None, 0), {}, "unique_id is NoneType, expected what get_unique_id() returned, or its 128 bytes"),
    "gpu": ((1, bytes(128), 0), {"device": "cuda:0"}, "device is 'cuda:0', but the host library works on the CPU"),
}


@pytest.mark.parametrize("name", BAD_INITS)
def test_a_bad_init_is_refused_before_it_reaches_the_library(name: str) -> None:
    args, options, says = BAD_INITS[name]
    stub = Stub()
    with pytest.raises(ValueError) as caught:
        Communicator.init(*args, **{**options, "library": stub.cpu_library})
    assert says in str(caught.value)
    assert stub.names() == []


def test_a_cpu_is_no_device_of_a_gpu_library() -> None:
    stub = Stub()
    with pytest.raises(ValueError, match=r"device is 'cpu', but .* works on GPUs; set PYNCCL_LIBRARY=host for the CPU"):
        Communicator.init(1, bytes(128), 0, "cpu", library=stub.library)
    with pytest.raises(ValueError, match="devices is 0, expected at least one"):
        Communicator.init_all(0, library=stub.library)
    assert stub.names() == []


def test_an_operation_after_the_end_says_how_it_ended() -> None:
    stub = Stub()
    destroyed, aborted = stub.comm(cpu=True), stub.comm(rank=2, cpu=True)
    destroyed.destroy()
    aborted.abort()
    stub.clear()
    for comm, end in ((destroyed, "destroyed"), (aborted, "aborted")):
        for call in (
            lambda comm: comm.all_reduce(torch.zeros(4)),
            lambda comm: comm.send(torch.zeros(4), 0),
            lambda comm: comm.split(0),
            lambda comm: comm.barrier(),
            lambda comm: comm.async_error(),
            lambda comm: comm.finalize(),
            lambda comm: comm.pre_mul_sum(1.0, F4),
            lambda comm: comm.handle,
        ):
            with pytest.raises(pynccl.NcclInvalidUsage) as caught:
                call(comm)
            assert f"this communicator (rank {comm.rank} of 4 on cpu) was {end}" in str(caught.value)
            assert "make a new one with Communicator.init" in str(caught.value)
    assert stub.names() == []


def test_a_communicator_that_ends_inside_a_group_launches_nothing() -> None:
    stub = Stub()
    comm = stub.comm(cpu=True)
    with pytest.raises(pynccl.NcclInvalidUsage, match="was destroyed"), pynccl.group():
        comm.all_reduce(torch.zeros(4))
        comm.destroy()
    assert stub.names() == ["ncclCommGetAsyncError", "ncclCommFinalize", "ncclCommDestroy"]


def refused_on_rank_1(comm: Communicator) -> float:
    """Rank 1 makes all the bad calls; rank 0 would hang or fail if any of them had been sent out."""
    if comm.rank == 1:
        for bad in BAD.values():
            refuse(comm, bad)
        with pytest.raises(ValueError, match="not divisible"), pynccl.group():
            comm.all_reduce(torch.ones(4))
            comm.reduce_scatter(torch.zeros(10))
    return comm.all_reduce(torch.tensor(comm.rank + 1.0)).item()


def test_other_ranks_see_nothing_of_a_bad_call(ranks: RankPool) -> None:
    assert ranks.run(4, refused_on_rank_1) == [10.0] * 4


def test_an_operator_that_was_destroyed_is_refused() -> None:
    comm = pynccl.Communicator.init_all(1, library=pynccl.load("host"))[0]
    operator = comm.pre_mul_sum(2.0, "float32")
    operator.destroy()
    with pytest.raises(ValueError, match="pre_mul_sum that was destroyed; make a new one"):
        comm.all_reduce(torch.ones(1), op=operator)
    comm.destroy()
