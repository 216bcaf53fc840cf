"""ad.nn.Sequential fuses pairs of modules. test_fuzz_autograd.py compares each module with its function."""

from __future__ import annotations

import pytest
import torch
from ranks import RankPool
from torch import Tensor

import pynccl_autograd as ad
from pynccl import Communicator

EXACT = {"rtol": 0.0, "atol": 0.0}


def integers(*shape: int, seed: int) -> Tensor:
    """Return integer values, so that sums are exact in any order."""
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)).double()


class Doubled(torch.nn.Linear):
    """A linear layer that overrides forward."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def check_block(comm: Communicator, modules: list[torch.nn.Module], method: str) -> None:
    """Compare with torch's Sequential bit by bit; `method` is the function that runs the fused pair, if any."""
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
        layer = kind(4, 4, bias=bias, dtype=torch.float64)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.copy_(integers(*parameter.shape, seed=10 * comm.rank + parameter.ndim))
        return layer

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
    for at in (0, 1):  # a hook runs and prevents fusion
        seen = list[object]()
        hook = modules[at].register_forward_hook(lambda module, *_, seen=seen: seen.append(module))
        check_block(comm, modules, "")
        assert seen == [modules[at]] * 2  # once in torch's Sequential too
        hook.remove()
    check_block(comm, modules, "matmul_reduce_scatter")


def test_exact_pairs_without_hooks_are_fused(ranks: RankPool) -> None:
    ranks.run(2, check_pairs)
