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


def test_what_cannot_be_sent_is_refused(comm: Communicator) -> None:
    """What does not depend on the device is refused on the host library too, whose tests say more."""
    x = torch.ones(4, device=comm.device)
    for call, kind, says in (
        (lambda: comm.all_reduce(x.cpu()), ValueError, f"send is on cpu, the communicator on {comm.device}"),
        (lambda: comm.all_reduce(x, x.cpu()), ValueError, "recv is on cpu"),
        (lambda: comm.all_reduce(x.to(torch.complex64)), TypeError, "view_as_real"),
        (lambda: comm.all_reduce(x.expand(4, 4).t()[:2]), ValueError, r"not contiguous; pass x\.contiguous"),
        (lambda: comm.all_gather(x, x[:3]), ValueError, f"recv has 3 elements, expected {4 * comm.size}"),
        (lambda: comm.broadcast(x, root=9), ValueError, "root is 9"),
    ):
        with pytest.raises(kind, match=says):
            call()


@pytest.mark.parametrize("after_a_barrier", [False, True])
def test_abort_frees_a_collective_that_waits_for_a_peer(
    comm: Communicator, child: Communicator, after_a_barrier: bool
) -> None:
    """Every rank but 0 calls; rank 0 never does. abort() must return, and the device must be usable after it.

    The memory of a barrier is freed with the communicator, which must not wait for what the abort is to stop: on the
    default stream, for which some versions of cuda.core wait."""
    if comm.size == 1:
        pytest.skip("one rank waits for nobody")
    x = torch.ones(1 << 20, device=comm.device)
    child.all_reduce(x)  # connects the ranks, which would itself wait for rank 0 below
    if after_a_barrier:
        child.barrier()
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
