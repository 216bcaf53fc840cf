"""The plain calls know of no derivatives: a tensor that requires grad is refused under grad mode, never cut off."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from libraries import Stub
from torch import Tensor

import pynccl
import pynccl_autograd as ad
from pynccl import Communicator

COUNTS = [4, 2, 1, 1]  # this rank, number 1 of 4, has 2
Call = Callable[[Communicator, Tensor], Any]  # of 8 elements

CALLS: dict[str, Call] = {
    "all_reduce": lambda comm, x: comm.all_reduce(x),
    "all_reduce in place": lambda comm, x: comm.all_reduce(x, x),
    "all_reduce with recv": lambda comm, x: comm.all_reduce(x, torch.zeros(8)),
    "all_reduce into it": lambda comm, x: comm.all_reduce(torch.zeros(8), x),
    "broadcast": lambda comm, x: comm.broadcast(x, root=1),
    "broadcast from elsewhere": lambda comm, x: comm.broadcast(x, root=0),
    "reduce": lambda comm, x: comm.reduce(x, root=1),
    "reduce elsewhere": lambda comm, x: comm.reduce(x, root=0),
    "all_gather": lambda comm, x: comm.all_gather(x),
    "reduce_scatter": lambda comm, x: comm.reduce_scatter(x),
    "all_to_all": lambda comm, x: comm.all_to_all(x),
    "gather": lambda comm, x: comm.gather(x, root=1),
    "gather elsewhere": lambda comm, x: comm.gather(x, root=0),
    "scatter": lambda comm, x: comm.scatter(x, root=1),
    "scatter into it": lambda comm, x: comm.scatter(None, x, root=0),
    "send": lambda comm, x: comm.send(x, 0),
    "recv": lambda comm, x: comm.recv(x, 0),
    "all_to_all_v": lambda comm, x: comm.all_to_all_v(x, send_counts=COUNTS, recv_counts=COUNTS),
    "all_gather_v": lambda comm, x: comm.all_gather_v(x, counts=[8, 8, 0, 0]),
    "reduce_scatter_v": lambda comm, x: comm.reduce_scatter_v(x, counts=COUNTS),
    "gather_v": lambda comm, x: comm.gather_v(x, root=0, counts=[8, 8, 0, 0]),
    "scatter_v": lambda comm, x: comm.scatter_v(x, root=1, counts=COUNTS),
    "pre_mul_sum": lambda comm, x: comm.pre_mul_sum(x[:1]),
}


def leaf() -> Tensor:
    return torch.zeros(8, requires_grad=True)


@pytest.mark.parametrize("name", CALLS)
def test_a_tensor_that_requires_grad_is_refused_with_the_function_that_has_a_derivative(name: str) -> None:
    stub = Stub()
    comm, call, operation = stub.comm(4, 1, cpu=True), CALLS[name], name.split()[0]
    for x, kind in ((leaf(), "a leaf"), (leaf() * 2, "the result of an operation"), (leaf()[:], "the result of")):
        with pytest.raises(ValueError, match="requires grad") as error:
            call(comm, x)
        text = str(error.value)
        assert text.startswith(f"{operation}: "), text
        assert kind in text or name == "pre_mul_sum", text  # a slice of a leaf
        assert "x.detach()" in text and "torch.no_grad()" in text
        named = text.partition("pynccl_autograd.")[2].split()[0]
        assert named in ad.__all__, named
        assert named == operation.removesuffix("_v") or operation in ("send", "recv", "pre_mul_sum")
    assert stub.names() == []


@pytest.mark.parametrize("name", CALLS)
def test_what_is_meant_is_done_and_lets_no_later_call_through(name: str) -> None:
    """Calls that are remembered are made on a shorter way."""
    stub = Stub()
    comm, call, x = stub.comm(4, 1, cpu=True), CALLS[name], leaf()
    for meant in (torch.no_grad, torch.inference_mode, nullcontext):
        for _ in range(2):
            stub.clear()
            with meant():
                call(comm, x.detach() if meant is nullcontext else x)
            assert stub.names()
    stub.clear()
    for other in (x, torch.nn.Parameter(torch.zeros(8))):
        with pytest.raises(ValueError, match="requires grad"):
            call(comm, other)
    assert stub.names() == []


def test_in_groups_and_plans() -> None:
    stub = Stub()
    comm = stub.comm(4, 1, cpu=True)
    x = torch.zeros(8)
    with pytest.raises(ValueError, match=r"all_gather: send: .*requires grad"), pynccl.group():
        comm.all_reduce(x, x)
        comm.all_gather(leaf())
    with pytest.raises(ValueError, match=r"all_reduce: send: .*requires grad"):
        comm.plan.all_reduce(leaf())
    assert stub.names() == []
    with torch.no_grad():
        comm.plan.all_reduce(leaf())()
    assert stub.names() == ["ncclAllReduce"]


def test_gradients_and_what_has_none_are_data() -> None:
    stub = Stub()
    comm, w = stub.comm(4, 1, cpu=True), leaf()
    (w * 3).sum().backward()
    comm.all_reduce(w.grad, w.grad)
    comm.all_reduce(torch.nn.Parameter(torch.zeros(8), requires_grad=False))
    comm.send(torch.zeros(8, dtype=torch.int64), 0)
    assert stub.names() == ["ncclAllReduce", "ncclAllReduce", "ncclSend"]
    (grad,) = torch.autograd.grad((w * w).sum(), w, create_graph=True)
    with pytest.raises(ValueError, match="result of an operation"):
        comm.all_reduce(grad)
