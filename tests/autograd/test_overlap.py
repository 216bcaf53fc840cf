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

SEQUENCE, BATCH, WIDTH, HIDDEN = 24, 2, 96, 144  # SEQUENCE is divisible by 2, 3 and 4, the rows not by all chunks
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
        draw(SEQUENCE, BATCH, WIDTH), draw(HIDDEN, WIDTH) / 10, draw(HIDDEN),
        draw(SEQUENCE, BATCH, HIDDEN),
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
def test_every_way_equals_the_unsharded_layer(ranks: RankPool, n: int) -> None:
    ranks.run(n, check_all, WAYS, torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_types_of_training(ranks: RankPool, dtype: torch.dtype) -> None:
    ranks.run(3, check_all, WAYS[1:2] + WAYS[5:6] + WAYS[9:11], dtype)


def check_all(comm: Communicator, ways: tuple[OverlapConfig, ...], dtype: torch.dtype) -> None:
    for name in CASES:
        check_ways(comm, name, ways, dtype)


def check_bits(comm: Communicator, dtype: torch.dtype) -> None:
    """Cut and uncut gathers, and sums in the order of the ranks, have the same bits. Slices have 64 rows and more:
    there BLAS gives a row of a product the same bits, however many others there are."""
    torch.manual_seed(comm.rank)
    x, own = torch.randn(256, 96).to(dtype), torch.randn(comm.size * 192, 96).to(dtype)
    parts = torch.randn(128, 96).to(dtype)
    torch.manual_seed(7)
    w, bias = torch.randn(128, 96).to(dtype), torch.randn(128).to(dtype)
    whole = comm.all_gather(x, x.new_empty(comm.size * 256, 96))
    for way in (*(OverlapConfig("slices", chunks=k) for k in (1, 3, 4)), OverlapConfig("ring"), OverlapConfig("bulk")):
        y, gathered = ad.all_gather_matmul(x, w, comm, bias, overlap=way, return_gathered=True)
        assert torch.equal(gathered, whole), way
        assert torch.equal(y, F.linear(whole, w, bias)), way
    products = comm.all_gather(F.linear(own, parts), own.new_empty(comm.size, comm.size * 192, 128))
    total = products[0].to(torch.promote_types(dtype, torch.float32))
    for other in products[1:]:
        total = total + other
    for name, config in itertools.product(
        ("matmul_reduce_scatter", "matmul_all_reduce"),
        (*(OverlapConfig("exchange", chunks=k, deterministic=True) for k in (1, 3)), OverlapConfig(deterministic=True)),
    ):
        y = CASES[name].function(own, parts, comm, overlap=config)
        assert torch.equal(y, part(total.to(dtype), CASES[name].y_dim, comm)), (name, config)


@pytest.mark.parametrize(("n", "dtype"), [(2, torch.bfloat16), (3, torch.float32)])
def test_what_is_cut_and_what_is_deterministic_has_the_same_bits(ranks: RankPool, n: int, dtype: torch.dtype) -> None:
    ranks.run(n, check_bits, dtype)


def gathered_too(comm: Communicator) -> None:
    """What was gathered has a gradient of its own, and may be changed in place as the output may."""
    torch.manual_seed(comm.rank)
    x = torch.randn(12, 8, dtype=torch.float64)
    torch.manual_seed(1)
    w = torch.randn(6, 8, dtype=torch.float64)
    found = []
    for way in ("off", OverlapConfig("slices", chunks=3), OverlapConfig("ring", save_gathered=False)):
        leaves = [t.clone().requires_grad_() for t in (x, w)]
        y, whole = ad.all_gather_matmul(*leaves, comm, overlap=way, return_gathered=True)  # type: ignore[arg-type]
        only_whole = torch.autograd.grad((whole**3).sum(), leaves[0], retain_graph=True)[0]
        ((y**2).sum() + (whole**3).sum()).backward()
        found.append((y.detach().clone().relu_(), whole.detach().mul_(2), only_whole, *(leaf.grad for leaf in leaves)))
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_what_was_gathered_can_be_had_and_derived(ranks: RankPool) -> None:
    ranks.run(3, gathered_too)


def accumulated(comm: Communicator) -> None:
    """main_grad gets what a backward pass was asked for, and nothing else; weight.grad stays empty."""
    for name, overlap in itertools.product(CASES, ("off", OverlapConfig("slices", chunks=3), OverlapConfig("ring"))):
        case = CASES[name]
        x, w, _, g = whole_tensors(torch.bfloat16)
        own = part(w, case.w_dim, comm).clone().requires_grad_()
        start = torch.randn(own.shape, generator=torch.Generator().manual_seed(1))
        own.main_grad = start.clone()  # type: ignore[attr-defined]
        mine = part(x, case.x_dim, comm).clone().requires_grad_()
        cotangent = part(g, case.y_dim, comm)

        def call(case: Case = case, overlap: Any = overlap, mine: Tensor = mine, own: Tensor = own) -> Tensor:
            y: Tensor = case.function(mine, own, comm, overlap=overlap, grad_accumulation_fusion=True)
            return y

        torch.autograd.grad(call(), mine, cotangent)
        call().backward(cotangent, inputs=[mine])
        assert torch.equal(own.main_grad, start), (name, overlap)  # type: ignore[attr-defined]
        for _ in range(2):
            call().backward(cotangent)
        assert own.grad is None
        expected = start.double() + 2 * part(reference(torch.bfloat16)["w"], case.w_dim, comm)
        torch.testing.assert_close(own.main_grad.double(), expected, rtol=2e-2, atol=0.3)  # type: ignore[attr-defined]
        own.grad_added_to_main_grad = False  # type: ignore[attr-defined]
        hooked: list[Tensor] = []
        own.register_post_accumulate_grad_hook(hooked.append)  # type: ignore[arg-type]
        call().backward(cotangent)
        assert own.grad_added_to_main_grad and hooked and not own.grad.any()  # type: ignore[attr-defined, union-attr]


def test_weight_gradients_are_added_where_the_optimizer_wants_them(ranks: RankPool) -> None:
    ranks.run(2, accumulated)
