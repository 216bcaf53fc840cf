"""Checkpointed regions where ranks save different tensors: all ranks recompute the collectives at the same point."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from ranks import RankPool
from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint as torch_checkpoint,
    create_selective_checkpoint_contexts,
)

import pynccl_autograd as ad
from pynccl import Communicator

Region = Callable[..., Any]
Checkpoint = Callable[..., Any]  # (region, *args)
Program = Callable[[Communicator, Checkpoint, Tensor, Tensor], Tensor]


def total(x: Tensor, comm: Communicator) -> Tensor:
    return ad.all_reduce(x, comm, grad="sum")


def uneven(x: Tensor, comm: Communicator) -> Tensor:
    """A function for which only rank 0 saves a tensor."""
    return x.sin() if comm.rank == 0 else x * 0.5


def frozen_parameter(comm: Communicator, checkpoint: Checkpoint, x: Tensor, w: Tensor) -> Tensor:
    def region(x: Tensor) -> Tensor:
        return uneven(total(uneven(total(x * w, comm), comm) * w, comm), comm)

    return checkpoint(region, checkpoint(region, x))


def other_collectives(comm: Communicator, checkpoint: Checkpoint, x: Tensor, w: Tensor) -> Tensor:
    """Lists, collectives that communicate only forward or only backward, and collectives without a gradient."""

    def region(x: Tensor) -> Tensor:
        a, b = ad.all_reduce([x * w, 2 * x], comm, grad="sum")
        y = ad.copy(a + b, comm) + ad.split(x.repeat(comm.size), comm)
        z = uneven(ad.all_gather(y, comm, grad="replicated"), comm)
        z = uneven(ad.reduce_scatter(z, comm), comm) + ad.all_reduce(x, comm, "max", grad="sum")
        with torch.no_grad():
            scale = total(z.abs(), comm).clamp(min=1)
        return uneven(z, comm) / scale

    return checkpoint(region, x)


def nested(comm: Communicator, checkpoint: Checkpoint, x: Tensor, w: Tensor) -> Tensor:
    """Nested regions: only rank 0 saves a tensor in the outer one; an asynchronous call is waited for twice."""

    def inner(x: Tensor) -> Tensor:
        handle = ad.start(ad.all_reduce, x * w, comm, grad="sum")
        return uneven(handle.wait() + uneven(x, comm) + handle.wait(), comm)

    def outer(x: Tensor) -> Tensor:
        return uneven(checkpoint(inner, checkpoint(inner, x) * 2), comm)

    return checkpoint(outer, x)


def plain(region: Region, *args: Any) -> Any:
    return region(*args)


recompute = partial(torch_checkpoint, use_reentrant=False)


def selective(region: Region, *args: Any) -> Any:
    def policy(ctx: Any, op: Any, *args: Any, **options: Any) -> CheckpointPolicy:
        keep = op is torch.ops.pynccl.all_reduce.default
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    def contexts() -> Any:
        return create_selective_checkpoint_contexts(policy)

    return torch_checkpoint(region, *args, use_reentrant=False, context_fn=contexts)


def gradients_of(comm: Communicator, program: Program) -> list[list[Tensor]]:
    found = []
    for checkpoint in (plain, recompute, selective):
        x = torch.linspace(0.1, 0.4, 4, dtype=torch.float64).add(comm.rank).requires_grad_()
        w = torch.full((4,), 0.5, dtype=torch.float64, requires_grad=comm.rank == 0)
        y = program(comm, checkpoint, x, w)
        if checkpoint is not selective:  # torch allows only one backward pass with it
            (y**2).sum().backward(retain_graph=True)
            x.grad = w.grad = None
        (y**3).sum().backward()
        found.append([y.detach(), *(leaf.grad for leaf in (x, w) if leaf.grad is not None)])
    return found


def compare_gradients(comm: Communicator) -> None:
    for program in (frozen_parameter, other_collectives, nested):
        expected, *checkpointed = gradients_of(comm, program)
        assert len(expected) == 3 - comm.rank
        for found in checkpointed:
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), program.__name__


def test_gradients_equal_those_without_checkpointing(ranks: RankPool) -> None:
    ranks.run(2, compare_gradients)
