"""Overlap communication with computation: start a collective, compute something else, then wait for its result.

    torchrun --standalone --nproc-per-node=2 scripts/examples/overlap.py
    overlap: loss and gradients are right; ...

`ad.start` runs the collective on a side stream of the communicator, and `wait()` makes the current stream wait for it.
The backward pass overlaps, too: it starts the gradient's collective as soon as the gradient is ready, and waits for it
where the forward pass started it. Here y = all_reduce(x) overlaps with z = tanh(a @ b); the loss needs both.

On one machine without a GPU overlap gains little, because the CPU also moves the data. A simulated link,
PYNCCL_HOST_LINK="latency=50us,bandwidth=100MB/s", delays the collective and leaves the CPU free.
docs/overlap.md describes the layers that overlap by themselves.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

import pynccl
import pynccl_autograd as ad

WIDTH, ROUNDS = 768, 5  # of the square matrices; the fastest round counts


def serial(x: Tensor, a: Tensor, b: Tensor, comm: pynccl.Communicator) -> Tensor:
    y = ad.all_reduce(x, comm, grad="sum")
    z = torch.tanh(a @ b)
    return (y * z).mean()


def overlapped(x: Tensor, a: Tensor, b: Tensor, comm: pynccl.Communicator) -> Tensor:
    work = ad.start(ad.all_reduce, x, comm, grad="sum")
    z = torch.tanh(a @ b)
    return (work.wait() * z).mean()


def seconds(step: Callable[[], object], comm: pynccl.Communicator) -> float:
    """Return the time of the fastest round on the slowest rank."""
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
    for compute_loss in (serial, overlapped):
        loss = compute_loss(leaves[0], leaves[1], leaves[2], comm)
        torch.testing.assert_close(loss.detach(), (total * z).mean())
        torch.testing.assert_close(list(torch.autograd.grad(loss, leaves)), expected)
    times = {
        "all_reduce": seconds(lambda: comm.all_reduce(x), comm),
        "matmul": seconds(lambda: torch.tanh(a @ b), comm),
        "serial": seconds(lambda: serial(x, a, b, comm), comm),
        "overlapped": seconds(lambda: overlapped(x, a, b, comm), comm),
    }
    shown = ", ".join(f"{name} {1e3 * value:.1f} ms" for name, value in times.items())
    return f"overlap: loss and gradients are right; {shown}"


if __name__ == "__main__":
    with pynccl.init() as world:
        verified = main(world)
        if world.rank == 0:
            print(verified)
