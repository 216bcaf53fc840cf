"""Overlapped matmuls against torch alone on the unsharded tensors: every way, forwards and backwards."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from ranks import RankPool, each_size
from torch import Tensor

import pynccl_autograd as ad
from pynccl import Communicator
from pynccl_autograd import OverlapConfig

SEQUENCE, BATCH, WIDTH, HIDDEN = 24, 2, 20, 36  # SEQUENCE is divisible by 2, 3 and 4, the rows not by all chunks
WAYS = (
    OverlapConfig("slices", chunks=1),
    OverlapConfig("slices", chunks=3),
    OverlapConfig("slices", chunks=5),
    OverlapConfig("slices", chunks=100),
    OverlapConfig("slices", chunks=4, save_gathered=False),
    OverlapConfig("ring"),
    OverlapConfig("ring", aggregate=True),
    OverlapConfig("ring", save_gathered=False),
    OverlapConfig("exchange", chunks=1),
    OverlapConfig("exchange", chunks=5),
    OverlapConfig("bulk"),
    OverlapConfig("bulk", save_gathered=False),
    OverlapConfig("slices", chunks=2, dgrad=OverlapConfig("off")),
    OverlapConfig("off", dgrad=OverlapConfig("slices", chunks=2)),
)
TOLERANCE = {
    torch.float64: {"rtol": 1e-10, "atol": 1e-10},
    torch.float32: {"rtol": 1e-4, "atol": 1e-4},
    torch.bfloat16: {"rtol": 3e-2, "atol": 6e-2},
    torch.float16: {"rtol": 5e-3, "atol": 1e-2},
}


class Case(NamedTuple):
    """A pattern on this rank, and the same of torch on the whole: both of (x, w, bias), this rank's and the whole.

    x_dim, w_dim, y_dim, bias_dim  dimensions that are cut over the ranks; None: equal on all
    summed                         whether each rank's loss is a part of the loss"""

    function: Any
    x_dim: int | None
    w_dim: int
    y_dim: int | None
    bias_dim: int | None


CASES = {
    "all_gather_matmul": Case(ad.all_gather_matmul, 0, 0, 2, 0),
    "matmul_reduce_scatter": Case(ad.matmul_reduce_scatter, 2, 1, 0, None),
    "matmul_all_reduce": Case(ad.matmul_all_reduce, 2, 1, None, None),
    "copy_matmul": Case(ad.copy_matmul, None, 0, 2, 0),
}


def part(t: Tensor, dim: int | None, comm: Communicator) -> Tensor:
    return t if dim is None else t.chunk(comm.size, dim)[comm.rank]


def whole_tensors(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, w, bias and the cotangent of y: equal on all ranks."""
    generator = torch.Generator().manual_seed(5)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    return (
        draw(SEQUENCE, BATCH, WIDTH * 12), draw(HIDDEN * 12, WIDTH * 12) / 16, draw(HIDDEN * 12),
        draw(SEQUENCE, BATCH, HIDDEN * 12),
    )  # fmt: skip


def reference(dtype: torch.dtype) -> dict[str, Tensor]:
    """What torch makes of the whole, in float64 of the rounded inputs."""
    x, w, bias, g = (t.double() for t in whole_tensors(dtype))
    leaves = [t.requires_grad_() for t in (x, w, bias)]
    y = F.linear(*leaves)
    y.backward(g)
    return {"y": y.detach(), "x": x.grad, "w": w.grad, "bias": bias.grad}  # type: ignore[dict-item]


def check_ways(comm: Communicator, name: str, ways: tuple[OverlapConfig, ...], dtype: torch.dtype, **more: Any) -> None:
    case, expected = CASES[name], reference(dtype)
    x, w, bias, g = whole_tensors(dtype)
    for way, with_bias in itertools.product(ways, (False, True)):
        own = [part(x, case.x_dim, comm), part(w, case.w_dim, comm), part(bias, case.bias_dim, comm)]
        own = [t.clone().requires_grad_() for t in own]
        y = case.function(own[0], own[1], comm, own[2] if with_bias else None, overlap=way, **more)
        y.backward(part(g, case.y_dim, comm))

        def close(found: Tensor | None, wanted: Tensor, what: str, way: OverlapConfig = way) -> None:
            assert found is not None and found.dtype is dtype, what
            torch.testing.assert_close(
                found.double(), wanted, **TOLERANCE[dtype], msg=lambda text: f"{what} of {name} by {way}: {text}"
            )

        y_bias = bias.double() if not with_bias else 0
        close(y, part(expected["y"] - y_bias, case.y_dim, comm), "y")
        close(own[0].grad, part(expected["x"], case.x_dim, comm), "dx")
        close(own[1].grad, part(expected["w"], case.w_dim, comm), "dw")
        if with_bias:
            close(own[2].grad, part(expected["bias"], case.bias_dim, comm), "dbias")


@each_size
@pytest.mark.parametrize("name", CASES)
def test_every_way_equals_the_unsharded_layer(ranks: RankPool, n: int, name: str) -> None:
    ranks.run(n, check_ways, name, WAYS, torch.float64)
