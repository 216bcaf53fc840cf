"""The buckets in which DataParallelGradients gathers gradients: what is in them, when they leave, in which order."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from ranks import RankPool
from test_data_parallel import WIDTH, assert_gradients, batch, loss_of, model_of
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import pynccl_autograd as ad
from pynccl import Communicator
from pynccl.interop.streams import Handle
from pynccl_autograd.layers.buckets import Bucket, cut_into_buckets
from pynccl_autograd.streams import side_stream


class OneDevice(TorchDispatchMode):
    """Refuses what reads the CPU and writes to another device: a copy that waits for the GPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        devices = {t.device.type for t in args if isinstance(t, Tensor) and t.dim()}
        assert len(devices) < 2, f"{func} of tensors on {devices}"
        return func(*args, **(kwargs or {}))


def test_a_bucket_is_filled_without_a_copy_from_the_cpu() -> None:
    """Which waits in the middle of a backward pass, and is an error in the capture of a CUDA graph."""
    parameters = [(str(size), nn.Parameter(torch.zeros(size, device="meta"))) for size in (3, 5, 4)]
    for _, parameter in parameters[::2]:
        parameter.grad = torch.zeros_like(parameter)
    bucket = Bucket(parameters)
    with OneDevice():
        bucket.fill()


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


def in_other_orders(comm: Communicator) -> None:
    models = [Chain([(rank + place) % 7 for place in range(7)]) for rank in range(comm.size)]
    for rank, one in enumerate(models):
        (one(batch(rank, 0)).square().mean() / comm.size).backward()
    grads = zip(*([parameter.grad for parameter in one.parameters()] for one in models), strict=True)
    expected = [torch.stack(each).sum(0) for each in grads]  # type: ignore[arg-type]
    model = models[comm.rank]
    model.zero_grad()
    ad.DataParallelGradients(model, comm, 1)
    model(batch(comm.rank, 0)).square().mean().backward()
    for parameter, total in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, total, rtol=1e-10, atol=1e-12)


def test_ranks_whose_gradients_come_in_other_orders_meet(ranks: RankPool) -> None:
    ranks.run(3, in_other_orders)


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


def as_on_a_gpu(side: Any, keeper: Any) -> Handle:
    """The handle of a side stream, whose buffers the keeper has to keep."""
    handle = Handle(side.stream.handle)
    handle.owner = keeper
    return handle


def dropped(comm: Communicator) -> list[int]:
    """How many bytes a pass has sent that are still there when it is over, and when all is dropped."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(side_stream(comm)), "handle", as_on_a_gpu)
        sent: list[weakref.ref[Tensor]] = []
        launch = type(comm).all_reduce

        def all_reduce(self: Any, send: Tensor, *args: Any, **options: Any) -> Any:
            sent.append(weakref.ref(send))
            return launch(self, send, *args, **options)

        patch.setattr(type(comm), "all_reduce", all_reduce)
        model = model_of(0, torch.float32)
        averaged = ad.DataParallelGradients(model, comm, 500, torch.bfloat16)
        flats = [weakref.ref(bucket.flat) for bucket in averaged._buckets]
        for step in range(4):  # a call is kept when it is made for the second time
            loss_of(model, comm.rank, step, dtype=torch.float32).backward()
        gc.collect()
        between = sum(one.nbytes for ref in sent if (one := ref()) is not None)
        averaged.remove()
        del averaged, model
        gc.collect()
    assert len(sent) >= 8
    return [between, sum(one.nbytes for ref in (*sent, *flats) if (one := ref()) is not None)]


def test_what_was_sent_goes_with_the_pass_and_the_buckets_with_the_model(ranks: RankPool) -> None:
    assert ranks.run(2, dropped) == [[0, 0]] * 2
