"""DataParallelGradients on a GPU: averages, combined with tensor parallelism, and in a CUDA graph."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from gpu.graphs import captured
from torch import Tensor, nn

import pynccl_autograd as ad
from pynccl import Communicator
from pynccl_autograd import OverlapConfig

WIDTH, HIDDEN, ROWS = 64, 256, 32
SMALL = 40_000  # bytes of a bucket: several buckets are in progress at once


def model_of(comm: Communicator, dtype: torch.dtype, width: int = WIDTH) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(width, 4 * width), nn.Tanh(), nn.Linear(4 * width, width), nn.Tanh(), nn.Linear(width, width)
    return nn.Sequential(*layers).to(comm.device, dtype)


def batch(comm: Communicator, rank: int, step: int, dtype: torch.dtype, width: int = WIDTH) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(ROWS, width, generator=generator, dtype=torch.float64).to(comm.device, dtype)


def grads(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Return the gradients of this rank's loss after the backward pass."""
    model.zero_grad(set_to_none=True)
    model(x).square().mean().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def average(model: nn.Module, comm: Communicator, step: int, dtype: torch.dtype) -> list[Tensor]:
    """Return the mean of all ranks' gradients, computed on this rank by a model without hooks."""
    each = [[g.double() for g in grads(model, batch(comm, rank, step, dtype))] for rank in range(comm.size)]
    return [torch.stack(same).mean(0) for same in zip(*each, strict=True)]


def assert_close(found: list[Tensor], expected: list[Tensor], rtol: float) -> None:
    assert len(found) == len(expected)
    for got, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(got.double(), reference, rtol=rtol, atol=rtol * float(reference.abs().max()))


@pytest.mark.parametrize(
    ("dtype", "reduce_dtype", "rtol"),
    [(torch.float64, None, 1e-10), (torch.bfloat16, None, 2**-5), (torch.bfloat16, torch.float32, 2**-7)],
    ids=["float64", "bfloat16", "bfloat16 in float32"],
)
def test_gradients_are_the_mean_of_all_ranks(
    comm: Communicator, dtype: torch.dtype, reduce_dtype: torch.dtype | None, rtol: float
) -> None:
    model, plain = (model_of(comm, dtype) for _ in range(2))
    data_parallel = ad.DataParallelGradients(model, comm, SMALL, reduce_dtype)
    for step in range(3):
        found = grads(model, batch(comm, comm.rank, step, dtype))
        assert {g.dtype for g in found} == {dtype}
        assert_close(found, average(plain, comm, step, dtype), rtol)
    data_parallel.remove()


def test_data_and_tensor_parallelism_together(comm: Communicator) -> None:
    """Two communicators at once: buckets are reduced while the preceding layers run their own collectives."""
    if comm.size % 2:
        pytest.skip("needs an even number of ranks")
    mesh = ad.Mesh(comm, {"dp": 2, "tp": comm.size // 2})
    dp, tp = mesh["dp"], mesh["tp"]
    config = OverlapConfig("slices", chunks=2)
    options: dict[str, Any] = {"overlap": config, "dtype": torch.float64, "sequence_parallel": False}
    sharded, full = [], []
    torch.manual_seed(1)
    for _ in range(3):
        pair = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        full += [pair[0], nn.Tanh(), pair[1], nn.Tanh()]
        column, row = (
            ad.ColumnParallelLinear(WIDTH, HIDDEN, tp, **options),
            ad.RowParallelLinear(HIDDEN, WIDTH, tp, **options),
        )
        for layer, plain in ((column, pair[0]), (row, pair[1])):
            layer.load_full(plain.weight.detach().double(), plain.bias.detach().double())
        sharded += [column, nn.Tanh(), row, nn.Tanh()]
    model, plain_model = nn.Sequential(*sharded), nn.Sequential(*full).to(comm.device, torch.float64)
    data_parallel = ad.DataParallelGradients(model, dp, SMALL)
    for step in range(5):
        found = grads(model, batch(comm, dp.rank, step, torch.float64))
        expected = average(plain_model, dp, step, torch.float64)
        shards = []
        for at, gradient in enumerate(expected):  # weight and bias of a column layer, of a row layer
            dim = (0, 0, 1, None)[at % 4]
            shards.append(gradient if dim is None else gradient.chunk(tp.size, dim)[tp.rank])
        assert_close(found, shards, 1e-9)
    data_parallel.remove()
    mesh.close()


@pytest.mark.parametrize("mode", ["global", "thread_local"])
def test_a_captured_step_averages_new_data(comm: Communicator, mode: str) -> None:
    model = model_of(comm, torch.float64)
    plain = copy.deepcopy(model)
    data_parallel = ad.DataParallelGradients(model, comm, SMALL)
    x = batch(comm, comm.rank, 0, torch.float64)
    with captured(lambda: grads(model, x), mode) as (graph, found):
        for step in range(1, 4):
            x.copy_(batch(comm, comm.rank, step, torch.float64))
            graph.replay()
            torch.cuda.synchronize()
            assert_close(list(found), average(plain, comm, step, torch.float64), 1e-10)
    data_parallel.remove()
