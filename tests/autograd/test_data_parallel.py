"""DataParallelGradients compared with one process that has all data."""

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
from pynccl_autograd.layers.buckets import assign_buckets

WIDTH, ROWS = 10, 6


class Model(nn.Module):
    """Optional branches, a layer used twice, a frozen parameter, a scalar and a channels-last weight."""

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


def make_model(seed: int) -> Model:
    torch.manual_seed(seed)
    return Model()


def batch(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)


def loss_of(model: nn.Module, rank: int, step: int, branches: str = "lr") -> Tensor:
    y: Tensor = model(batch(rank, step), branches)
    return y.square().mean()


def average(ranks: int, steps: Sequence[int] = (0,), branches: Sequence[str] = ("lr",) * 4) -> Model:
    """Return a model with the gradients of the mean of all ranks' losses, summed over `steps`."""
    model = make_model(0)
    for step in steps:
        for rank in range(ranks):
            (loss_of(model, rank, step, branches[rank]) / ranks).backward()
    return model


def assert_gradients(model: nn.Module, expected: nn.Module) -> None:
    for (name, parameter), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert (parameter.grad is None) == (other.grad is None), name
        if parameter.grad is not None:
            message = partial("{}: {}".format, name)
            torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-10, atol=1e-12, msg=message)


def compare_with_one_process(comm: Communicator) -> None:
    for bucket_bytes, as_view in ((1, False), (1000, True), (1e9, False)):
        model = make_model(seed=comm.rank)  # rank 0's values are broadcast
        model.steps.fill_(comm.rank == 0)
        averaged = ad.DataParallelGradients(model, comm, bucket_bytes, gradient_as_bucket_view=as_view)
        assert model.steps.tolist() == [True, True]
        for step in range(3):  # buckets are rebuilt after the first; the average is added to .grad
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
        local_model = make_model(seed=0)
        loss_of(local_model, comm.rank, 0).backward()
        assert_gradients(model, local_model)


@pytest.mark.parametrize("n", [2, 3])
def test_gradients_equal_those_of_one_process_with_all_data(ranks: RankPool, n: int) -> None:
    ranks.run(n, compare_with_one_process)


def leave_branches_unused(comm: Communicator) -> None:
    """Parameters unused on some ranks count as zeros, on all ranks stay None; a rank can have no loss at all."""
    model, branches = make_model(0), ["l", "r", ""]
    averaged = ad.DataParallelGradients(model, comm, 500)
    loss_of(model, comm.rank, 0, branches[comm.rank]).backward()
    assert_gradients(model, average(comm.size, branches=branches))
    assert model.never.weight.grad is None
    model.zero_grad()
    if comm.rank == 0:
        loss_of(model, 0, 0).backward()
    else:
        averaged.finish()
    expected = make_model(0)
    (loss_of(expected, 0, 0) / comm.size).backward()
    assert_gradients(model, expected)


def reduce_in_bfloat16(comm: Communicator) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))
    ad.DataParallelGradients(model, comm, 100, torch.bfloat16, gradient_as_bucket_view=True)
    local = copy.deepcopy(model)  # a copy is not averaged
    model(batch(comm.rank, 0).float()).square().sum().backward()
    total = [torch.zeros_like(parameter, dtype=torch.float64) for parameter in local.parameters()]
    for rank in range(comm.size):
        local.zero_grad()
        local(batch(rank, 0).float()).square().sum().backward()
        total = [sum_ + parameter.grad.bfloat16() for sum_, parameter in zip(total, local.parameters(), strict=True)]  # type: ignore[union-attr]
    for parameter, summed in zip(model.parameters(), total, strict=True):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, parameter.grad.bfloat16().float())  # it was sent in bfloat16
        torch.testing.assert_close(parameter.grad.double(), summed / comm.size, rtol=2**-7, atol=1e-6)


def reuse_graph_and_compile(comm: Communicator) -> None:
    """Two backward passes through one graph, and torch.compile."""
    model = make_model(0)
    ad.DataParallelGradients(model, comm)
    loss = loss_of(model, comm.rank, 0)
    loss.backward(retain_graph=True)
    loss.backward()  # is added to the average of the first
    assert_gradients(model, average(comm.size, (0, 0)))
    model.zero_grad()
    loss_of(torch.compile(model, backend="aot_eager"), comm.rank, 0).backward()
    assert_gradients(model, average(comm.size))


@pytest.mark.parametrize("use", [leave_branches_unused, reduce_in_bfloat16, reuse_graph_and_compile])
def test_unused_parameters_bfloat16_reduction_and_graph_reuse(ranks: RankPool, use: Any) -> None:
    ranks.run(3, use)


