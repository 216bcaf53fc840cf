"""Programs as users write them, each beside the same in one process: derivatives through layers cut over ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from ranks import RankPool
from torch import Tensor, func, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

import pynccl_autograd as ad
from pynccl import Communicator

CLOSE = {"rtol": 1e-10, "atol": 1e-10}
WIDTH = 6


def batch() -> Tensor:
    return torch.randn(4, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def model(comm: Communicator | None) -> nn.Sequential:
    """An MLP, in one piece or cut over the ranks; the same numbers."""
    torch.manual_seed(0)
    first, last = nn.Linear(WIDTH, 8).double(), nn.Linear(8, WIDTH).double()
    if comm is None:
        return nn.Sequential(first, nn.Tanh(), last)
    up = ad.ColumnParallelLinear(WIDTH, 8, comm, dtype=torch.float64)
    down = ad.RowParallelLinear(8, WIDTH, comm, dtype=torch.float64)
    up.load_full(first.weight.detach(), first.bias.detach())
    down.load_full(last.weight.detach(), last.bias.detach())
    return nn.Sequential(up, nn.Tanh(), down)


def second_order(mlp: nn.Module) -> dict[str, Tensor]:
    """By x, which is replicated, so that the results are too."""
    x, v = batch(), batch().cos()
    leaf = x.clone().requires_grad_()
    loss = (mlp(leaf) ** 3).sum()
    (dx,) = torch.autograd.grad(loss, leaf, create_graph=True)
    (product,) = torch.autograd.grad((dx * v).sum(), leaf)

    parameters = {name: p.detach() for name, p in mlp.named_parameters()}

    def functional(t: Tensor) -> Tensor:
        return (func.functional_call(mlp, parameters, (t,)) ** 3).sum()

    return {
        "gradient": dx.detach(),
        "Hessian-vector product": product,
        "the same, forward over reverse": func.jvp(func.grad(functional), (x,), (v,))[1],
        "the same, reverse over forward": func.grad(lambda t: func.jvp(functional, (t,), (v,))[1])(x),
        "curvature, forward over forward": func.jvp(lambda t: func.jvp(functional, (t,), (v,))[1], (x,), (v,))[1],
        "per sample": func.vmap(func.grad(functional))(x),
        "Jacobian": func.jacfwd(lambda t: func.functional_call(mlp, parameters, (t,)))(x[0]),
    }


def sharded_second_order(comm: Communicator) -> dict[str, Tensor]:
    return second_order(model(comm))


def test_second_derivatives_through_sharded_layers(ranks: RankPool) -> None:
    expected = second_order(model(None))
    for found in ranks.run(2, sharded_second_order):
        for name, exact in expected.items():
            assert torch.allclose(found[name], exact, **CLOSE), name


def penalized(mlp: nn.Module, wrap: Callable[..., Any]) -> list[Tensor]:
    """Two steps of training with a gradient penalty."""
    optimizer = torch.optim.SGD(mlp.parameters(), lr=1e-3)
    inputs = []
    for _ in range(2):
        x = batch().requires_grad_()
        loss = (wrap(mlp, x) ** 2).sum()
        (dx,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + (dx**2).sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert x.grad is not None
        inputs.append(x.grad)
    return inputs


def in_checkpoint(mlp: nn.Module, x: Tensor) -> Any:
    return checkpoint(mlp, x, use_reentrant=False)


def on_cpu(mlp: nn.Module, x: Tensor) -> Any:
    with save_on_cpu():
        return mlp(x)


def sharded_training(comm: Communicator) -> list[list[Tensor]]:
    return [penalized(model(comm), wrap) for wrap in (lambda mlp, x: mlp(x), in_checkpoint, on_cpu)]


def test_training_with_a_gradient_penalty(ranks: RankPool) -> None:
    expected = penalized(model(None), lambda mlp, x: mlp(x))
    for ways in ranks.run(2, sharded_training):
        assert len(ways) == 3
        for found in ways:
            for step, exact in zip(found, expected, strict=True):
                torch.testing.assert_close(step, exact, **CLOSE)


def hooks(comm: Communicator) -> list[Any]:
    """Hooks see the cotangents, one may change them, intermediate gradients are kept, unused inputs give None."""
    x = torch.full((2,), comm.rank + 1.0, requires_grad=True)
    unused = torch.ones(2, requires_grad=True)
    y = ad.all_gather(x, comm, grad="sum")
    y.retain_grad()
    y.register_hook(lambda g: g * 10)
    seen: list[list[float]] = []
    z = ad.reduce_scatter(y * y, comm)
    z.register_hook(lambda g: seen.append(g.tolist()))
    z.grad_fn.register_hook(lambda dx, g: seen.append(dx[0].tolist()))
    found: Any = torch.autograd.grad(z.sum(), [x, unused], allow_unused=True, retain_graph=True)
    z.sum().backward()
    assert found[1] is None and y.grad is not None and x.grad is not None
    return [seen, y.grad.tolist(), found[0].tolist(), x.grad.tolist()]


def test_hooks_retained_and_unused_gradients(ranks: RankPool) -> None:
    for rank, (seen, kept, dx, grad) in enumerate(ranks.run(2, hooks)):
        assert seen == [[1.0, 1.0], [1.0] * 4] * 2
        assert kept == [40.0, 40.0, 80.0, 80.0]  # 2 * y by the hook's 10, of two passes
        assert dx == grad == [2 * 20.0 * (rank + 1)] * 2


def two_threads(comm: Communicator) -> list[list[float]]:
    """Each with a communicator and a backward pass of its own."""
    comms = [comm.split(0), comm.split(0)]
    found: dict[int, list[float]] = {}

    def work(at: int) -> None:
        x = torch.full((2,), comm.rank + 1.0, requires_grad=True)
        for _ in range(5):
            handle = ad.start(ad.all_gather, x, comms[at], grad="sum")
            y = checkpoint(lambda t: ad.all_reduce(t, comms[at], "prod", grad="sum"), x, use_reentrant=False)
            ((at + 1) * (handle.wait().sum() + y.sum())).backward()
        assert x.grad is not None
        found[at] = x.grad.tolist()

    threads = [threading.Thread(target=work, args=(at,)) for at in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for own in comms:
        own.destroy()
    return [found[at] for at in range(2)]


def test_two_threads_with_a_backward_pass_each(ranks: RankPool) -> None:
    for rank, found in enumerate(ranks.run(2, two_threads)):
        other = 2.0 - rank  # the factor that is not this rank's
        assert found == [[5 * (at + 1) * (2 + 2 * other)] * 2 for at in range(2)]
