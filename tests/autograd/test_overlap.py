"""Overlapped matmuls compared with torch on the unsharded tensors: every schedule, forward and backward."""

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
CONFIGS = (
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
    """An overlapped function and how its tensors are sharded.

    x_dim, w_dim, y_dim, bias_dim  sharded dimensions; None: replicated"""

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


def shard(t: Tensor, dim: int | None, comm: Communicator) -> Tensor:
    return t if dim is None else t.chunk(comm.size, dim)[comm.rank]


def full_tensors(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return x, w, bias and the cotangent of y, equal on all ranks."""
    generator = torch.Generator().manual_seed(5)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    return (
        draw(SEQUENCE, BATCH, WIDTH), draw(HIDDEN, WIDTH) / 10, draw(HIDDEN),
        draw(SEQUENCE, BATCH, HIDDEN),
    )  # fmt: skip


def reference(dtype: torch.dtype) -> dict[str, Tensor]:
    """Compute outputs and gradients with torch on the unsharded tensors, in float64 from the rounded inputs."""
    x, w, bias, g = (t.double() for t in full_tensors(dtype))
    leaves = [t.requires_grad_() for t in (x, w, bias)]
    y = F.linear(*leaves)
    y.backward(g)
    return {"y": y.detach(), "x": x.grad, "w": w.grad, "bias": bias.grad}  # type: ignore[dict-item]


def check_configs(
    comm: Communicator, name: str, configs: tuple[OverlapConfig, ...], dtype: torch.dtype, **more: Any
) -> None:
    case, expected = CASES[name], reference(dtype)
    x, w, bias, g = full_tensors(dtype)
    for config, with_bias in itertools.product(configs, (False, True)):
        own = [shard(x, case.x_dim, comm), shard(w, case.w_dim, comm), shard(bias, case.bias_dim, comm)]
        own = [t.clone().requires_grad_() for t in own]
        y = case.function(own[0], own[1], comm, own[2] if with_bias else None, overlap=config, **more)
        y.backward(shard(g, case.y_dim, comm))

        def close(found: Tensor | None, value: Tensor, what: str, config: OverlapConfig = config) -> None:
            assert found is not None and found.dtype is dtype, what
            torch.testing.assert_close(
                found.double(), value, **TOLERANCE[dtype], msg=lambda text: f"{what} of {name} by {config}: {text}"
            )

        y_bias = bias.double() if not with_bias else 0
        close(y, shard(expected["y"] - y_bias, case.y_dim, comm), "y")
        close(own[0].grad, shard(expected["x"], case.x_dim, comm), "dx")
        close(own[1].grad, shard(expected["w"], case.w_dim, comm), "dw")
        if with_bias:
            close(own[2].grad, shard(expected["bias"], case.bias_dim, comm), "dbias")


@each_size
def test_every_schedule_equals_the_unsharded_layer(ranks: RankPool, n: int) -> None:
    ranks.run(n, check_all, CONFIGS, torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_training_dtypes(ranks: RankPool, dtype: torch.dtype) -> None:
    ranks.run(3, check_all, CONFIGS[1:2] + CONFIGS[5:6] + CONFIGS[9:11], dtype)


def check_all(comm: Communicator, configs: tuple[OverlapConfig, ...], dtype: torch.dtype) -> None:
    for name in CASES:
        check_configs(comm, name, configs, dtype)


def check_bits(comm: Communicator, dtype: torch.dtype) -> None:
    """Compare bits of gathers in slices and in one piece, and of sums in rank order.

    Slices have at least 64 rows: from there on BLAS gives each row the same bits for any number of rows."""
    torch.manual_seed(comm.rank)
    x, own_x = torch.randn(256, 96).to(dtype), torch.randn(comm.size * 192, 96).to(dtype)
    own_w = torch.randn(128, 96).to(dtype)
    torch.manual_seed(7)
    w, bias = torch.randn(128, 96).to(dtype), torch.randn(128).to(dtype)
    gathered_x = comm.all_gather(x, x.new_empty(comm.size * 256, 96))
    for config in (
        *(OverlapConfig("slices", chunks=k) for k in (1, 3, 4)),
        OverlapConfig("ring"),
        OverlapConfig("bulk"),
    ):
        y, gathered = ad.all_gather_matmul(x, w, comm, bias, overlap=config, return_gathered=True)
        assert torch.equal(gathered, gathered_x), config
        assert torch.equal(y, F.linear(gathered_x, w, bias)), config
    products = comm.all_gather(F.linear(own_x, own_w), own_x.new_empty(comm.size, comm.size * 192, 128))
    total = products[0].to(torch.promote_types(dtype, torch.float32))
    for other in products[1:]:
        total = total + other
    for name, config in itertools.product(
        ("matmul_reduce_scatter", "matmul_all_reduce"),
        (*(OverlapConfig("exchange", chunks=k, deterministic=True) for k in (1, 3)), OverlapConfig(deterministic=True)),
    ):
        y = CASES[name].function(own_x, own_w, comm, overlap=config)
        assert torch.equal(y, shard(total.to(dtype), CASES[name].y_dim, comm)), (name, config)


@pytest.mark.parametrize(("n", "dtype"), [(2, torch.bfloat16), (3, torch.float32)])
def test_sliced_gathers_and_deterministic_sums_are_bitwise_equal(ranks: RankPool, n: int, dtype: torch.dtype) -> None:
    ranks.run(n, check_bits, dtype)


def check_gathered(comm: Communicator) -> None:
    """The gathered tensor is differentiable and can be changed in place."""
    torch.manual_seed(comm.rank)
    x = torch.randn(12, 8, dtype=torch.float64)
    torch.manual_seed(1)
    w = torch.randn(6, 8, dtype=torch.float64)
    found = []
    for config in ("off", OverlapConfig("slices", chunks=3), OverlapConfig("ring", save_gathered=False)):
        leaves = [t.clone().requires_grad_() for t in (x, w)]
        y, gathered = ad.all_gather_matmul(*leaves, comm, overlap=config, return_gathered=True)  # type: ignore[arg-type]
        only = torch.autograd.grad((gathered**3).sum(), leaves[0], retain_graph=True)[0]
        ((y**2).sum() + (gathered**3).sum()).backward()
        found.append((y.detach().clone().relu_(), gathered.detach().mul_(2), only, *(leaf.grad for leaf in leaves)))
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_the_gathered_tensor_is_returned_and_differentiable(ranks: RankPool) -> None:
    ranks.run(3, check_gathered)


def check_main_grad(comm: Communicator) -> None:
    """Only requested weight gradients are added to main_grad; weight.grad stays empty."""
    for name, overlap in itertools.product(CASES, ("off", OverlapConfig("slices", chunks=3), OverlapConfig("ring"))):
        case = CASES[name]
        x, w, _, g = full_tensors(torch.bfloat16)
        own = shard(w, case.w_dim, comm).clone().requires_grad_()
        start = torch.randn(own.shape, generator=torch.Generator().manual_seed(1))
        own.main_grad = start.clone()  # type: ignore[attr-defined]
        mine = shard(x, case.x_dim, comm).clone().requires_grad_()
        cotangent = shard(g, case.y_dim, comm)

        def call(case: Case = case, overlap: Any = overlap, mine: Tensor = mine, own: Tensor = own) -> Tensor:
            y: Tensor = case.function(mine, own, comm, overlap=overlap, grad_accumulation_fusion=True)
            return y

        torch.autograd.grad(call(), mine, cotangent)
        call().backward(cotangent, inputs=[mine])
        assert torch.equal(own.main_grad, start), (name, overlap)  # type: ignore[attr-defined]
        for _ in range(2):
            call().backward(cotangent)
        assert own.grad is None
        expected = start.double() + 2 * shard(reference(torch.bfloat16)["w"], case.w_dim, comm)
        torch.testing.assert_close(own.main_grad.double(), expected, rtol=2e-2, atol=0.3)  # type: ignore[attr-defined]
        own.grad_added_to_main_grad = False  # type: ignore[attr-defined]
        hooked: list[Tensor] = []
        own.register_post_accumulate_grad_hook(hooked.append)  # type: ignore[arg-type]
        call().backward(cotangent)
        assert own.grad_added_to_main_grad and hooked and not own.grad.any()  # type: ignore[attr-defined, union-attr]


def test_weight_gradients_are_added_to_main_grad(ranks: RankPool) -> None:
    ranks.run(2, check_main_grad)
