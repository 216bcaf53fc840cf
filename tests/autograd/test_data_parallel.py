"""DataParallelGradients against one process that has all data."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import RankPool
from small_transformers import MAKE, batch as words, compare
from torch import Tensor, nn

import pynccl_autograd as ad
from pynccl import Communicator
from pynccl_autograd.layers.buckets import cut_into_buckets

WIDTH, ROWS = 10, 6


class Model(nn.Module):
    """Branches that a rank may leave out, a layer used twice, a frozen parameter, a scalar, a channels-last weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.never = nn.Linear(3, 3)
        self.conv = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.last = nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.steps: Tensor
        self.register_buffer("steps", torch.tensor([True, False]))
        self.double()

    def forward(self, x: Tensor, branches: str = "lr") -> Tensor:
        x = torch.tanh(self.first(x)) * self.frozen
        y = x * self.scale
        if "l" in branches:
            y = y + self.left(x)
        if "r" in branches:
            y = y + self.right(x)
        images = F.pad(y, (0, 8)).view(-1, 2, 3, 3)
        return torch.tanh(self.last(y)) + self.conv(images).mean() + torch.tanh(self.last(x))  # used twice


def model_of(seed: int) -> Model:
    torch.manual_seed(seed)
    return Model()


def batch(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)


def loss_of(model: nn.Module, rank: int, step: int, branches: str = "lr") -> Tensor:
    y: Tensor = model(batch(rank, step), branches)
    return y.square().mean()


def average(ranks: int, steps: Sequence[int] = (0,), branches: Sequence[str] = ("lr",) * 4) -> Model:
    """A model whose gradients are those of the mean of all ranks' losses, added up over `steps`."""
    model = model_of(0)
    for step in steps:
        for rank in range(ranks):
            (loss_of(model, rank, step, branches[rank]) / ranks).backward()
    return model


def assert_gradients(model: nn.Module, expected: nn.Module) -> None:
    for (name, parameter), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert (parameter.grad is None) == (other.grad is None), name
        if parameter.grad is not None:
            told = partial("{}: {}".format, name)
            torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-10, atol=1e-12, msg=told)


def equals_one_process(comm: Communicator) -> None:
    for bucket_bytes, as_view in ((1, False), (1000, True), (1e9, False)):
        model = model_of(seed=comm.rank)  # rank 0's are taken
        model.steps.fill_(comm.rank == 0)
        averaged = ad.DataParallelGradients(model, comm, bucket_bytes, gradient_as_bucket_view=as_view)
        assert model.steps.tolist() == [True, True]
        for step in range(3):  # buckets are made anew after the first; .grad is what was there and the average
            model.zero_grad()
            with averaged.no_sync():
                loss_of(model, comm.rank, step + 10).backward()
            for other in (step, step + 5):
                loss_of(model, comm.rank, other).backward()
            assert_gradients(model, average(comm.size, [step, step + 5, step + 10]))
        assert model.conv.weight.grad is not None
        assert model.conv.weight.grad.stride() == model.conv.weight.stride()
        averaged.remove()
        model.zero_grad()
        loss_of(model, comm.rank, 0).backward()
        alone = model_of(seed=0)
        loss_of(alone, comm.rank, 0).backward()
        assert_gradients(model, alone)


@pytest.mark.parametrize("n", [2, 3])
def test_gradients_are_those_of_one_process_with_all_data(ranks: RankPool, n: int) -> None:
    ranks.run(n, equals_one_process)


def unused(comm: Communicator) -> None:
    """What ranks do not use counts as zeros, what none uses stays None; a rank may have no loss at all."""
    model, branches = model_of(0), ["l", "r", ""]
    averaged = ad.DataParallelGradients(model, comm, 500)
    loss_of(model, comm.rank, 0, branches[comm.rank]).backward()
    assert_gradients(model, average(comm.size, branches=branches))
    assert model.never.weight.grad is None
    model.zero_grad()
    if comm.rank == 0:
        loss_of(model, 0, 0).backward()
    else:
        averaged.finish()
    expected = model_of(0)
    (loss_of(expected, 0, 0) / comm.size).backward()
    assert_gradients(model, expected)


def reduced_in_bfloat16(comm: Communicator) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))
    ad.DataParallelGradients(model, comm, 100, torch.bfloat16, gradient_as_bucket_view=True)
    own = copy.deepcopy(model)  # a copy is not averaged
    model(batch(comm.rank, 0).float()).square().sum().backward()
    total = [torch.zeros_like(one, dtype=torch.float64) for one in own.parameters()]
    for rank in range(comm.size):
        own.zero_grad()
        own(batch(rank, 0).float()).square().sum().backward()
        total = [sum_ + one.grad.bfloat16() for sum_, one in zip(total, own.parameters(), strict=True)]  # type: ignore[union-attr]
    for parameter, summed in zip(model.parameters(), total, strict=True):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, parameter.grad.bfloat16().float())  # it travelled as such
        torch.testing.assert_close(parameter.grad.double(), summed / comm.size, rtol=2**-7, atol=1e-6)


def other_uses(comm: Communicator) -> None:
    """A graph that is used twice, torch.compile."""
    model = model_of(0)
    ad.DataParallelGradients(model, comm)
    loss = loss_of(model, comm.rank, 0)
    loss.backward(retain_graph=True)
    loss.backward()  # to the average of the first is added
    assert_gradients(model, average(comm.size, (0, 0)))
    model.zero_grad()
    loss_of(torch.compile(model, backend="aot_eager"), comm.rank, 0).backward()
    assert_gradients(model, average(comm.size))


