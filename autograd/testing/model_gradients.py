"""The gradients of a sharded model beside their parts of the unsharded one's, and what explains a difference.

Each rank compares what it has. The numbers that it found are gathered, and what is said is made of these alone, so that
all ranks say the same.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from pynccl import Communicator, progress

from ..agreement import broadcast_object, gathered
from ..layers.shards import shard_of

# Of a gradient's error, relative to its largest element: rounding along a deep model, in other orders of summation.
TOLERANCES: dict[torch.dtype, float] = {
    torch.float64: 1e-9,
    torch.complex128: 1e-9,
    torch.float32: 1e-4,
    torch.complex64: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
}
_EXPLAINED = 8  # differences that are looked into: each takes a few sums over ranks of the whole parameter


class Difference(NamedTuple):
    """A gradient that differs from the unsharded model's."""

    name: str  # of the parameter
    error: float  # the largest difference on any rank, relative to the largest element of the whole gradient
    where: str  # the largest difference: rank, index in the whole parameter, the two values
    explanation: str | None  # "factor", "missing sum"; None: neither
    advice: str

    def __str__(self) -> str:
        return f"{self.name}: {self.where}, {self.error:.3%} of the gradient's largest element\n    {self.advice}"


class ModelReport(NamedTuple):
    """What `check_model` found, equal on all ranks; str() of it is meant to be read."""

    parameters: int  # compared
    error: float  # the largest of all gradients, each relative to its largest element
    losses: tuple[float, ...]  # of the sharded model, rank by rank
    reference_loss: float
    wrong: int  # gradients that differ
    differences: tuple[Difference, ...]  # the first of them, in the order of definition

    def __str__(self) -> str:
        if not self.wrong:
            return f"{self.parameters} gradients equal the reference's; the largest error is {self.error:.2g}"
        text = f"{self.wrong} of {self.parameters} gradients differ from the reference's. The first is\n  "
        text += str(self.differences[0])
        if not self._losses_agree():
            found = ", ".join(f"{loss:.9g}" for loss in self.losses)
            text += (
                f"\nThe losses differ, too: {found} on the ranks, {self.reference_loss:.9g} of the reference. Look at "
                "the forward pass first."
            )
        return text

    def _losses_agree(self) -> bool:
        """Each is the reference's, or a share whose sum or mean is."""
        total = math.fsum(self.losses)
        wholes = (self.losses, (total,), (total / len(self.losses),))
        return any(all(math.isclose(one, self.reference_loss, rel_tol=1e-2) for one in whole) for whole in wholes)


class ModelError(AssertionError):
    """Gradients differ. Raised on every rank alike; `report` is a ModelReport, and the text is its text."""

    def __init__(self, report: ModelReport) -> None:
        super().__init__(report)
        self.report = report


# ------------------------------------------------------------------------------------------------ the comparison


class Pair(NamedTuple):
    """A parameter of the reference, and what this rank's model has of it: all, a part, or None."""

    name: str
    whole: Tensor
    part: Tensor | None

    def own(self, whole: Tensor) -> Tensor:
        """This rank's part of a tensor like the whole; all of it where it has none."""
        shard = shard_of(self.part) if self.part is not None else None
        return whole if shard is None else shard.own(whole)

    def gradients(self) -> tuple[Tensor, Tensor]:
        """The one that the part has, zeros where there is none, and the right one."""
        expected = self.own(_gradient(self.whole))
        return torch.zeros_like(expected) if self.part is None else _gradient(self.part), expected


class _Row(NamedTuple):
    """What a rank says of a parameter; numbers, so that it can be gathered."""

    has: float  # 1: this rank has it, or a part
    error: float  # the largest difference
    scale: float  # the largest element of the whole gradient
    tolerance: float
    rounding: float  # of a number 1 in its type


def compare(comm: Communicator, pairs: list[Pair], tolerance: float | None) -> ModelReport:
    """Of the gradients as they are now, without losses. Every rank must call it, with pairs of the same names."""
    own = [_row(pair, tolerance) for pair in progress.over(pairs, "comparing", "gradient", own=comm.rank == 0)]
    width = len(_Row.__annotations__)
    flat = gathered(comm, [number for row in own for number in row], torch.float64)
    table = [[_Row(*ranks[at : at + width]) for ranks in flat] for at in range(0, width * len(pairs), width)]
    largest = max((row.scale for rows in table for row in rows if math.isfinite(row.scale)), default=0.0)
    error, wrong = 0.0, []
    for pair, rows in zip(pairs, table, strict=True):
        scale = max(row.scale for row in rows)
        worst = max(rows, key=lambda row: math.inf if math.isnan(row.error) else row.error)
        relative = worst.error / (scale or largest or 1.0)
        allowed = max(row.tolerance * scale + 2 * row.rounding * largest for row in rows)
        if worst.error <= allowed:
            error = max(error, relative)
        else:
            wrong.append((pair, allowed, relative, rows.index(worst)))
            error = max(error, math.inf if math.isnan(relative) else relative)
    differences = []
    for pair, allowed, relative, rank in wrong[:_EXPLAINED]:
        where = broadcast_object(comm, _where(pair, rank) if comm.rank == rank else "", rank)
        differences.append(Difference(pair.name, relative, where, *_explain(comm, pair, allowed)))
    parameters = sum(any(row.has for row in rows) for rows in table)
    return ModelReport(parameters, error, (), math.nan, len(wrong), tuple(differences))


