"""Bad input and ended communicators on a GPU: a clear error, nothing launched, the communicator still works."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import pynccl
from pynccl import Communicator


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
def test_an_ended_communicator_says_so(child: Communicator, end: str, word: str) -> None:
    x = torch.ones(4, device=child.device)
    assert child.all_reduce(x).tolist() == [child.size] * 4
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
    comm.barrier()
    if child.rank != 0:
        child.all_reduce(x)
    child.abort()
    comm.barrier()
    assert not child.alive
