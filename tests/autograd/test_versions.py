"""Receiving bumps the version counter of a tensor; tensors that require grad raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from libraries import Stub

import pynccl
from pynccl import Communicator

zeros = torch.zeros
RECEIVES: dict[str, tuple[int, Callable[[Communicator, torch.Tensor], Any]]] = {
    "all_reduce": (2, lambda comm, r: comm.all_reduce(zeros(2), r)),
    "all_reduce in place": (2, lambda comm, r: comm.all_reduce(r, r)),
    "broadcast": (2, lambda comm, r: comm.broadcast(zeros(2), r)),
    "reduce": (2, lambda comm, r: comm.reduce(zeros(2), r, root=1)),
    "all_gather": (8, lambda comm, r: comm.all_gather(zeros(2), r)),
    "reduce_scatter": (2, lambda comm, r: comm.reduce_scatter(zeros(8), r)),
    "all_to_all": (4, lambda comm, r: comm.all_to_all(zeros(4), r)),
    "gather": (8, lambda comm, r: comm.gather(zeros(2), r, root=1)),
    "scatter": (2, lambda comm, r: comm.scatter(None, r)),
    "recv": (2, lambda comm, r: comm.recv(r, 0)),
    "all_to_all_v": (4, lambda comm, r: comm.all_to_all_v(zeros(4), r, send_counts=[1] * 4, recv_counts=[1] * 4)),
    "all_gather_v": (8, lambda comm, r: comm.all_gather_v(zeros(2), r, counts=[2] * 4)),
    "reduce_scatter_v": (2, lambda comm, r: comm.reduce_scatter_v(zeros(8), r, counts=[2] * 4)),
    "gather_v": (8, lambda comm, r: comm.gather_v(zeros(2), r, root=1, counts=[2] * 4)),
    "scatter_v": (2, lambda comm, r: comm.scatter_v(None, r, counts=[2] * 4)),
}


@pytest.mark.parametrize("name", RECEIVES)
def test_every_operation_bumps_the_version_of_its_output_and_rejects_tensors_that_require_grad(name: str) -> None:
    size, call = RECEIVES[name]
    # Alternate between libraries with and without native gather and scatter
    stub = Stub((2, 21, 5) if len(name) % 2 else (2, 32, 3))
    comm = stub.comm(cpu=True)
    recv = zeros(size)
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
    stub.clear()
    leaf = zeros(size, requires_grad=True)
    for recv, kind in ((leaf, "a leaf"), (leaf * 1, "the result")):
        with pytest.raises(ValueError, match=rf"^{name.split()[0]}: \w+: .*requires grad \({kind}.*x\.detach\(\)"):
            call(comm, recv)
        assert stub.names() == []
        with torch.no_grad():
            call(comm, recv)
        assert recv._version == 1
        stub.clear()


def test_plans_bump_the_version_once_per_launch() -> None:
    comm = Stub().comm(cpu=True)
    x, y = zeros(2), zeros(2)
    plan = comm.plan.all_reduce(x, x)
    step = comm.plan.group([plan, comm.plan.all_reduce(x, y), plan, comm.plan.send(x, 0)])
    plan()
    step()
    with pynccl.group():
        step()
    assert (x._version, y._version) == (3, 2)
    with pytest.raises(ValueError, match="requires grad"):
        comm.plan.all_reduce(zeros(2), zeros(2, requires_grad=True))