def train_sequence_parallel(comm: Communicator, reentrant: bool | None) -> None:
    """Tensor-parallel gradients are finished in the same pass, so that complete gradients are averaged."""
    with ad.Mesh(comm, {"dp": 2, "tp": 2}) as mesh:
        torch.manual_seed(0)
        unsharded, dp_rank = MAKE["llama"](2).double(), mesh.coordinate["dp"]
        model: Any = ad.parallelize(copy.deepcopy(unsharded), mesh["tp"], ad.plans.llama)
        handle = ad.finish_gradients_in_backward(model)
        with pytest.raises(RuntimeError, match=r"already called for a parameter of shape .*; call it once"):
            ad.finish_gradients_in_backward(model.model.layers)
        if reentrant is not None:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        averaged = ad.DataParallelGradients(model, mesh["dp"], 2000)
        optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (model, unsharded)]

        def backward(number: int) -> None:
            model(**words(10 * number + dp_rank)).loss.backward()
            for rank in range(2):
                (unsharded(**words(10 * number + rank)).loss / 2).backward()

        for step in range(2):
            with averaged.no_sync():
                backward(10 * step)
            backward(10 * step + 1)
            backward(10 * step + 2)  # is added to the average
            expected = nn.utils.clip_grad_norm_(unsharded.parameters(), 0.5)
            torch.testing.assert_close(ad.clip_grad_norm_(model, 0.5).double(), expected, rtol=1e-6, atol=0.0)
            compare(model, unsharded, {"rtol": 1e-6, "atol": 1e-9})
            for module in optimizers:
                module.step()
                module.zero_grad()
        handle.remove()
        averaged.remove()
        for module in (model, unsharded):
            module.zero_grad()
            module(**words(7)).loss.backward()
        ad.finish_gradients(model)  # the backward pass leaves partial gradients again
        compare(model, unsharded, {"rtol": 1e-6, "atol": 1e-9})


@pytest.mark.parametrize("reentrant", [None, True, False])
def test_sequence_parallel_gradients_are_finished_in_the_same_pass(ranks: RankPool, reentrant: bool | None) -> None:
    """Also with both kinds of activation checkpointing."""
    pytest.importorskip("transformers")
    ranks.run(4, train_sequence_parallel, reentrant)


def bucket_sizes(kilobytes: list[int], nbytes: float) -> list[list[int]]:
    """Sizes in KB of the parameters in each bucket."""
    named = [(str(dp_rank), nn.Parameter(torch.zeros(250 * size))) for dp_rank, size in enumerate(kilobytes)]
    return [[parameter.nbytes // 1000 for _, parameter in bucket] for bucket in assign_buckets(named, nbytes)]


def test_buckets_hold_bucket_bytes_or_an_eighth_of_the_model() -> None:
    assert bucket_sizes([3, 2, 1], 1) == [[1], [2], [3]]
    assert bucket_sizes([10, 5, 5, 1] * 10, 12e3) == [[1, 5, 5, 10]] * 10  # ends with the parameter that fills it
    assert bucket_sizes([1] * 80, 1e9) == [[1] * 80]  # one bucket is better for a small model
    assert bucket_sizes([1] * 80, 100e3) == [[1] * 10] * 8
    assert bucket_sizes([1] * 80, 320e3) == [[1] * 20] * 4
    assert bucket_sizes([1, 40, 1], 1e9) == [[1, 40, 1]]


class Chain(nn.Module):
    """Layers that are used in a given order."""

    def __init__(self, order: Sequence[int]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH).double() for _ in range(7))
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        for dp_rank in self.order:
            x = torch.tanh(self.layers[dp_rank](x))
        return x


def add_passes(model: nn.Module, comm: Communicator, step: int = 0) -> None:
    """Add the gradients of the mean of all ranks' losses."""
    for rank in range(comm.size):
        (model(batch(rank, step).requires_grad_()).square().mean() / comm.size).backward()


def rebuild_buckets(comm: Communicator) -> None:
    """A model whose layers are defined in backward order, with an unused layer in between."""
    model, expected = (Chain((6, 5, 4, 2, 1, 0)) for _ in range(2))
    averaged = ad.DataParallelGradients(model, comm, 1)
    if comm.rank == 0:  # this pass shows no order; the next one does
        averaged.finish()
    else:
        model(batch(comm.rank, 7)).sum().backward()
    model.zero_grad()
    counts: list[int] = []
    for step in range(3):  # .grad accumulates across the rebuild
        x = batch(comm.rank, step).requires_grad_()
        x.register_hook(lambda g: counts.append(len(averaged._launched)))
        model(x).square().mean().backward()
        add_passes(expected, comm, step)
        assert_gradients(model, expected)
    assert counts[0] <= 2  # the first bucket to be sent was filled last
    assert min(counts[1:]) >= 10  # of 12 used parameters, during the pass


def test_buckets_follow_the_order_of_the_gradients_of_the_first_pass(ranks: RankPool) -> None:
    ranks.run(2, rebuild_buckets)


def check_bad_input(comm: Communicator) -> None:
    model, other, frozen = make_model(0), nn.Linear(2, 2 + comm.rank), nn.Linear(2, 2).requires_grad_(False)
    fused: Any = nn.Linear(2, 2)
    fused.weight.main_grad = torch.zeros(2, 2)
    rows: list[tuple[type[Exception], str, tuple[Any, ...]]] = [
        (TypeError, r"model is \[\], expected a torch\.nn\.Module", ([], comm)),
        (TypeError, "comm is None", (model, None)),
        *((ValueError, "bucket_bytes is", (model, comm, nbytes)) for nbytes in (0, float("nan"))),
        *((TypeError, "bucket_bytes is", (model, comm, nbytes)) for nbytes in ("25", True)),
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


def test_bad_input_raises_on_all_ranks(ranks: RankPool) -> None:
    ranks.run(2, check_bad_input)
