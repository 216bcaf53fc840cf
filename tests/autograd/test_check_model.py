"""check_model: a right model of any kind passes, each planted mistake is named alike on all ranks, bad input refused."""

from __future__ import annotations

import copy
import math
import re
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import RankPool
from torch import Tensor, nn

import pynccl_autograd as ad
from pynccl import Communicator

SEQUENCE, BATCH, WIDTH, HIDDEN = 8, 3, 12, 24


class Block(nn.Module):
    """Its forward is the loss. up and down are nn.Linear, or layers that are cut, or told to make a mistake."""

    norm: Any
    up: Any
    down: Any

    def __init__(self, norm: nn.Module, up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.norm, self.up, self.down = norm, up, down

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.down(torch.tanh(self.up(self.norm(x))))).square().sum()


def whole_block(dtype: torch.dtype = torch.float64) -> Block:
    torch.manual_seed(3)
    block = Block(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH))
    nn.init.normal_(block.norm.weight)
    return block.to(dtype)


def whole_batch(dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(4)
    return torch.randn(SEQUENCE, BATCH, WIDTH, generator=generator, dtype=torch.float64).to(dtype)


def cut_block(whole: Block, comm: Communicator, sequence_parallel: bool = False, **options: Any) -> Block:
    up = ad.ColumnParallelLinear.from_linear(whole.up, comm, sequence_parallel, **options)
    down = ad.RowParallelLinear.from_linear(whole.down, comm, sequence_parallel)
    return Block(copy.deepcopy(whole.norm), up, down)


def mark_partial(module: nn.Module, comm: Communicator) -> None:
    for parameter in module.parameters():
        parameter.shard = ad.Shard(comm, None, parameter.shape, partial=True)  # type: ignore[attr-defined]


def right(comm: Communicator) -> None:
    """In each type, with and without sequence parallelism."""
    for sequence_parallel in (False, True):
        for dtype, bound in ((torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 5e-2)):
            whole = whole_block(dtype)
            model = cut_block(whole, comm, sequence_parallel)
            kept = torch.ones_like(whole.norm.weight)
            model.norm.weight.grad = whole.norm.weight.grad = kept
            x, options = whole_batch(dtype), {}
            if sequence_parallel:
                mark_partial(model.norm, comm)
                x, options = x.chunk(comm.size)[comm.rank], {"batch_dim": 0}
            report = ad.testing.check_model(model, whole, x, comm, **options)
            assert model.norm.weight.grad is kept and model.up.weight.grad is None
            assert (report.parameters, report.wrong, report.differences) == (6, 0, ())
            assert report.error <= bound and "6 gradients equal the reference's" in str(report)
            loss = math.fsum(report.losses) if sequence_parallel else report.losses[-1]
            assert loss == pytest.approx(report.reference_loss, rel=2e-2)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.last(torch.sin(self.first(x))), y)


def batches(comm: Communicator) -> None:
    """Tuples and dicts, tied parameters, unequal parts of a batch with a loss of the caller's, complex numbers."""
    torch.manual_seed(1)
    tied, x, y = Tied().double(), torch.randn(8, 4).double(), torch.randn(8, 4).double()
    for batch in ((x, y), {"x": x, "y": y}):
        assert ad.testing.check_model(copy.deepcopy(tied), tied, batch, comm).parameters == 1
    own = tuple(t.split([1, 7] if comm.size == 2 else [1, 3, 2, 2])[comm.rank] for t in (x, y))

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return model(*batch) * (1.0 if model is tied else len(own[0]) / 8)

    model = copy.deepcopy(tied)
    mark_partial(model, comm)
    ad.testing.check_model(model, tied, own, comm, loss, batch_dim=0)
    z = nn.Linear(3, 3, dtype=torch.complex128)

    def norm(model: nn.Module, batch: Tensor) -> Tensor:
        y: Tensor = model(batch)
        return y.abs().square().sum()

    ad.testing.check_model(copy.deepcopy(z), z, torch.randn(5, 3, dtype=torch.complex128), comm, norm)


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("passes", [right, batches])
def test_a_right_model_passes(ranks: RankPool, n: int, passes: Any) -> None:
    ranks.run(n, passes)


# ------------------------------------------------------------------------------------------------------------ mistakes


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


