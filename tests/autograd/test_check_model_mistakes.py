"""check_model names each planted mistake by its parameter and its explanation, alike on all ranks."""

from __future__ import annotations

import copy
import re
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import RankPool
from test_check_model import (
    WIDTH,
    Block,
    cut_block,
    explained,
    fails,
    mark_partial,
    same_on_all,
    some_sizes,
    whole_batch,
    whole_block,
)
from torch import Tensor, nn

import pynccl_autograd as ad
from pynccl import Communicator


class RowLinear(nn.Module):
    """A row-parallel linear layer by hand, whose all_reduce takes either convention."""

    def __init__(self, linear: nn.Linear, comm: Communicator, grad: Any) -> None:
        super().__init__()
        self.comm, self.grad = comm, grad
        whole = linear.weight.detach()
        self.weight = nn.Parameter(whole.chunk(comm.size, 1)[comm.rank].clone())
        self.bias = nn.Parameter(linear.bias.detach().clone())
        self.weight.shard = ad.Shard(comm, 1, whole.shape)  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return ad.all_reduce(F.linear(x, self.weight), self.comm, grad=self.grad) + self.bias


def nothing(model: nn.Module) -> None:
    """Leaves the gradients as backward() did."""


def sum_for_replicated(comm: Communicator) -> ad.testing.ModelReport:
    whole = whole_block()
    model = cut_block(whole, comm)
    model.down = RowLinear(whole.down, comm, "replicated")
    ad.testing.check_model(model, whole, whole_batch(), comm)
    model.down = RowLinear(whole.down, comm, "sum")
    report = fails(model, whole, whole_batch(), comm)
    names = ["norm.weight", "norm.bias", "up.weight", "up.bias", "down.weight"]
    assert explained(report) == dict.fromkeys(names, "factor")
    assert report.wrong == 5 and report.parameters == 6
    for one in report.differences:
        assert one.error == pytest.approx(comm.size - 1)
        assert f"factor: {comm.size} times the gradient, on {comm.size} ranks" in one.advice
    found = re.search(r"rank \d has (\S+) at \[\d+\], expected (\S+):", str(report))
    assert found and float(found[1]) == pytest.approx(comm.size * float(found[2]), rel=1e-4)
    assert "losses differ" not in str(report)
    return report


class MeanLoss(nn.Module):
    """The mean of all samples' losses, of which this rank has some; comm None: all of them."""

    def __init__(self, comm: Communicator | None, grad: Any) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.linear, self.comm, self.grad = nn.Linear(WIDTH, 3).double(), comm, grad

    def forward(self, x: Tensor) -> Tensor:
        loss = torch.tanh(self.linear(x)).square().mean()
        return loss if self.comm is None else ad.all_reduce(loss, self.comm, "avg", grad=self.grad)


def add_up(model: nn.Module, comm: Communicator, *, op: str = "sum") -> None:
    """Gradients summed over ranks."""
    for parameter in model.parameters():
        assert parameter.grad is not None
        comm.all_reduce(parameter.grad, parameter.grad, op)


def mean_twice(comm: Communicator) -> ad.testing.ModelReport:
    whole, own = MeanLoss(None, None), whole_batch().chunk(comm.size)[comm.rank]
    for grad, op in (("replicated", "sum"), ("sum", "avg")):
        model = MeanLoss(comm, grad)
        ad.testing.check_model(model, whole, own, comm, batch_dim=0, finish=partial(add_up, comm=comm, op=op))
    alone = fails(MeanLoss(None, None), whole, own, comm, batch_dim=0)
    assert alone.differences[0].explanation == "missing sum" and f"add up to {comm.size} times the whole" in str(alone)
    model = MeanLoss(comm, "replicated")
    report = fails(model, whole, own, comm, batch_dim=0, finish=partial(add_up, comm=comm, op="avg"))
    assert explained(report) == {"linear.weight": "factor", "linear.bias": "factor"}
    assert f"factor: 1/{comm.size} of the gradient" in str(report) and 'expected grad="sum"' in str(report)
    return report


