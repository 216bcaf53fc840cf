"""start and wait: the same results and gradients as the synchronous functions, in the order that overlap needs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import RankPool, each_size
from semantics import OPERATIONS, Case, tensors
from torch import Tensor
from torch.autograd import forward_ad

import pynccl_autograd as ad
from pynccl import Communicator

CALLS: dict[str, Any] = {
    "all_reduce sum": (ad.all_reduce, {"grad": "sum"}),
    "all_reduce avg": (ad.all_reduce, {"op": "avg", "grad": "replicated"}),
    "all_reduce premul": (ad.all_reduce, {"op": ad.PreMul(0.5), "grad": "sum"}),
    "copy": (ad.copy, {}),
    "reduce_scatter avg": (ad.reduce_scatter, {"dim": 1, "op": "avg"}),
    "all_gather": (ad.all_gather, {"dim": 2, "grad": "sum"}),
    "split": (ad.split, {"dim": 1}),
    "broadcast": (ad.broadcast, {"root": 1, "grad": "sum"}),
    "reduce": (ad.reduce, {"root": 1}),
    "scatter": (ad.scatter, {"root": 1, "dim": 1}),
    "gather": (ad.gather, {"root": 0, "dim": 1}),
    "all_to_all": (ad.all_to_all, {"split_dim": 1, "concat_dim": 0}),
    "permute": (ad.permute, {"edges": [(0, 1), (1, 0), (0, 0)]}),
    "halo_exchange": (ad.halo_exchange, {"dim": 2, "halo": 1}),
}


def same_as_synchronous(comm: Communicator) -> list[str]:
    """Output, first and second derivatives, bit by bit."""
    for name, (operation, options) in CALLS.items():
        x = torch.randn(3, 12, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(comm.rank))
        found = []
        for asynchronous in (False, True):
            leaf = x.clone().requires_grad_()
            if asynchronous:
                handle = ad.start(operation, leaf * 2, comm, **options)
                y = handle.wait()
                assert handle.wait() is y
            else:
                y = operation(leaf * 2, comm, **options)
            (dx,) = torch.autograd.grad((y**3).sum(), leaf, create_graph=True)
            (ddx,) = torch.autograd.grad((dx**2).sum(), leaf)
            found.append((y.detach(), dx.detach(), ddx))
        for kind, now, later in zip(("output", "gradient", "second derivative"), *found, strict=True):
            assert torch.equal(now, later), f"{name}, {kind}"
    return list(CALLS)


@each_size
def test_results_and_derivatives_of_any_order_equal_the_synchronous_ones(ranks: RankPool, n: int) -> None:
    assert ranks.run(n, same_as_synchronous) == [list(CALLS)] * n


class Recorded(torch.autograd.Function):
    """The identity; notes in a list when its backward runs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, log: list[str], name: str) -> Tensor:
        ctx.log, ctx.name = log, name
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        ctx.log.append(ctx.name)
        return g, None, None


def order_of_backward(comm: Communicator) -> list[str]:
    """What runs while the adjoint is under way: the work between start and wait, backwards."""
    from pynccl_autograd import work

    log: list[str] = []
    launch, result = work._Pending.launch, work._Pending.result

    def logged_launch(pending: Any, x: Tensor) -> None:
        log.append(f"launch {pending.function.name}")
        launch(pending, x)

    def logged_result(pending: Any) -> Tensor:
        log.append(f"result {pending.function.name}")
        return result(pending)

    work._Pending.launch, work._Pending.result = logged_launch, logged_result  # type: ignore
    try:
        x = torch.randn(2, 3, requires_grad=True)
        handle = ad.start(ad.all_gather, x, comm, grad="sum")
        between = Recorded.apply(x * 2, log, "between")
        y = handle.wait()
        (y.sum() + between.sum()).backward()
    finally:
        work._Pending.launch, work._Pending.result = launch, result  # type: ignore
    assert x.grad is not None and torch.equal(x.grad, torch.full_like(x, comm.size + 2.0))
    return log


def test_the_adjoint_starts_before_the_backward_of_the_work_between_and_is_waited_for_after_it(ranks: RankPool) -> None:
    assert (
        ranks.run(2, order_of_backward)
        == [
            [
                "launch all_gather",
                "result all_gather",
                "launch reduce_scatter",
                "between",
                "result reduce_scatter",
            ]
        ]
        * 2
    )


