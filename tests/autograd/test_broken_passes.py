"""Backward passes that raise while communication is in flight do not affect the passes after them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from ranks import HOST, RankPool
from torch import Tensor, nn

import pynccl_autograd as ad
from pynccl import Communicator

WIDTH = 8


@pytest.fixture(scope="module")
def slow_ranks() -> Iterator[RankPool]:
    """Ranks whose messages take 10 ms."""
    pool = RankPool({**HOST, "PYNCCL_HOST_LINK": "latency=10ms"})
    yield pool
    pool.close()


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))).double()


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(5, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + rank))


def interrupt_backward(model: nn.Sequential, x: Tensor) -> None:
    """Raise in a backward pass before its first layer, while buckets of the other layers are in flight."""

    def raise_arithmetic_error(grad: Tensor) -> None:
        raise ArithmeticError("refused")

    y = model[0](x)
    y.register_hook(raise_arithmetic_error)
    with pytest.raises(ArithmeticError, match="refused"):
        model[1:](y).square().sum().backward()


def interrupt_model_backward(model: nn.Sequential, x: Tensor) -> None:
    """The same, when the model itself is called."""
    handle = model[0].register_full_backward_hook(_raise_arithmetic_error)
    with pytest.raises(ArithmeticError, match="refused"):
        model(x).square().sum().backward()
    handle.remove()


def _raise_arithmetic_error(*args: Any) -> None:
    raise ArithmeticError("refused")


RESETS: dict[str, Callable[[nn.Module, Any], object]] = {
    "its own": lambda model, averaged: averaged.zero_grad(),
    "to None": lambda model, averaged: model.zero_grad(),
    "to zeros": lambda model, averaged: model.zero_grad(set_to_none=False),
}


def after_a_broken_pass(comm: Communicator, options: dict[str, Any], reset: str) -> None:
    for called in (True, False):
        model, expected = make_model(), make_model()
        averaged = ad.DataParallelGradients(model, comm, 300, **options)
        for step in range(4):  # the first pass shows the order; the second breaks, and no_sync() follows the third
            RESETS[reset](model, averaged)
            if step in (1, 3):
                (interrupt_model_backward if called else interrupt_backward)(model, batch(comm.rank, step))
                RESETS[reset](model, averaged)
            if step == 3:
                with averaged.no_sync():
                    model(batch(comm.rank, step)).square().sum().backward()
            run = model if called else model.forward
            run(batch(comm.rank, step)).square().sum().backward()
            expected.zero_grad()
            for rank in range(comm.size):
                (expected(batch(rank, step)).square().sum() * (2 if step == 3 else 1) / comm.size).backward()
            for (name, p), q in zip(model.named_parameters(), expected.parameters(), strict=True):
                assert p.grad is not None and q.grad is not None
                torch.testing.assert_close(p.grad, q.grad, msg=lambda text, at=(name, step): f"{at}: {text}")  # type: ignore[misc]
        averaged.remove()


@pytest.mark.parametrize(
    ("n", "reset", "options"),
    [
        (2, "its own", {"gradient_as_bucket_view": True, "reduce_dtype": torch.float64}),
        (2, "to None", {"gradient_as_bucket_view": False}),
        (3, "to zeros", {"gradient_as_bucket_view": True}),
    ],
)
def test_an_interrupted_pass_leaves_no_gradients_in_the_buckets(
    slow_ranks: RankPool, n: int, reset: str, options: dict[str, Any]
) -> None:
    slow_ranks.run(n, after_a_broken_pass, options, reset)
