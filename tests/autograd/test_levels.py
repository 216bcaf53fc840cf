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
    "grad": lambda f: func.grad(f)(X),
    "vjp": lambda f: func.vjp(f, X)[1](torch.ones(()).double())[0],
    "grad of grad": lambda f: func.grad(lambda t: (func.grad(f)(t) ** 2).sum())(X),
    "jvp of grad": lambda f: func.jvp(func.grad(f), (X,), (X,))[1],
    "per sample": lambda f: func.vmap(func.grad(f))(torch.stack([X, 2 * X])),
    "jacrev of jacrev": lambda f: func.jacrev(func.jacrev(f))(X),
    "hessian": lambda f: func.hessian(f)(X),
}
FORWARD: dict[str, Callable[[Callable[[Tensor], Tensor]], Tensor]] = {
    "jacfwd": lambda f: func.jacfwd(f)(X),
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

        def f(t: Tensor, own: Communicator = own) -> Tensor:
            return ad.all_reduce(t * C if own.rank == 0 else C, own, grad="sum")

        try:
            transform(f)
            own.all_reduce(torch.ones(7))
            said.append("")
        except pynccl.NcclError as error:
            said.append(str(error))
        own.abort()
    return said


def test_ranks_that_do_not_depend_alike_on_the_argument_are_told_so(doomed: RankPool) -> None:
    for said in doomed.run(2, apart):
        assert len(said) == 3 and all("disagree" in text for text in said)


REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda ys: ys.sum(0),
    "max": lambda ys: ys.amax(0),
    "prod": lambda ys: ys.prod(0),
}


FACTORS = torch.randn(2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(4))


def nested(comm: Communicator, op: Any) -> list[Tensor]:
    own, s, v = FACTORS[comm.rank], torch.tensor([0.3, -0.7, 1.1]).double(), torch.ones(3).double()

    def f(t: Tensor) -> Tensor:
        return ad.all_reduce((own * t).sin(), comm, op, grad="sum")

    nested = func.vmap(func.vmap(lambda t: ad.all_gather(t, comm, grad="sum"), in_dims=1), in_dims=0)
    batch = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(7))
    assert torch.equal(nested(batch), batch.transpose(1, 2).repeat(1, 1, comm.size))
    return [
        func.jvp(lambda t: func.jvp(f, (t,), (v,))[1], (s,), (v,))[1],
        func.jacfwd(func.jacfwd(f))(s),
        func.jacfwd(func.jacfwd(func.jacfwd(f)))(s),
        func.jacfwd(func.jacrev(f))(s),
        func.jacrev(func.jacfwd(f))(s),
        func.jacrev(func.jacrev(f))(s),
    ]


@pytest.mark.parametrize("op", REDUCTIONS)
def test_derivatives_in_either_mode_of_derivatives_in_either_mode(ranks: RankPool, op: str) -> None:
    """In forward mode the argument moves on all ranks at once; in reverse mode it is a rank's own."""
    n, s, v = 2, torch.tensor([0.3, -0.7, 1.1]).double(), torch.ones(3).double()

    def f(t: Tensor) -> Tensor:
        return REDUCTIONS[op]((FACTORS * t).sin())

    def by_rank(ts: Tensor) -> Tensor:  # the sum of the ranks' outputs, of which each has a variable of its own
        return n * REDUCTIONS[op]((FACTORS * ts).sin())

    hessian = func.jacfwd(func.jacrev(by_rank))(torch.stack([s] * n))  # [3, n, 3, n, 3]
    for rank, (twice, second, third, *mixed) in enumerate(ranks.run(n, nested, op)):
        torch.testing.assert_close(twice, func.jvp(lambda t: func.jvp(f, (t,), (v,))[1], (s,), (v,))[1], **CLOSE)
        torch.testing.assert_close(second, func.jacfwd(func.jacfwd(f))(s), **CLOSE)
        torch.testing.assert_close(third, func.jacfwd(func.jacfwd(func.jacfwd(f)))(s), **CLOSE)
        assert len(mixed) == 3
        for found in mixed:
            torch.testing.assert_close(found, hessian[:, rank].sum(2), **CLOSE)


def ties(comm: Communicator) -> None:
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        x, g = torch.ones(2, dtype=dtype, requires_grad=True), torch.tensor([1.0, 0.7], dtype=dtype)
        ad.all_reduce(x, comm, "max", grad="replicated").backward(g)
        expected = g * (torch.ones((), dtype=torch.float64) / 3).to(dtype)
        assert x.grad is not None and x.grad.dtype == dtype and torch.equal(x.grad, expected)


def test_ties_are_shared_as_exactly_as_the_type_allows(ranks: RankPool) -> None:
    ranks.run(3, ties)


def batched_cotangents(comm: Communicator, asynchronous: bool) -> str:
    x = torch.tensor([1.0, 2.0, 3.0]).double().requires_grad_()
    y = ad.start(ad.all_gather, x, comm, grad="sum").wait() if asynchronous else ad.all_gather(x, comm, grad="sum")
    with pytest.raises(NotImplementedError) as caught:
        torch.autograd.grad(y, x, torch.eye(len(y)).double(), is_grads_batched=True)
    comm.barrier()
    return str(caught.value)


def test_batched_cotangents_of_torchs_old_vmap_are_refused(ranks: RankPool) -> None:
    for asynchronous in (False, True):
        for text in ranks.run(2, batched_cotangents, asynchronous):
            assert "use torch.func.vmap, jacrev or hessian" in text
