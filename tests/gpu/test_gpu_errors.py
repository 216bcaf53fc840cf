"""Bad input and ended communicators on a GPU: a clear error, nothing launched, the communicator still works."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import pytest
import torch

import pynccl
from pynccl import Communicator

ABORT_SECONDS = 20.0  # pynccl gives up waiting after 30, with a warning


@pytest.fixture(autouse=True)
def still_works(comm: Communicator) -> Iterator[None]:
    yield
    assert comm.all_reduce(torch.ones(4, device=comm.device)).tolist() == [comm.size] * 4


def test_a_tensor_on_the_cpu_is_refused(comm: Communicator) -> None:
    with pytest.raises(ValueError, match=f"send is on cpu, the communicator on {comm.device}"):
        comm.all_reduce(torch.ones(4))
    with pytest.raises(ValueError, match="recv is on cpu"):
        comm.all_reduce(torch.ones(4, device=comm.device), torch.ones(4))


def test_a_type_without_an_nccl_type_is_refused(comm: Communicator) -> None:
    with pytest.raises(TypeError, match="view_as_real"):
        comm.all_reduce(torch.ones(4, device=comm.device, dtype=torch.complex64))


def test_a_strided_tensor_is_refused(comm: Communicator) -> None:
    with pytest.raises(ValueError, match=r"not contiguous; pass x\.contiguous"):
        comm.all_reduce(torch.ones(4, 4, device=comm.device).t()[:2])


def test_a_recv_of_the_wrong_size_or_type_is_refused(comm: Communicator) -> None:
    x = torch.ones(4, device=comm.device)
    with pytest.raises(ValueError, match=f"recv has 3 elements, expected {4 * comm.size}"):
        comm.all_gather(x, torch.ones(3, device=comm.device))
    with pytest.raises(ValueError, match="send is FLOAT32, recv is FLOAT64"):
        comm.all_reduce(x, x.double())


def test_a_root_or_operator_that_does_not_exist_is_refused(comm: Communicator) -> None:
    x = torch.ones(4, device=comm.device)
    with pytest.raises(ValueError, match="root is 9"):
        comm.broadcast(x, root=9)
    with pytest.raises(ValueError, match="unknown operator 'mean'"):
        comm.all_reduce(x, op="mean")


@pytest.mark.parametrize(("end", "word"), [("destroy", "destroyed"), ("abort", "aborted")])
def test_an_ended_communicator_says_so(comm: Communicator, child: Communicator, end: str, word: str) -> None:
    x = torch.ones(4, device=child.device)
    assert child.all_reduce(x).tolist() == [child.size] * 4
    comm.barrier()  # what is here may still be on its way to a peer, which an abort would leave waiting
    getattr(child, end)()
    getattr(child, end)()
    assert not child.alive
    with pytest.raises(pynccl.NcclInvalidUsage, match=f"was {word}"):
        child.all_reduce(x)


def test_abort_frees_a_collective_that_waits_for_a_peer(comm: Communicator, child: Communicator) -> None:
    """Every rank but 0 calls; rank 0 never does. abort() must return, and the device must be usable after it."""
    if comm.size == 1:
        pytest.skip("one rank waits for nobody")
    x = torch.ones(1 << 20, device=comm.device)
    child.all_reduce(x)  # connects the ranks, which would itself wait for rank 0 below
    torch.cuda.synchronize()
    comm.barrier()  # as above
    if child.rank != 0:
        with contextlib.suppress(pynccl.NcclError):  # of the call itself, where a peer has aborted already
            child.all_reduce(x)
    started = time.monotonic()
    child.abort()
    assert time.monotonic() - started < ABORT_SECONDS
    comm.barrier()
    assert not child.alive


def test_abort_after_a_barrier_waits_for_no_peer_either(comm: Communicator, child: Communicator) -> None:
    """The memory of the barrier is freed with the communicator, which must not wait for what the abort is to stop."""
    if comm.size == 1:
        pytest.skip("one rank waits for nobody")
    x = torch.ones(1 << 20, device=comm.device)
    child.all_reduce(x)
    child.barrier()
    torch.cuda.synchronize()
    comm.barrier()
    if child.rank != 0:
        with contextlib.suppress(pynccl.NcclError):
            child.all_reduce(x)  # on the default stream, for which some versions of cuda.core wait
    started = time.monotonic()
    child.abort()
    assert time.monotonic() - started < ABORT_SECONDS
    comm.barrier()


def test_a_barrier_in_the_capture_of_a_graph_is_refused(comm: Communicator) -> None:
    x = torch.ones(4, device=comm.device)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            with pytest.raises(pynccl.NcclInvalidUsage, match=r"barrier\(\) in the capture"):
                comm.barrier()
            x.add_(1)
        graph.replay()  # the capture is valid
        torch.cuda.synchronize()
        assert x.tolist() == [2.0] * 4
    finally:
        graph.reset()
    comm.barrier()
