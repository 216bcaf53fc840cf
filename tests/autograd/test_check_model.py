"""check_model accepts a correct model, reports each planted mistake identically on all ranks, and rejects bad input."""

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
    """A block whose forward returns the loss. up and down are nn.Linear or their sharded counterparts."""

    norm: Any
    up: Any
    down: Any

    def __init__(self, norm: nn.Module, up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.norm, self.up, self.down = norm, up, down

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.down(torch.tanh(self.up(self.norm(x))))).square().sum()


def reference_block(dtype: torch.dtype = torch.float64) -> Block:
    torch.manual_seed(3)
    block = Block(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH))
    nn.init.normal_(block.norm.weight)
    return block.to(dtype)


def full_batch(dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(4)
    return torch.randn(SEQUENCE, BATCH, WIDTH, generator=generator, dtype=torch.float64).to(dtype)


def sharded_block(full: Block, comm: Communicator, sequence_parallel: bool = False, **options: Any) -> Block:
    up = ad.ColumnParallelLinear.from_linear(full.up, comm, sequence_parallel, **options)
    down = ad.RowParallelLinear.from_linear(full.down, comm, sequence_parallel)
    return Block(copy.deepcopy(full.norm), up, down)


def mark_partial(module: nn.Module, comm: Communicator) -> None:
    for parameter in module.parameters():
        ad.set_shard(parameter, ad.Shard(comm, None, parameter.shape, partial=True))


def check_correct_models(comm: Communicator) -> None:
    """Check in each dtype, with and without sequence parallelism."""
    for sequence_parallel in (False, True):
        for dtype, bound in ((torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 5e-2)):
            full = reference_block(dtype)
            model = sharded_block(full, comm, sequence_parallel)
            kept = torch.ones_like(full.norm.weight)
            model.norm.weight.grad = full.norm.weight.grad = kept
            x, options = full_batch(dtype), {}
            if sequence_parallel:
                mark_partial(model.norm, comm)
                x, options = x.chunk(comm.size)[comm.rank], {"batch_dim": 0}
            report = ad.testing.check_model(model, full, x, comm, **options)
            assert model.norm.weight.grad is kept and model.up.weight.grad is None
            assert (report.parameters, report.wrong, report.differences) == (6, 0, ())
            assert report.error <= bound and "6 gradients equal the reference's" in str(report)
            loss = math.fsum(report.losses) if sequence_parallel else report.losses[-1]
            assert loss == pytest.approx(report.reference_loss, rel=2e-2)


@pytest.mark.parametrize("n", [2, 4])
def test_a_correct_model_passes(ranks: RankPool, n: int) -> None:
    ranks.run(n, check_correct_models)


# ------------------------------------------------------------------------------------------------------------ mistakes


def mistakes(comm: Communicator) -> list[str]:
    """Return the report of each mistake, after checking its explanation of every wrong gradient."""
    full, x, reports = reference_block(), full_batch(), []
    own_shard = x.chunk(comm.size)[comm.rank]

    def expect_report(model: nn.Module, explanations: dict[str, Any], words: str, *args: Any, **options: Any) -> None:
        with pytest.raises(ad.testing.ModelError) as caught:
            ad.testing.check_model(model, full, *args, **options)
        report = caught.value.report
        assert {difference.name: difference.explanation for difference in report.differences} == explanations
        assert report.wrong == len(explanations) and words in str(report) == str(caught.value)
        reports.append(str(report))

    model = sharded_block(full, comm)
    ad.testing.check_model(model, full, x, comm)

    def scale(model: Any) -> None:
        for parameter in model.parameters():
            parameter.grad.mul_(comm.size)

    factor = f"factor: {comm.size} times the gradient, on {comm.size} ranks"
    expect_report(model, {name: "factor" for name, _ in model.named_parameters()}, factor, x, comm, finish=scale)

    def spoil(model: Any) -> None:
        model.up.bias.grad.mul_(torch.arange(HIDDEN // comm.size))

    expect_report(model, {"up.bias": None}, "neither a constant factor nor a missing sum", x, comm, finish=spoil)

    missing = {"norm.weight": "missing sum", "norm.bias": "missing sum"}
    model = sharded_block(full, comm, True)
    mark = "ad.set_shard(parameter, ad.Shard(comm, None, parameter.shape, partial=True))"
    expect_report(model, missing, mark, own_shard, comm, batch_dim=0)
    mark_partial(model.norm, comm)
    finish = "ad.finish_gradients(model)"
    expect_report(model, missing, finish, own_shard, comm, batch_dim=0, finish=lambda model: None)
    expect_report(sharded_block(full, comm, gather_input=False), missing, "or apply ad.copy(x, comm)", x, comm)
    return reports


@pytest.mark.parametrize("n", [2, 4])
def test_a_mistake_is_named_by_its_parameter_and_its_explanation(ranks: RankPool, n: int) -> None:
    first, *others = ranks.run(n, mistakes)
    assert all(other == first for other in others)


# ----------------------------------------------------------------------------------------------------------- bad input


def check_bad_input(comm: Communicator) -> None:
    """Only rank 1 passes bad input; the other ranks raise too."""
    check, full, x, bad = ad.testing.check_model, reference_block(), full_batch(), comm.rank == 1
    model, unmarked, other = (sharded_block(full, comm) for _ in range(3))
    if bad:
        del unmarked.up.weight.shard
        other.up.bias.data[3] += 0.5
    names, mark = "norm.weight, norm.bias, up.weight, ..", r"expected \[24, 12\].*ad.Shard\(comm, dim, \[24, 12\]\)"
    check_dim = partial(check, batch_dim=3)
    rows: list[tuple[Any, tuple[Any, ...], type[Exception], str]] = [
        (check, ("block" if bad else model, full, x), TypeError, "model is 'block', expected a torch.nn.Module"),
        (check_dim, (model, full, x), ValueError, r"batch_dim is 3, but a tensor of the batch has shape \[8, 3, 12\]"),
        (check, (model, full, x + bad), ValueError, r"losses are \[.*\] on the ranks, expected equal losses"),
        (check, (nn.Identity(), full, x), ValueError, f"no rank's model has {names}"),
        (check, (unmarked, full, x), ValueError, rf"up.weight has shape \[12, 12\], {mark}"),
        (check, (other, full, x), ValueError, "up.bias on rank 1 differs from its shard of the reference by 0.5"),
    ]
    for function, args, error, words in rows:
        with pytest.raises(error if bad else (error, RuntimeError), match=words):
            function(*args, comm)
    assert check(model, full, x, comm).wrong == 0  # the failed checks have no lasting effect


def test_bad_input_raises_on_every_rank(ranks: RankPool) -> None:
    ranks.run(2, check_bad_input)
