"""bfloat16 over several ranks and steps: what sums lose, and reduce_dtype, which adds in float32 and rounds once.

    torchrun --standalone --nproc-per-node=2 scripts/examples/low_precision.py
    low_precision: 4 steps on 2 ranks; sums not correctly rounded, of 4096: bfloat16 additions 2144, reduce_dtype ...

A bfloat16 has 8 significant bits. A library that adds in bfloat16 rounds after each addition, as NCCL does for the
partial sums that it sends; the host library adds in float32. `reduce_dtype=torch.float32` doubles the bytes on the wire
and rounds the sum over ranks only once. It applies to forward passes that sum (all_reduce, reduce_scatter) and to
backward passes that sum (all_gather, copy, broadcast); layers and ad.DataParallelGradients also take it. Each step's
result is still rounded to bfloat16. For a correctly rounded sum over several steps, as in gradient accumulation,
accumulate in float32 first. Every rank knows all inputs here and computes the exact sums in float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

import pynccl
import pynccl_autograd as ad

STEPS, COUNT = 4, 4096


def inputs(ranks: int) -> Tensor:
    """[ranks, STEPS, COUNT] in bfloat16: multiples of 1/1024 below 8, which float32 adds without rounding."""
    values = torch.randn(ranks, STEPS, COUNT, generator=torch.Generator().manual_seed(0)).clamp(-7, 7)
    return (values * 1024).round().div(1024).bfloat16()


def chain(terms: Tensor) -> Tensor:
    """Sum along dim 0, rounded to bfloat16 after each addition."""
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def main(comm: pynccl.Communicator) -> str:
    terms = inputs(comm.size).to(comm.device)
    x = terms[comm.rank].clone().requires_grad_()  # [STEPS, COUNT]: this rank's input of each step
    per_step = ad.all_reduce(x, comm, grad="sum", reduce_dtype=torch.float32)
    assert per_step.dtype == torch.bfloat16
    torch.testing.assert_close(per_step.detach(), terms.double().sum(0).bfloat16(), rtol=0, atol=0)  # rounded once

    gathered = ad.all_gather(x, comm, grad="sum", reduce_dtype=torch.float32)
    cotangents = terms.flip(2)  # different on each rank
    (dx,) = torch.autograd.grad(gathered, x, cotangents[comm.rank].repeat(comm.size, 1))
    torch.testing.assert_close(dx, cotangents.double().sum(0).bfloat16(), rtol=0, atol=0)

    exact = terms.double().sum((0, 1)).bfloat16()
    sums = {
        "bfloat16 additions": chain(terms.flatten(0, 1)),
        "reduce_dtype": per_step.float().sum(0).bfloat16(),
        "float32 additions": comm.all_reduce(x.detach().float().sum(0)).bfloat16(),
    }
    torch.testing.assert_close(sums["float32 additions"], exact, rtol=0, atol=0)
    wrong = ", ".join(f"{name} {int((found != exact).sum())}" for name, found in sums.items())
    return f"low_precision: {STEPS} steps on {comm.size} ranks; sums not correctly rounded, of {COUNT}: {wrong}"


if __name__ == "__main__":
    with pynccl.init() as world:
        verified = main(world)
        if world.rank == 0:
            print(verified)
