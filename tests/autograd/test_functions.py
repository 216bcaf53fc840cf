"""What test_semantics.py does not hold: ties, NaN, zeros, scalars, counts per peer, types, one rank, bad arguments."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from ranks import RankPool, each_size
from semantics import OPERATIONS, Case, tensors
from torch import Tensor

import pynccl_autograd as ad
from pynccl import Communicator


def gradient(y: Tensor, x: Tensor, g: Tensor | None = None) -> list[float]:
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y) if g is None else g)
    return dx.tolist()


def ties_and_nan(comm: Communicator) -> tuple[list[float], list[float]]:
    """Columns: all tie; all but rank 0 tie; NaN everywhere; NaN on rank 0, and on the others a number."""
    nan, last = float("nan"), comm.rank == comm.size - 1
    x = torch.tensor([2.0, 0.0 if comm.rank == 0 else 5.0, nan, 1.0 if last else 0.5], requires_grad=True)
    y = ad.all_reduce(x, comm, "max", grad="sum")
    return y.tolist(), gradient(y, x)


@each_size
def test_the_cotangent_of_max_is_shared_among_ties_and_nan_matches_nan(ranks: RankPool, n: int) -> None:
    for rank, (y, dx) in enumerate(ranks.run(n, ties_and_nan)):
        assert y[:2] == [2.0, 5.0] and math.isnan(y[2]) and y[3] == 1.0
        # n cotangents of 1 each, shared by those who attain the maximum.
        assert dx == pytest.approx([1.0, 0.0 if rank == 0 else n / (n - 1), 1.0, n if rank == n - 1 else 0.0])


def zeros_in_a_product(comm: Communicator) -> tuple[list[float], list[float]]:
    """Columns: no zero; one, on rank 0; one on every rank; factors whose product overflows where the others' do not."""
    first = comm.rank == 0
    x = torch.tensor([2.0, 0.0 if first else 3.0, 0.0, 1e200 if comm.rank < 2 else 1.0], dtype=torch.float64)
    x.requires_grad_()
    y = ad.all_reduce(x, comm, "prod", grad="replicated")
    return y.tolist(), gradient(y, x)


@each_size
def test_the_gradient_of_a_product_divides_by_nothing(ranks: RankPool, n: int) -> None:
    for rank, (y, dx) in enumerate(ranks.run(n, zeros_in_a_product)):
        assert y == [2.0**n, 0.0, 0.0, math.inf]
        huge = 1e200 if rank < 2 else math.inf
        assert dx == [2.0 ** (n - 1), 3.0 ** (n - 1) if rank == 0 else 0.0, 0.0, huge]


def scale_with_a_gradient(comm: Communicator) -> tuple[list[float], float, list[complex]]:
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    s = torch.tensor(comm.rank + 1.0, requires_grad=True)
    y = ad.all_reduce(x, comm, ad.PreMul(s), grad="replicated")
    y.sum().backward()
    z = ad.all_reduce(torch.ones(1, dtype=torch.complex64), comm, ad.PreMul(1j), grad="sum")
    return x.grad.tolist(), float(s.grad), z.tolist()


def test_premul_takes_tensors_that_get_a_gradient_and_complex_numbers(ranks: RankPool) -> None:
    assert ranks.run(3, scale_with_a_gradient) == [([r + 1.0] * 2, 3.0, [3j]) for r in range(3)]


def counts_per_peer(comm: Communicator, dim: int) -> None:
    """Rank s sends s + 2t + (s == t) rows to rank t, each row naming both; along one dimension."""
    n, r = comm.size, comm.rank

    def rows(source: int, target: int) -> int:
        return source + 2 * target + (source == target)

    def part(source: int, target: int) -> Tensor:
        shape = [3, 3]
        shape[dim] = rows(source, target)
        return torch.full(shape, 10.0 * source + target, dtype=torch.float64)

    x = torch.cat([part(r, t) for t in range(n)], dim).requires_grad_()
    sends, recvs = [rows(r, t) for t in range(n)], [rows(s, r) for s in range(n)]
    y = ad.all_to_all(x, comm, dim, dim, send_splits=sends, recv_splits=recvs)
    assert torch.equal(y.detach(), torch.cat([part(s, r) for s in range(n)], dim))
    (dx,) = torch.autograd.grad(y, x, y.detach())
    assert torch.equal(dx, x.detach())  # a permutation: the cotangent y goes back to x


@pytest.mark.parametrize(("n", "dim"), [(2, 1), (3, 0), (4, 1)])
def test_all_to_all_with_counts_per_peer_along_one_dimension(ranks: RankPool, n: int, dim: int) -> None:
    ranks.run(n, counts_per_peer, dim)