def on_a_mesh(comm: Communicator) -> ad.testing.ModelReport:
    """Tensor parallel along one axis, data parallel along the other; whose sum is missing, or a factor of 2 of 4."""
    with ad.Mesh(comm, {"dp": 2, "tp": 2}) as mesh:
        whole, own = whole_block(), whole_batch().chunk(2, 1)[mesh.coordinate["dp"]]
        model = cut_block(whole, mesh["tp"])

        def step(model: nn.Module, batch: Tensor) -> Tensor:
            return model(whole_batch() if model is whole else own)

        assert mesh["dp"].size == 2
        finish = partial(add_up, comm=mesh["dp"])
        ad.testing.check_model(model, whole, whole_batch(), comm, step, finish=finish)
        missing = fails(model, whole, whole_batch(), comm, step, finish=nothing)
        assert [one.explanation for one in missing.differences] == ["missing sum"] * 6
        model.down = RowLinear(whole.down, mesh["tp"], "sum")
        report = fails(model, whole, whole_batch(), comm, step, finish=finish)
        assert "add up to 2 times the whole. After backward()" in str(missing)
        return report


def test_an_axis_of_a_mesh_is_told_from_all_ranks(ranks: RankPool) -> None:
    report = same_on_all(ranks.run(4, on_a_mesh))
    assert [one.explanation for one in report.differences] == ["factor"] * 5
    assert "factor: 2 times the gradient, on 4 ranks" in str(report)


def without_finishing(comm: Communicator) -> ad.testing.ModelReport:
    whole, own = whole_block(), whole_batch().chunk(comm.size)[comm.rank]
    model = cut_block(whole, comm, True)
    missing = {"norm.weight": "missing sum", "norm.bias": "missing sum"}
    unmarked = fails(model, whole, own, comm, batch_dim=0)
    assert explained(unmarked) == missing
    assert "parameter.shard = ad.Shard(comm, None, parameter.shape, partial=True)" in str(unmarked)
    mark_partial(model.norm, comm)
    report = fails(model, whole, own, comm, batch_dim=0, finish=nothing)
    assert explained(report) == missing and "call ad.finish_gradients(model) after backward()" in str(report)
    return report


def without_copy(comm: Communicator) -> ad.testing.ModelReport:
    whole = whole_block()
    report = fails(cut_block(whole, comm, gather_input=False), whole, whole_batch(), comm)
    assert list(explained(report).values()) == ["missing sum", "missing sum"]
    assert "or put ad.copy(x, comm)" in str(report)
    return report


class Gathered(nn.Module):
    """A layer cut by rows, whose output is gathered and taken up by columns of each rank's own."""

    def __init__(self, whole: Block, comm: Communicator, grad: Any) -> None:
        super().__init__()
        self.comm, self.grad = comm, grad
        self.norm, self.up = copy.deepcopy(whole.norm), copy.deepcopy(whole.up)
        self.down = RowLinear(whole.down, comm, "replicated")
        mark_partial(self.norm, comm)
        mark_partial(self.up, comm)

    def forward(self, x: Tensor) -> Tensor:
        own = ad.split(x, self.comm)
        h = ad.all_gather(torch.tanh(self.up(self.norm(own))), self.comm, grad=self.grad)
        return (x + self.down(h.chunk(self.comm.size, -1)[self.comm.rank])).square().sum()


def wrong_elementwise(comm: Communicator) -> ad.testing.ModelReport:
    whole = whole_block()
    ad.testing.check_model(Gathered(whole, comm, "sum"), whole, whole_batch(), comm)
    report = fails(Gathered(whole, comm, "replicated"), whole, whole_batch(), comm)
    assert explained(report) == dict.fromkeys(["norm.weight", "norm.bias", "up.weight", "up.bias"])
    assert "wrong by more than a factor" in str(report) and "docs/conventions.md" in str(report)
    return report


def other_forward(comm: Communicator) -> ad.testing.ModelReport:
    """The model gets another batch than the reference."""
    whole = whole_block()
    model = cut_block(whole, comm)

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch) if model is whole else model(2 * batch)

    report = fails(model, whole, whole_batch(), comm, step)
    assert report.losses[0] != pytest.approx(report.reference_loss, rel=0.1)
    assert "The losses differ, too" in str(report) and "Look at the forward pass first." in str(report)
    return report


MISTAKES = [sum_for_replicated, mean_twice, without_finishing, without_copy, wrong_elementwise, other_forward]


@some_sizes
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named_by_its_parameter_and_its_explanation(ranks: RankPool, n: int, mistake: Any) -> None:
    same_on_all(ranks.run(n, mistake))
