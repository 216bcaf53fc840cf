"""Differentiable collectives on a GPU under torch.compile, with and without CUDA graphs, and as started handles."""

from __future__ import annotations

import copy

import pytest
import torch
from gpu.graphs import forget_graphs
from torch import nn

import pynccl_autograd as ad
from pynccl import Communicator


def values(comm: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
    """(this rank's input, the sum of all ranks' inputs), integer-valued."""
    each = [torch.arange(1.0, 13.0, device=comm.device).view(4, 3) * (rank + 1) for rank in range(comm.size)]
    return each[comm.rank], torch.stack(each).sum(0)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_compiled_step_equals_the_eager_one(comm: Communicator, mode: str) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return (ad.all_reduce(2 * x, comm, grad="sum") ** 2).sum()

    own, total = values(comm)
    try:
        compiled = torch.compile(step, fullgraph=True, mode=mode)
        for _ in range(4):  # with CUDA graphs: warm-up, capture, replay
            x = own.clone().requires_grad_()
            loss = compiled(x)
            loss.backward()
            assert float(loss) == float((4 * total**2).sum())
            assert x.grad is not None
            torch.testing.assert_close(x.grad, comm.size * 8 * total)
            del loss
    finally:
        forget_graphs()  # the communicator of the session cannot be destroyed before


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.down(torch.tanh(self.up(x)))
        return y


def test_a_compiled_parallelized_model_equals_the_whole_one(comm: Communicator) -> None:
    torch.manual_seed(3)
    whole = nn.Sequential(Block(), Block()).to(comm.device, torch.float64)
    plan = {"*.up": "column", "*.down": "row"}
    model = ad.parallelize(copy.deepcopy(whole), comm, plan, sequence_parallel=True, seq_dim=1)
    x = torch.randn(2, 8 * comm.size, 64, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    x = x.to(comm.device)
    own = x.chunk(comm.size, 1)[comm.rank]
    expected = whole(x)
    expected.square().sum().backward()
    try:
        compiled = torch.compile(model)
        for _ in range(3):
            model.zero_grad()
            y = compiled(own)
            y.square().sum().backward()
    finally:
        forget_graphs()
    torch.testing.assert_close(y, expected.chunk(comm.size, 1)[comm.rank])
    for (name, parameter), plain in zip(model.named_parameters(), whole.parameters(), strict=True):
        assert parameter.grad is not None and plain.grad is not None
        if name.endswith("down.bias"):
            continue  # partial until finish_gradients
        dim = 1 if "down" in name else 0
        torch.testing.assert_close(parameter.grad, plain.grad.chunk(comm.size, dim)[comm.rank])
