"""Compiled autograd runs the backward of every collective, and what torch.compile cannot trace says so."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from ranks import RankPool
from torch import Tensor
from torch._dynamo import compiled_autograd

import pynccl_autograd as ad
from pynccl import Communicator


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    torch._dynamo.reset()
    with compiled_autograd._enable(torch.compile(backend="eager", fullgraph=True)):
        yield


def network(x: Tensor, comm: Communicator, dim: int) -> Tensor:
    y = ad.all_gather(x * 2, comm, dim, grad="sum").sin()
    z = ad.reduce_scatter(y, comm, dim) * ad.all_reduce(x, comm, "prod", grad="sum")
    return (z * ad.all_reduce(x, comm, "max", grad="sum")).sum()


def gradients(comm: Communicator) -> list[list[Tensor]]:
    """Of two communicators and two dimensions, so that a graph of one is not used for the other."""
    other = comm.split(0, key=-comm.rank)
    assert other is not None
    found = []
    for at in (comm, other):
        for dim in (0, 1):
            x = torch.randn(2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(comm.rank))
            x.requires_grad_()
            (eager,) = torch.autograd.grad(network(x, at, dim), x)
            loss = network(x, at, dim)
            with compiling() if (at, dim) == (comm, 0) else compiled_autograd._enable(torch.compile(backend="eager")):
                loss.backward()
            assert x.grad is not None
            found.append([eager, x.grad])
    other.destroy()
    return found


def test_compiled_autograd_gives_the_same_gradients(ranks: RankPool) -> None:
    for results in ranks.run(2, gradients, timeout=110):
        assert len(results) == 4
        for eager, compiled in results:
            torch.testing.assert_close(compiled, eager, rtol=1e-12, atol=1e-12)


def started(comm: Communicator) -> list[float]:
    x = torch.full((2,), comm.rank + 1.0, requires_grad=True)
    y = ad.start(ad.all_reduce, x * x, comm, grad="sum").wait()
    loss = ad.anchor((y**2).sum(), ad.all_gather(x, comm, grad="sum"))
    torch._dynamo.reset()
    with compiled_autograd._enable(torch.compile(backend="eager")):
        loss.backward()
    assert x.grad is not None
    return x.grad.tolist()


def test_compiled_autograd_with_start_and_anchor(ranks: RankPool) -> None:
    assert ranks.run(2, started, timeout=110) == [[2.0 * 2 * 5 * 2 * x] * 2 for x in (1.0, 2.0)]


def refused(comm: Communicator) -> str:
    torch._dynamo.reset()

    def f(t: Tensor) -> Any:
        return torch.func.grad(lambda u: ad.all_reduce(u * u, comm, grad="sum").sum())(t)

    with pytest.raises(Exception, match=r"torch\.func\.grad") as caught:  # torch.compile wraps what is raised
        torch.compile(f, fullgraph=True, backend="aot_eager")(torch.ones(3))
    comm.barrier()  # nothing was launched
    return str(caught.value)


def test_torch_func_grad_within_compile_says_what_to_do(ranks: RankPool) -> None:
    for message in ranks.run(2, refused):
        assert "call torch.func outside of torch.compile" in message
