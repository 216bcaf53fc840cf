"""check_model: a right model of any kind passes, losses may be of some ranks, and bad input is refused."""

from __future__ import annotations

import copy
import math
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
some_sizes = pytest.mark.parametrize("n", [2, 4])


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
    assert isinstance(whole.up, nn.Linear) and isinstance(whole.down, nn.Linear)
    up = ad.ColumnParallelLinear.from_linear(whole.up, comm, sequence_parallel, **options)
    down = ad.RowParallelLinear.from_linear(whole.down, comm, sequence_parallel)
    return Block(copy.deepcopy(whole.norm), up, down)


def mark_partial(module: nn.Module, comm: Communicator) -> None:
    for parameter in module.parameters():
        parameter.shard = ad.Shard(comm, None, parameter.shape, partial=True)  # type: ignore[attr-defined]


def fails(*args: Any, **options: Any) -> ad.testing.ModelReport:
    with pytest.raises(ad.testing.ModelError) as caught:
        ad.testing.check_model(*args, **options)
    assert str(caught.value) == str(caught.value.report)
    return caught.value.report


def same_on_all(reports: list[Any]) -> Any:
    """What all ranks found, if that is one thing."""
    assert all(report == reports[0] and str(report) == str(reports[0]) for report in reports)
    return reports[0]


def explained(report: ad.testing.ModelReport) -> dict[str, str | None]:
    """By name of the parameter."""
    return {one.name: one.explanation for one in report.differences}


# ------------------------------------------------------------------------------------------------------ right models


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
            assert model.norm.weight.grad is kept and whole.norm.weight.grad is kept
            assert model.up.weight.grad is None
            assert (report.parameters, report.wrong, report.differences) == (6, 0, ())
            assert report.error <= bound and "6 gradients equal the reference's" in str(report)
            loss = math.fsum(report.losses) if sequence_parallel else report.losses[-1]
            assert loss == pytest.approx(report.reference_loss, rel=2e-2)


@some_sizes
def test_a_right_model_passes(ranks: RankPool, n: int) -> None:
    ranks.run(n, right)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.last(torch.sin(self.first(x))), y)


def batches(comm: Communicator) -> None:
    """Tuples and dicts, tied parameters, complex ones, a loss of the caller's, frozen ones."""
    torch.manual_seed(1)
    tied, x, y = Tied().double(), torch.randn(8, 4).double(), torch.randn(8, 4).double()
    for batch in ((x, y), {"x": x, "y": y}):
        assert ad.testing.check_model(copy.deepcopy(tied), tied, batch, comm).parameters == 1
    own = tuple(t.split([1, 7] if comm.size == 2 else [1, 3, 2, 2])[comm.rank] for t in (x, y))
    weight = len(own[0]) / 8

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return model(*batch) * (1.0 if model is tied else weight)

    model = copy.deepcopy(tied)
    mark_partial(model, comm)
    report = ad.testing.check_model(model, tied, own, comm, loss, batch_dim=0)
    assert report.losses[comm.rank] != report.reference_loss
    z = nn.Linear(3, 3, dtype=torch.complex128)
    z.bias.requires_grad_(False)

    def norm(model: nn.Module, batch: Tensor) -> Tensor:
        y: Tensor = model(batch)
        return y.abs().square().sum()

    ad.testing.check_model(copy.deepcopy(z), z, torch.randn(5, 3, dtype=torch.complex128), comm, norm)


@some_sizes
def test_batches_losses_and_parameters_of_many_kinds(ranks: RankPool, n: int) -> None:
    ranks.run(n, batches)


class Stages(nn.Module):
    """A pipeline of two stages: this rank has that of `stage`, None: both."""

    def __init__(self, stage: int | None) -> None:
        super().__init__()
        self.stage, self.factor = stage, 1.0
        torch.manual_seed(6)
        for number in range(2):
            made = nn.Linear(WIDTH, WIDTH).double()
            if stage in (None, number):
                self.add_module(str(number), made)


def run_stages(model: nn.Module, batch: Tensor, comm: Communicator) -> Tensor:
    """The loss; 0 but on the last stage. Ranks 0 .. have the first stage, the others the second, each its own batch."""
    assert isinstance(model, Stages)
    first, second = (model._modules.get(name) for name in "01")
    half = comm.size // 2
    if first is not None and second is not None:
        return torch.tanh(second(torch.tanh(first(batch)))).square().sum()
    if first is not None:
        y = torch.tanh(first(batch.chunk(half)[comm.rank]))
        return ad.anchor(y.new_zeros(()), ad.send_recv(y, comm, target=comm.rank + half))
    assert second is not None
    like = torch.zeros_like(batch.chunk(half)[0], requires_grad=True)
    return torch.tanh(second(ad.send_recv(like, comm, source=comm.rank - half))).square().sum() * model.factor


