"""Cases that test_semantics.py does not cover: ties, NaN, zeros, scalars, dtypes, one rank, bad arguments."""

from __future__ import annotations

import math
from typing import Any, cast

import pytest
import torch
from ranks import RankPool
from semantics import OPERATIONS, Case, tensors
from torch import Tensor

import pynccl_autograd as ad
from pynccl import Communicator


def gradient(y: Tensor, x: Tensor) -> list[float]:
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    return dx.tolist()


def check_ties_and_zeros(comm: Communicator) -> None:
    n, first, last = comm.size, comm.rank == 0, comm.rank == comm.size - 1
    # All tie; all but rank 0 tie; NaN everywhere; one maximum.
    x = torch.tensor([2.0, 0.0 if first else 5.0, math.nan, 1.0 if last else 0.5], requires_grad=True)
    y = ad.all_reduce(x, comm, "max", grad="sum")
    assert y.tolist()[:2] == [2.0, 5.0] and math.isnan(y[2]) and y[3] == 1.0
    # n cotangents of 1 each, shared by the ranks that attain the maximum.
    assert gradient(y, x) == pytest.approx([1.0, 0.0 if first else n / (n - 1), 1.0, n if last else 0.0])
    for dtype in (torch.float64, torch.float16, torch.bfloat16):  # shared as exactly as the dtype allows
        x, g = torch.ones(2, dtype=dtype, requires_grad=True), torch.tensor([1.0, 0.7], dtype=dtype)
        ad.all_reduce(x, comm, "max", grad="replicated").backward(g)
        assert torch.equal(x.grad, g * (torch.ones((), dtype=torch.float64) / n).to(dtype))
    # A product: no zero; a zero on rank 0; zeros on all ranks; an overflow in the total, not in the others' product.
    x = torch.tensor([2.0, 0.0 if first else 3.0, 0.0, 1e200 if comm.rank < 2 else 1.0], dtype=torch.float64)
    x.requires_grad_()
    y = ad.all_reduce(x, comm, "prod", grad="replicated")
    assert y.tolist() == [2.0**n, 0.0, 0.0, math.inf]
    huge = 1e200 if comm.rank < 2 else math.inf
    assert gradient(y, x) == [2.0 ** (n - 1), 3.0 ** (n - 1) if first else 0.0, 0.0, huge]
    # A scale that requires a gradient, and a complex one.
    x, s = torch.tensor([1.0, 2.0], requires_grad=True), torch.tensor(comm.rank + 1.0, requires_grad=True)
    ad.all_reduce(x, comm, ad.PreMul(s), grad="replicated").sum().backward()
    assert x.grad.tolist() == [comm.rank + 1.0] * 2 and float(s.grad) == 3.0
    z = ad.all_reduce(torch.ones(1, dtype=torch.complex64), comm, ad.PreMul(1j), grad="sum")
    assert z.tolist() == [n * 1j]


def check_dtypes(comm: Communicator) -> None:
    n, r = comm.size, comm.rank
    flags = torch.tensor([True, r == 0])
    assert ad.all_gather(flags, comm, grad="sum").tolist() == [q for s in range(n) for q in (True, s == 0)]
    scalar = torch.tensor(r + 1.0, requires_grad=True)
    for y, expected in (
        (ad.all_reduce(scalar, comm, grad="sum"), torch.tensor(n * (n + 1) / 2)),
        (ad.all_gather(scalar, comm, grad="sum"), torch.arange(1.0, n + 1)),
    ):
        assert torch.equal(y.detach(), expected) and y.shape == expected.shape
        found: Any = gradient(y, scalar)
        assert found == n
    x = torch.full((n, 2), 256.0 if r == 0 else 0.75, dtype=torch.bfloat16)  # bfloat16 would drop each 0.75
    wide = ad.reduce_scatter(x, comm, reduce_dtype=torch.float32)
    assert wide.unique().tolist() == [float(torch.tensor(256 + (n - 1) * 0.75).bfloat16())]


