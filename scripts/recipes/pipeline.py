"""A pipeline: each rank has one stage, microbatches pass through all; all forwards, then all backwards, as in GPipe.

Activations travel by send_recv, and in the backward pass their gradients by the same edges reversed. What a stage sends
away is no part of its own loss: `anchor` ties it in, so that its backward pass waits for the gradient from the next
rank. The backward passes run last microbatch first, on every rank alike.

examples:
  torchrun --nproc-per-node=2 scripts/recipes/pipeline.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pynccl
import pynccl_autograd as ad
from pynccl.tools import command

MICROBATCHES, ROWS, WIDTH = 4, 3, 8


def run(stage: nn.Module, batch: Tensor, target: Tensor, comm: pynccl.Communicator) -> Tensor:
    """The loss of the whole batch (0 but on the last rank); gradients are in stage.parameters()."""
    before = comm.rank - 1 if comm.rank else None
    after = comm.rank + 1 if comm.rank + 1 < comm.size else None
    losses = []
    for x, goal in zip(batch.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True):
        if before is not None:  # the sender names its target, this rank its source: two calls of one edge
            x = ad.send_recv(torch.zeros_like(x, requires_grad=True), comm, source=before)
        y = stage(x)
        if after is None:
            losses.append(F.mse_loss(y, goal) / MICROBATCHES)
        else:
            losses.append(ad.anchor(y.new_zeros(()), ad.send_recv(y, comm, target=after)))
    for loss in reversed(losses):
        loss.backward()
    return torch.stack(losses).detach().sum()


def main(comm: pynccl.Communicator) -> str:
    torch.manual_seed(0)
    stages = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double().to(comm.device) for _ in range(comm.size)]
    x, target = torch.randn(2, MICROBATCHES * ROWS, WIDTH, dtype=torch.float64).to(comm.device)
    whole = F.mse_loss(nn.Sequential(*stages)(x), target)
    expected = torch.autograd.grad(whole, list(stages[comm.rank].parameters()))
    loss = comm.all_reduce(run(stages[comm.rank], x, target, comm))
    torch.testing.assert_close(loss, whole.detach())
    torch.testing.assert_close([parameter.grad for parameter in stages[comm.rank].parameters()], list(expected))
    return f"pipeline: {comm.size} stages, {MICROBATCHES} microbatches: loss and gradients equal those of one process"


if __name__ == "__main__":
    command.on_ranks(main, __doc__)