def staged(comm: Communicator) -> list[ad.testing.ModelReport]:
    whole, model = Stages(None), Stages(comm.rank // (comm.size // 2))
    loss = partial(run_stages, comm=comm)
    if comm.size == 2:
        report = ad.testing.check_model(model, whole, whole_batch(), comm, loss)
        assert report.parameters == 4 and list(report.losses) == pytest.approx([0.0, report.reference_loss])
    missing = fails(model, whole, whole_batch(), comm, loss) if comm.size == 4 else None
    model.factor = float(comm.size)
    if missing is None:
        return [fails(model, whole, whole_batch(), comm, loss)]
    model.factor = 2.0  # then it is as if the loss were a mean
    return [missing, fails(model, whole, whole_batch(), comm, loss)]


def test_ranks_may_have_some_of_the_parameters(ranks: RankPool) -> None:
    names = ["0.weight", "0.bias", "1.weight", "1.bias"]
    (factor,) = (same_on_all(list(one)) for one in zip(*ranks.run(2, staged), strict=True))
    assert explained(factor) == dict.fromkeys(names, "factor")
    found = [same_on_all(list(one)) for one in zip(*ranks.run(4, staged), strict=True)]
    for report, text in zip(found, ("add up to the whole", "add up to 2 times the whole"), strict=True):
        assert explained(report) == dict.fromkeys(names, "missing sum")
        assert text in str(report)


def tolerates(comm: Communicator) -> None:
    whole = whole_block(torch.float32)
    model = cut_block(whole, comm)

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch) * (1.0 if model is whole else 1.0 + 2e-4)

    fails(model, whole, whole_batch(torch.float32), comm, step)
    ad.testing.check_model(model, whole, whole_batch(torch.float32), comm, step, tolerance=1e-3)


def test_the_tolerance_is_that_of_the_type_or_the_callers(ranks: RankPool) -> None:
    ranks.run(2, tolerates)


# ---------------------------------------------------------------------------------------------------------- bad input


def refused(comm: Communicator) -> None:
    """Also by the ranks on which all is well: rank 1 is wrong alone."""
    check, whole, x = ad.testing.check_model, whole_block(), whole_batch()
    model = cut_block(whole, comm)
    alone = comm.rank == 1

    def is_refused(error: type[Exception], text: str, *args: Any, **options: Any) -> None:
        told = text.startswith("on rank 1: ") and not alone
        with pytest.raises(RuntimeError if told else error, match=text if told else text.replace("on rank 1: ", "")):
            check(*args, **options)

    given, fused = "block" if alone else model, cut_block(whole, comm, grad_accumulation_fusion=True)
    same, sharing = nn.Identity(), Block(whole.norm, model.up, model.down)
    shape = r"tensor of (?:the batch has )?shape \[8, 3, 12\]"
    names = "norm.weight, norm.bias, up.weight, .."
    is_refused(TypeError, r"on rank 1: .*model is 'block', expected a torch.nn.Module", given, whole, x, comm)
    is_refused(TypeError, r"loss is 3, expected a function", model, whole, x, comm, 3)
    is_refused(TypeError, r"finish is 1, expected a function", model, whole, x, comm, finish=1)
    is_refused(TypeError, r"batch_dim is 'rows', expected a dimension", model, whole, x, comm, batch_dim="rows")
    is_refused(ValueError, r"tolerance is -1, expected a number >= 0", model, whole, x, comm, tolerance=-1)
    is_refused(ValueError, rf"the loss is a {shape}", same, same, x, comm)
    is_refused(ValueError, rf"batch_dim is 3, but a {shape}", model, whole, x, comm, batch_dim=3)
    is_refused(ValueError, r"losses are \[.*\] on the ranks, expected one value", model, whole, x + alone, comm)
    is_refused(ValueError, f"no rank's model has {names}", same, whole, x, comm)
    is_refused(ValueError, f"the model has {names}, which the reference has not", model, same, x, comm)
    is_refused(ValueError, r"a layer of the model has grad_accumulation_fusion", fused, whole, x, comm)
    is_refused(ValueError, r"norm.weight, norm.bias of the model and of the reference are", sharing, whole, x, comm)
    unmarked = cut_block(whole, comm)
    if alone:
        del unmarked.up.weight.shard
    told = r"on rank 1: .*up.weight has shape \[12, 12\], expected \[24, 12\].*ad.Shard\(comm, dim, \[24, 12\]\)"
    is_refused(ValueError, told, unmarked, whole, x, comm)
    other = cut_block(whole, comm)
    with torch.no_grad():
        other.up.bias[3] += 0.5 * alone
    told = r"up.bias differs on rank 1 from its part of the reference's, by 0.5; start both"
    is_refused(ValueError, told, other, whole, x, comm)
    assert ad.testing.check_model(model, whole, x, comm).wrong == 0  # nothing that came before has left a trace


def test_bad_input_is_refused_on_every_rank_alike(ranks: RankPool) -> None:
    ranks.run(2, refused)
