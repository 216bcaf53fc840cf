"""Modules: each does what its function does; pairs in Sequential run as one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import RankPool
from torch import Tensor

import pynccl_autograd as ad
from pynccl import Communicator

EXACT = {"rtol": 0.0, "atol": 0.0}


def integers(*shape: int, seed: int) -> Tensor:
    """Integer-valued, so that sums are exact in any order."""
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)).double()


def check_modules(comm: Communicator) -> None:
    n, last, edges = comm.size, comm.size - 1, [(q, (q + 1) % comm.size) for q in range(comm.size)]
    pre, rows = ad.PreMul(float(comm.rank + 2)), [2] * n
    pairs: list[tuple[Any, Callable[[Tensor], Tensor]]] = [
        (ad.nn.AllReduce(comm, "avg", grad="replicated"), lambda x: ad.all_reduce(x, comm, "avg", grad="replicated")),
        (ad.nn.AllReduce(comm, pre, grad="sum"), lambda x: ad.all_reduce(x, comm, pre, grad="sum")),
        (ad.nn.Copy(comm), lambda x: ad.copy(x, comm)),
        (ad.nn.ReduceScatter(comm, 1, "avg"), lambda x: ad.reduce_scatter(x, comm, 1, "avg")),
        (ad.nn.ReduceScatter(comm, splits=rows), lambda x: ad.reduce_scatter(x, comm, splits=rows)),
        (ad.nn.AllGather(comm, -1, grad="sum"), lambda x: ad.all_gather(x, comm, -1, grad="sum")),
        (ad.nn.Split(comm, 1), lambda x: ad.split(x, comm, 1)),
        (ad.nn.Broadcast(comm, last, grad="sum"), lambda x: ad.broadcast(x, comm, last, grad="sum")),
        (ad.nn.Reduce(comm, last, "avg"), lambda x: ad.reduce(x, comm, last, "avg")),
        (ad.nn.Scatter(comm, last, 1), lambda x: ad.scatter(x, comm, last, 1)),
        (ad.nn.Gather(comm, last, 1), lambda x: ad.gather(x, comm, last, 1)),
        (ad.nn.AllToAll(comm, 0, 1), lambda x: ad.all_to_all(x, comm, 0, 1)),
        (ad.nn.Permute(comm, iter(edges)), lambda x: ad.permute(x, comm, edges)),
        (ad.nn.HaloExchange(comm, 0, (1, 2)), lambda x: ad.halo_exchange(x, comm, 0, (1, 2))),
    ]
    for module, function in pairs:
        x = integers(2 * n + 2 * isinstance(module, ad.nn.HaloExchange), n, seed=comm.rank).requires_grad_()
        for _ in range(2):  # a module is called many times
            y, expected = module(x), function(x)
            torch.testing.assert_close(y, expected, **EXACT)
        g = integers(*y.shape, seed=50 + comm.rank)
        torch.testing.assert_close(torch.autograd.grad(y, x, g), torch.autograd.grad(expected, x, g), **EXACT)
    assert repr(pairs[3][0]) == f"ReduceScatter(rank {comm.rank} of {n}, dim=1, op='avg')"


def test_every_module_does_what_its_function_does(ranks: RankPool) -> None:
    ranks.run(4, check_modules)


# Sequential


class Doubled(torch.nn.Linear):
    """A linear layer with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def check_block(comm: Communicator, modules: list[torch.nn.Module], method: str) -> None:
    """As torch's Sequential, bit by bit; the two run as one by `method`, if there is one."""
    block, plain = ad.nn.Sequential(*modules, torch.nn.Tanh()), torch.nn.Sequential(*modules, torch.nn.Tanh())
    assert block.fused_pairs() == ([(0, 1)] if method else []), block
    calls = []
    x = integers(2 * comm.size, 4, seed=comm.rank).requires_grad_()
    with pytest.MonkeyPatch.context() as patch:
        if method:
            fused = getattr(ad.nn, method)
            patch.setattr(ad.nn, method, lambda *args, **options: calls.append(args) or fused(*args, **options))
        y, expected = block(x), plain(x)
    assert len(calls) == bool(method)
    torch.testing.assert_close(y, expected, **EXACT)
    g, inputs = integers(*y.shape, seed=0), [x, *block.parameters()]
    torch.testing.assert_close(torch.autograd.grad(y, inputs, g), torch.autograd.grad(expected, inputs, g), **EXACT)


def check_pairs(comm: Communicator) -> None:
    def linear(bias: bool = False, kind: type[torch.nn.Linear] = torch.nn.Linear) -> torch.nn.Linear:
        made = kind(4, 4, bias=bias, dtype=torch.float64)
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.copy_(integers(*parameter.shape, seed=10 * comm.rank + parameter.ndim))
        return made

    scatter, reduce = ad.nn.ReduceScatter(comm), ad.nn.AllReduce(comm, grad="replicated")
    gather = ad.nn.AllGather(comm, grad="sum")
    rows: list[tuple[list[torch.nn.Module], str]] = [
        ([linear(), scatter], "matmul_reduce_scatter"),
        ([linear(), reduce], "matmul_all_reduce"),
        ([gather, linear(bias=True)], "all_gather_matmul"),
        ([linear(bias=True), scatter], ""),
        ([linear(), ad.nn.ReduceScatter(comm, op="avg")], ""),
        ([ad.nn.AllGather(comm, grad="replicated"), linear()], ""),
        ([linear(kind=Doubled), scatter], ""),
    ]
    for modules, method in rows:
        check_block(comm, modules, method)
    modules = [linear(), scatter]
    for at in (0, 1):  # a hook is called, and ends it
        seen = list[object]()
        hook = modules[at].register_forward_hook(lambda module, *_, seen=seen: seen.append(module))
        check_block(comm, modules, "")
        assert seen == [modules[at]] * 2  # by torch's Sequential too
        hook.remove()
    check_block(comm, modules, "matmul_reduce_scatter")


def test_a_pair_is_run_as_one_if_it_is_exactly_that_and_has_no_hooks(ranks: RankPool) -> None:
    ranks.run(2, check_pairs)
