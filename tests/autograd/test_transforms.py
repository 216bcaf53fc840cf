"""Collectives under torch.compile, compiled autograd, autocast and torch.func.

test_semantics.py covers each operation under vmap, jvp and torch.compile; this file covers combinations.
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
    """Compare compiled and eager, without graph breaks: another (dynamic) shape, another communicator."""
    torch._dynamo.reset()
    compiled = torch.compile(network, fullgraph=True, backend="aot_eager")
    other = comm.split(0, key=-comm.rank)
    assert other is not None
    for rows, on_comm in ((2, comm), (3, comm), (3, other)):
        eager_inputs, copies = leaves(comm, rows), leaves(comm, rows)
        eager, traced = network(*eager_inputs, on_comm), compiled(*copies, on_comm)
        torch.testing.assert_close(traced, eager, rtol=1e-12, atol=1e-12)
        found, expected = torch.autograd.grad(traced, copies), torch.autograd.grad(eager, eager_inputs)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    other.destroy()


def test_a_network_compiles_to_one_graph_with_equal_gradients(ranks: RankPool) -> None:
    ranks.run(2, compiled_network, timeout=110)


def compiled_backward(comm: Communicator) -> None:
    """Use two communicators: the graph of one must not be used for the other."""
    other = comm.split(0, key=-comm.rank)
    assert other is not None

    def f(x: Tensor, c: Communicator) -> Tensor:
        y = ad.reduce_scatter(ad.all_gather(x * 2, c, grad="sum").sin(), c)
        return (
            y * ad.start(ad.all_reduce, x * x, c, grad="sum").wait() * ad.all_reduce(x, c, "prod", grad="sum")
        ).sum()

    torch._dynamo.reset()
    for c in (comm, other):
        x = leaves(comm, 2)[0]
        (eager,) = torch.autograd.grad(f(x, c), x)
        loss = f(x, c)
        with compiled_autograd._enable(torch.compile(backend="eager")):
            loss.backward()
        torch.testing.assert_close(x.grad, eager, rtol=1e-12, atol=1e-12)
    other.destroy()


def test_compiled_autograd_gives_the_same_gradients(ranks: RankPool) -> None:
    ranks.run(2, compiled_backward, timeout=110)


def under_autocast(comm: Communicator) -> None:
    """A collective keeps its input's dtype, a layer follows autocast, and gradients have the leaf's dtype."""
    x = torch.full((2, 4), comm.rank + 0.5, requires_grad=True)
    layer = ad.ColumnParallelLinear(4, 2 * comm.size, comm, sequence_parallel=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, z = ad.all_reduce(x, comm, grad="sum"), layer(x)
        assert (y.dtype, z.dtype) == (torch.float32, torch.bfloat16)
    (y.sum() + z.float().sum()).backward()
    assert x.grad.dtype == torch.float32 and layer.weight.grad.dtype == torch.float32


def check_unsupported(comm: Communicator) -> None:
    """Operators support vmap; forward mode raises instead of dropping the tangent, also when compiled."""
    under_autocast(comm)
    x, func, key = torch.ones(3), torch.func, ad.key_of(comm)

    def total(u: Tensor) -> Tensor:
        return ad.all_reduce(u * u, comm, grad="sum")

    def compiled(f: Any) -> Any:
        torch._dynamo.reset()
        return torch.compile(f, fullgraph=True, backend="aot_eager")(x)

    cases: list[tuple[Any, str]] = [
        (lambda: func.jvp(lambda t: torch.ops.pynccl.copy(t, key, "", None)[0], (x,), (x,)), "has no forward mode"),
        (lambda: compiled(lambda t: func.jvp(lambda u: total(u) * u, (t,), (t,))), "has no forward mode"),
        (
            lambda: compiled(lambda t: func.grad(lambda u: total(u * t).sum())(t)),
            r"call torch\.func outside of torch\.compile",
        ),
        (lambda: compiled(lambda t: ad.all_to_all(t, comm, send_splits=[1, 2])), "both are needed under torch.compile"),
        (lambda: torch.ops.pynccl.copy(x, "gone", "", None), "does not name an alive communicator"),
    ]
    for call, text in cases:
        with pytest.raises(Exception, match=text):  # torch.compile wraps errors that occur while tracing
            call()
    comm.barrier()  # nothing was launched
    rows = torch.randn(2 * comm.size, 3, 2)
    traced = func.vmap(lambda t: torch.ops.pynccl.reduce_scatter(t, key, "", 0, "sum", None, None)[0], in_dims=1)(rows)
    assert torch.equal(traced, ad.reduce_scatter(rows, comm).movedim(1, 0))


def test_autocast_and_operators_under_forward_mode_and_vmap(ranks: RankPool) -> None:
    ranks.run(2, check_unsupported)
