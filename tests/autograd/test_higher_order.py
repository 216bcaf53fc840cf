"""anchor in derivatives of any order: a gradient penalty where one rank leaves an output unused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from ranks import RankPool
from torch import Tensor

import pynccl_autograd as ad
from pynccl import Communicator

Losses = Callable[[list[Tensor]], Tensor]


def inputs(n: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(4, dtype=torch.float64, generator=generator, requires_grad=True) for _ in range(n)]


def penalties(loss: Tensor, xs: list[Tensor], order: int) -> list[list[Tensor]]:
    """The gradient of the loss, of the loss with a penalty on that gradient, of that with a penalty on its own, ..."""
    found = []
    for _ in range(order):
        gradient = torch.autograd.grad(loss, xs, create_graph=True)
        found.append([g.detach() for g in gradient])
        loss = loss + torch.stack([(g**2).sum() for g in gradient]).sum()
    return found


def used(y: Tensor, z: Tensor) -> Tensor:
    return (y**4).sum() + (y[0] * z).sum() + (z**3).sum()


def own(x: Tensor) -> Tensor:
    return (x**3).sum()


def reference(n: int, order: int) -> list[list[Tensor]]:
    """In one process: rank 0 alone uses the outputs."""
    xs = inputs(n)
    loss = used(torch.stack([x.sin() for x in xs]).sum(0), torch.cat([x * 2 for x in xs]))
    return penalties(loss + torch.stack([own(x) for x in xs]).sum(), xs, order)


def gradient_penalty(comm: Communicator, order: int, unused: str) -> list[Tensor]:
    x = inputs(comm.size)[comm.rank]
    y = ad.all_reduce(x.sin(), comm, grad="sum")
    z = ad.all_gather(x * 2, comm, grad="sum")
    if unused == "infinite":  # what the unused outputs are does not matter
        y, z = (y, z) if comm.rank == 0 else (y + float("nan"), z + float("inf"))
    loss = used(y, z) if comm.rank == 0 else ad.anchor(torch.zeros(()).double(), y, z, torch.arange(3), x[:0])
    return [gradient for (gradient,) in penalties(loss + own(x), [x], order)]


@pytest.mark.parametrize("unused", ["finite", "infinite"])
def test_a_gradient_penalty_enters_the_collectives_of_unused_outputs(ranks: RankPool, unused: str) -> None:
    expected = reference(2, 3)
    for rank, found in enumerate(ranks.run(2, gradient_penalty, 3, unused)):
        assert len(found) == 3
        for order, gradient in enumerate(found):
            torch.testing.assert_close(gradient, expected[order][rank], rtol=1e-10, atol=1e-10)


def penalty_alone(comm: Communicator) -> Tensor:
    """The loss is not part of what is differentiated a second time, by backward()."""
    x = inputs(comm.size)[comm.rank]
    y = ad.all_reduce(x.sin(), comm, grad="sum")
    loss = (y**4).sum() if comm.rank == 0 else ad.anchor(x.sum() * 0, y)
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    (gradient**2).sum().backward()
    assert x.grad is not None
    return x.grad


def test_the_penalty_may_be_all_that_is_differentiated(ranks: RankPool) -> None:
    xs = inputs(2)
    loss = (torch.stack([x.sin() for x in xs]).sum(0) ** 4).sum()
    gradients = torch.autograd.grad(loss, xs, create_graph=True)
    expected = torch.autograd.grad(torch.stack([(g**2).sum() for g in gradients]).sum(), xs)
    for found, exact in zip(ranks.run(2, penalty_alone), expected, strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-12, atol=1e-12)


def by_torch_func(comm: Communicator) -> list[Tensor]:
    """Gradient of a gradient, its tangent, per sample, and forward over forward."""
    x = inputs(comm.size)[comm.rank].detach()

    def loss(t: Tensor) -> Tensor:
        y = ad.all_reduce(t.sin(), comm, grad="sum")
        return (y**4).sum() if comm.rank == 0 else ad.anchor((t**2).sum(), y)

    def penalty(t: Tensor) -> Tensor:
        return (torch.func.grad(loss)(t) ** 2).sum()

    return [
        torch.func.grad(penalty)(x),
        torch.func.jvp(torch.func.grad(loss), (x,), (x,))[1],
        torch.func.vmap(torch.func.grad(loss))(torch.stack([x, 2 * x])),
        torch.func.jvp(lambda t: torch.func.jvp(loss, (t,), (x,))[1], (x,), (x,))[1],
    ]


def test_anchor_under_torch_func(ranks: RankPool) -> None:
    xs = torch.stack([x.detach() for x in inputs(2)])

    def losses(ts: Tensor) -> tuple[Tensor, Tensor]:
        return (ts.sin().sum(0) ** 4).sum(), (ts[1] ** 2).sum()

    def total(ts: Tensor) -> Tensor:
        return torch.stack(losses(ts)).sum()

    gradient = torch.func.grad(total)
    twice = torch.func.jvp(lambda t: torch.stack(torch.func.jvp(losses, (t,), (xs,))[1]), (xs,), (xs,))[1]
    for rank, (second, tangent, samples, forward) in enumerate(ranks.run(2, by_torch_func)):
        torch.testing.assert_close(second, torch.func.grad(lambda t: (gradient(t) ** 2).sum())(xs)[rank])
        torch.testing.assert_close(tangent, torch.func.jvp(gradient, (xs,), (xs,))[1][rank])
        torch.testing.assert_close(samples, torch.stack([gradient(xs)[rank], gradient(2 * xs)[rank]]))
        torch.testing.assert_close(forward, twice[rank])


def compiled(comm: Communicator) -> list[float]:
    torch._dynamo.reset()

    def f(x: Tensor) -> Tensor:
        y = ad.all_gather(x, comm, grad="sum")
        return (y**2).sum() if comm.rank == 0 else ad.anchor(x.sum(), y + float("inf"), y.to(torch.int64))

    x = torch.full((2,), comm.rank + 1.0, requires_grad=True)
    loss = torch.compile(f, fullgraph=True, backend="aot_eager")(x)
    loss.backward()
    assert x.grad is not None
    return [loss.item(), *x.grad.tolist()]


def test_anchor_compiles_to_one_graph(ranks: RankPool) -> None:
    assert ranks.run(2, compiled) == [[10.0, 2.0, 2.0], [4.0, 5.0, 5.0]]