def test_ties_nan_zeros_infinities_bool_scalars_and_small_floats(ranks: RankPool) -> None:
    ranks.run(3, check_ties_and_zeros)
    ranks.run(3, check_dtypes)


def one_rank(comm: Communicator) -> None:
    single_rank = comm.split(comm.rank)
    assert single_rank is not None
    for name, operation in OPERATIONS.items():
        if name == "permute":  # its edges need at least two ranks
            continue
        x = tensors(operation, Case(1), 1)[0].requires_grad_()
        y = operation.call(x, single_rank, Case(1))
        assert torch.equal(y, operation.reference([x.detach()], Case(1))[0]), name
        assert name == "copy" or y.data_ptr() != x.data_ptr(), name
        (dx,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(dx, torch.full_like(x, -0.5 if name == "all_reduce premul" else 1.0)), name
    x = torch.tensor([1.0, math.inf])
    assert ad.permute(x, single_rank, [(0, 0), (0, 0)]).tolist() == [2.0, math.inf]
    assert ad.nn.AllReduce(single_rank, grad="sum")(x) is x
    assert torch.equal(ad.nn.AllReduce(single_rank, ad.PreMul(2.0), grad="sum")(x), 2 * x)
    single_rank.destroy()


def test_on_one_rank_outputs_are_new_tensors_and_gradients_pass_through(ranks: RankPool) -> None:
    ranks.run(2, one_rank)


WRONG: list[tuple[Any, str]] = [  # test_wrong_inputs.py covers wrong types
    (lambda x, c: ad.reduce_scatter(x, c, splits=[2, 3]), "has size 6, but splits (2, 3) add up to 5"),
    (lambda x, c: ad.all_gather(x, c, grad="sum", splits=[5, 5]), "all_gather: x has size 6 along dim 0, but splits["),
    (lambda x, c: ad.reduce_scatter(x[:5], c), "has size 5, not divisible by 2 ranks; pad it or pass splits="),
    (
        lambda x, c: ad.halo_exchange(x, c, 0, 3),
        "halos (3, 3) need size 9 along dim 0 (the interior must be as wide as the adjacent halos, 3), but",
    ),
    (lambda x, c: ad.halo_exchange(x, c, 0, [(0, 1)]), "expected one pair for each of 2 ranks"),
    (lambda x, c: ad.halo_exchange(x, c, 0, cast(Any, [(0, 1), 2])), "expected a width, a pair of widths (left, right"),
    (lambda x, c: ad.halo_exchange(x, c, 0, [(0, 5), (5, 0)]), "as wide as the adjacent halos, 5), but x has 6"),
    (lambda x, c: ad.all_reduce(x.to(torch.complex64), c, "max", grad="sum"), "complex"),
    (lambda x, c: ad.start(ad.all_reduce, x, c, "max", grad="sum"), "max"),
]


def check_wrong_arguments(comm: Communicator) -> None:
    x = torch.ones(6, 2, requires_grad=True)
    for call, text in WRONG:
        with pytest.raises((ValueError, TypeError, NotImplementedError)) as caught:
            call(x, comm)
        assert text in str(caught.value), text
    comm.barrier()  # no rank is left waiting for a launch


def test_wrong_arguments_raise_on_every_rank_before_any_launch(ranks: RankPool) -> None:
    ranks.run(2, check_wrong_arguments)


def send_recv(comm: Communicator) -> Any:
    """Send from rank 0 to rank 1 of 3 ranks; rank 2 does not take part."""
    if comm.rank == 2:
        return None
    x = torch.full((2,), comm.rank + 1.0, requires_grad=True)
    y = ad.send_recv(x, comm, target=1) if comm.rank == 0 else ad.send_recv(x, comm, source=0)
    (y * 3).sum().backward()
    return y.tolist(), x.grad.tolist()


def test_send_recv_involves_only_its_two_ranks(ranks: RankPool) -> None:
    assert ranks.run(3, send_recv) == [([0.0, 0.0], [3.0, 3.0]), ([1.0, 1.0], [0.0, 0.0]), None]
