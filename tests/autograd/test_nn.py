"""Modules: each does what its function does, TransformerEngine's contracts, and pairs in Sequential."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from ranks import RankPool, each_size
from torch import Tensor

import pynccl
import pynccl_autograd as ad
from pynccl import Communicator

EXACT = {"rtol": 0.0, "atol": 0.0}


def integers(*shape: int, seed: int) -> Tensor:
    """Integer-valued, so that sums are exact in any order."""
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)).double()


def gradients(y: Tensor, inputs: list[Tensor], g: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(y, inputs, g))


def total(tensors: list[Tensor]) -> Tensor:
    return torch.stack(tensors).sum(0)


# Each module against its function


def pairs(comm: Communicator) -> list[tuple[torch.nn.Module, Callable[[Tensor], Tensor]]]:
    n, edges = comm.size, [(q, (q + 1) % comm.size) for q in range(comm.size)]
    sizes = [2] * n
    pre = ad.PreMul(float(comm.rank + 2))
    return [
        (ad.nn.AllReduce(comm, grad="sum"), lambda x: ad.all_reduce(x, comm, grad="sum")),
        (ad.nn.AllReduce(comm, "avg", grad="replicated"), lambda x: ad.all_reduce(x, comm, "avg", grad="replicated")),
        (ad.nn.AllReduce(comm, op="max", grad="sum"), lambda x: ad.all_reduce(x, comm, "max", grad="sum")),
        (ad.nn.AllReduce(comm, pre, grad="sum"), lambda x: ad.all_reduce(x, comm, pre, grad="sum")),
        (ad.nn.Copy(comm), lambda x: ad.copy(x, comm)),
        (ad.nn.ReduceScatter(comm, 1, "avg"), lambda x: ad.reduce_scatter(x, comm, 1, "avg")),
        (ad.nn.ReduceScatter(comm, splits=sizes), lambda x: ad.reduce_scatter(x, comm, splits=sizes)),
        (ad.nn.AllGather(comm, -1, grad="sum"), lambda x: ad.all_gather(x, comm, -1, grad="sum")),
        (ad.nn.Split(comm, 1), lambda x: ad.split(x, comm, 1)),
        (ad.nn.Broadcast(comm, n - 1, grad="sum"), lambda x: ad.broadcast(x, comm, n - 1, grad="sum")),
        (ad.nn.Reduce(comm, n - 1, "avg"), lambda x: ad.reduce(x, comm, n - 1, "avg")),
        (ad.nn.Scatter(comm, n - 1, 1), lambda x: ad.scatter(x, comm, n - 1, 1)),
        (ad.nn.Gather(comm, n - 1, 1), lambda x: ad.gather(x, comm, n - 1, 1)),
        (ad.nn.AllToAll(comm, 0, 1), lambda x: ad.all_to_all(x, comm, 0, 1)),
        (ad.nn.Permute(comm, iter(edges)), lambda x: ad.permute(x, comm, edges)),
        (ad.nn.HaloExchange(comm, 0, (1, 2)), lambda x: ad.halo_exchange(x, comm, 0, (1, 2))),
    ]


def check_modules(comm: Communicator) -> list[str]:
    n = comm.size
    for module, function in pairs(comm):
        x = integers(2 * n + 2 if isinstance(module, ad.nn.HaloExchange) else 2 * n, n, seed=comm.rank).requires_grad_()
        for _ in range(2):  # a module is called many times
            y, expected = module(x), function(x)
            torch.testing.assert_close(y, expected, **EXACT)
        g = integers(*y.shape, seed=50 + comm.rank)
        torch.testing.assert_close(gradients(y, [x], g), gradients(expected, [x], g), **EXACT)
    return [repr(module) for module, _ in pairs(comm)]


@each_size
def test_every_module_does_what_its_function_does(ranks: RankPool, n: int) -> None:
    for rank, shown in enumerate(ranks.run(n, check_modules)):
        assert f"AllReduce(rank {rank} of {n}, op='sum', grad='sum')" in shown
        assert f"ReduceScatter(rank {rank} of {n}, dim=1, op='avg')" in shown
        assert f"Permute(rank {rank} of {n}, edges=" in " ".join(shown)


# TransformerEngine's contracts


def check_contracts(comm: Communicator) -> str:
    n, r = comm.size, comm.rank
    xs, gs = [integers(2 * n, 3, seed=q) for q in range(n)], [integers(2, 3, seed=90 + q) for q in range(n)]
    x = xs[r].clone().requires_grad_()
    y = ad.nn.ReduceScatter(comm)(x)
    torch.testing.assert_close(y, total(xs)[2 * r : 2 * r + 2], **EXACT)
    torch.testing.assert_close(gradients(y, [x], gs[r])[0], torch.cat(gs), **EXACT)

    y = ad.nn.AllReduce(comm, grad="replicated")(x)
    torch.testing.assert_close(y, total(xs), **EXACT)
    torch.testing.assert_close(gradients(y, [x], xs[0])[0], xs[0], **EXACT)

    x = gs[r].clone().requires_grad_()
    y = ad.nn.AllGather(comm, grad="sum")(x)
    torch.testing.assert_close(y, torch.cat(gs), **EXACT)
    torch.testing.assert_close(gradients(y, [x], xs[r])[0], total(xs)[2 * r : 2 * r + 2], **EXACT)

    with pytest.raises(ValueError) as caught:
        ad.nn.ReduceScatter(comm)(torch.zeros(2 * n + 1, 3))
    return str(caught.value)


@each_size
def test_reduce_scatter_all_reduce_and_all_gather_keep_the_contracts_of_transformer_engine(
    ranks: RankPool, n: int
) -> None:
    for message in ranks.run(n, check_contracts):
        assert f"has {2 * n + 1} rows, not divisible by {n} ranks" in message


@pytest.fixture
def alone() -> Iterator[Communicator]:
    with pynccl.Communicator.init(1, pynccl.get_unique_id(), 0) as comm:
        yield comm


def test_they_are_no_ops_on_one_rank(alone: Communicator) -> None:
    x = torch.ones(3, 2, requires_grad=True)
    for module in (
        ad.nn.AllReduce(alone, grad="replicated"),
        ad.nn.ReduceScatter(alone),
        ad.nn.AllGather(alone, grad="sum"),
        ad.nn.Split(alone),
        ad.nn.Copy(alone),
    ):
        assert module(x) is x, f"{module} changed its input"
    doubled = ad.nn.AllReduce(alone, ad.PreMul(2.0), grad="sum")(x)
    assert torch.equal(doubled, 2 * x)  # not a no-op
    with pytest.raises(ValueError, match="dim is 2, but the tensor has shape"):
        ad.nn.ReduceScatter(alone, 2)(x)


def test_wrong_arguments_are_named_when_the_module_is_made(alone: Communicator) -> None:
    with pytest.raises(ValueError, match=r"nn\.AllReduce: grad is 'mean', expected 'sum'"):
        ad.nn.AllReduce(alone, grad="mean")
    with pytest.raises(ValueError, match=r"nn\.ReduceScatter: op is 'max'"):
        ad.nn.ReduceScatter(alone, op="max")
    with pytest.raises((TypeError, ValueError), match=r"nn\.ReduceScatter: op is"):
        ad.nn.ReduceScatter(alone, op=ad.PreMul(2.0))
    with pytest.raises((TypeError, ValueError), match=r"nn\.Reduce: op is"):
        ad.nn.Reduce(alone, 0, op=ad.PreMul(2.0))
    with pytest.raises(ValueError, match=r"nn\.Broadcast: root is 1"):
        ad.nn.Broadcast(alone, 1, grad="sum")
    with pytest.raises(TypeError, match="grad"):
        ad.nn.AllGather(alone)


# Sequential


def layers(comm: Communicator, kind: str, bias: bool) -> list[torch.nn.Module]:
    linear = torch.nn.Linear(6, 4, bias=bias, dtype=torch.float64)
    with torch.no_grad():
        for i, parameter in enumerate(linear.parameters()):
            parameter.copy_(integers(*parameter.shape, seed=10 * comm.rank + i))
    return {
        "reduce_scatter": lambda: [linear, ad.nn.ReduceScatter(comm)],
        "all_reduce": lambda: [linear, ad.nn.AllReduce(comm, grad="replicated")],
        "all_gather": lambda: [ad.nn.AllGather(comm, grad="sum"), linear],
    }[kind]()


def check_pair(comm: Communicator, kind: str, bias: bool, method: str) -> None:
    modules = layers(comm, kind, bias)
    fused, plain = ad.nn.Sequential(*modules, torch.nn.Tanh()), torch.nn.Sequential(*modules, torch.nn.Tanh())
    expect_fused = kind == "all_gather" or not bias
    assert fused.fused_pairs() == ([(0, 1)] if expect_fused else [])

    calls = []
    original = getattr(ad.nn, method)

    def counted(*args: Any, **options: Any) -> Tensor:
        calls.append(args)
        return original(*args, **options)

    setattr(ad.nn, method, counted)
    try:
        x = integers(2 * comm.size, 3, 6, seed=comm.rank).requires_grad_()
        y = fused(x)
    finally:
        setattr(ad.nn, method, original)
    assert len(calls) == expect_fused
    expected = plain(x)
    torch.testing.assert_close(y, expected, **EXACT)
    g = integers(*y.shape, seed=0)
    inputs = [x, *fused.parameters()]
    torch.testing.assert_close(gradients(y, inputs, g), gradients(expected, inputs, g), **EXACT)


@each_size
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("kind", "method"),
    [
        ("reduce_scatter", "matmul_reduce_scatter"),
        ("all_reduce", "matmul_all_reduce"),
        ("all_gather", "all_gather_matmul"),
    ],
)
def test_a_pair_run_as_one_gives_the_result_of_its_modules(
    ranks: RankPool, n: int, kind: str, method: str, bias: bool
) -> None:
    ranks.run(n, check_pair, kind, bias, method)


def check_hooks(comm: Communicator) -> None:
    for module_at in (0, 1):
        modules = layers(comm, "reduce_scatter", bias=False)
        block = ad.nn.Sequential(*modules)
        seen: list[object] = []
        x = integers(2 * comm.size, 6, seed=comm.rank).requires_grad_()
        expected = block(x)

        def note(module: torch.nn.Module, *args: Any, seen: list[object] = seen) -> None:
            seen.append(type(module))

        hook = modules[module_at].register_forward_hook(note)
        assert block.fused_pairs() == []
        torch.testing.assert_close(block(x), expected, **EXACT)
        assert seen == [type(modules[module_at])]
        hook.remove()
        assert block.fused_pairs() == [(0, 1)]
        modules[module_at].register_full_backward_hook(note)
        block(x).backward(torch.ones_like(expected))
        assert seen == [type(modules[module_at])] * 2


def test_hooks_on_the_modules_of_a_pair_fire(ranks: RankPool) -> None:
    ranks.run(2, check_hooks)


class Doubled(torch.nn.Linear):
    """A linear layer with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def check_unfused(comm: Communicator) -> None:
    linear = torch.nn.Linear(4, 4, bias=False, dtype=torch.float64)
    for modules in (
        [linear, ad.nn.ReduceScatter(comm, 1)],
        [linear, ad.nn.ReduceScatter(comm, op="avg")],
        [linear, ad.nn.ReduceScatter(comm, splits=[2] * comm.size)],
        [linear, ad.nn.AllReduce(comm, grad="sum")],
        [linear, ad.nn.AllReduce(comm, grad="replicated", reduce_dtype=torch.float32)],
        [ad.nn.AllGather(comm, grad="replicated"), linear],
        [Doubled(4, 4, bias=False, dtype=torch.float64), ad.nn.ReduceScatter(comm)],
        [torch.nn.Identity(), linear],
    ):
        block = ad.nn.Sequential(*modules)
        assert block.fused_pairs() == [], block
        x = integers(2 * comm.size, 4, seed=comm.rank)
        torch.testing.assert_close(block(x), torch.nn.Sequential(*modules)(x), **EXACT)


