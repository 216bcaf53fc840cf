"""Train a pipeline with one stage per rank: all microbatches run forward, then all run backward, as in GPipe.

send_recv sends the activations; in the backward pass their gradients travel along the same edges in reverse. A stage's
loss does not depend on the output that it sends, so `anchor` adds the output to the loss: its backward pass then waits
for the gradient from the next rank. All ranks run the backward passes in the same order, last microbatch first.

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
    """Return the loss of the full batch (0 except on the last rank), and accumulate gradients in the parameters."""
    previous = comm.rank - 1 if comm.rank else None
    following = comm.rank + 1 if comm.rank + 1 < comm.size else None
    losses = []
    for x, goal in zip(batch.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True):
        if previous is not None:  # the sender passes target=, this rank source=: the two ends of an edge
            x = ad.send_recv(torch.zeros_like(x, requires_grad=True), comm, source=previous)
        y = stage(x)
        if following is None:
            losses.append(F.mse_loss(y, goal) / MICROBATCHES)
        else:
            losses.append(ad.anchor(y.new_zeros(()), ad.send_recv(y, comm, target=following)))
    for loss in reversed(losses):
        loss.backward()
    return torch.stack(losses).detach().sum()


def main(comm: pynccl.Communicator) -> str:
    torch.manual_seed(0)
    stages = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double().to(comm.device) for _ in range(comm.size)]
    x, target = torch.randn(2, MICROBATCHES * ROWS, WIDTH, dtype=torch.float64).to(comm.device)
    expected_loss = F.mse_loss(nn.Sequential(*stages)(x), target)
    expected = torch.autograd.grad(expected_loss, list(stages[comm.rank].parameters()))
    loss = comm.all_reduce(run(stages[comm.rank], x, target, comm))
    torch.testing.assert_close(loss, expected_loss.detach())
    torch.testing.assert_close([parameter.grad for parameter in stages[comm.rank].parameters()], list(expected))
    return f"pipeline: {comm.size} stages, {MICROBATCHES} microbatches: loss and gradients equal those of one process"


if __name__ == "__main__":
    command.on_ranks(main, __doc__)
