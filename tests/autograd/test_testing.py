"""check_adjoint and check_gradients with correct and incorrect functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import RankPool
from torch import Tensor

import pynccl_autograd as ad
from pynccl import Communicator

check, adjoint = ad.testing.check_gradients, ad.testing.check_adjoint


def random_tensor(comm: Communicator, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(comm.rank))


class Plain(torch.autograd.Function):
    """All-reduce of x and of the gradient by plain communicator calls; rank 1 scales one gradient element."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator, factor: float = 1.0) -> Tensor:
        ctx.comm, ctx.factor = comm, factor
        return comm.all_reduce(x.contiguous())

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        dx = ctx.comm.all_reduce(g.contiguous())
        if ctx.comm.rank == 1:
            dx[1, 2] *= ctx.factor
        return dx, None, None


class DetachedBackward(torch.autograd.Function):
    """Sum of squares over ranks with a correct gradient that is not differentiable."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator) -> Tensor:
        ctx.comm = comm
        ctx.save_for_backward(x)
        return comm.all_reduce((x**2).contiguous())

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return ad.all_reduce(g, ctx.comm, grad="sum") * 2 * x.detach(), None


SECOND = "the gradients themselves are right"
OTHER = ("wrong gradient", "docs/conventions.md")
Call = Callable[[Communicator, Tensor], Any]
WRONG: list[tuple[tuple[str, ...], Call]] = [
    (
        ("rank 1, the input, index (1, 2)", "the backward pass gives", "finite differences"),
        lambda comm, x: check(lambda t: Plain.apply(t, comm, 1.01), x, comm, second_order=False, samples=None),
    ),
    (("wrong second derivative", SECOND), lambda comm, x: check(lambda t: DetachedBackward.apply(t, comm), x, comm)),
    ((SECOND, "pynccl_autograd.all_reduce"), lambda comm, x: check(lambda t: Plain.apply(t, comm), x, comm)),
    (OTHER, lambda comm, x: check(lambda t: ad.all_reduce(t, comm, grad="sum"), x, comm, replicated=True)),
    (("need float64",), lambda comm, x: check(lambda t: t, x.float(), comm)),
    (
        ("not adjoint: <F x, y> =",),
        lambda comm, x: adjoint(lambda t: ad.all_reduce(t, comm, grad="replicated"), x, comm),
    ),
    (("pass tolerance=",), lambda comm, x: adjoint(lambda t: t, x.bfloat16(), comm)),
]


def check_wrong_functions(comm: Communicator) -> None:
    for expected, call in WRONG:
        with pytest.raises((ad.testing.GradientError, ad.testing.AdjointError, ValueError)) as caught:
            call(comm, random_tensor(comm, 2, 3))
        text = str(caught.value)
        assert all(words in text for words in expected) and (SECOND in text) == (SECOND in expected), (expected, text)


def test_wrong_derivatives_raise_on_every_rank_with_a_description(ranks: RankPool) -> None:
    ranks.run(3, check_wrong_functions)


def idle_ranks(comm: Communicator) -> None:
    """Ranks whose output is constant, or whose input is empty and of another dtype."""
    x = random_tensor(comm, 3)

    def double_or_constant(t: Tensor) -> Tensor:
        return t * 2 if comm.rank else torch.zeros(2, dtype=torch.float64)

    partition = ad.Partition(comm, [0])
    inactive = x if partition.active else ad.zero_volume_tensor()  # float32, with a larger tolerance
    assert adjoint(double_or_constant, x, comm) <= 1e-12
    assert adjoint(ad.AllSumReduce(partition, 0), inactive, comm) <= 1e-12
    assert check(double_or_constant, x, comm, samples=1) <= 1
    partition.destroy()


def test_ranks_that_do_not_take_part_do_not_block_the_others(ranks: RankPool) -> None:
    ranks.run(2, idle_ranks)
