"""Differentiable collectives: values against a single-process reference, adjoints, conventions, odd inputs."""

from __future__ import annotations

import pytest
import torch
from ranks import RankPool, each_size
from torch import Tensor

import pynccl_autograd as ad
from pynccl import Communicator


def inputs(n: int, *shape: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Every rank's input; integer-valued, so that sums are exact in any order."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(-8, 9, shape, generator=generator).to(dtype) for _ in range(n)]


def expect(found: Tensor, expected: Tensor, what: str) -> None:
    assert found.shape == expected.shape and found.dtype == expected.dtype and torch.equal(found, expected), (
        f"{what}: found {found}, expected {expected}"
    )


def gradient(y: Tensor, x: Tensor, g: Tensor) -> Tensor:
    (dx,) = torch.autograd.grad(y, x, g)
    return dx


# Values and gradients


def check_all_reduce(comm: Communicator) -> None:
    n, r = comm.size, comm.rank
    xs, gs = inputs(n, 3, 2), inputs(n, 3, 2)[::-1]
    for op, scale in (("sum", 1), ("avg", n)):
        x = xs[r].clone().requires_grad_()
        y = ad.all_reduce(x, comm, op, grad="sum")
        expect(y, sum(xs) / scale, op)
        expect(gradient(y, x, gs[r]), sum(gs) / scale, f"{op}, gradient by sum")
        y = ad.all_reduce(x, comm, op, grad="replicated")
        expect(gradient(y, x, gs[0]), gs[0] / scale, f"{op}, replicated gradient")
        expect(x.detach(), xs[r], "input")


def check_reduce_scatter(comm: Communicator, dim: int) -> None:
    n, r = comm.size, comm.rank
    shape = [3, 5, 2]
    shape[dim] = 2 * n
    xs = inputs(n, *shape)
    shape[dim] = 2
    gs = inputs(n, *shape)
    for op, scale in (("sum", 1), ("avg", n)):
        x = xs[r].clone().requires_grad_()
        y = ad.reduce_scatter(x, comm, dim, op)
        expect(y, (sum(xs) / scale).chunk(n, dim)[r], op)
        assert y.is_contiguous()
        expect(gradient(y, x, gs[r]), torch.cat(gs, dim) / scale, f"{op}, gradient")


def check_all_gather(comm: Communicator, dim: int) -> None:
    n, r = comm.size, comm.rank
    xs = inputs(n, 3, 1, 2)
    y_shape = list(xs[0].shape)
    y_shape[dim] *= n
    gs = inputs(n, *y_shape)
    x = xs[r].clone().requires_grad_()
    y = ad.all_gather(x, comm, dim, grad="sum")
    expect(y, torch.cat(xs, dim), "all_gather")
    expect(gradient(y, x, gs[r]), sum(gs).chunk(n, dim)[r], "gradient by sum")
    y = ad.all_gather(x, comm, dim, grad="replicated")
    expect(gradient(y, x, gs[0]), gs[0].chunk(n, dim)[r], "replicated gradient")


def check_copy_and_split(comm: Communicator, dim: int) -> None:
    n, r = comm.size, comm.rank
    shape = [2, 3, 4]
    shape[dim] = 2 * n
    x = inputs(1, *shape)[0].requires_grad_()
    gs = inputs(n, *shape)
    expect(gradient(ad.copy(x, comm), x, gs[r]), sum(gs), "copy, gradient")
    parts = [g.chunk(n, dim)[0] for g in gs]
    y = ad.split(x, comm, dim)
    expect(y, x.detach().chunk(n, dim)[r], "split")
    expect(gradient(y, x, parts[r]), torch.cat(parts, dim), "split, gradient")


@each_size
def test_all_reduce_equals_the_sum_of_all_ranks_under_both_conventions(ranks: RankPool, n: int) -> None:
    ranks.run(n, check_all_reduce)


@each_size
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_reduce_scatter_and_all_gather_work_along_any_dimension(ranks: RankPool, n: int, dim: int) -> None:
    ranks.run(n, check_reduce_scatter, dim)
    ranks.run(n, check_all_gather, dim)


@each_size
@pytest.mark.parametrize("dim", [0, -1])
def test_copy_sums_gradients_and_split_gathers_them(ranks: RankPool, n: int, dim: int) -> None:
    ranks.run(n, check_copy_and_split, dim)


# Adjoints


def adjoint_errors(comm: Communicator) -> list[float]:
    generator = torch.Generator().manual_seed(comm.rank)
    x = torch.randn(3, 2 * comm.size, 5, dtype=torch.float64, generator=generator)
    same = torch.randn(3, 2 * comm.size, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(99))
    errors = [
        ad.testing.check_adjoint(lambda t: ad.all_reduce(t, comm, "sum", grad="sum"), x, comm),
        ad.testing.check_adjoint(lambda t: ad.all_reduce(t, comm, "avg", grad="sum"), x, comm),
        ad.testing.check_adjoint(lambda t: ad.all_reduce(t, comm, "sum", grad="replicated"), x, comm, replicated=True),
        ad.testing.check_adjoint(lambda t: ad.all_reduce(t, comm, "avg", grad="replicated"), x, comm, replicated=True),
        ad.testing.check_adjoint(lambda t: ad.reduce_scatter(t, comm, 1), x, comm),
        ad.testing.check_adjoint(lambda t: ad.reduce_scatter(t, comm, 1, "avg"), x, comm),
        ad.testing.check_adjoint(lambda t: ad.all_gather(t, comm, 2, grad="sum"), x, comm),
        ad.testing.check_adjoint(lambda t: ad.all_gather(t, comm, 2, grad="replicated"), x, comm, replicated=True),
    ]
    # copy and split take a replicated input: on the product space, F x = (x, .., x) has the adjoint sum_q g_q.
    errors += [
        replicated_input_error(lambda t: ad.copy(t, comm), same, comm),
        replicated_input_error(lambda t: ad.split(t, comm, 1), same, comm),
    ]
    return errors


def replicated_input_error(fn, x: Tensor, comm: Communicator) -> float:
    """|<F x, y> - <x, F* y>| for an input that is one logical value: counted once, the output on every rank."""
    x = x.clone().requires_grad_()
    fx = fn(x)
    y = torch.randn(fx.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(comm.rank + 1))
    dx = gradient(fx, x, y)
    left = (fx.detach() * y).sum().reshape(1)
    comm.all_reduce(left, left)
    return float((left - (x.detach() * dx).sum()).abs() / (x.detach().norm() * dx.norm()))


@each_size
def test_every_operation_is_adjoint_to_its_backward_to_1e_12(ranks: RankPool, n: int) -> None:
    for errors in ranks.run(n, adjoint_errors):
        assert len(errors) == 10 and max(errors) <= 1e-12


# Second derivatives, precision, odd inputs


def second_derivatives(comm: Communicator) -> None:
    """L = sum over ranks of sum(y**3) with y a collective of x; d/dx of <dL/dx, v> by hand on all ranks' data."""
    n, r = comm.size, comm.rank
    xs, vs = inputs(n, 2 * n, 3), inputs(n, 2 * n, 3)[::-1]
    x = xs[r].clone().requires_grad_()
    v = vs[r]
    y = ad.all_reduce(x, comm, grad="sum")
    (dx,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
    (ddx,) = torch.autograd.grad((dx * v).sum(), x)
    total = sum(xs)
    expect(dx.detach(), 3 * n * total**2, "all_reduce, first derivative")
    expect(ddx, 6 * n * total * sum(vs), "all_reduce, second derivative")
    y = ad.reduce_scatter(x, comm, 0)
    (dx,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
    (ddx,) = torch.autograd.grad((dx * v).sum(), x)
    expect(dx.detach(), 3 * total**2, "reduce_scatter, first derivative")
    expect(ddx, 6 * total * sum(vs), "reduce_scatter, second derivative")


@each_size
def test_second_derivatives_are_right(ranks: RankPool, n: int) -> None:
    ranks.run(n, second_derivatives)


def small_terms_lost(comm: Communicator) -> tuple[float, float, float]:
    """Sums whose small terms bfloat16 drops one by one: 256, then 1 from each other rank, per reduction type."""
    mine = 256.0 if comm.rank == 0 else 0.75
    x = torch.full((comm.size, 2), mine, dtype=torch.bfloat16)
    wide = ad.reduce_scatter(x, comm, reduce_dtype=torch.float32)
    assert wide.dtype == torch.bfloat16
    leaf = torch.zeros(1, dtype=torch.bfloat16, requires_grad=True)
    y = ad.all_gather(leaf, comm, grad="sum", reduce_dtype=torch.float32)
    (dx,) = torch.autograd.grad(y, leaf, torch.full_like(y, mine))
    total = ad.all_reduce(x, comm, grad="sum", reduce_dtype=torch.float32)
    return float(wide[0, 0]), float(dx[0]), float(total[0, 0])


def test_reduce_dtype_sums_in_float32_and_rounds_once(ranks: RankPool) -> None:
    expected = float(torch.tensor(256 + 3 * 0.75).bfloat16())
    assert ranks.run(4, small_terms_lost) == [(expected,) * 3] * 4


def odd_inputs(comm: Communicator) -> None:
    n, r = comm.size, comm.rank
    xs = inputs(n, 2 * n, 3)
    # a cotangent of stride 0
    x = xs[r].clone().requires_grad_()
    ad.reduce_scatter(x, comm).sum().backward()
    expect(x.grad, torch.ones_like(x), "gradient of a sum")
    # non-contiguous input and cotangent
    x = xs[r].clone().t().requires_grad_()
    y = ad.all_gather(x, comm, 0, grad="sum")
    expect(y, torch.cat([t.t() for t in xs]), "transposed input")
    g = torch.ones(y.shape[::-1], dtype=y.dtype).t()
    expect(gradient(y, x, g), torch.full_like(x, n), "transposed cotangent")
    # 0-d, zero-size, integers
    scalar = torch.tensor(float(r + 1), dtype=torch.float64, requires_grad=True)
    y = ad.all_reduce(scalar, comm, grad="sum")
    assert y.shape == () and float(y) == n * (n + 1) / 2
    expect(gradient(y, scalar, torch.tensor(2.0, dtype=torch.float64)), torch.tensor(2.0 * n).double(), "0-d")
    gathered = ad.all_gather(scalar, comm, grad="sum")
    expect(gathered, torch.arange(1, n + 1, dtype=torch.float64), "0-d all_gather")
    expect(gradient(gathered, scalar, torch.ones(n).double()), torch.tensor(float(n)).double(), "0-d all_gather")
    empty = torch.zeros(0, 4, requires_grad=True)
    for y in (
        ad.all_reduce(empty, comm, grad="sum"),
        ad.all_gather(empty, comm, grad="sum"),
        ad.reduce_scatter(empty, comm),
    ):
        assert y.shape == (0, 4)
        y.sum().backward()
    expect(empty.grad, torch.zeros(0, 4), "gradient of nothing")
    expect(ad.all_reduce(torch.arange(3), comm, grad="sum"), torch.arange(3) * n, "integers")


@each_size
def test_strided_empty_scalar_and_integer_tensors_work(ranks: RankPool, n: int) -> None:
    ranks.run(n, odd_inputs)


def bad_inputs(comm: Communicator) -> list[str]:
    x = torch.ones(comm.size * 2 + 1, 2, requires_grad=True)
    messages = []
    for call in (
        lambda: ad.reduce_scatter(x, comm),
        lambda: ad.split(x, comm),
        lambda: ad.all_gather(x, comm, 2, grad="sum"),
        lambda: ad.all_reduce(x, comm, "median", grad="sum"),
        lambda: ad.all_reduce(x, comm, grad="mean"),
        lambda: ad.reduce_scatter(torch.tensor(1.0), comm),
    ):
        with pytest.raises(ValueError) as caught:
            call()
        messages.append(str(caught.value))
    with pytest.raises(TypeError):
        ad.all_reduce(x, comm)  # no convention
    with pytest.raises(TypeError):
        ad.all_gather(x, comm)
    comm.barrier()  # nothing was launched that the other ranks would still wait for
    return messages


def test_bad_input_says_what_was_passed_and_what_to_do(ranks: RankPool) -> None:
    for messages in ranks.run(2, bad_inputs):
        indivisible, split, dim, op, grad, scalar = messages
        assert "reduce_scatter: dimension 0 of (5, 2) has 5 rows, not divisible by 2 ranks; pad it" in indivisible
        assert "split: dimension 0" in split
        assert "dim is 2" in dim and "(5, 2)" in dim
        assert "'median'" in op and "'avg'" in op
        assert "'mean'" in grad and "'replicated'" in grad
        assert "shape ()" in scalar


def one_rank(comm: Communicator) -> None:
    alone = comm.split(comm.rank)
    assert alone is not None and alone.size == 1
    x = torch.randn(4, 2, requires_grad=True)
    for y in (
        ad.all_reduce(x, alone, grad="sum"),
        ad.reduce_scatter(x, alone),
        ad.all_gather(x, alone, grad="sum"),
        ad.split(x, alone),
    ):
        assert torch.equal(y, x) and y.data_ptr() != x.data_ptr()
        assert torch.equal(gradient(y, x, torch.ones_like(y)), torch.ones_like(x))
    assert torch.equal(ad.copy(x, alone), x)
    alone.destroy()


def test_one_rank_gets_a_new_tensor_and_its_own_gradient(ranks: RankPool) -> None:
    ranks.run(2, one_rank)


# The check itself


def wrong_adjoint(comm: Communicator, kind: str) -> str:
    """What check_adjoint says on this rank."""
    x = torch.randn(2 * comm.size, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(comm.rank))
    with pytest.raises((ad.testing.AdjointError, ValueError)) as caught:
        if kind == "convention":
            ad.testing.check_adjoint(lambda t: ad.all_reduce(t, comm, grad="replicated"), x, comm)
        elif kind == "identity":
            # the sum over ranks, rolled by a row, with the identity as its backward
            ad.testing.check_adjoint(
                lambda t: ad.all_reduce(t, comm, grad="sum").roll(1, 0).detach() + t - t.detach(), x, comm
            )
        else:
            ad.testing.check_adjoint(lambda t: t, x.bfloat16(), comm)
    return f"{caught.type.__name__}: {caught.value}"


@pytest.mark.parametrize("kind", ["convention", "identity"])
def test_check_adjoint_finds_a_wrong_backward_on_every_rank(ranks: RankPool, kind: str) -> None:
    for text in ranks.run(3, wrong_adjoint, kind):
        assert text.startswith("AdjointError: not adjoint: <F x, y> =")


def test_check_adjoint_asks_for_a_tolerance_where_it_has_none(ranks: RankPool) -> None:
    for text in ranks.run(2, wrong_adjoint, "tolerance"):
        assert text.startswith("ValueError") and "pass tolerance=" in text
