"""The calls of pynccl have no derivatives: in grad mode they raise for tensors that require grad."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from libraries import Stub
from torch import Tensor

import pynccl_autograd as ad
from pynccl import Communicator

COUNTS = [4, 2, 1, 1]  # the rank of the test is 1

# Calls with a tensor of 8 elements.
CALLS: dict[str, Callable[[Communicator, Tensor], Any]] = {
    "all_reduce": lambda comm, x: comm.all_reduce(x),
    "all_reduce in place": lambda comm, x: comm.all_reduce(x, x),
    "all_reduce into it": lambda comm, x: comm.all_reduce(torch.zeros(8), x),
    "broadcast": lambda comm, x: comm.broadcast(x, root=0),
    "reduce": lambda comm, x: comm.reduce(x, root=1),
    "all_gather": lambda comm, x: comm.all_gather(x),
    "reduce_scatter": lambda comm, x: comm.reduce_scatter(x),
    "all_to_all": lambda comm, x: comm.all_to_all(x),
    "gather": lambda comm, x: comm.gather(x, root=0),
    "scatter": lambda comm, x: comm.scatter(x, root=1),
    "send": lambda comm, x: comm.send(x, 0),
    "recv": lambda comm, x: comm.recv(x, 0),
    "all_to_all_v": lambda comm, x: comm.all_to_all_v(x, send_counts=COUNTS, recv_counts=COUNTS),
    "all_gather_v": lambda comm, x: comm.all_gather_v(x, counts=[8, 8, 0, 0]),
    "reduce_scatter_v": lambda comm, x: comm.reduce_scatter_v(x, counts=COUNTS),
    "pre_mul_sum": lambda comm, x: comm.pre_mul_sum(x[:1]),
}


def leaf() -> Tensor:
    return torch.zeros(8, requires_grad=True)


@pytest.mark.parametrize("name", CALLS)
def test_tensor_requiring_grad_raises_and_names_differentiable_function(name: str) -> None:
    stub = Stub()
    comm, call, operation = stub.comm(4, 1, cpu=True), CALLS[name], name.split()[0]
    x = leaf()
    for tensor in (x, x * 2):
        with pytest.raises(ValueError, match=rf"^{operation}: .*requires grad") as error:
            call(comm, tensor)
        text = str(error.value)
        assert "x.detach()" in text and "torch.no_grad()" in text
        named = text.partition("pynccl_autograd.")[2].split()[0]
        assert named in ad.__all__
        assert named == operation.removesuffix("_v") or operation in ("send", "recv", "pre_mul_sum")
    assert stub.names() == []
    for _ in range(2):  # the second call uses the cache of validated calls
        with torch.no_grad():
            call(comm, x)
        call(comm, x.detach())
    stub.clear()
    with pytest.raises(ValueError, match="requires grad"):
        call(comm, x)
    assert stub.names() == []
