"""bfloat16 over several ranks: what the sum loses, and reduce_dtype, which adds in float32 and rounds once.

    torchrun --standalone --nproc-per-node=4 scripts/examples/low_precision.py
    low_precision: with reduce_dtype all 4096 sums are rounded once; in bfloat16 others are: all_reduce 0, a ...

A bfloat16 has 8 significant bits. A library that adds in bfloat16 rounds after each addition, as NCCL does where the
partial sums travel; the host library adds in float32. With `reduce_dtype=torch.float32` the wire has twice the bytes,
and the result is the same everywhere. It is for forward passes that sum (all_reduce, reduce_scatter) and for backward
passes that do (all_gather, copy, broadcast); layers and ad.DataParallelGradients take it, too. Here all ranks know all
inputs, so that each can say what is right.
"""

from __future__ import annotations

import torch
from torch import Tensor

import pynccl
import pynccl_autograd as ad

COUNT = 4096


def inputs(comm: pynccl.Communicator) -> Tensor:
    """[N, COUNT] in bfloat16, multiples of 1/1024 below 8: float32 adds such numbers without any rounding."""
    drawn = torch.randn(comm.size, COUNT, generator=torch.Generator().manual_seed(0)).clamp(-7, 7)
    return (drawn * 1024).round().div(1024).bfloat16().to(comm.device)


def chain(terms: Tensor) -> Tensor:
    """Their sum, rounded to bfloat16 after each addition."""
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def main(comm: pynccl.Communicator) -> str:
    terms = inputs(comm)
    exact = terms.double().sum(0).bfloat16()  # rounded once
    x = terms[comm.rank].clone().requires_grad_()
    wide = ad.all_reduce(x, comm, grad="sum", reduce_dtype=torch.float32)
    assert wide.dtype == torch.bfloat16
    torch.testing.assert_close(wide.detach(), exact, rtol=0, atol=0)

    gathered = ad.all_gather(x, comm, grad="sum", reduce_dtype=torch.float32)
    cotangents = terms.flip(1)  # of each rank its own, for the slices of all ranks
    (dx,) = torch.autograd.grad(gathered, x, cotangents[comm.rank].repeat(comm.size))
    torch.testing.assert_close(dx, cotangents.double().sum(0).bfloat16(), rtol=0, atol=0)

    narrow = comm.all_reduce(x.detach())
    counts = {"all_reduce": narrow, "a chain of additions": chain(terms)}
    wrong = ", ".join(f"{name} {int((found != exact).sum())}" for name, found in counts.items())
    return f"low_precision: with reduce_dtype all {COUNT} sums are rounded once; in bfloat16 others are: {wrong}"


if __name__ == "__main__":
    with pynccl.init() as world:
        verified = main(world)
        if world.rank == 0:
            print(verified)
