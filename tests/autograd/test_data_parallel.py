"""DataParallelGradients against one process that has all data, and against torch's DistributedDataParallel."""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import RankPool
from small_transformers import MAKE, batch as words, compare
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import pynccl_autograd as ad
from pynccl import Communicator

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
        for step in range(2):
            model.zero_grad()
            loss_of(model, comm.rank, step).backward()
            assert_gradients(model, average(comm.size, [step]))
        averaged.remove()
        model.zero_grad()
        loss_of(model, comm.rank, 0).backward()
        alone = model_of(seed=0)
        loss_of(alone, comm.rank, 0).backward()
        assert_gradients(model, alone)


@pytest.mark.parametrize("n", [2, 3])
def test_gradients_are_those_of_one_process_with_all_data(ranks: RankPool, n: int) -> None:
    ranks.run(n, equals_one_process)


def equals_torch(comm: Communicator, path: str, as_view: bool) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(path, comm.size), rank=comm.rank, world_size=comm.size)
    try:
        steps_like_torch(comm, as_view)  # a frame of its own: what it has made ends before the process group
    finally:
        gc.collect()
        comm.barrier()
        dist.destroy_process_group()


def steps_like_torch(comm: Communicator, as_view: bool) -> None:
    theirs = DistributedDataParallel(
        model_of(0), find_unused_parameters=True, gradient_as_bucket_view=as_view, bucket_cap_mb=1
    )
    model = model_of(0)
    averaged = ad.DataParallelGradients(model, comm, 700, gradient_as_bucket_view=as_view)
    optimizers = [torch.optim.SGD(one.parameters(), 0.1, momentum=0.9) for one in (model, theirs)]
    for step, branches in enumerate(["lr", "l", "lr"[comm.rank % 2], "r"]):
        for accumulated in (True, False):
            with averaged.no_sync() if accumulated else contextlib.nullcontext():
                loss_of(model, comm.rank, 2 * step + accumulated, branches).backward()
            with theirs.no_sync() if accumulated else contextlib.nullcontext():
                loss_of(theirs, comm.rank, 2 * step + accumulated, branches).backward()
        assert_gradients(model, theirs.module)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for mine, other in zip(model.parameters(), theirs.module.parameters(), strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize(("n", "as_view"), [(2, True), (4, False)])
def test_steps_are_those_of_distributed_data_parallel(ranks: RankPool, tmp_path: Path, n: int, as_view: bool) -> None:
    """With accumulation under no_sync, and branches that are used by all ranks, some, or none."""
    ranks.run(n, equals_torch, str(tmp_path / "store"), as_view)


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


def complex_numbers(comm: Communicator) -> None:
    model = nn.Linear(WIDTH, 5, dtype=torch.complex128)
    ad.DataParallelGradients(model, comm, 100)
    whole = copy.deepcopy(model)
    model(batch(comm.rank, 0) * (1 + 2j)).abs().square().sum().backward()
    for rank in range(comm.size):
        (whole(batch(rank, 0) * (1 + 2j)).abs().square().sum() / comm.size).backward()
    assert_gradients(model, whole)


def views(comm: Communicator) -> None:
    """Gradients stay views of the buckets, from the second pass on: before it they are made anew."""
    model = model_of(0)
    averaged = ad.DataParallelGradients(model, comm, 1000, gradient_as_bucket_view=True)
    addresses = []
    for step in (5, 1, 0):
        averaged.zero_grad()
        addresses.append([one.grad.data_ptr() for one in model.parameters() if one.grad is not None])
        loss_of(model, comm.rank, step).backward()
    assert addresses[1] == addresses[2] != []
    expected = average(comm.size)
    for parameter in expected.never.parameters():
        parameter.grad = torch.zeros_like(parameter)  # which also what is never used has
    assert_gradients(model, expected)
    assert model.conv.weight.grad is not None
    assert model.conv.weight.grad.stride() == model.conv.weight.stride()


def other_uses(comm: Communicator) -> None:
    """torch.autograd.grad, a graph that is used twice, torch.compile."""
    model, alone = model_of(0), model_of(0)
    ad.DataParallelGradients(model, comm)
    own = [torch.autograd.grad(loss_of(one, comm.rank, 0), [one.scale])[0] for one in (model, alone)]
    torch.testing.assert_close(own[0], own[1])
    loss = loss_of(model, comm.rank, 0)
    loss.backward(retain_graph=True)
    loss.backward()  # to the average of the first is added
    assert_gradients(model, average(comm.size, (0, 0)))
    model.zero_grad()
    loss_of(torch.compile(model, backend="aot_eager"), comm.rank, 0).backward()
    assert_gradients(model, average(comm.size))


@pytest.mark.parametrize("use", [unused, reduced_in_bfloat16, complex_numbers, views, other_uses])
def test_each_way_to_use_it(ranks: RankPool, use: Any) -> None:
    ranks.run(3, use)


def sequence_parallel(comm: Communicator) -> None:
    """Of which the other axis is finished in the same pass: it averages whole gradients."""
    with ad.Mesh(comm, {"dp": 2, "tp": 2}) as mesh:
        torch.manual_seed(0)
        whole, place = MAKE["llama"](2).double(), mesh.coordinate["dp"]
        model: Any = ad.parallelize(copy.deepcopy(whole), mesh["tp"], ad.plans.llama)
        ad.finish_gradients_in_backward(model)
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


def test_what_sequence_parallelism_leaves_partial_is_finished_in_the_same_pass(ranks: RankPool) -> None:
    pytest.importorskip("transformers")
    ranks.run(4, sequence_parallel)


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
