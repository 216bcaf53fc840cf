"""Lists of tensors: outputs and derivatives of the calls one by one, in one group forwards and one backwards."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from ranks import RankPool
from torch import Tensor

import pynccl
import pynccl_autograd as ad
from pynccl import Communicator

# (function, arguments) for tensors of shapes(n), along dimension 0 or the last
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
GROUPED = [name for name in CALLS if "max" not in name]


def drawn(comm: Communicator, name: str, seed: int = 0) -> list[Tensor]:
    """Tensors of several shapes and types; cotangents and inputs are equal on no two ranks."""
    n = comm.size
    generator = torch.Generator().manual_seed(17 * seed + comm.rank)
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

    module.launch = counted
    try:
        yield sizes
    finally:
        module.launch = launch


def real_sum(ys: Sequence[Tensor], gs: Sequence[Tensor]) -> Tensor:
    return sum(((g.conj() * y).real.sum().double() for y, g in zip(ys, gs, strict=True)), torch.zeros(()).double())


def derivatives(ys: Sequence[Tensor], xs: Sequence[Tensor], gs: Sequence[Tensor]) -> list[Tensor]:
    """First and second ones: of <y, g> + |y|^3, then of |dx|^2."""
    loss = real_sum(ys, gs) + sum((y.abs() ** 3).sum().double() for y in ys)
    first = torch.autograd.grad(loss, xs, create_graph=True)
    outer = sum((dx.abs() ** 2).sum().double() for dx in first)
    return [*first, *torch.autograd.grad(outer, xs)]  # type: ignore[arg-type]


def as_one_by_one(comm: Communicator) -> None:
    """Outputs and derivatives; one group forwards and one backwards."""
    for name, (function, options) in CALLS.items():
        given = drawn(comm, name)
        seed = 1 if options.get("grad") == "replicated" else comm.rank
        found: list[Any] = []
        for together in (False, True):
            xs = [x.clone().requires_grad_() for x in given]
            with groups() as sizes:
                ys = function(tuple(xs), comm, **options) if together else [function(x, comm, **options) for x in xs]
                launched = list(sizes)
                made = torch.Generator().manual_seed(seed)
                gs = [torch.randn(y.shape, generator=made, dtype=y.dtype) for y in ys]
                plain = torch.autograd.grad(ys, xs, gs, retain_graph=True)
                both = list(sizes)
            found.append([*ys, *plain, *derivatives(ys, xs, gs)])
            assert type(ys) is list and [y.dtype for y in ys] == [x.dtype for x in given]
        for alone, listed in zip(*found, strict=True):
            assert torch.equal(alone.detach(), listed.detach()), name
        assert not any(y._is_view() for y in ys)
        if name in GROUPED:
            assert launched == [4] and both == ([4] if options.get("grad") == "replicated" else [4, 4]), name
        else:
            assert not launched


@pytest.mark.parametrize("n", [2, 3])
def test_a_list_gives_what_its_tensors_give_one_by_one_in_one_group(ranks: RankPool, n: int) -> None:
    ranks.run(n, as_one_by_one)


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
    # Nothing needs a gradient on one rank, while the others' backward passes wait for it.
    xs = [torch.ones(2), torch.ones(3)] if r == 0 else [torch.ones(2, requires_grad=True), torch.ones(3)]
    gathered = ad.all_gather(xs, comm, grad="sum")
    (gathered[0] * 3).sum().backward()
    assert r == 0 or xs[0].grad.tolist() == [3.0 * n] * 2
    with torch.no_grad():
        assert not any(y.requires_grad for y in ad.all_gather(xs, comm, grad="sum"))


def test_unused_outputs_and_inputs_without_a_gradient_leave_no_rank_waiting(ranks: RankPool) -> None:
    ranks.run(3, parts_of_it)


def transformed(comm: Communicator) -> None:
    n = comm.size
    a, b = (
        torch.randn(3, n, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(s + comm.rank))
        for s in (0, 9)
    )

    def together(u: Tensor, v: Tensor) -> Tensor:
        y, z = ad.all_gather([u.sin(), v], comm, grad="sum")
        p, q = ad.reduce_scatter([y * z, y], comm)
        return (p * q).sum()

    def alone(u: Tensor, v: Tensor) -> Tensor:
        y, z = ad.all_gather(u.sin(), comm, grad="sum"), ad.all_gather(v, comm, grad="sum")
        p, q = ad.reduce_scatter(y * z, comm), ad.reduce_scatter(y, comm)
        return (p * q).sum()

    func = torch.func
    ways: list[Any] = [
        lambda f: func.jvp(f, (a, b), (b, a))[1],
        lambda f: func.jvp(lambda u: f(u, b), (a,), (b,))[1],  # one tensor of the list has no tangent
        lambda f: func.vmap(f, in_dims=(0, 2))(a, b.permute(1, 2, 0)),
        lambda f: torch.cat(func.vmap(func.grad(f, argnums=(0, 1)))(a, b)),
        lambda f: func.jvp(func.grad(f), (a, b), (b, a))[1],
    ]
    for way in ways:
        torch.testing.assert_close(way(together), way(alone), rtol=1e-12, atol=1e-12)
    torch._dynamo.reset()
    for f in (together, torch.compile(together, fullgraph=True, backend="aot_eager")):
        u, v = a.clone().requires_grad_(), b.clone().requires_grad_()
        f(u, v).backward()
        torch.testing.assert_close(u.grad, func.grad(alone)(a, b), rtol=1e-12, atol=1e-12)


def test_lists_under_forward_mode_vmap_and_compile(ranks: RankPool) -> None:
    ranks.run(2, transformed)


def edges(comm: Communicator) -> list[str]:
    """Nothing, one tensor, one rank, shapes only; what takes no lists; what is wrong in a list."""
    x = torch.ones(2, comm.size, requires_grad=True)
    with groups() as sizes:
        assert ad.all_reduce([], comm, grad="sum") == [] and sizes == []
        assert torch.equal(ad.all_reduce((x,), comm, grad="sum")[0], x * comm.size)
    alone = comm.split(comm.rank)
    assert alone is not None
    module = ad.nn.AllGather(alone, grad="sum")
    for y in ad.all_gather([x, x], alone, grad="sum") + module([x, x]):
        assert torch.equal(y, x) and y is not x
    assert module(x) is x and len(ad.nn.AllGather(comm, grad="sum")([x, x])) == 2
    alone.destroy()
    meta = ad.reduce_scatter([x.to("meta"), x.to("meta")], comm)
    assert [y.shape for y in meta] == [(1, comm.size)] * 2 and meta[0].is_meta
    messages = []
    wrong: list[Any] = [
        lambda: ad.start(ad.all_reduce, [x, x], comm, grad="sum"),
        lambda: ad.broadcast([x], comm, 0, grad="sum"),  # type: ignore[arg-type]
        lambda: ad.reduce_scatter([x, x[:1]], comm),
        lambda: ad.all_reduce([x, 3.0], comm, grad="sum"),  # type: ignore[list-item]
    ]
    for call in wrong:
        with pytest.raises((TypeError, ValueError)) as caught:
            call()
        messages.append(str(caught.value))
    comm.barrier()
    return messages


def test_lists_of_nothing_and_lists_that_are_wrong(ranks: RankPool) -> None:
    for start, broadcast, rows, number in ranks.run(2, edges):
        assert "all_reduce: x is a list" in start and "its tensors one by one" in start
        assert "broadcast: x is a list" in broadcast
        assert "has 1 rows, not divisible by 2 ranks" in rows and "(x is tensor 1 of 2 in the list)" in rows
        assert "all_reduce: x is a float" in number and "tensor 1 of 2" in number


def compared(comm: Communicator) -> str:
    """PYNCCL_CHECK=1: equal cotangents pass, others are named."""
    os.environ["PYNCCL_CHECK"] = "1"
    checked = comm.split(0)
    assert checked is not None
    xs = [torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)]
    torch.autograd.backward([y.sum() for y in ad.all_reduce(xs, checked, grad="replicated")])
    ys = ad.all_reduce(xs, checked, grad="replicated")
    with pytest.raises(Exception, match="the cotangents differ between ranks") as caught:
        (ys[1] * comm.rank).sum().backward()
    checked.destroy()
    return str(caught.value)


def test_cotangents_of_lists_are_compared_on_demand(ranks: RankPool) -> None:
    for text in ranks.run(2, compared):
        assert "all_reduce of 2 tensors" in text


def in_a_group(comm: Communicator) -> list[str]:
    """What a pynccl.group() around differentiable functions and around a backward pass says."""
    x = torch.ones(2, 2 * comm.size, requires_grad=True)
    y = ad.all_gather(x * 2, comm, 1, grad="sum").sum()
    calls = [
        lambda: ad.all_gather(x, comm, 1, grad="sum"),
        lambda: ad.all_reduce([x, x], comm, grad="sum"),
        lambda: ad.start(ad.all_reduce, x, comm, grad="sum"),
        y.backward,
    ]
    said = []
    for call in calls:
        with pytest.raises(pynccl.NcclInvalidUsage) as caught, pynccl.group():
            call()
        said.append(str(caught.value))
    with pynccl.group():
        part = ad.split(x, comm, dim=1)  # which sends nothing
    assert part.shape == (2, 2)
    assert ad.all_reduce(x, comm, grad="sum")[0, 0] == comm.size
    return said


def test_a_group_around_differentiable_functions_is_refused(ranks: RankPool) -> None:
    """Their results, or the rest of the backward pass, would be made of memory that nothing has come to yet."""
    for said in ranks.run(2, in_a_group):
        names = [text.partition(" within a pynccl.group()")[0] for text in said]
        assert names == ["all_gather", "all_reduce of 2 tensors", "all_reduce", "reduce_scatter"]
        assert all("ad.all_reduce([a, b], comm, ...)" in text and "a thread for each" in text for text in said)