def several_under_way(comm: Communicator) -> None:
    """Waited for in another order than started, with synchronous calls in between; retained graphs run twice."""
    xs = [torch.full((4,), float(comm.rank + i), dtype=torch.float64, requires_grad=True) for i in range(4)]
    handles = [ad.start(ad.all_reduce, x, comm, grad="sum") for x in xs]
    between = ad.all_reduce(xs[0], comm, grad="sum")
    ys = [handle.wait() for handle in reversed(handles)][::-1]
    ranks = sum(range(comm.size))
    for i, y in enumerate(ys):
        assert y.tolist() == [float(ranks + comm.size * i)] * 4
    loss = (torch.stack(ys) * torch.arange(1, 5).double()[:, None]).sum() + between.sum()
    for times in (1, 2):
        loss.backward(retain_graph=True)
        expected = [comm.size * (i + 1.0 + (i == 0)) * times for i in range(4)]
        assert [x.grad.tolist()[0] for x in xs] == expected


@each_size
def test_several_may_be_under_way_and_waited_for_in_any_order(ranks: RankPool, n: int) -> None:
    ranks.run(n, several_under_way)


def one_side_needs_a_gradient(comm: Communicator) -> float:
    x = torch.ones(2, requires_grad=comm.rank == 0)
    y = ad.start(ad.all_reduce, x, comm, grad="sum").wait()
    y.sum().backward()
    return float(x.grad.sum()) if x.grad is not None else 0.0


def test_every_rank_enters_the_backward_whatever_needs_a_gradient_there(ranks: RankPool) -> None:
    assert ranks.run(3, one_side_needs_a_gradient) == [6.0, 0.0, 0.0]


def never_waited_for(comm: Communicator) -> list[float]:
    handle = ad.start(ad.all_reduce, torch.ones(3), comm, grad="sum")
    del handle
    return ad.all_reduce(torch.ones(1), comm, grad="sum").tolist()


def test_a_handle_may_be_dropped(ranks: RankPool) -> None:
    assert ranks.run(2, never_waited_for) == [[2.0]] * 2


def unsupported(comm: Communicator) -> list[str]:
    x = torch.ones(2)
    messages = []
    for error, call in (
        (NotImplementedError, lambda: ad.start(ad.all_reduce, x, comm, "max", grad="sum")),
        (TypeError, lambda: ad.start(torch.sum, x)),
    ):
        with pytest.raises(error) as caught:
            call()
        messages.append(str(caught.value))
    comm.barrier()  # nothing was launched
    return messages


def test_what_cannot_run_asynchronously_raises(ranks: RankPool) -> None:
    for extremum, no_collective in ranks.run(2, unsupported):
        assert "ad.all_reduce" in extremum and "max" in extremum
        assert "no collective of pynccl_autograd" in no_collective


def within_levels(comm: Communicator) -> list[list[float]]:
    x = torch.full((2,), comm.rank + 1.0)

    def started(t: Tensor) -> Tensor:
        return ad.start(ad.all_reduce, t * t, comm, grad="sum").wait()

    with forward_ad.dual_level():
        change = forward_ad.unpack_dual(started(forward_ad.make_dual(x, x))).tangent
    return [
        torch.func.jvp(started, (x,), (x,))[1].tolist(),
        change.tolist(),
        torch.func.grad(lambda t: started(t).sum())(x).tolist(),
        torch.func.vmap(started)(x).tolist(),
    ]


def test_within_forward_mode_and_torch_func_it_is_done_at_once(ranks: RankPool) -> None:
    for rank, (jvp, dual, grad, vmap) in enumerate(ranks.run(2, within_levels)):
        assert jvp == dual == [2.0 * (1 + 4)] * 2
        assert grad == [2.0 * 2 * (rank + 1)] * 2
        assert vmap == [1.0 + 4] * 2


def one_rank(comm: Communicator) -> None:
    alone = comm.split(comm.rank)
    x = torch.ones(3, requires_grad=True)
    y = ad.start(ad.all_reduce, x, alone, grad="sum").wait()
    y.sum().backward()
    assert x.grad.tolist() == [1.0] * 3 and y.data_ptr() != x.data_ptr()
    alone.destroy()


def test_one_rank(ranks: RankPool) -> None:
    ranks.run(2, one_rank)


def uneven(comm: Communicator) -> None:
    case = Case(comm.size, uneven=True)
    operation = OPERATIONS["all_gather"]
    xs = tensors(operation, case, 1)
    y = ad.start(ad.all_gather, xs[comm.rank], comm, grad="sum", splits=case.splits()).wait()
    assert torch.equal(y.detach(), torch.cat(xs))


def test_uneven_splits(ranks: RankPool) -> None:
    ranks.run(3, uneven)


def wrong_input(comm: Communicator) -> str:
    with pytest.raises(ValueError) as caught:
        ad.start(ad.reduce_scatter, torch.ones(2 * comm.size + 1), comm)
    return str(caught.value)


def test_errors_come_from_start(ranks: RankPool) -> None:
    for text in ranks.run(2, wrong_input):
        assert "not divisible by 2 ranks" in text
