"""The buckets in which DataParallelGradients gathers gradients: what is in them, when they leave, in which order."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from ranks import RankPool
from test_data_parallel import WIDTH, assert_gradients, batch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pynccl_autograd as ad
from pynccl import Communicator
from pynccl_autograd.layers.buckets import cut_into_buckets


def sizes(kilobytes: list[int], nbytes: float) -> list[list[int]]:
    """Of the parameters in each bucket, KB."""
    named = [(str(place), nn.Parameter(torch.zeros(250 * size))) for place, size in enumerate(kilobytes)]
    return [[one.nbytes // 1000 for _, one in bucket] for bucket in cut_into_buckets(named, nbytes)]


def test_buckets_are_full_with_bucket_bytes_or_an_eighth_of_all() -> None:
    assert sizes([3, 2, 1], 1) == [[1], [2], [3]]
    assert sizes([10, 5, 5, 1] * 10, 12e3) == [[1, 5, 5, 10]] * 10  # by the one that fills it up
    assert sizes([1] * 80, 1e9) == [[1] * 80]  # of a small model one is better
    assert sizes([1] * 80, 100e3) == [[1] * 10] * 8
    assert sizes([1] * 80, 320e3) == [[1] * 20] * 4
    assert sizes([1, 40, 1], 1e9) == [[1, 40, 1]]


class Chain(nn.Module):
    """Layers in an order of use, each within a checkpoint of a kind."""

    def __init__(self, order: Sequence[int], reentrant: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH).double() for _ in range(7))
        self.order, self.reentrant = order, reentrant

    def forward(self, x: Tensor) -> Tensor:
        for place in self.order:
            layer = self.layers[place]
            x = torch.tanh(layer(x) if self.reentrant is None else checkpoint(layer, x, use_reentrant=self.reentrant))
        return x


def add_passes(model: nn.Module, comm: Communicator, step: int = 0) -> None:
    """Of the losses of all ranks, of which it is the mean."""
    for rank in range(comm.size):
        (model(batch(rank, step).requires_grad_()).square().mean() / comm.size).backward()


def made_anew(comm: Communicator, as_view: bool) -> None:
    """Defined in the order of the backward pass, with a layer that is not used between."""
    model, expected = (Chain((6, 5, 4, 2, 1, 0)) for _ in range(2))
    averaged = ad.DataParallelGradients(model, comm, 1, gradient_as_bucket_view=as_view)
    if comm.rank == 0:  # it shows no order: the next pass does
        averaged.finish()
    else:
        model(batch(comm.rank, 7)).sum().backward()
    model.zero_grad()
    counts: list[int] = []
    for step in range(3):  # .grad is added to, across the change
        x = batch(comm.rank, step).requires_grad_()
        x.register_hook(lambda g: counts.append(len(averaged._launched)))
        model(x).square().mean().backward()
        add_passes(expected, comm, step)
        assert_gradients(model, expected)
    assert counts[0] <= 2  # the first to leave was that which is full last
    assert min(counts[1:]) >= 10  # of 12 that are used, while the pass goes on


@pytest.mark.parametrize("as_view", [False, True])
def test_buckets_follow_the_order_of_the_gradients_of_the_first_pass(ranks: RankPool, as_view: bool) -> None:
    ranks.run(2, made_anew, as_view)


def checkpointed(comm: Communicator) -> None:
    for reentrant in (False, True):
        model, expected = (Chain(range(4), reentrant) for _ in range(2))
        averaged = ad.DataParallelGradients(model, comm, 1500)
        add_passes(expected, comm)
        model(batch(comm.rank, 0).requires_grad_()).square().mean().backward()
        assert_gradients(model, expected)
        if reentrant:
            model.zero_grad()
            with pytest.raises(RuntimeError, match="has its gradient twice in one backward pass"):
                model(model(batch(comm.rank, 0).requires_grad_())).sum().backward()
        model.zero_grad()  # a pass that raised leaves nothing behind
        model(batch(comm.rank, 0).requires_grad_()).square().mean().backward()
        assert_gradients(model, expected)
        averaged.remove()


def test_checkpoints_of_both_kinds(ranks: RankPool) -> None:
    ranks.run(2, checkpointed)
