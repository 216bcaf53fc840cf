"""Lists of tensors: same results as separate calls, in one group per forward and per backward pass."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from ranks import RankPool
from torch import Tensor, func

import pynccl
import pynccl_autograd as ad
from pynccl import Communicator

# (function, arguments) for the tensors of `random_tensors`
CALLS: list[tuple[Any, dict[str, Any]]] = [
    (ad.all_reduce, {"op": "avg", "grad": "replicated"}),
    (ad.all_reduce, {"grad": "sum", "reduce_dtype": torch.float64}),
    (ad.all_reduce, {"op": ad.PreMul(0.5), "grad": "sum"}),
    (ad.all_gather, {"grad": "sum"}),
    (ad.all_gather, {"dim": -1, "grad": "replicated"}),
    (ad.reduce_scatter, {}),
    (ad.reduce_scatter, {"dim": -1, "op": "avg"}),
]


def random_tensors(comm: Communicator) -> list[Tensor]:
    """Tensors of several shapes and dtypes, different on every rank."""
    n, generator = comm.size, torch.Generator().manual_seed(comm.rank)
    shapes = [(n, 2 * n), (2 * n, 1, n), (3 * n,), (n, 0, n)]
    dtypes = [torch.float64, torch.float32, torch.complex128, torch.float64]
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]


def compare_with_separate_calls(comm: Communicator) -> None:
    """Compare outputs, derivatives of <y, g> + |y|^3, and derivatives of |dx|^2."""
    groups: Any = sys.modules["pynccl.comm.groups"]
    for function, options in CALLS:
        replicated = options.get("grad") == "replicated"
        found = []
        for together in (False, True):
            xs, sizes = [x.requires_grad_() for x in random_tensors(comm)], list[int]()
            with pytest.MonkeyPatch.context() as patch:
                launch = groups.launch
                patch.setattr(groups, "launch", lambda calls, *rest: (sizes.append(len(calls)), launch(calls, *rest)))  # noqa: B023
                ys = function(tuple(xs), comm, **options) if together else [function(x, comm, **options) for x in xs]
                generator = torch.Generator().manual_seed(1 if replicated else comm.rank)
                gs = [torch.randn(y.shape, generator=generator, dtype=y.dtype) for y in ys]
                products = [(g.conj() * y).real.sum().double() for y, g in zip(ys, gs, strict=True)]
                loss = sum((y.abs() ** 3).sum().double() for y in ys) + sum(products)
                first = torch.autograd.grad(loss, xs, create_graph=True)
            outer = sum((dx.abs() ** 2).sum().double() for dx in first)
            found.append([*ys, *first, *torch.autograd.grad(outer, xs)])
            assert type(ys) is list and [y.dtype for y in ys] == [x.dtype for x in xs]
        for separate, listed in zip(*found, strict=True):
            assert torch.equal(separate.detach(), listed.detach()), (function, options)
        assert sizes == ([4] if replicated else [4, 4]), (function, options)


def test_a_list_gives_the_results_of_separate_calls_in_one_group(ranks: RankPool) -> None:
    ranks.run(3, compare_with_separate_calls)


def compare_transforms(comm: Communicator) -> None:
    generator = torch.Generator().manual_seed(comm.rank)
    a, b = torch.randn(2, 3, comm.size, 2, dtype=torch.float64, generator=generator)

    def together(u: Tensor, v: Tensor) -> Tensor:
        y, z = ad.all_gather([u.sin(), v], comm, grad="sum")
        p, q = ad.reduce_scatter([y * z, y], comm)
        return (p * q).sum()

    def separately(u: Tensor, v: Tensor) -> Tensor:
        y, z = ad.all_gather(u.sin(), comm, grad="sum"), ad.all_gather(v, comm, grad="sum")
        p, q = ad.reduce_scatter(y * z, comm), ad.reduce_scatter(y, comm)
        return (p * q).sum()

    found = func.jvp(lambda u: together(u, b), (a,), (b,))[1]  # one tensor of the list has no tangent
    torch.testing.assert_close(found, func.jvp(lambda u: separately(u, b), (a,), (b,))[1], rtol=1e-12, atol=1e-12)
    found, expected = (func.vmap(func.grad(f, argnums=(0, 1)))(a, b) for f in (together, separately))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    torch._dynamo.reset()
    u = a.clone().requires_grad_()
    torch.compile(together, fullgraph=True, backend="aot_eager")(u, b.clone().requires_grad_()).backward()
    torch.testing.assert_close(u.grad, func.grad(separately)(a, b), rtol=1e-12, atol=1e-12)


def test_lists_under_forward_mode_vmap_and_compile(ranks: RankPool) -> None:
    ranks.run(2, compare_transforms)


def check_rejected_calls(comm: Communicator) -> None:
    x = torch.ones(2, 2 * comm.size, requires_grad=True)
    assert ad.all_reduce([], comm, grad="sum") == []
    any_of: Any = ad
    wrong: list[tuple[Any, str]] = [
        (lambda: any_of.start(ad.all_reduce, [x, x], comm, grad="sum"), "all_reduce: x is a list"),
        (lambda: any_of.broadcast([x], comm, 0, grad="sum"), "broadcast: x is a list"),
        (lambda: ad.reduce_scatter([x, x[:1]], comm), r"not divisible by 2 ranks.*\(x is tensor 1 of 2 in the list\)"),
        (lambda: any_of.all_reduce([x, 3.0], comm, grad="sum"), "all_reduce: x is a float.*tensor 1 of 2"),
    ]
    for call, text in wrong:
        with pytest.raises((TypeError, ValueError), match=text):
            call()
    y = ad.all_gather(x * 2, comm, 1, grad="sum").sum()
    calls: list[tuple[Any, str]] = [  # the results would read memory that has not been received yet
        (lambda: ad.all_gather(x, comm, 1, grad="sum"), "all_gather"),
        (lambda: ad.all_reduce([x, x], comm, grad="sum"), "all_reduce of 2 tensors"),
        (lambda: ad.start(ad.all_reduce, x, comm, grad="sum"), "all_reduce"),
        (y.backward, "reduce_scatter"),
    ]
    for call, name in calls:
        with pytest.raises(pynccl.NcclInvalidUsage, match=rf"^{name} within a pynccl.group\(\)"), pynccl.group():
            call()
    assert ad.all_reduce(x, comm, grad="sum")[0, 0] == comm.size


def test_wrong_lists_and_differentiable_functions_within_a_group_raise(ranks: RankPool) -> None:
    ranks.run(2, check_rejected_calls)
