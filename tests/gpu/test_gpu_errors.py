"""Bad input and aborted communicators on a GPU: errors, no launch, and a communicator that still works."""

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


def test_invalid_tensors_raise(comm: Communicator) -> None:
    """The tests on the host library cover errors that do not depend on the device in more detail."""
    x = torch.ones(4, device=comm.device)
    for call, kind, message in (
        (lambda: comm.all_reduce(x.cpu()), ValueError, f"send is on cpu, the communicator is on {comm.device}"),
        (lambda: comm.all_reduce(x, x.cpu()), ValueError, "recv is on cpu"),
        (lambda: comm.all_reduce(x.to(torch.complex64)), TypeError, "view_as_real"),
        (lambda: comm.all_reduce(x.expand(4, 4).t()[:2]), ValueError, r"not contiguous; pass x\.contiguous"),
        (lambda: comm.all_gather(x, x[:3]), ValueError, f"recv has 3 elements, expected {4 * comm.size}"),
        (lambda: comm.broadcast(x, root=9), ValueError, "root is 9"),
    ):
        with pytest.raises(kind, match=message):
            call()


@pytest.mark.parametrize("after_a_barrier", [False, True])
def test_abort_ends_a_collective_that_waits_for_a_peer(
    comm: Communicator, child: Communicator, after_a_barrier: bool
) -> None:
    """All ranks except 0 make the call. abort() must return and leave the device usable.

    The communicator's memory for barriers is freed with it. That must not wait for the aborted collective on the
    default stream, as some versions of cuda.core do."""
    if comm.size == 1:
        pytest.skip("needs 2 ranks")
    x = torch.ones(1 << 20, device=comm.device)
    child.all_reduce(x)  # connects the ranks, which below would wait for rank 0
    if after_a_barrier:
        child.barrier()
    torch.cuda.synchronize()
    comm.barrier()  # as above
    if child.rank != 0:
        with contextlib.suppress(pynccl.NcclError):  # raised by the call if a peer has aborted already
            child.all_reduce(x)
    started = time.monotonic()
    child.abort()
    assert time.monotonic() - started < ABORT_SECONDS
    comm.barrier()
    assert not child.alive
