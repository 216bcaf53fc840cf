"""Forward mode and torch.func: derivatives of any order, and where ranks differ in what depends on the variable."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from ranks import RankPool
from torch import Tensor, func
from torch.autograd import forward_ad

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


@pytest.fixture
def checked() -> Iterator[RankPool]:
    pool = RankPool({"PYNCCL_LIBRARY": "host", "PYNCCL_CHECK": "1"})
    yield pool
    pool.close()


def apart(comm: Communicator, name: str) -> str:
    """Rank 0 differentiates by what its input depends on, rank 1 by what its input does not depend on."""
    start, batch = torch.ones(()).double(), torch.stack([X, 2 * X])

    def f(t: Tensor) -> Tensor:
        return ad.all_reduce(t * C if comm.rank == 0 else C, comm, grad="sum")

    try:
        if name == "jvp":
            func.jvp(f, (start,), (start,))
        elif name == "grad":
            func.grad(lambda t: f(t).sum() + t)(start)
        else:
            func.vmap(f)(batch)
        comm.all_reduce(torch.ones(7))
    except pynccl.NcclError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", ["jvp", "grad", "vmap"])
def test_ranks_that_do_not_depend_alike_on_the_argument_are_told_so(checked: RankPool, name: str) -> None:
    for text in checked.run(2, apart, name):
        assert "disagree" in text


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


def ties(comm: Communicator, dtype: torch.dtype) -> Tensor:
    x = torch.ones(2, dtype=dtype, requires_grad=True)
    ad.all_reduce(x, comm, "max", grad="replicated").backward(torch.tensor([1.0, 0.7], dtype=dtype))
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_ties_are_shared_as_exactly_as_the_type_allows(ranks: RankPool, dtype: torch.dtype) -> None:
    expected = torch.tensor([1.0, 0.7], dtype=dtype) * (torch.ones((), dtype=torch.float64) / 3).to(dtype)
    for found in ranks.run(3, ties, dtype):
        assert found.dtype == dtype and torch.equal(found, expected)


def zeros_without_memory(comm: Communicator) -> list[list[float]]:
    zero = torch._efficientzerotensor(3)
    y = ad.all_reduce(zero, comm, grad="sum")
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.ones(3), torch._efficientzerotensor(3))
        t = forward_ad.unpack_dual(ad.all_gather(dual, comm, grad="sum")).tangent
    x = torch.ones(3, requires_grad=True)
    z = ad.all_reduce(x, comm, "prod", grad="sum")
    z.backward(torch._efficientzerotensor(3))
    started = ad.start(ad.all_gather, zero, comm, grad="sum").wait()
    assert x.grad is not None
    return [y.tolist(), t.tolist(), x.grad.tolist(), started.tolist()]


def test_zeros_without_memory(ranks: RankPool) -> None:
    assert ranks.run(2, zeros_without_memory) == [[[0.0] * 3, [0.0] * 6, [0.0] * 3, [0.0] * 6]] * 2


def batched_cotangents(comm: Communicator, asynchronous: bool) -> str:
    x = torch.tensor([1.0, 2.0, 3.0]).double().requires_grad_()
    y = ad.start(ad.all_gather, x, comm, grad="sum").wait() if asynchronous else ad.all_gather(x, comm, grad="sum")
    with pytest.raises(NotImplementedError) as caught:
        torch.autograd.grad(y, x, torch.eye(len(y)).double(), is_grads_batched=True)
    comm.barrier()
    return str(caught.value)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_batched_cotangents_of_torchs_old_vmap_are_refused(ranks: RankPool, asynchronous: bool) -> None:
    for text in ranks.run(2, batched_cotangents, asynchronous):
        assert "use torch.func.vmap, jacrev or hessian" in text