def largest_of(x: Tensor) -> float:
    """The largest absolute value; NaN if there is one."""
    return float(x.abs().max()) if x.numel() else 0.0


def wide(x: Tensor) -> Tensor:
    """In double precision, dense."""
    dense = x.detach() if x.layout == torch.strided else x.detach().to_dense()
    return dense.to(torch.complex128 if x.is_complex() else torch.float64)


def _gradient(parameter: Tensor) -> Tensor:
    """None counts as zeros."""
    return wide(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)


def _row(pair: Pair, tolerance: float | None) -> _Row:
    found, expected = pair.gradients()
    scale = largest_of(_gradient(pair.whole))
    if pair.part is None:
        return _Row(0.0, 0.0, scale, 0.0, 0.0)
    types = (pair.part.dtype, pair.whole.dtype)
    allowed = max(TOLERANCES.get(one, 0.1) for one in types) if tolerance is None else float(tolerance)
    return _Row(1.0, largest_of(found - expected), scale, allowed, max(torch.finfo(one).eps for one in types))


def _where(pair: Pair, rank: int) -> str:
    """The largest difference on this rank."""
    found, expected = pair.gradients()
    difference = (found - expected).abs().nan_to_num(nan=math.inf)
    at = int(difference.argmax())
    numbers = torch.arange(pair.whole.numel(), device=pair.whole.device).view(pair.whole.shape)
    index = [int(one) for one in torch.unravel_index(pair.own(numbers).reshape(-1)[at], pair.whole.shape)]
    here, there = (float(one.reshape(-1)[at].real) for one in (found, expected))
    off = largest_of(found - expected)
    return f"rank {rank} has {here:.6g} at {index}, expected {there:.6g}: off by {off:.3g}"


# ------------------------------------------------------------------------------------------------ the explanations


def _explain(comm: Communicator, pair: Pair, allowed: float) -> tuple[str | None, str]:
    """(the explanation that fits, what to do)."""
    found, expected = pair.gradients()

    def first_fit(guesses: list[tuple[Tensor, float]]) -> int | None:
        """The first guess, (what equals the right gradient, times the tolerance), that is right on every rank."""
        own = [pair.part is None or largest_of(one - expected) <= allowed * times for one, times in guesses]
        ranks = gathered(comm, own)
        return next((at for at in range(len(guesses)) if all(row[at] for row in ranks)), None)

    counts = [count for count in range(1, comm.size + 1) if comm.size % count == 0]  # of ranks, also along an axis
    factors = [*reversed(counts[1:]), *(1 / count for count in counts[1:])]
    fit = first_fit([(found / factor, max(1.0, 1 / factor)) for factor in factors])
    if fit is not None:
        return "factor", _advice_on_factor(factors[fit], comm.size)
    total = _sum(comm, pair, found)
    fit = first_fit([(total / count, 1.0) for count in counts])
    if fit is not None:
        return "missing sum", _advice_on_sum(counts[fit])
    return None, _NO_EXPLANATION


def _sum(comm: Communicator, pair: Pair, own: Tensor) -> Tensor:
    """Over the ranks that have the same part."""
    whole = torch.zeros_like(pair.whole, dtype=own.dtype, device=comm.device)
    if pair.part is not None:
        pair.own(whole).copy_(own)
    total = torch.view_as_real(whole).contiguous() if whole.is_complex() else whole.contiguous()
    comm.all_reduce(total, total)
    whole = torch.view_as_complex(total) if whole.is_complex() else total
    return pair.own(whole).to(pair.whole.device)


_NO_EXPLANATION = (
    "not explained: it is no factor, and no sum over all ranks is missing. Look for what is wrong by more than a "
    'factor: grad="replicated" where each rank goes on with work of its own (docs/conventions.md), the slice of '
    "another rank, a rank that a sum leaves out, an operation that the reference has not"
)


def _advice_on_factor(factor: float, ranks: int) -> str:
    if factor > 1:
        return (
            f"factor: {factor:g} times the gradient, on {ranks} ranks. Between here and the loss an operation has "
            'grad="sum" whose output every rank goes on with alike (expected grad="replicated"), or a sum over ranks '
            "is made twice, or where a mean is meant"
        )
    return (
        f"factor: 1/{1 / factor:g} of the gradient, on {ranks} ranks. Between here and the loss an operation has "
        'grad="replicated" where each rank goes on with work of its own (expected grad="sum"), or a mean over ranks '
        "is taken twice, or where a sum is meant"
    )


def _advice_on_sum(times: int) -> str:
    if times > 1:
        return (
            f"missing sum: the gradients of the ranks add up to {times} times the whole. After backward() a mean over "
            "the ranks is missing, or a sum over an axis of a mesh"
        )
    return (
        "missing sum: the gradients of the ranks add up to the whole. Say so, parameter.shard = ad.Shard(comm, None, "
        "parameter.shape, partial=True), and call ad.finish_gradients(model) after backward() (finish= here); or put "
        "ad.copy(x, comm) where each rank takes x up for a part of the work, e.g. before columns of its own"
    )
