"""A layer of one's own: the cumulative sum along a sequence that is cut over the ranks, differentiated in two ways.

    torchrun --standalone --nproc-per-node=2 scripts/examples/custom_layer.py
    custom_layer: by hand and composed: values, gradients, adjoint and second derivatives are right

`CumulativeSum` is a torch.autograd.Function around calls of the communicator, its adjoint written by hand: an output is
the sum of the inputs before it, so an input's gradient is the sum of the gradients behind it, the same in reverse.
`composed` is made of ad.all_gather, whose adjoint is known. Both are compared with torch.cumsum of the whole sequence,
check_adjoint says whether the backward pass is the adjoint, check_gradients compares with finite differences.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

import pynccl
import pynccl_autograd as ad

ROWS, WIDTH = 3, 2  # of the sequence on each rank


class CumulativeSum(torch.autograd.Function):
    """Sum of all rows up to each one, or with `reverse` from each one on.

    forward    x [s, d]  ->  y [s, d]    y = cumsum(x) + the sum of the ranks before
    backward   g [s, d]  ->  [s, d]      the same in reverse: a Function again, so it can be differentiated twice
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: pynccl.Communicator, reverse: bool = False) -> Tensor:
        ctx.comm, ctx.reverse = comm, reverse
        totals = comm.all_gather(x.sum(0)).view(comm.size, -1)  # no graph in here: plain collectives
        if reverse:
            return x.flip(0).cumsum(0).flip(0) + totals[comm.rank + 1 :].sum(0)
        return x.cumsum(0) + totals[: comm.rank].sum(0)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        return CumulativeSum.apply(g, ctx.comm, not ctx.reverse), None, None


def by_hand(x: Tensor, comm: pynccl.Communicator) -> Tensor:
    return CumulativeSum.apply(x, comm)


def composed(x: Tensor, comm: pynccl.Communicator) -> Tensor:
    """Each rank goes on with sums of its own, so the gradients of what was gathered are summed: "sum"."""
    totals = ad.all_gather(x.sum(0, keepdim=True), comm, grad="sum")
    return x.cumsum(0) + totals[: comm.rank].sum(0)


def main(comm: pynccl.Communicator) -> str:
    whole, weights = torch.randn(2, comm.size * ROWS, WIDTH, generator=torch.Generator().manual_seed(0)).double()
    x, w = (each.chunk(comm.size)[comm.rank].to(comm.device) for each in (whole, weights))
    expected = whole.requires_grad_().cumsum(0)
    (gradient,) = torch.autograd.grad((expected * weights).sum(), whole)
    for layer in (by_hand, composed):
        leaf = x.clone().requires_grad_()
        y = layer(leaf, comm)
        torch.testing.assert_close(y.cpu(), expected.chunk(comm.size)[comm.rank])
        (dx,) = torch.autograd.grad((y * w).sum(), leaf)
        torch.testing.assert_close(dx.cpu(), gradient.chunk(comm.size)[comm.rank])
        ad.testing.check_adjoint(partial(layer, comm=comm), x, comm)
        ad.testing.check_gradients(partial(layer, comm=comm), x, comm)
    return "custom_layer: by hand and composed: values, gradients, adjoint and second derivatives are right"


if __name__ == "__main__":
    with pynccl.init() as world:
        verified = main(world)
        if world.rank == 0:
            print(verified)