def a_cut_line(comm: Communicator) -> None:
    """Convolution of a line that is cut unevenly, by halos, equals that of the whole line; gradient too."""
    sizes = [3 + 2 * r for r in range(comm.size)]
    whole = torch.randn(1, 1, sum(sizes), dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    kernel = torch.randn(1, 1, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    reference = whole.clone().requires_grad_()
    expected = torch.nn.functional.conv1d(torch.nn.functional.pad(reference, (1, 1)), kernel)
    (expected**2).sum().backward()
    own = whole.split(sizes, 2)[comm.rank].clone().requires_grad_()
    y = torch.nn.functional.conv1d(ad.halo_exchange(torch.nn.functional.pad(own, (1, 1)), comm, 2, 1), kernel)
    (y**2).sum().backward()
    torch.testing.assert_close(y.detach(), expected.detach().split(sizes, 2)[comm.rank], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(own.grad, reference.grad.split(sizes, 2)[comm.rank], rtol=1e-12, atol=1e-12)


def test_halos_make_a_convolution_of_a_cut_line_equal_that_of_the_whole(ranks: RankPool) -> None:
    ranks.run(3, a_cut_line)


def types(comm: Communicator) -> None:
    n, r = comm.size, comm.rank
    flags = torch.tensor([True, r == 0])
    assert ad.all_gather(flags, comm, grad="sum").tolist() == [q for s in range(n) for q in (True, s == 0)]
    assert ad.broadcast(flags, comm, 0, grad="sum").tolist() == [True, True]
    counts = torch.arange(3) + r
    assert ad.all_reduce(counts, comm, "max", grad="sum").tolist() == [n - 1, n, n + 1]
    conjugate = torch.tensor([1 + 2j]).conj()  # a lazy one
    assert ad.all_reduce(conjugate, comm, grad="sum").tolist() == [n * (1 - 2j)]
    negative = torch.tensor([1 + 2j]).conj().imag  # a lazy minus sign
    assert ad.all_reduce(negative, comm, grad="sum").tolist() == [-2.0 * n]
    half = torch.full((2,), 1 / 3, dtype=torch.float16, requires_grad=True)
    y = ad.all_gather(half, comm, grad="sum", reduce_dtype=torch.float32)
    assert torch.equal(y.detach(), half.detach().repeat(n)) and y.dtype == torch.float16  # copies: bit by bit
    scalar = torch.tensor(r + 1.0, requires_grad=True)
    for y, expected in (
        (ad.all_reduce(scalar, comm, grad="sum"), torch.tensor(n * (n + 1) / 2)),
        (ad.all_gather(scalar, comm, grad="sum"), torch.arange(1.0, n + 1)),
    ):
        assert torch.equal(y.detach(), expected) and y.shape == expected.shape
        assert gradient(y, scalar) == n
    x = torch.full((n, 2), 256.0 if r == 0 else 0.75, dtype=torch.bfloat16)  # which bfloat16 drops one by one
    assert ad.reduce_scatter(x, comm, reduce_dtype=torch.float32).unique().tolist() == [
        float(torch.tensor(256 + (n - 1) * 0.75).bfloat16())
    ]


def test_bool_integers_scalars_lazy_conjugates_and_small_floats(ranks: RankPool) -> None:
    ranks.run(4, types)


def one_rank(comm: Communicator) -> list[str]:
    alone = comm.split(comm.rank)
    case = Case(1)
    checked = []
    for name, operation in OPERATIONS.items():
        if name == "permute":
            continue
        x = tensors(operation, case, 1)[0].requires_grad_()
        y = operation.call(x, alone, case)
        assert torch.equal(y, operation.reference([x.detach()], case)[0]), name
        assert name == "copy" or y.data_ptr() != x.data_ptr(), name
        (dx,) = torch.autograd.grad(y.sum(), x)
        scale = -0.5 if name == "all_reduce premul" else 1.0
        assert torch.equal(dx, torch.full_like(x, scale)), name
        checked.append(name)
    x = torch.tensor([1.0, math.inf], requires_grad=True)
    assert ad.permute(x, alone, [(0, 0), (0, 0)]).tolist() == [2.0, math.inf]
    assert ad.permute(x, alone, [(0, 0)]).tolist() == [1.0, math.inf]
    assert ad.permute(x, alone, []).tolist() == [0.0, 0.0]
    alone.destroy()
    return checked


def test_one_rank_gets_new_tensors_and_its_own_gradient(ranks: RankPool) -> None:
    assert ranks.run(2, one_rank) == [[name for name in OPERATIONS if name != "permute"]] * 2


def classes(comm: Communicator) -> None:
    """The Functions themselves, for those who build on them."""
    x = torch.full((2 * comm.size,), comm.rank + 1.0, requires_grad=True)
    y = ad.ReduceScatter.apply(ad.AllReduce.apply(x, comm, "sum", "sum", None), comm, 0, "avg", None, None)
    assert isinstance(y.grad_fn, torch.autograd.graph.Node) and issubclass(ad.AllReduce, torch.autograd.Function)
    total = comm.size * (comm.size + 1) / 2
    assert y.tolist() == [total] * 2
    assert gradient(y, x) == [1.0] * (2 * comm.size)


def test_the_function_classes_are_usable(ranks: RankPool) -> None:
    ranks.run(3, classes)


WRONG: dict[str, tuple[Any, str]] = {
    "splits, number": (lambda x, c: ad.all_gather(x, c, grad="sum", splits=[6]), "expected one size for each of 2"),
    "splits, sign": (lambda x, c: ad.split(x, c, splits=[7, -1]), "expected sizes >= 0"),
    "splits, sum": (lambda x, c: ad.reduce_scatter(x, c, splits=[2, 3]), "has 6 rows, but splits (2, 3) add up to 5"),
    "splits, own": (
        lambda x, c: ad.all_gather(x, c, grad="sum", splits=[5, 5]),
        "has 6 rows, but splits (5, 5) give rank",
    ),
    "splits, remedy": (
        lambda x, c: ad.reduce_scatter(x[:5], c),
        "has 5 rows, not divisible by 2 ranks; pad it or pass splits=",
    ),
    "root": (lambda x, c: ad.broadcast(x, c, 2, grad="sum"), "root is 2, expected a rank in 0..1"),
    "root of reduce": (lambda x, c: ad.reduce(x, c, "0"), "root is '0', expected a rank"),
    "op of reduce": (lambda x, c: ad.reduce(x, c, 0, "max"), "op is 'max', expected 'sum' or 'avg'"),
    "op of reduce_scatter": (lambda x, c: ad.reduce_scatter(x, c, 0, "prod"), "op is 'prod'"),
    "scatter": (lambda x, c: ad.scatter(x[:3], c, 0), "has 3 rows, not divisible by 2"),
    "gather": (lambda x, c: ad.gather(x, c, 0, splits=[1, 1]), "give rank"),
    "one split": (
        lambda x, c: ad.all_to_all(x, c, send_splits=[3, 4]),
        "has 6 rows, but send_splits (3, 4) add up to 7",
    ),
    "edge": (lambda x, c: ad.permute(x, c, [(0, 5)]), "the target of edge (0, 5) is 5"),
    "no edge": (lambda x, c: ad.permute(x, c, [3]), "edge 3 is none, expected a pair"),  # type: ignore[list-item]
    "peer": (lambda x, c: ad.send_recv(x, c, target=9), "target is 9"),
    "halo": (lambda x, c: ad.halo_exchange(x, c, 0, 3), "of which 0 are the interior"),
    "halo of one": (
        lambda x, c: ad.halo_exchange(x, c, 0, [(0, 1)]),
        "expected a pair (left, right) for each of 2 ranks",
    ),
    "halos, mixed": (
        lambda x, c: ad.halo_exchange(x, c, 0, [(0, 1), 2]),
        "expected a width, or a pair (left, right) of",
    ),
    "halos, own": (lambda x, c: ad.halo_exchange(x, c, 0, [(0, 5), (5, 0)]), "an interior of at least 5"),
    "halo, sign": (lambda x, c: ad.halo_exchange(x, c, 0, (-1, 1)), "halo is (-1, 1)"),
    "dim": (lambda x, c: ad.all_gather(x, c, 2, grad="sum"), "dim is 2, but the tensor has shape (6, 2)"),
    "op": (lambda x, c: ad.all_reduce(x, c, "median", grad="sum"), "op is 'median', expected"),
    "scalar": (lambda x, c: ad.reduce_scatter(x[0, 0], c), "shape ()"),
    "convention": (lambda x, c: ad.broadcast(x, c, 0, grad="both"), "grad is 'both'"),
}


def wrong(comm: Communicator) -> dict[str, str]:
    x = torch.ones(6, 2, requires_grad=True)
    messages = {}
    for name, (call, _) in WRONG.items():
        with pytest.raises((ValueError, TypeError)) as caught:
            call(x, comm)
        messages[name] = str(caught.value)
    with pytest.raises(TypeError, match="complex"):
        ad.all_reduce(x.to(torch.complex64), comm, "max", grad="sum")
    with pytest.raises(TypeError, match="grad"):
        ad.broadcast(x, comm, 0)
    for no_convention in (ad.all_reduce, ad.all_gather):
        with pytest.raises(TypeError, match="grad= is missing"):
            no_convention(x, comm)
    comm.barrier()  # nothing was launched that the other ranks would still wait for
    return messages


def test_wrong_arguments_are_named_on_every_rank_before_anything_is_launched(ranks: RankPool) -> None:
    for messages in ranks.run(2, wrong):
        for name, (_, text) in WRONG.items():
            assert text in messages[name], name
