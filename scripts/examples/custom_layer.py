"""Write a custom differentiable layer in two ways: the cumulative sum along a sequence that is sharded over ranks.

    torchrun --standalone --nproc-per-node=2 scripts/examples/custom_layer.py
    custom_layer: by hand and composed: values, gradients, adjoint and second derivatives are right

`CumulativeSum` is a torch.autograd.Function around calls of the communicator with an adjoint written by hand: an output
is the sum of the inputs up to it, so an input's gradient is the sum of the output gradients from it on, in reverse.
`composed` uses ad.all_gather, which is differentiable. Both are compared with torch.cumsum of the full sequence.
check_adjoint checks that the backward pass is the adjoint, check_gradients compares with finite differences.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

import pynccl
import pynccl_autograd as ad

ROWS, WIDTH = 3, 2  # rows of the sequence on each rank, features


class CumulativeSum(torch.autograd.Function):
    """Sum of all rows up to each row, or with `reverse` from each row on.

    forward    x [s, d]  ->  y [s, d]    y = cumsum(x) + the sum of the previous ranks
    backward   g [s, d]  ->  [s, d]      the same in reverse; applies the Function, so it can be differentiated twice
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: pynccl.Communicator, reverse: bool = False) -> Tensor:
        ctx.comm, ctx.reverse = comm, reverse
        totals = comm.all_gather(x.sum(0)).view(comm.size, -1)  # autograd records nothing here
        if reverse:
            return x.flip(0).cumsum(0).flip(0) + totals[comm.rank + 1 :].sum(0)
        return x.cumsum(0) + totals[: comm.rank].sum(0)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        return CumulativeSum.apply(g, ctx.comm, not ctx.reverse), None, None


def by_hand(x: Tensor, comm: pynccl.Communicator) -> Tensor:
    return CumulativeSum.apply(x, comm)


def composed(x: Tensor, comm: pynccl.Communicator) -> Tensor:
    """Each rank uses the gathered totals in its own way, so their gradients are summed: grad="sum"."""
    totals = ad.all_gather(x.sum(0, keepdim=True), comm, grad="sum")
    return x.cumsum(0) + totals[: comm.rank].sum(0)


def main(comm: pynccl.Communicator) -> str:
    sequence, weights = torch.randn(2, comm.size * ROWS, WIDTH, generator=torch.Generator().manual_seed(0)).double()
    x, w = (tensor.chunk(comm.size)[comm.rank].to(comm.device) for tensor in (sequence, weights))
    expected = sequence.requires_grad_().cumsum(0)
    (gradient,) = torch.autograd.grad((expected * weights).sum(), sequence)
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
