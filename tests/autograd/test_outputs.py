"""Every output is a tensor of its own: no view, no memory of the input, to be changed in place as any other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import RankPool
from semantics import OPERATIONS, Case, start, tensors
from torch import Tensor

import pynccl_autograd as ad
from pynccl import Communicator

Map = Callable[[Tensor], Tensor]


def expect_own(y: Tensor, x: Tensor, what: str) -> None:
    assert not y._is_view(), f"{what}: the output is a view"
    assert y is not x, f"{what}: the output is the input"
    if y.numel() and x.numel():
        assert y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr(), f"{what}: one memory"


def gradient_after_change(call: Map, given: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """The gradient of a loss of the output that `change` was made of, beside x unchanged."""
    x = given.clone().requires_grad_()
    y = change(call(x * 1.0))
    loss = (y * y.conj()).real.sum() if y.is_complex() else (y * y).sum()
    (dx,) = torch.autograd.grad(loss, x)
    assert torch.equal(x.detach(), given)
    return dx


def check_ways(call: Map, given: Tensor, what: str, saves_output: bool = False) -> None:
    """Plain, under no_grad and in inference mode: own memory; in place as out of place; the input as it was."""
    expect_own(call(given.clone().requires_grad_()), given, what)
    if saves_output:  # as torch.amax, whose derivative needs the result
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            gradient_after_change(call, given, lambda y: y.mul_(2))
        gradient_after_change(call, given, lambda y: y * 2)  # the collectives of a backward pass, on every rank
    else:
        in_place = gradient_after_change(call, given, lambda y: y.mul_(2).add_(1))
        assert torch.equal(in_place, gradient_after_change(call, given, lambda y: y * 2 + 1)), f"{what}: gradient"
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            x = given.clone()
            y = call(x)
            expect_own(y, x, f"{what}, {mode.__name__}")
            y.add_(1)
            assert torch.equal(x, given), f"{what}, {mode.__name__}: the input has changed"
    y = call(given)  # nothing needs a gradient
    expect_own(y, given, f"{what}, without a gradient")
    y.add_(torch.ones_like(y, requires_grad=True))


def outputs(comm: Communicator) -> None:
    for name in OPERATIONS:
        outputs_of(comm, name)


def outputs_of(comm: Communicator, name: str) -> None:
    operation = OPERATIONS[name]
    saves_output = name.split()[-1] in ("max", "min", "prod")
    for dtype in (torch.float64, torch.complex128):
        if dtype.is_complex and "complex" in operation.cannot:
            continue
        for dim in (0,) if "any dim" in operation.cannot else (0, 2):
            case = Case(comm.size, dim)
            x = tensors(operation, case, 1, dtype)[comm.rank]
            what = f"{name}, dim {dim}, {dtype}"
            check_ways(lambda t: operation.call(t, comm, case), x, what, saves_output)  # noqa: B023
            if not saves_output:
                check_ways(lambda t: start(operation, t, comm, case).wait(), x, f"{what}, started")  # noqa: B023
            transformed(lambda t: operation.call(t, comm, case), x, what, saves_output)  # noqa: B023


def transformed(call: Map, given: Tensor, what: str, saves_output: bool) -> None:
    """Changed in place within torch.func's transforms, and what comes out of them."""

    def loss(x: Tensor, in_place: bool) -> Tensor:
        y = call(x)
        y = y.mul_(2) if in_place else y * 2
        return (y * y.conj()).real.sum() if y.is_complex() else (y * y).sum()

    func = torch.func
    batched = func.vmap(lambda t: call(t).mul_(2))(torch.stack([given, given]))
    assert torch.equal(batched[1], call(given) * 2), f"{what}: vmap"
    batched.add_(1)
    if not saves_output:
        found = func.grad(lambda t: loss(t, True))(given)
        assert torch.equal(found, func.grad(lambda t: loss(t, False))(given)), f"{what}: grad"


def test_an_output_is_its_own_and_may_be_changed_in_place(ranks: RankPool) -> None:
    ranks.run(2, outputs)


def on_one_rank(comm: Communicator) -> None:
    alone = comm.split(comm.rank)
    assert alone is not None
    for name, operation in OPERATIONS.items():
        if name != "permute":  # whose edges are of two ranks at least
            x = tensors(operation, Case(1), 1)[0]
            check_ways(lambda t: operation.call(t, alone, Case(1)), x, f"{name}, one rank")  # noqa: B023
    check_ways(lambda t: ad.permute(t, alone, [(0, 0)]), torch.ones(3), "permute, one rank")
    alone.destroy()


def test_outputs_on_one_rank_may_be_changed_in_place(ranks: RankPool) -> None:
    ranks.run(2, on_one_rank)


def between_partitions(comm: Communicator) -> None:
    first, both = ad.Partition(comm, [0]), ad.Partition(comm, [0, 1])
    alone = comm.split(comm.rank)
    one = ad.Partition(alone, [0])
    modules: list[tuple[Any, ad.Partition]] = [
        (ad.partition.Broadcast(first, both), first),
        (ad.SumReduce(both, first), both),
        (ad.Repartition(both, first), both),
        (ad.AllSumReduce(both, 0), both),
        (ad.AllSumReduce(first, ()), first),
    ]
    for P_x, P_y in ((both, both), (one, one)):  # to itself
        modules += [(layer(P_x, P_y), P_x) for layer in (ad.partition.Broadcast, ad.SumReduce, ad.Repartition)]
    for module, P_x in modules:
        x = torch.arange(4.0) if P_x.active else ad.zero_volume_tensor()
        check_ways(module, x, repr(module))
    copied = torch.ones(2)
    with torch.no_grad():
        ad.copy(copied, comm).add_(1)
    assert copied.tolist() == [1.0, 1.0]
    alone.destroy()


def test_what_arrives_from_another_partition_may_be_changed_in_place(ranks: RankPool) -> None:
    ranks.run(2, between_partitions)


def after_inference(comm: Communicator) -> None:
    """The same buffers in inference mode and then outside of it, where the host library may remember the call."""
    for count in (4, 1 << 16):
        x, y = torch.ones(count * comm.size), torch.zeros(count * comm.size)
        part = torch.zeros(count)
        with torch.inference_mode():
            comm.all_reduce(x, y)
            comm.reduce_scatter(x, part)
        for _ in range(2):
            comm.all_reduce(x, y)
            comm.reduce_scatter(x, part)
            assert y.unique().tolist() == part.unique().tolist() == [float(comm.size)]


def test_a_call_in_inference_mode_leaves_later_ones_alone(ranks: RankPool) -> None:
    ranks.run(2, after_inference)
