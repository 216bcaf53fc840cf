"""Train with data parallelism by hand: each rank has a shard of the batch, and gradients are averaged before each step.

examples:
  torchrun --nproc-per-node=2 scripts/recipes/ddp.py
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pynccl
from pynccl.tools import command

ROWS, STEPS, RATE = 6, 3, 0.1  # rows of the batch on each rank


def average_gradients(model: nn.Module, comm: pynccl.Communicator) -> None:
    """Average all gradients with one all_reduce of a flat tensor, which pays the latency once."""
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    flat = torch.cat([grad.reshape(-1) for grad in grads])
    comm.all_reduce(flat, flat, "avg")
    for grad, mean in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(mean.view_as(grad))


def train(model: nn.Module, x: Tensor, target: Tensor, comm: pynccl.Communicator | None) -> nn.Module:
    optimizer = torch.optim.AdamW(model.parameters(), RATE)
    for _ in range(STEPS):
        optimizer.zero_grad()
        F.mse_loss(model(x), target).backward()  # the mean over ranks of these means is the batch's mean
        if comm is not None:
            average_gradients(model, comm)
        optimizer.step()
    return model


def main(comm: pynccl.Communicator) -> str:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2)).double().to(comm.device)
    x, target = (torch.randn(ROWS * comm.size, width, dtype=torch.float64).to(comm.device) for width in (8, 2))
    reference = train(copy.deepcopy(model), x, target, None)
    own = slice(comm.rank * ROWS, (comm.rank + 1) * ROWS)
    train(model, x[own], target[own], comm)
    for parameter, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected)
    return f"ddp: after {STEPS} steps the weights on {comm.size} ranks equal those of one process with the full batch"


if __name__ == "__main__":
    command.on_ranks(main, __doc__)
