"""Autograd hears of what is received: a tensor that it saved may not be overwritten, nor one that requires grad."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from libraries import Stub
from ranks import RankPool

import pynccl
from pynccl import Communicator


def saved(comm: Communicator) -> None:
    """A tensor that the backward pass needs may be reduced, but not in place."""
    w, x = torch.tensor([3.0], requires_grad=True), torch.tensor([2.0])
    y = (w * x).sum()
    comm.all_reduce(x)
    y.backward(retain_graph=True)
    assert w.grad is not None and w.grad.item() == 2.0
    comm.all_reduce(x, x)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*is at version 1; expected version 0"):
        y.backward()


def test_backward_refuses_a_saved_tensor_that_was_reduced_in_place(ranks: RankPool) -> None:
    ranks.run(2, saved)


X, Y, Z = (2,), (8,), (4,)
RECEIVES: dict[str, tuple[tuple[int, ...], Callable[[Communicator, torch.Tensor], Any]]] = {
    "all_reduce": (X, lambda comm, r: comm.all_reduce(torch.zeros(2), r)),
    "all_reduce in place": (X, lambda comm, r: comm.all_reduce(r, r)),
    "broadcast": (X, lambda comm, r: comm.broadcast(torch.zeros(2), r)),
    "reduce": (X, lambda comm, r: comm.reduce(torch.zeros(2), r, root=1)),
    "all_gather": (Y, lambda comm, r: comm.all_gather(torch.zeros(2), r)),
    "reduce_scatter": (X, lambda comm, r: comm.reduce_scatter(torch.zeros(8), r)),
    "all_to_all": (Z, lambda comm, r: comm.all_to_all(torch.zeros(4), r)),
    "gather": (Y, lambda comm, r: comm.gather(torch.zeros(2), r, root=1)),
    "scatter": (X, lambda comm, r: comm.scatter(None, r)),
    "scatter at root": (X, lambda comm, r: comm.scatter(torch.zeros(8), r, root=1)),
    "recv": (X, lambda comm, r: comm.recv(r, 0)),
    "all_to_all_v": (
        Z,
        lambda comm, r: comm.all_to_all_v(torch.zeros(4), r, send_counts=[1] * 4, recv_counts=[1] * 4),
    ),
    "all_gather_v": (Y, lambda comm, r: comm.all_gather_v(torch.zeros(2), r, counts=[2] * 4)),
    "reduce_scatter_v": (X, lambda comm, r: comm.reduce_scatter_v(torch.zeros(8), r, counts=[2] * 4)),
    "gather_v": (Y, lambda comm, r: comm.gather_v(torch.zeros(2), r, root=1, counts=[2] * 4)),
    "scatter_v": (X, lambda comm, r: comm.scatter_v(None, r, counts=[2] * 4)),
}


@pytest.mark.parametrize("name", RECEIVES)
def test_every_operation_counts_a_change_of_what_it_fills(name: str) -> None:
    shape, call = RECEIVES[name]
    # By turns a library with and without operations of its own for gather and scatter
    comm = Stub((2, 21, 5) if len(name) % 2 else (2, 32, 3)).comm(cpu=True)
    recv = torch.zeros(shape)
    call(comm, recv)
    assert recv._version == 1
    with pynccl.group():
        call(comm, recv)
        assert recv._version == 1  # nothing is written before the launch
    assert recv._version == 2
    with pytest.raises(KeyError), pynccl.group():
        call(comm, recv)
        raise KeyError
    assert recv._version == 2
    whole = torch.zeros(16)
    call(comm, whole[: shape[0]])
    assert whole._version == 1  # views share a count


def test_what_requires_grad_is_not_overwritten_under_grad_mode() -> None:
    stub = Stub()
    comm = stub.comm(cpu=True)
    for name, (shape, call) in RECEIVES.items():
        leaf = torch.zeros(shape, requires_grad=True)
        for recv, kind in ((leaf, "a leaf"), (leaf * 1, "the result")):
            message = rf"^{name.split()[0]}: \w+: .*requires grad \({kind}.*x\.detach\(\)"
            with pytest.raises(ValueError, match=message):
                call(comm, recv)
            assert stub.names() == []
            with torch.no_grad():
                call(comm, recv)
            assert recv._version == 1
            call(comm, recv.detach())
            assert recv._version == 2
            stub.clear()


def test_what_is_sent_without_grad_mode_may_require_grad_and_is_not_counted() -> None:
    comm = Stub().comm(cpu=True)
    x = torch.zeros(2, requires_grad=True)
    with torch.no_grad():
        result = comm.all_reduce(x)
        comm.send(x, 0)
        comm.gather(x, root=0)
    assert x._version == 0 and not result.requires_grad


def test_plans_count_once_a_launch() -> None:
    comm = Stub().comm(cpu=True)
    x, y = torch.zeros(2), torch.zeros(2)
    one = comm.plan.all_reduce(x, x)
    step = comm.plan.group([one, comm.plan.all_reduce(x, y), one, comm.plan.send(x, 0)])
    assert x._version == y._version == 0
    one()
    assert x._version == 1
    step()
    assert (x._version, y._version) == (2, 1)
    with pynccl.group():
        one()
        step()
    assert (x._version, y._version) == (3, 2)
    with pytest.raises(ValueError, match="requires grad"):
        comm.plan.all_reduce(torch.zeros(2), torch.zeros(2, requires_grad=True))


def test_inference_tensors_have_no_version_and_are_received_into() -> None:
    stub = Stub()
    comm = stub.comm(cpu=True)
    with torch.inference_mode():
        x = torch.zeros(2)
        comm.all_reduce(x, x)
        comm.recv(x, 0)
    comm.all_reduce(x, x)
    comm.plan.all_reduce(x, x)()
    with pynccl.group():
        comm.recv(x, 0)
    assert x.is_inference() and len(stub.calls()) == 7
