"""Forward mode and torch.func where ranks differ in what depends on the variable, and derivatives of any order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import RankPool
from semantics import OPERATIONS, Case, tensors
from torch import Tensor, func
from torch.autograd import forward_ad

import pynccl_autograd as ad
from pynccl import Communicator

CLOSE = {"rtol": 1e-10, "atol": 1e-10}


def one_rank_has_a_tangent(comm: Communicator, which: int) -> list[str]:
    """Dual numbers, and torch.func.jvp of a function whose argument reaches the operation on one rank only."""
    r, one = comm.rank, torch.ones((), dtype=torch.float64)
    for name, operation in OPERATIONS.items():
        case = Case(comm.size)
        xs = tensors(operation, case, 1)
        changes = [t if q == which else torch.zeros_like(t) for q, t in enumerate(tensors(operation, case, 6))]

        def moved(s: Tensor, xs: Any = xs, changes: Any = changes, op: Any = operation, case: Any = case) -> Tensor:
            # What is one input on all ranks is moved as this rank has it.
            starts = zip(xs, [changes[r]] * case.n if op.input_is_one else changes, strict=True)
            return op.reference([x + s * t for x, t in starts], case)[r]

        expected = func.jvp(moved, (one * 0,), (one,))[1]
        with forward_ad.dual_level():
            x = forward_ad.make_dual(xs[r], changes[r]) if r == which else xs[r]
            dual = forward_ad.unpack_dual(operation.call(x, comm, case)).tangent

        def call(s: Tensor, x: Any = xs[r], t: Any = changes[r], op: Any = operation, case: Any = case) -> Tensor:
            return op.call(x + s * t if r == which else x, comm, case)

        pushed = func.jvp(call, (one * 0,), (one,))[1]
        for kind, found in (("dual numbers", dual), ("jvp", pushed)):
            assert found is not None, f"{name}, {kind}"
            assert torch.allclose(found, expected, **CLOSE), f"{name}, {kind}"
    return list(OPERATIONS)


@pytest.mark.parametrize("which", [0, 1])
def test_a_tangent_on_one_rank_reaches_all(ranks: RankPool, which: int) -> None:
    assert ranks.run(2, one_rank_has_a_tangent, which) == [list(OPERATIONS)] * 2


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
        return (ad.all_reduce(t * t if comm.rank == 0 else C, comm, grad="sum") ** 3).sum()

    return {name: transform(f) for name, transform in {**TRANSFORMS, **FORWARD}.items()}


def test_torch_func_where_the_argument_reaches_the_collective_on_one_rank(ranks: RankPool) -> None:
    def loss(t: Tensor) -> Tensor:
        return ((t * t + C) ** 3).sum()

    first, second = ranks.run(2, one_rank_reaches_the_collective)
    for name, transform in TRANSFORMS.items():  # of the two ranks' losses together, by rank 0's argument
        torch.testing.assert_close(first[name], transform(lambda t: 2 * loss(t)), **CLOSE)
        assert not second[name].any()
    for name, transform in FORWARD.items():  # of each rank's own loss
        torch.testing.assert_close(first[name], transform(loss), **CLOSE)
        torch.testing.assert_close(second[name], transform(loss), **CLOSE)


def one_rank_is_batched(comm: Communicator) -> list[list[Any]]:
    batch, alone = torch.stack([X, 2 * X]), comm.rank
    return [
        func.vmap(lambda t: ad.all_reduce(C if alone else t, comm, grad="sum"))(batch).tolist(),
        func.vmap(lambda t: ad.broadcast(C if alone else t, comm, 0, grad="sum"))(batch).tolist(),
        func.vmap(lambda t: ad.broadcast(C.long() if alone else t, comm, 0, grad="sum"))(batch.long()).tolist(),
        func.vmap(lambda t: ad.all_gather(C if alone else t, comm, grad="sum"), out_dims=1)(batch).tolist(),
    ]


def test_vmap_where_one_rank_has_no_batch_dimension(ranks: RankPool) -> None:
    sent = torch.stack([X, 2 * X])
    expected = [sent + C, sent, sent.long(), torch.cat([sent.T, torch.stack([C, C], 1)])]
    assert ranks.run(2, one_rank_is_batched) == [[y.tolist() for y in expected]] * 2


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


def batched_cotangents(comm: Communicator, asynchronous: bool) -> list[Tensor]:
    """is_grads_batched, and what torch.autograd.functional makes of it."""
    x = torch.tensor([1.0, 2.0, 3.0]).double().requires_grad_()

    def f(t: Tensor) -> Tensor:
        if asynchronous:
            return ad.start(ad.all_gather, t**2, comm, grad="sum").wait()
        return ad.all_reduce(t**2, comm, "prod", grad="sum")

    y = f(x)
    rows = torch.eye(len(y)).double()
    (batched,) = torch.autograd.grad(y, x, rows, is_grads_batched=True, retain_graph=True)
    one_by_one = torch.stack([torch.autograd.grad(y, x, row, retain_graph=True)[0] for row in rows])
    vectorized = torch.autograd.functional.jacobian(f, x, vectorize=True)
    return [batched, vectorized, one_by_one]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_batched_cotangents(ranks: RankPool, asynchronous: bool) -> None:
    for batched, vectorized, one_by_one in ranks.run(2, batched_cotangents, asynchronous):
        torch.testing.assert_close(batched, one_by_one, **CLOSE)
        torch.testing.assert_close(vectorized, one_by_one, **CLOSE)
