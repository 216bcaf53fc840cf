"""Combine data and tensor parallelism on a mesh: layers are sharded along "tp", the batch along "dp".

With 4 or more ranks "dp" has size 2, otherwise 1. Ranks along "tp" see the same samples and hold shards of the weights;
ranks along "dp" hold the same shards, and their gradients are averaged.

examples:
  torchrun --nproc-per-node=4 scripts/recipes/mesh_2d.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pynccl
import pynccl_autograd as ad
from pynccl.tools import command

ROWS, WIDTH, HIDDEN = 4, 8, 24  # batch rows per "dp" coordinate


def sharded(up: nn.Linear, down: nn.Linear, comm: pynccl.Communicator) -> nn.Sequential:
    """Return this rank's shard: column-parallel first layer, row-parallel second layer."""
    columns = ad.ColumnParallelLinear.from_linear(up, comm)
    return nn.Sequential(columns, nn.GELU(), ad.RowParallelLinear.from_linear(down, comm))


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, target = batch
    return F.mse_loss(model(x), target)


def main(comm: pynccl.Communicator) -> str:
    torch.manual_seed(0)
    sizes = {"dp": 2 if comm.size >= 4 else 1, "tp": -1}
    with ad.Mesh(comm, sizes) as mesh:
        up, down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        unsharded = nn.Sequential(up, nn.GELU(), down).double().to(comm.device)
        model = sharded(up, down, mesh["tp"])
        batch = tuple(torch.randn(2, mesh.size("dp") * ROWS, WIDTH, dtype=torch.float64).to(comm.device))
        first = mesh.coordinate["dp"] * ROWS
        local = tuple(x[first : first + ROWS] for x in batch)

        def average_gradients(model: nn.Module) -> None:
            for parameter in model.parameters():
                mesh["dp"].all_reduce(parameter.grad, parameter.grad, "avg")

        def loss(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
            return loss_of(module, batch if module is unsharded else local)

        report = ad.testing.check_model(model, unsharded, batch, comm, loss, finish=average_gradients)
        return f"mesh_2d: {mesh.size('dp')} x {mesh.size('tp')} ranks: {report}"


if __name__ == "__main__":
    command.on_ranks(main, __doc__)
