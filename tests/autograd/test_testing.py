"""check_adjoint and check_gradients on functions that are right, and on wrong ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from ranks import RankPool
from semantics import OPERATIONS, Case
from torch import Tensor

import pynccl_autograd as ad
from pynccl import Communicator

NONLINEAR = ("all_reduce max", "all_reduce min", "all_reduce prod")


def squared(fn: Any, x: Tensor) -> Tensor:
    return fn(x) ** 2


def second_derivatives_of_extremes(comm: Communicator) -> list[float]:
    """With ties, and with zeros in the product: two on one element, one on another."""
    case = Case(comm.size)
    errors = []
    for name in NONLINEAR:
        fn = partial(OPERATIONS[name].call, comm=comm, case=case)
        x = torch.randn(5, dtype=torch.float64, generator=torch.Generator().manual_seed(comm.rank))
        if name.endswith("prod"):
            x[0] = 0.0 if comm.rank < 2 else 1.5
            x[1] = 0.0 if comm.rank == 0 else 2.0
        errors.append(ad.testing.check_gradients(partial(squared, fn), x, comm, samples=None))
    z = torch.randn(3, dtype=torch.complex128, generator=torch.Generator().manual_seed(comm.rank))
    errors.append(ad.testing.check_gradients(lambda t: ad.all_reduce(t, comm, "prod", grad="sum"), z, comm))
    return errors


@pytest.mark.parametrize("n", [2, 3])
def test_max_min_and_prod_have_second_derivatives_also_at_zeros(ranks: RankPool, n: int) -> None:
    for errors in ranks.run(n, second_derivatives_of_extremes):
        assert len(errors) == 4 and max(errors) <= 1


check, adjoint = ad.testing.check_gradients, ad.testing.check_adjoint


class WrongOnRankOne(torch.autograd.Function):
    """The sum over ranks; backwards one element on rank 1 is 1 % off."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator) -> Tensor:
        ctx.comm = comm
        return comm.all_reduce(x.contiguous())

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        dx = ctx.comm.all_reduce(g.contiguous())
        if ctx.comm.rank == 1:
            dx[1, 2] *= 1.01
        return dx, None


class DetachedBackward(torch.autograd.Function):
    """Squares, summed over ranks; the gradient is right, and its own derivative is forgotten."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator) -> Tensor:
        ctx.comm = comm
        ctx.save_for_backward(x)
        return comm.all_reduce((x**2).contiguous())

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return ad.all_reduce(g, ctx.comm, grad="sum") * 2 * x.detach(), None


class PlainBackward(torch.autograd.Function):
    """The sum over ranks, and that of the gradients, by the communicator's own calls."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator) -> Tensor:
        ctx.comm = comm
        return comm.all_reduce(x.contiguous())

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return ctx.comm.all_reduce(g.contiguous()), None


class OnceDifferentiable(PlainBackward):
    """The same, marked as not to be differentiated again."""

    backward = staticmethod(torch.autograd.function.once_differentiable(PlainBackward.backward))  # type: ignore[assignment]


WRONG: dict[str, tuple[Callable[[Communicator, Tensor], Any], tuple[str, ...]]] = {
    "an element": (
        lambda comm, x: check(lambda t: WrongOnRankOne.apply(t, comm), x, comm, second_order=False, samples=None),
        ("rank 1, the input, index (1, 2)", "the backward pass gives", "finite differences"),
    ),
    "a second derivative": (
        lambda comm, x: check(lambda t: DetachedBackward.apply(t, comm), x, comm),
        ("wrong second derivative", "the gradients themselves are right", "second_order=False"),
    ),
    "the communicator's own calls": (
        lambda comm, x: check(lambda t: PlainBackward.apply(t, comm), x, comm),
        ("the gradients themselves are right", "pynccl_autograd.all_reduce", "second_order=False"),
    ),
    "once differentiable": (
        lambda comm, x: check(lambda t: OnceDifferentiable.apply(t, comm), x, comm),
        ("wrong second derivative", "the gradients themselves are right", "@once_differentiable"),
    ),
    "sum for replicated": (
        lambda comm, x: check(lambda t: ad.all_reduce(t, comm, grad="sum"), x, comm, replicated=True),
        ("wrong gradient", "docs/conventions.md"),
    ),
    "replicated for sum": (
        lambda comm, x: check(lambda t: ad.all_reduce(t, comm, grad="replicated"), x, comm),
        ("wrong gradient", "docs/conventions.md"),
    ),
    "single precision": (lambda comm, x: check(lambda t: t, x.float(), comm), ("need float64",)),
    "the adjoint of another convention": (
        lambda comm, x: adjoint(lambda t: ad.all_reduce(t, comm, grad="replicated"), x, comm),
        ("not adjoint: <F x, y> =",),
    ),
    "no adjoint": (  # the sum over ranks, rolled by a row, with the identity as its backward
        lambda comm, x: adjoint(
            lambda t: ad.all_reduce(t, comm, grad="sum").roll(1, 0).detach() + t - t.detach(), x, comm
        ),
        ("not adjoint: <F x, y> =",),
    ),
    "a type without a tolerance": (
        lambda comm, x: adjoint(lambda t: t, x.bfloat16(), comm),
        ("pass tolerance=",),
    ),
}


def wrong(comm: Communicator) -> None:
    for name, (call, expected) in WRONG.items():
        x = torch.randn(2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(comm.rank))
        with pytest.raises((ad.testing.GradientError, ad.testing.AdjointError, ValueError)) as caught:
            call(comm, x)
        text = str(caught.value)
        assert all(words in text for words in expected), (name, text)
        second = "the gradients themselves are right"
        assert (second in text) == (second in expected), (name, text)


def test_what_is_wrong_is_found_on_every_rank_and_described(ranks: RankPool) -> None:
    ranks.run(3, wrong)


def idle_ranks(comm: Communicator) -> list[float]:
    """Ranks whose output is a constant, or whose input is empty and of another type."""
    x = torch.randn(3, dtype=torch.float64, generator=torch.Generator().manual_seed(comm.rank))

    def own_or_constant(t: Tensor) -> Tensor:
        return t * 2 if comm.rank else torch.zeros(2, dtype=torch.float64)

    partition = ad.Partition(comm, [0])
    inactive = x if partition.active else ad.zero_volume_tensor()  # float32, in which far less is asked for
    found = [ad.testing.check_adjoint(own_or_constant, x, comm)]
    found.append(ad.testing.check_adjoint(ad.AllSumReduce(partition, 0), inactive, comm))
    found.append(ad.testing.check_gradients(own_or_constant, x, comm, samples=1))
    with pytest.raises(ad.testing.AdjointError):  # 1e-9 off: too much in double precision, on every rank
        ad.testing.check_adjoint(lambda t: Slightly.apply(t) if partition.active else t.clone(), inactive, comm)
    with pytest.raises(ValueError, match="no default tolerance for the type of some rank's input"):
        ad.testing.check_adjoint(lambda t: t.clone(), x.half() if comm.rank else x, comm)
    comm.barrier()
    partition.destroy()
    return found


class Slightly(torch.autograd.Function):
    """The identity, whose gradient is a bit too large."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * (1 + 1e-9)


def test_ranks_without_a_part_in_the_function_do_not_stop_the_others(ranks: RankPool) -> None:
    for errors in ranks.run(2, idle_ranks):
        assert len(errors) == 3 and max(errors[:2]) <= 1e-12 and errors[2] <= 1
