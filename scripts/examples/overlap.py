"""Communication beside computation: a collective is started, something else is computed, then its result is waited for.

    torchrun --standalone --nproc-per-node=2 scripts/examples/overlap.py
    overlap: loss and gradients are right; ...

`ad.start` runs the collective on a side stream of the communicator, and `wait()` has the current stream wait for it;
both ways: in the backward pass the gradient's collective starts as soon as there is one, and is waited for where the
forward pass started it. Here y = all_reduce(x) travels beside z = tanh(a @ b), and the loss needs both.

On one machine without a GPU nothing is gained, since the processor carries the data, too. A modelled link, by
PYNCCL_HOST_LINK="latency=50us,bandwidth=100MB/s", makes the collective take its time and leaves the processor free.
What layers do of this by themselves: docs/overlap.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

import pynccl
import pynccl_autograd as ad

WIDTH, ROUNDS = 768, 5  # of square matrices; of which the fastest counts


def one_after_the_other(x: Tensor, a: Tensor, b: Tensor, comm: pynccl.Communicator) -> Tensor:
    y = ad.all_reduce(x, comm, grad="sum")
    z = torch.tanh(a @ b)
    return (y * z).mean()


def beside(x: Tensor, a: Tensor, b: Tensor, comm: pynccl.Communicator) -> Tensor:
    work = ad.start(ad.all_reduce, x, comm, grad="sum")
    z = torch.tanh(a @ b)
    return (work.wait() * z).mean()


def seconds(step: Callable[[], object], comm: pynccl.Communicator) -> float:
    """Of the fastest round, on the slowest rank."""
    found = []
    for _ in range(ROUNDS + 1):
        comm.barrier()
        start = time.perf_counter()
        step()
        pynccl.current_stream(comm.device).synchronize()
        found.append(time.perf_counter() - start)
    slowest = torch.tensor(min(found[1:]), dtype=torch.float64, device=comm.device)
    return comm.all_reduce(slowest, op="max").item()


def main(comm: pynccl.Communicator) -> str:
    generator = torch.Generator().manual_seed(comm.rank)
    leaves = [torch.randn(WIDTH, WIDTH, generator=generator).to(comm.device).requires_grad_() for _ in range(3)]
    x, a, b = (leaf.detach() for leaf in leaves)
    z, total = torch.tanh(a @ b), comm.all_reduce(x)
    dz = total * (1 - z.square())
    expected = [gradient / z.numel() for gradient in (comm.all_reduce(z), dz @ b.T, a.T @ dz)]
    for way in (one_after_the_other, beside):
        loss = way(leaves[0], leaves[1], leaves[2], comm)
        torch.testing.assert_close(loss.detach(), (total * z).mean())
        torch.testing.assert_close(list(torch.autograd.grad(loss, leaves)), expected)
    times = {
        "all_reduce": seconds(lambda: comm.all_reduce(x), comm),
        "matmul": seconds(lambda: torch.tanh(a @ b), comm),
        "one after the other": seconds(lambda: one_after_the_other(x, a, b, comm), comm),
        "beside each other": seconds(lambda: beside(x, a, b, comm), comm),
    }
    shown = ", ".join(f"{name} {1e3 * value:.1f} ms" for name, value in times.items())
    return f"overlap: loss and gradients are right; {shown}"


if __name__ == "__main__":
    with pynccl.init() as world:
        verified = main(world)
        if world.rank == 0:
            print(verified)
