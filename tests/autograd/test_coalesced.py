"""Lists of tensors: outputs and derivatives of the calls one by one, in one group forwards and one backwards."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from ranks import RankPool
from torch import Tensor, func

import pynccl
import pynccl_autograd as ad
from pynccl import Communicator

# (function, arguments) for tensors of the shapes of `drawn`
CALLS: dict[str, tuple[Any, dict[str, Any]]] = {
    "all_reduce sum": (ad.all_reduce, {"grad": "sum"}),
    "all_reduce avg": (ad.all_reduce, {"op": "avg", "grad": "replicated"}),
    "all_reduce wide": (ad.all_reduce, {"grad": "sum", "reduce_dtype": torch.float64}),
    "all_reduce premul": (ad.all_reduce, {"op": ad.PreMul(0.5), "grad": "sum"}),
    "all_reduce max": (ad.all_reduce, {"op": "max", "grad": "sum"}),
    "all_gather": (ad.all_gather, {"grad": "sum"}),
    "all_gather last": (ad.all_gather, {"dim": -1, "grad": "replicated"}),
    "reduce_scatter": (ad.reduce_scatter, {}),
    "reduce_scatter last avg": (ad.reduce_scatter, {"dim": -1, "op": "avg"}),
}


def drawn(comm: Communicator, name: str) -> list[Tensor]:
    """Tensors of several shapes and types, equal on no two ranks."""
    n, generator = comm.size, torch.Generator().manual_seed(comm.rank)
    shapes = [(n, 2 * n), (2 * n, 1, n), (3 * n,), (n, 0, n)]
    dtypes = [torch.float64, torch.float32, torch.float64 if "max" in name else torch.complex128, torch.float64]
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]


@contextmanager
def groups() -> Iterator[list[int]]:
    """How many calls each group has that is launched in the block."""
    module: Any = sys.modules["pynccl.comm.groups"]
    launch, sizes = module.launch, []

    def counted(calls: Any, *rest: Any) -> None:
        sizes.append(len(calls))
        launch(calls, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "launch", counted)
        yield sizes


def derivatives(ys: Sequence[Tensor], xs: Sequence[Tensor], gs: Sequence[Tensor]) -> list[Tensor]:
    """First and second ones: of <y, g> + |y|^3, then of |dx|^2."""
    loss = sum((g.conj() * y).real.sum().double() + (y.abs() ** 3).sum().double() for y, g in zip(ys, gs, strict=True))
    first = torch.autograd.grad(loss, xs, create_graph=True)  # type: ignore[arg-type]
    outer = sum((dx.abs() ** 2).sum().double() for dx in first)
    return [*first, *torch.autograd.grad(outer, xs)]  # type: ignore[arg-type]


def as_one_by_one(comm: Communicator) -> None:
    for name, (function, options) in CALLS.items():
        given = drawn(comm, name)
        replicated = options.get("grad") == "replicated"
        found: list[Any] = []
        for together in (False, True):
            xs = [x.clone().requires_grad_() for x in given]
            with groups() as sizes:
                ys = function(tuple(xs), comm, **options) if together else [function(x, comm, **options) for x in xs]
                made = torch.Generator().manual_seed(1 if replicated else comm.rank)
                gs = [torch.randn(y.shape, generator=made, dtype=y.dtype) for y in ys]
                plain = torch.autograd.grad(ys, xs, gs, retain_graph=True)
            found.append([*ys, *plain, *derivatives(ys, xs, gs)])
            assert type(ys) is list and [y.dtype for y in ys] == [x.dtype for x in given]
        for alone, listed in zip(*found, strict=True):
            assert torch.equal(alone.detach(), listed.detach()), name
        if "max" not in name:
            assert sizes == ([4] if replicated else [4, 4]), name


def test_a_list_gives_what_its_tensors_give_one_by_one_in_one_group(ranks: RankPool) -> None:
    ranks.run(3, as_one_by_one)


def parts_of_it(comm: Communicator) -> None:
    """Each rank uses another output, some inputs need no gradient, some cannot have one."""
    n, r = comm.size, comm.rank
    xs = [torch.full((2,), 1.0 + r, requires_grad=True), torch.full((3,), 2.0 + r), torch.arange(4) + r]
    if r == 0:  # here another tensor needs a gradient than there
        xs[0], xs[1] = xs[0].detach(), xs[1].requires_grad_()
    ys = ad.all_reduce(xs, comm, grad="sum")
    assert [y.requires_grad for y in ys] == [True, True, False] and not ys[2].is_floating_point()
    assert ys[2].tolist() == (torch.arange(4) * n + n * (n - 1) // 2).tolist()
    (ys[0] if r == 0 else ys[1] * 10).sum().backward()
    if r == 0:
        assert xs[0].grad is None and xs[1].grad.tolist() == [10.0 * (n - 1)] * 3
    else:
        assert xs[0].grad.tolist() == [1.0] * 2 and xs[1].grad is None


def test_unused_outputs_and_inputs_without_a_gradient_leave_no_rank_waiting(ranks: RankPool) -> None:
    ranks.run(3, parts_of_it)


def transformed(comm: Communicator) -> None:
    generator = torch.Generator().manual_seed(comm.rank)
    a, b = torch.randn(2, 3, comm.size, 2, dtype=torch.float64, generator=generator)

    def together(u: Tensor, v: Tensor) -> Tensor:
        y, z = ad.all_gather([u.sin(), v], comm, grad="sum")
        p, q = ad.reduce_scatter([y * z, y], comm)
        return (p * q).sum()

    def alone(u: Tensor, v: Tensor) -> Tensor:
        y, z = ad.all_gather(u.sin(), comm, grad="sum"), ad.all_gather(v, comm, grad="sum")
        p, q = ad.reduce_scatter(y * z, comm), ad.reduce_scatter(y, comm)
        return (p * q).sum()

    ways: list[Any] = [
        lambda f: func.jvp(lambda u: f(u, b), (a,), (b,))[1],  # one tensor of the list has no tangent
        lambda f: torch.cat(func.vmap(func.grad(f, argnums=(0, 1)))(a, b)),
        lambda f: func.jvp(func.grad(f), (a, b), (b, a))[1],
    ]
    for way in ways:
        torch.testing.assert_close(way(together), way(alone), rtol=1e-12, atol=1e-12)
    torch._dynamo.reset()
    u = a.clone().requires_grad_()
    torch.compile(together, fullgraph=True, backend="aot_eager")(u, b.clone().requires_grad_()).backward()
    torch.testing.assert_close(u.grad, func.grad(alone)(a, b), rtol=1e-12, atol=1e-12)


def test_lists_under_forward_mode_vmap_and_compile(ranks: RankPool) -> None:
    ranks.run(2, transformed)


def refused(comm: Communicator) -> None:
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
    calls: list[tuple[Any, str]] = [  # results would be made of memory that nothing has come to yet
        (lambda: ad.all_gather(x, comm, 1, grad="sum"), "all_gather"),
        (lambda: ad.all_reduce([x, x], comm, grad="sum"), "all_reduce of 2 tensors"),
        (lambda: ad.start(ad.all_reduce, x, comm, grad="sum"), "all_reduce"),
        (y.backward, "reduce_scatter"),
    ]
    for call, name in calls:
        with pytest.raises(pynccl.NcclInvalidUsage, match=rf"^{name} within a pynccl.group\(\)"), pynccl.group():
            call()
    assert ad.all_reduce(x, comm, grad="sum")[0, 0] == comm.size


def test_lists_that_are_wrong_and_a_group_around_differentiable_functions_are_refused(ranks: RankPool) -> None:
    ranks.run(2, refused)
