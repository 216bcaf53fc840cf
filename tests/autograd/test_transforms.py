"""torch.compile, opcheck, checkpointing, autocast: the collectives under what transforms a program.

Each operation under vmap, jvp and torch.compile is a cell of test_semantics.py; here is what concerns many at once.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import RankPool
from torch import Tensor
from torch._dynamo import compiled_autograd

import pynccl_autograd as ad
from pynccl import Communicator


def network(x: Tensor, w: Tensor, v: Tensor, comm: Communicator) -> Tensor:
    """Sequence-parallel MLP with a distributed softmax-like tail: five kinds of collectives, uneven shapes."""
    h = F.gelu(ad.all_gather(x, comm, grad="sum") @ w)
    y = ad.reduce_scatter(h @ v, comm)
    largest = ad.all_reduce(y.detach(), comm, "max", grad="replicated")
    total = ad.start(ad.all_reduce, (y - largest).exp().sum(0), comm, grad="sum").wait()
    return ad.all_to_all(y.repeat(1, comm.size), comm, 1, 0).sum() + total.log().sum()


def leaves(comm: Communicator, rows: int) -> list[Tensor]:
    generator, shapes = torch.Generator().manual_seed(comm.rank), ((rows, 4), (4, 6), (6, 4))
    return [torch.randn(shape, dtype=torch.float64, generator=generator, requires_grad=True) for shape in shapes]


def compiled_network(comm: Communicator) -> None:
    """Forward and backward, another shape (dynamic), another communicator: as eager; no graph break."""
    torch._dynamo.reset()
    compiled = torch.compile(network, fullgraph=True, backend="aot_eager")
    other = comm.split(0, key=-comm.rank)
    assert other is not None
    for rows, at in ((2, comm), (3, comm), (3, other)):
        given, again = leaves(comm, rows), leaves(comm, rows)
        eager, traced = network(*given, at), compiled(*again, at)
        torch.testing.assert_close(traced, eager, rtol=1e-12, atol=1e-12)
        found, wanted = torch.autograd.grad(traced, again), torch.autograd.grad(eager, given)
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    other.destroy()


def test_a_network_compiles_to_one_graph_with_equal_gradients(ranks: RankPool) -> None:
    ranks.run(2, compiled_network, timeout=110)


def compiled_backward(comm: Communicator) -> None:
    """Of two communicators, so that a graph of one is not used for the other."""
    other = comm.split(0, key=-comm.rank)
    assert other is not None

    def f(x: Tensor, at: Communicator) -> Tensor:
        y = ad.reduce_scatter(ad.all_gather(x * 2, at, grad="sum").sin(), at)
        return (
            y * ad.start(ad.all_reduce, x * x, at, grad="sum").wait() * ad.all_reduce(x, at, "prod", grad="sum")
        ).sum()

    torch._dynamo.reset()
    for at in (comm, other):
        x = leaves(comm, 2)[0]
        (eager,) = torch.autograd.grad(f(x, at), x)
        loss = f(x, at)
        with compiled_autograd._enable(torch.compile(backend="eager")):
            loss.backward()
        torch.testing.assert_close(x.grad, eager, rtol=1e-12, atol=1e-12)
    other.destroy()


def test_compiled_autograd_gives_the_same_gradients(ranks: RankPool) -> None:
    ranks.run(2, compiled_backward, timeout=110)


def under_autocast(comm: Communicator) -> None:
    """A collective keeps the type of its input; a layer follows autocast, and gradients come in the leaf's type."""
    x = torch.full((2, 4), comm.rank + 0.5, requires_grad=True)
    layer = ad.ColumnParallelLinear(4, 2 * comm.size, comm, sequence_parallel=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, z = ad.all_reduce(x, comm, grad="sum"), layer(x)
        assert (y.dtype, z.dtype) == (torch.float32, torch.bfloat16)
    (y.sum() + z.float().sum()).backward()
    assert x.grad.dtype == torch.float32 and layer.weight.grad.dtype == torch.float32


def refusals(comm: Communicator) -> None:
    """An operator has vmap, and refuses forward mode instead of dropping a tangent; so it does compiled."""
    under_autocast(comm)
    x, func, key = torch.ones(3), torch.func, ad.key_of(comm)

    def total(u: Tensor) -> Tensor:
        return ad.all_reduce(u * u, comm, grad="sum")

    def compiled(f: Any) -> Any:
        torch._dynamo.reset()
        return torch.compile(f, fullgraph=True, backend="aot_eager")(x)

    cases: list[tuple[Any, str]] = [
        (lambda: func.jvp(lambda t: torch.ops.pynccl.copy(t, key, None), (x,), (x,)), "has no forward mode"),
        (lambda: compiled(lambda t: func.jvp(lambda u: total(u) * u, (t,), (t,))), "has no forward mode"),
        (
            lambda: compiled(lambda t: func.grad(lambda u: total(u * t).sum())(t)),
            r"call torch\.func outside of torch\.compile",
        ),
        (lambda: compiled(lambda t: ad.all_to_all(t, comm, send_splits=[1, 2])), "both are needed where nothing can"),
        (lambda: torch.ops.pynccl.copy(x, "gone", None), "names no communicator"),
    ]
    for call, text in cases:
        with pytest.raises(Exception, match=text):  # torch.compile wraps what is raised while it traces
            call()
    comm.barrier()  # nothing was launched
    rows = torch.randn(2 * comm.size, 3, 2)
    traced = func.vmap(lambda t: torch.ops.pynccl.reduce_scatter(t, key, 0, "sum", None, None), in_dims=1)(rows)
    assert torch.equal(traced, ad.reduce_scatter(rows, comm).movedim(1, 0))


def test_autocast_and_operators_under_forward_mode_and_vmap(ranks: RankPool) -> None:
    ranks.run(2, refusals)