def mistakes(comm: Communicator) -> list[str]:
    """What is said of each: the explanation of every wrong gradient, and words of the report."""
    whole, x, reports = whole_block(), whole_batch(), []
    own = x.chunk(comm.size)[comm.rank]

    def told(model: nn.Module, explanations: dict[str, Any], words: str, *args: Any, **options: Any) -> None:
        with pytest.raises(ad.testing.ModelError) as caught:
            ad.testing.check_model(model, whole, *args, **options)
        report = caught.value.report
        assert {one.name: one.explanation for one in report.differences} == explanations
        assert report.wrong == len(explanations) and words in str(report) == str(caught.value)
        reports.append(str(report))

    model = cut_block(whole, comm)
    model.down = RowLinear(whole.down, comm, "replicated")
    ad.testing.check_model(model, whole, x, comm)
    model.down = RowLinear(whole.down, comm, "sum")
    names = ["norm.weight", "norm.bias", "up.weight", "up.bias", "down.weight"]
    factor = f"factor: {comm.size} times the gradient, on {comm.size} ranks"
    told(model, dict.fromkeys(names, "factor"), factor, x, comm)
    found = re.search(r"rank \d has (\S+) at \[\d+\], expected (\S+):", reports[-1])
    assert found and float(found[1]) == pytest.approx(comm.size * float(found[2]), rel=1e-4)

    missing = {"norm.weight": "missing sum", "norm.bias": "missing sum"}
    model = cut_block(whole, comm, True)
    mark = "parameter.shard = ad.Shard(comm, None, parameter.shape, partial=True)"
    told(model, missing, mark, own, comm, batch_dim=0)
    mark_partial(model.norm, comm)
    finish = "call ad.finish_gradients(model) after backward()"
    told(model, missing, finish, own, comm, batch_dim=0, finish=lambda model: None)
    told(cut_block(whole, comm, gather_input=False), missing, "or put ad.copy(x, comm)", x, comm)

    model = cut_block(whole, comm)

    def spoil(model: Any) -> None:
        model.up.bias.grad.mul_(torch.arange(HIDDEN // comm.size))

    told(model, {"up.bias": None}, "wrong by more than a factor", x, comm, finish=spoil)

    def other_batch(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch) if model is whole else model(2 * batch)

    with pytest.raises(ad.testing.ModelError, match=r"The losses differ, too.* Look at the forward pass first\."):
        ad.testing.check_model(model, whole, x, comm, other_batch)

    def slightly(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch) * (1.0 if model is whole else 1.0 + 2e-4)

    ad.testing.check_model(model, whole, x, comm, slightly, tolerance=1e-3)
    with pytest.raises(ad.testing.ModelError):
        ad.testing.check_model(model, whole, x, comm, slightly)
    return reports


@pytest.mark.parametrize("n", [2, 4])
def test_a_mistake_is_named_by_its_parameter_and_its_explanation(ranks: RankPool, n: int) -> None:
    first, *others = ranks.run(n, mistakes)
    assert all(other == first for other in others)


# ----------------------------------------------------------------------------------------------------------- bad input


def refused(comm: Communicator) -> None:
    """Also by the ranks on which all is well: rank 1 is wrong alone."""
    check, whole, x, alone = ad.testing.check_model, whole_block(), whole_batch(), comm.rank == 1
    model, same, fused = cut_block(whole, comm), nn.Identity(), cut_block(whole, comm, grad_accumulation_fusion=True)
    sharing, unmarked, other = Block(whole.norm, model.up, model.down), cut_block(whole, comm), cut_block(whole, comm)
    if alone:
        del unmarked.up.weight.shard
        other.up.bias.data[3] += 0.5
    names, mark = "norm.weight, norm.bias, up.weight, ..", r"expected \[24, 12\].*ad.Shard\(comm, dim, \[24, 12\]\)"
    check_dim = partial(check, batch_dim=3)
    rows: list[tuple[Any, tuple[Any, ...], type[Exception], str]] = [
        (check, ("block" if alone else model, whole, x), TypeError, "model is 'block', expected a torch.nn.Module"),
        (check, (same, same, x), ValueError, r"the loss is a tensor of shape \[8, 3, 12\]"),
        (check_dim, (model, whole, x), ValueError, r"batch_dim is 3, but a tensor of the batch has shape \[8, 3, 12\]"),
        (check, (model, whole, x + alone), ValueError, r"losses are \[.*\] on the ranks, expected one value"),
        (check, (same, whole, x), ValueError, f"no rank's model has {names}"),
        (check, (model, same, x), ValueError, f"the model has {names}, which the reference has not"),
        (check, (fused, whole, x), ValueError, "a layer of the model has grad_accumulation_fusion"),
        (check, (sharing, whole, x), ValueError, "norm.weight, norm.bias of the model and of the reference are"),
        (check, (unmarked, whole, x), ValueError, rf"up.weight has shape \[12, 12\], {mark}"),
        (check, (other, whole, x), ValueError, "up.bias differs on rank 1 from its part of the reference's, by 0.5"),
    ]
    for function, args, error, words in rows:
        with pytest.raises(error if alone else (error, RuntimeError), match=words):
            function(*args, comm)
    assert check(model, whole, x, comm).wrong == 0  # nothing that came before has left a trace


def test_bad_input_is_refused_on_every_rank_alike(ranks: RankPool) -> None:
    ranks.run(2, refused)