def test_what_is_not_exactly_a_pair_is_run_one_by_one(ranks: RankPool) -> None:
    ranks.run(2, check_unfused)


def check_block(comm: Communicator) -> None:
    """AllGather + Linear, a nonlinearity, Linear + ReduceScatter: the sequence-parallel MLP, against nn.Linear."""
    n, r = comm.size, comm.rank
    up, down = integers(8 * n, 6, seed=1), integers(6, 8 * n, seed=2)
    full = integers(2 * n, 6, seed=3).requires_grad_()
    expected = torch.relu(full @ up.T) @ down.T
    g = integers(2 * n, 6, seed=4)
    (dfull,) = gradients(expected, [full], g)

    first = torch.nn.Linear(6, 8, bias=False, dtype=torch.float64)
    second = torch.nn.Linear(8, 6, bias=False, dtype=torch.float64)
    block = ad.nn.Sequential(
        ad.nn.AllGather(comm, grad="sum"), first, torch.nn.ReLU(), second, ad.nn.ReduceScatter(comm)
    )
    with torch.no_grad():
        first.weight.copy_(up[8 * r : 8 * r + 8])
        second.weight.copy_(down[:, 8 * r : 8 * r + 8])
    assert block.fused_pairs() == [(0, 1), (3, 4)]
    x = full.detach()[2 * r : 2 * r + 2].clone().requires_grad_()
    y = block(x)
    torch.testing.assert_close(y, expected.detach()[2 * r : 2 * r + 2], **EXACT)
    torch.testing.assert_close(gradients(y, [x], g[2 * r : 2 * r + 2])[0], dfull[2 * r : 2 * r + 2], **EXACT)


@each_size
def test_a_sequence_parallel_mlp_of_pairs_equals_the_unsharded_one(ranks: RankPool, n: int) -> None:
    ranks.run(n, check_block)