@pytest.mark.parametrize("use", [unused, reduced_in_bfloat16, other_uses])
def test_each_way_to_use_it(ranks: RankPool, use: Any) -> None:
    ranks.run(3, use)


def sequence_parallel(comm: Communicator, reentrant: bool | None) -> None:
    """Of which the other axis is finished in the same pass: it averages whole gradients."""
    with ad.Mesh(comm, {"dp": 2, "tp": 2}) as mesh:
        torch.manual_seed(0)
        whole, place = MAKE["llama"](2).double(), mesh.coordinate["dp"]
        model: Any = ad.parallelize(copy.deepcopy(whole), mesh["tp"], ad.plans.llama)
        handle = ad.finish_gradients_in_backward(model)
        with pytest.raises(RuntimeError, match="has it already; call it once for a model"):
            ad.finish_gradients_in_backward(model.model.layers)
        if reentrant is not None:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        averaged = ad.DataParallelGradients(model, mesh["dp"], 2000)
        optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, whole)]

        def backward(number: int) -> None:
            model(**words(10 * number + place)).loss.backward()
            for rank in range(2):
                (whole(**words(10 * number + rank)).loss / 2).backward()

        for step in range(2):
            with averaged.no_sync():
                backward(10 * step)
            backward(10 * step + 1)
            backward(10 * step + 2)  # to the average is added
            expected = nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
            torch.testing.assert_close(ad.clip_grad_norm_(model, 0.5).double(), expected, rtol=1e-6, atol=0.0)
            compare(model, whole, {"rtol": 1e-6, "atol": 1e-9})
            for one in optimizers:
                one.step()
                one.zero_grad()
        handle.remove()
        averaged.remove()
        for one in (model, whole):
            one.zero_grad()
            one(**words(7)).loss.backward()
        ad.finish_gradients(model)  # what the backward pass leaves partial again
        compare(model, whole, {"rtol": 1e-6, "atol": 1e-9})


@pytest.mark.parametrize("reentrant", [None, True, False])
def test_what_sequence_parallelism_leaves_partial_is_finished_in_the_same_pass(
    ranks: RankPool, reentrant: bool | None
) -> None:
    """Within checkpoints of both kinds, too."""
    pytest.importorskip("transformers")
    ranks.run(4, sequence_parallel, reentrant)


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
    """Layers in an order of use."""

    def __init__(self, order: Sequence[int]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH).double() for _ in range(7))
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        for place in self.order:
            x = torch.tanh(self.layers[place](x))
        return x


def add_passes(model: nn.Module, comm: Communicator, step: int = 0) -> None:
    """Of the losses of all ranks, of which it is the mean."""
    for rank in range(comm.size):
        (model(batch(rank, step).requires_grad_()).square().mean() / comm.size).backward()


def made_anew(comm: Communicator) -> None:
    """Defined in the order of the backward pass, with a layer that is not used between."""
    model, expected = (Chain((6, 5, 4, 2, 1, 0)) for _ in range(2))
    averaged = ad.DataParallelGradients(model, comm, 1)
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


def test_buckets_follow_the_order_of_the_gradients_of_the_first_pass(ranks: RankPool) -> None:
    ranks.run(2, made_anew)


def wrong(comm: Communicator) -> None:
    model, other, frozen = model_of(0), nn.Linear(2, 2 + comm.rank), nn.Linear(2, 2).requires_grad_(False)
    fused: Any = nn.Linear(2, 2)
    fused.weight.main_grad = torch.zeros(2, 2)
    rows: list[tuple[type[Exception], str, tuple[Any, ...]]] = [
        (TypeError, r"model is \[\], expected a torch\.nn\.Module", ([], comm)),
        (TypeError, "comm is None", (model, None)),
        *((ValueError, "bucket_bytes is", (model, comm, nbytes)) for nbytes in (0, "25", True, float("nan"))),
        (TypeError, r"reduce_dtype is torch\.int32", (model, comm, 1, torch.int32)),
        (ValueError, "no parameter that requires a gradient", (frozen, comm)),
        (ValueError, "weight is on meta", (nn.Linear(2, 2, device="meta"), comm)),
        (TypeError, "sparse gradients", (nn.Embedding(4, 2, sparse=True), comm)),
        (ValueError, "rank 1 and rank 0 differ in names, shapes", (other, comm)),
        (ValueError, "rank 1 and rank 0 differ in bucket_bytes", (model, comm, 100 + comm.rank)),
        (ValueError, "weight has main_grad", (fused, comm)),
    ]
    for kind, match, args in rows:
        with pytest.raises(kind, match=match):
            ad.DataParallelGradients(*args)
    shared = nn.Linear(4, 3)
    ad.DataParallelGradients(shared, comm)
    with pytest.raises(TypeError, match=r"the gradient of weight is torch\.sparse_coo, expected a dense one"):
        F.embedding(torch.tensor([0, 2]), shared.weight, sparse=True).sum().backward()


def test_what_is_wrong_is_said_on_all_ranks(ranks: RankPool) -> None:
    ranks.run(2, wrong)
