"""Modules: each does what its function does, nothing on one rank; pairs in Sequential run as one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from ranks import RankPool
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


@pytest.mark.parametrize("n", [2, 4])
def test_every_module_does_what_its_function_does(ranks: RankPool, n: int) -> None:
    for rank, shown in enumerate(ranks.run(n, check_modules)):
        assert f"AllReduce(rank {rank} of {n}, op='sum', grad='sum')" in shown
        assert f"ReduceScatter(rank {rank} of {n}, dim=1, op='avg')" in shown
        assert f"Permute(rank {rank} of {n}, edges=" in " ".join(shown)


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
    wrong: list[tuple[Callable[[], object], str]] = [
        (lambda: ad.nn.AllReduce(alone, grad="mean"), r"nn\.AllReduce: grad is 'mean', expected 'sum'"),
        (lambda: ad.nn.ReduceScatter(alone, op="max"), r"nn\.ReduceScatter: op is 'max'"),
        (lambda: ad.nn.ReduceScatter(alone, op=ad.PreMul(2.0)), r"nn\.ReduceScatter: op is"),
        (lambda: ad.nn.Reduce(alone, 0, op=ad.PreMul(2.0)), r"nn\.Reduce: op is"),
        (lambda: ad.nn.Broadcast(alone, 1, grad="sum"), r"nn\.Broadcast: root is 1"),
        (lambda: ad.nn.AllGather(alone), r"nn\.AllGather: grad= is missing"),
    ]
    for make, text in wrong:
        with pytest.raises((TypeError, ValueError), match=text):
            make()


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


KINDS = {
    "reduce_scatter": "matmul_reduce_scatter",
    "all_reduce": "matmul_all_reduce",
    "all_gather": "all_gather_matmul",
}


def check_pairs(comm: Communicator) -> None:
    for kind, method in KINDS.items():
        for bias in (False, True):
            check_pair(comm, kind, bias, method)
    check_hooks(comm)
    check_unfused(comm)


@pytest.mark.parametrize("n", [2, 4])
def test_a_pair_is_run_as_one_if_it_is_exactly_that_and_has_no_hooks(ranks: RankPool, n: int) -> None:
    ranks.run(n, check_pairs)


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
