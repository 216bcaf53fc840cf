"""Forward mode and torch.func: derivatives of any order, and where ranks differ in what depends on the variable."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import RankPool
from torch import Tensor, func

import pynccl
import pynccl_autograd as ad
from pynccl import Communicator

CLOSE = {"rtol": 1e-10, "atol": 1e-10}
X, C = torch.tensor([1.0, 2.0]).double(), torch.tensor([3.0, 4.0]).double()

# Derivatives of a function of one tensor that gives a number.
TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor]], Tensor]] = {
    "jvp of grad": lambda f: func.jvp(func.grad(f), (X,), (X,))[1],
    "per sample": lambda f: func.vmap(func.grad(f))(torch.stack([X, 2 * X])),
    "jacrev of jacrev": lambda f: func.jacrev(func.jacrev(f))(X),
    "hessian": lambda f: func.hessian(f)(X),
}
FORWARD: dict[str, Callable[[Callable[[Tensor], Tensor]], Tensor]] = {
    "jacfwd of jacfwd": lambda f: func.jacfwd(func.jacfwd(f))(X),
    "jacfwd per sample": lambda f: func.vmap(func.jacfwd(f))(torch.stack([X, 2 * X])),
}


def one_rank_reaches_the_collective(comm: Communicator) -> dict[str, Tensor]:
    def f(t: Tensor) -> Tensor:
        return (ad.all_reduce(t * t if comm.rank == 0 else C + 0 * t, comm, grad="sum") ** 3).sum()

    return {name: transform(f) for name, transform in {**TRANSFORMS, **FORWARD}.items()}


def test_torch_func_where_the_argument_counts_on_one_rank(ranks: RankPool) -> None:
    def loss(t: Tensor) -> Tensor:
        return ((t * t + C) ** 3).sum()

    first, second = ranks.run(2, one_rank_reaches_the_collective)
    for name, transform in TRANSFORMS.items():  # of the two ranks' losses together, by rank 0's argument
        torch.testing.assert_close(first[name], transform(lambda t: 2 * loss(t)), **CLOSE)
        assert not second[name].any()
    for name, transform in FORWARD.items():  # of each rank's own loss
        torch.testing.assert_close(first[name], transform(loss), **CLOSE)
        torch.testing.assert_close(second[name], transform(loss), **CLOSE)


def apart(comm: Communicator) -> list[str]:
    """Rank 0 differentiates by what its input depends on, rank 1 by what its input does not depend on."""
    start, batch, said = torch.ones(()).double(), torch.stack([X, 2 * X]), []
    transforms: list[Callable[[Any], object]] = [
        lambda f: func.jvp(f, (start,), (start,)),
        lambda f: func.grad(lambda t: f(t).sum() + t)(start),
        lambda f: func.vmap(f)(batch),
    ]
    os.environ["PYNCCL_CHECK"] = "1"
    for transform in transforms:
        own = comm.split(0)
        assert own is not None
        with pytest.raises(pynccl.NcclError) as caught:
            transform(lambda t, own=own: ad.all_reduce(t * C if own.rank == 0 else C, own, grad="sum"))
            own.all_reduce(torch.ones(7))
        said.append(str(caught.value))
        own.abort()
    return said


def test_ranks_that_do_not_depend_alike_on_the_argument_are_told_so(doomed: RankPool) -> None:
    for said in doomed.run(2, apart):
        assert len(said) == 3 and all("disagree" in text for text in said)


REDUCTIONS = {"sum": lambda ys: ys.sum(0), "max": lambda ys: ys.amax(0), "prod": lambda ys: ys.prod(0)}
FACTORS = torch.randn(2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
S, V = torch.tensor([0.3, -0.7, 1.1]).double(), torch.ones(3).double()


def nested(comm: Communicator) -> None:
    """In forward mode the argument moves on all ranks at once; in reverse mode it is a rank's own."""
    n, own = comm.size, FACTORS[comm.rank]
    for op, reduction in REDUCTIONS.items():

        def found(t: Tensor, op: Any = op) -> Tensor:
            return ad.all_reduce((own * t).sin(), comm, op, grad="sum")

        def wanted(t: Tensor, reduction: Any = reduction) -> Tensor:
            return reduction((FACTORS * t).sin())

        # Of the sum of the ranks' outputs, where each rank has a variable of its own: [3, n, 3, n, 3]
        by_rank = func.jacfwd(func.jacrev(lambda ts: n * wanted(ts)))(torch.stack([S] * n))
        for outer, inner in ((func.jacfwd, func.jacrev), (func.jacrev, func.jacfwd), (func.jacrev, func.jacrev)):
            torch.testing.assert_close(outer(inner(found))(S), by_rank[:, comm.rank].sum(2), **CLOSE)
        third = func.jacfwd(func.jacfwd(func.jacfwd(found)))(S)
        torch.testing.assert_close(third, func.jacfwd(func.jacfwd(func.jacfwd(wanted)))(S), **CLOSE)
    twice = func.vmap(func.vmap(lambda t: ad.all_gather(t, comm, grad="sum"), in_dims=1), in_dims=0)
    batch = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(7))
    assert torch.equal(twice(batch), batch.transpose(1, 2).repeat(1, 1, n))
    x = X.clone().requires_grad_()
    y = ad.all_gather(x, comm, grad="sum")
    with pytest.raises(NotImplementedError, match=r"use torch\.func\.vmap, jacrev or hessian"):  # torch's old vmap
        torch.autograd.grad(y, x, torch.eye(len(y)).double(), is_grads_batched=True)


def test_derivatives_in_either_mode_of_derivatives_in_either_mode(ranks: RankPool) -> None:
    ranks.run(2, nested)
