"""check_model: a right model passes, each planted mistake is named alike on all ranks, bad input is refused."""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any

import pytest
import torch
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


@pytest.mark.parametrize("n", [2, 4])
def test_a_right_model_passes(ranks: RankPool, n: int) -> None:
    ranks.run(n, right)


# ------------------------------------------------------------------------------------------------------------ mistakes


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
    ad.testing.check_model(model, whole, x, comm)

    def scale(model: Any) -> None:
        for parameter in model.parameters():
            parameter.grad.mul_(comm.size)

    factor = f"factor: {comm.size} times the gradient, on {comm.size} ranks"
    told(model, {name: "factor" for name, _ in model.named_parameters()}, factor, x, comm, finish=scale)

    def spoil(model: Any) -> None:
        model.up.bias.grad.mul_(torch.arange(HIDDEN // comm.size))

    told(model, {"up.bias": None}, "wrong by more than a factor", x, comm, finish=spoil)

    missing = {"norm.weight": "missing sum", "norm.bias": "missing sum"}
    model = cut_block(whole, comm, True)
    mark = "parameter.shard = ad.Shard(comm, None, parameter.shape, partial=True)"
    told(model, missing, mark, own, comm, batch_dim=0)
    mark_partial(model.norm, comm)
    finish = "call ad.finish_gradients(model) after backward()"
    told(model, missing, finish, own, comm, batch_dim=0, finish=lambda model: None)
    told(cut_block(whole, comm, gather_input=False), missing, "or put ad.copy(x, comm)", x, comm)
    return reports


@pytest.mark.parametrize("n", [2, 4])
def test_a_mistake_is_named_by_its_parameter_and_its_explanation(ranks: RankPool, n: int) -> None:
    first, *others = ranks.run(n, mistakes)
    assert all(other == first for other in others)


# ----------------------------------------------------------------------------------------------------------- bad input


def refused(comm: Communicator) -> None:
    """Also by the ranks on which all is well: rank 1 is wrong alone."""
    check, whole, x, alone = ad.testing.check_model, whole_block(), whole_batch(), comm.rank == 1
    model, unmarked, other = (cut_block(whole, comm) for _ in range(3))
    if alone:
        del unmarked.up.weight.shard
        other.up.bias.data[3] += 0.5
    names, mark = "norm.weight, norm.bias, up.weight, ..", r"expected \[24, 12\].*ad.Shard\(comm, dim, \[24, 12\]\)"
    check_dim = partial(check, batch_dim=3)
    rows: list[tuple[Any, tuple[Any, ...], type[Exception], str]] = [
        (check, ("block" if alone else model, whole, x), TypeError, "model is 'block', expected a torch.nn.Module"),
        (check_dim, (model, whole, x), ValueError, r"batch_dim is 3, but a tensor of the batch has shape \[8, 3, 12\]"),
        (check, (model, whole, x + alone), ValueError, r"losses are \[.*\] on the ranks, expected one value"),
        (check, (nn.Identity(), whole, x), ValueError, f"no rank's model has {names}"),
        (check, (unmarked, whole, x), ValueError, rf"up.weight has shape \[12, 12\], {mark}"),
        (check, (other, whole, x), ValueError, "up.bias differs on rank 1 from its part of the reference's, by 0.5"),
    ]
    for function, args, error, words in rows:
        with pytest.raises(error if alone else (error, RuntimeError), match=words):
            function(*args, comm)
    assert check(model, whole, x, comm).wrong == 0  # nothing that came before has left a trace


def test_bad_input_is_refused_on_every_rank_alike(ranks: RankPool) -> None:
    ranks.run(2, refused)
