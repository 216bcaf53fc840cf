"""Passes that an exception ends while communication is under way: what comes after them has nothing of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import HOST, RankPool
from torch import Tensor, nn

import pynccl_autograd as ad
from pynccl import Communicator
from pynccl.comm.observing import Observer, observing
from pynccl_autograd.overlap.lanes import Lane

WIDTH = 8


@pytest.fixture(scope="module")
def slow() -> Iterator[RankPool]:
    """Ranks whose messages are under way for a while."""
    pool = RankPool({**HOST, "PYNCCL_HOST_LINK": "latency=10ms"})
    yield pool
    pool.close()


# ---------------------------------------------------------------------------------------------- DataParallelGradients


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))).double()


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(5, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + rank))


def break_off(model: nn.Sequential, x: Tensor) -> None:
    """A backward pass that raises before it comes to the first layer, when buckets of the others are under way."""

    def refuse(grad: Tensor) -> None:
        raise ArithmeticError("refused")

    y = model[0](x)
    y.register_hook(refuse)
    with pytest.raises(ArithmeticError, match="refused"):
        model[1:](y).square().sum().backward()


def break_off_whole(model: nn.Sequential, x: Tensor) -> None:
    """The same of a call of the model."""
    handle = model[0].register_full_backward_hook(_refuse)
    with pytest.raises(ArithmeticError, match="refused"):
        model(x).square().sum().backward()
    handle.remove()


def _refuse(*given: Any) -> None:
    raise ArithmeticError("refused")


RESETS: dict[str, Callable[[nn.Module, Any], object]] = {
    "its own": lambda model, averaged: averaged.zero_grad(),
    "to None": lambda model, averaged: model.zero_grad(),
    "to zeros": lambda model, averaged: model.zero_grad(set_to_none=False),
}


def after_a_broken_pass(comm: Communicator, options: dict[str, Any], reset: str) -> None:
    for called in (True, False):
        model, alone = model_of(), model_of()
        averaged = ad.DataParallelGradients(model, comm, 300, **options)
        for step in range(4):  # the first pass shows the order; the second breaks, and no_sync() follows the third
            RESETS[reset](model, averaged)
            if step in (1, 3):
                (break_off_whole if called else break_off)(model, batch(comm.rank, step))
                RESETS[reset](model, averaged)
            if step == 3:
                with averaged.no_sync():
                    model(batch(comm.rank, step)).square().sum().backward()
            run = model if called else model.forward
            run(batch(comm.rank, step)).square().sum().backward()
            alone.zero_grad()
            for rank in range(comm.size):
                (alone(batch(rank, step)).square().sum() * (2 if step == 3 else 1) / comm.size).backward()
            for (name, one), other in zip(model.named_parameters(), alone.parameters(), strict=True):
                assert one.grad is not None and other.grad is not None
                torch.testing.assert_close(one.grad, other.grad, msg=lambda text, at=(name, step): f"{at}: {text}")  # type: ignore[misc]
        averaged.remove()


@pytest.mark.parametrize(
    ("n", "reset", "options"),
    [
        (2, "its own", {"gradient_as_bucket_view": True, "reduce_dtype": torch.float64}),
        (2, "to None", {"gradient_as_bucket_view": False}),
        (3, "to zeros", {"gradient_as_bucket_view": True}),
        (2, "its own", {"gradient_as_bucket_view": False}),
        (2, "to None", {"gradient_as_bucket_view": True}),
    ],
)
def test_a_broken_pass_leaves_nothing_in_the_buckets(
    slow: RankPool, n: int, reset: str, options: dict[str, Any]
) -> None:
    slow.run(n, after_a_broken_pass, options, reset)


def finished(comm: Communicator, zeros: bool) -> None:
    """finish_gradients_in_backward of parameters whose gradients sequence parallelism leaves partial."""
    torch.manual_seed(0)
    norms = nn.Sequential(*(nn.LayerNorm(WIDTH) for _ in range(4))).double()
    alone = nn.Sequential(*(nn.LayerNorm(WIDTH) for _ in range(4))).double()
    for one in norms.parameters():
        one.shard = ad.Shard(comm, None, tuple(one.shape), partial=True)  # type: ignore[attr-defined]
    ad.finish_gradients_in_backward(norms)
    for step in range(3):
        break_off_whole(norms, batch(comm.rank, step).requires_grad_())
        norms.zero_grad(set_to_none=not zeros)
        norms(batch(comm.rank, step).requires_grad_()).square().sum().backward()
        alone.zero_grad()
        for rank in range(comm.size):
            alone(batch(rank, step)).square().sum().backward()
        for one, other in zip(norms.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.parametrize(("n", "zeros"), [(2, False), (3, True)])
def test_gradients_that_a_pass_finishes_are_right_after_a_broken_one(slow: RankPool, n: int, zeros: bool) -> None:
    slow.run(n, finished, zeros)


# ------------------------------------------------------------------------------------------- buffers of CommOverlap


class Refuses(Observer):
    """Raises once work of this name was launched."""

    def __init__(self, name: str) -> None:
        self.name = name

    def ran(self, lane: Lane, name: str, reads: Sequence[Any], writes: Sequence[Any], begin: Any, end: Any) -> None:
        if name == self.name:
            raise ValueError("refused")


SENDS = {"ring": "send_recv", "slices": "reduce_scatter", "exchange": "all_to_all"}


def made(comm: Communicator, kind: str, shape: tuple[int, int], dtype: torch.dtype) -> Any:
    helper = ad.CommOverlapHelper(comm)
    if kind == "ring":
        return ad.CommOverlapP2P(helper, shape, dtype)
    return ad.CommOverlap(helper, shape, dtype, num_splits=3, deterministic=kind == "exchange")


def closed_after_an_error(comm: Communicator, kind: str) -> None:
    rows = 1024 * comm.size
    x, w = torch.ones(rows, 64), torch.ones(256, 64)
    for again in (False, True, False):
        overlap = made(comm, kind, (rows, 256), torch.float32)
        with observing(Refuses(SENDS[kind])), pytest.raises(ValueError, match="refused"):
            overlap.matmul_reduce_scatter(x, w)
        if again:  # the next pass has none of it
            assert overlap.matmul_reduce_scatter(x, w).eq(64 * comm.size).all()
        overlap.close()
    comm.barrier()


def of_every_kind(comm: Communicator, check: Callable[[Communicator, str], None]) -> None:
    for kind in SENDS:
        check(comm, kind)


@pytest.mark.parametrize("n", [2, 3])
def test_close_waits_for_what_an_error_left_under_way(slow: RankPool, n: int) -> None:
    slow.run(n, of_every_kind, closed_after_an_error)


def travels_wider(comm: Communicator, kind: str) -> None:
    """bfloat16 that is summed in float32, in buffers of its shape in float32."""
    rows, width, hidden = 4 * comm.size, 6 * comm.size, 24
    generator = torch.Generator().manual_seed(1)
    x, w = (torch.randn(shape, generator=generator).bfloat16() for shape in ((rows, width), (hidden, width)))
    expected = F.linear(x.float(), w.float())
    part = x.chunk(comm.size, 1)[comm.rank], w.chunk(comm.size, 1)[comm.rank]
    with made(comm, kind, (rows, hidden), torch.float32) as overlap:
        scattered = overlap.matmul_reduce_scatter(*part, reduce_dtype=torch.float32)
        summed = overlap.matmul_all_reduce(*part, reduce_dtype=torch.float32)
        own = x.chunk(comm.size)[comm.rank].clone().requires_grad_()
        mine = w.chunk(comm.size)[comm.rank]
        overlap.all_gather_matmul(own, mine, reduce_dtype=torch.float32).sum().backward()
        for found, wanted in (
            (scattered, expected.chunk(comm.size)[comm.rank]),
            (summed, expected),
            (own.grad, w.float().sum(0).expand(rows // comm.size, width)),
        ):
            torch.testing.assert_close(found.float(), wanted, rtol=2e-2, atol=6e-2)


def test_sums_that_travel_wider_fit(ranks: RankPool) -> None:
    ranks.run(3, of_every_kind, travels_wider)


def as_it_was_made(comm: Communicator, kind: str) -> None:
    """Every function with the shape that the object was made with, whose rows no number of splits divides."""
    for rows in (9 * comm.size, comm.size, 7 * comm.size):
        x, w = torch.ones(rows, 16, dtype=torch.float64), torch.ones(16, 16, dtype=torch.float64)
        with made(comm, kind, (rows, 16), torch.float64) as overlap:
            own = x[: rows // comm.size].clone().requires_grad_()
            overlap.all_gather_matmul(own, w).sum().backward()
            assert own.grad is not None and own.grad.eq(16 * comm.size).all()
            assert overlap.matmul_all_reduce(x, w).eq(16 * comm.size).all()
            mine = x.clone().requires_grad_()
            y = overlap.matmul_reduce_scatter(mine, w)
            y.sum().backward()
            assert y.eq(16 * comm.size).all() and mine.grad is not None and mine.grad.eq(16).all()


@pytest.mark.parametrize("n", [2, 3])
def test_buffers_hold_the_shape_that_they_were_made_for(ranks: RankPool, n: int) -> None:
    ranks.run(n, of_every_kind, as_it_was_made)
