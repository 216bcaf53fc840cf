"""Compare the gradients of a sharded model with the shards of the unsharded model's, and explain a difference.

Each rank compares its shards. The results are gathered, and the report is made from the gathered numbers only, so that
it is the same on all ranks.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from pynccl import Communicator, progress

from ..agreement import broadcast_object, gathered
from ..layers.shards import shard_of

# For the error of a gradient relative to its largest element: rounding in a deep model, summed in a different order.
TOLERANCES: dict[torch.dtype, float] = {
    torch.float64: 1e-9,
    torch.complex128: 1e-9,
    torch.float32: 1e-4,
    torch.complex64: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
}
_MAX_EXPLAINED = 8  # differences to explain: each takes a few all-reduces of the full parameter


class Difference(NamedTuple):
    """A gradient that differs from that of the unsharded model."""

    name: str  # name of the parameter
    error: float  # largest difference on any rank, relative to the largest element of the full gradient
    where: str  # the largest difference: rank, index in the full parameter, the two values
    explanation: str | None  # "factor", "missing sum"; None: neither
    advice: str

    def __str__(self) -> str:
        return f"{self.name}: {self.where}, {self.error:.3%} of the gradient's largest element\n    {self.advice}"


class ModelReport(NamedTuple):
    """The result of `check_model`, equal on all ranks. str() returns a readable report."""

    parameters: int  # number of parameters compared
    error: float  # largest error of all gradients, each relative to its largest element
    losses: tuple[float, ...]  # losses of the sharded model, by rank
    reference_loss: float
    wrong: int  # number of gradients that differ
    differences: tuple[Difference, ...]  # the first of these, in order of definition

    def __str__(self) -> str:
        if not self.wrong:
            return f"{self.parameters} gradients equal the reference's; the largest error is {self.error:.2g}"
        text = f"{self.wrong} of {self.parameters} gradients differ from the reference's. The first is\n  "
        text += str(self.differences[0])
        if not self._losses_agree():
            losses = ", ".join(f"{loss:.9g}" for loss in self.losses)
            text += (
                f"\nThe losses differ too: {losses} on the ranks, {self.reference_loss:.9g} for the reference. Check "
                "the forward pass first."
            )
        return text

    def _losses_agree(self) -> bool:
        """Return whether the losses, their sum or their mean equal the loss of the reference."""
        total = math.fsum(self.losses)
        candidates = (self.losses, (total,), (total / len(self.losses),))
        return any(
            all(math.isclose(loss, self.reference_loss, rel_tol=1e-2) for loss in losses) for losses in candidates
        )


class ModelError(AssertionError):
    """Gradients differ. Raised on every rank; `report` is the ModelReport, and str() returns its text."""

    def __init__(self, report: ModelReport) -> None:
        super().__init__(report)
        self.report = report


# ------------------------------------------------------------------------------------------------ the comparison


class Pair(NamedTuple):
    """A parameter of the reference, and that of this rank's model: the full one, a shard of it, or None."""

    name: str
    full: Tensor
    local: Tensor | None

    def take_shard(self, full: Tensor) -> Tensor:
        """Return this rank's shard of a tensor like `full`, or the tensor itself if the parameter is not sharded."""
        shard = shard_of(self.local) if self.local is not None else None
        return full if shard is None else shard.local(full)

    def gradients(self) -> tuple[Tensor, Tensor]:
        """Return (this rank's gradient, or zeros if it lacks the parameter; the correct gradient)."""
        expected = self.take_shard(_gradient(self.full))
        return torch.zeros_like(expected) if self.local is None else _gradient(self.local), expected


class _Row(NamedTuple):
    """The result of one rank for one parameter. Numbers only, so that it can be gathered."""

    has: float  # 1 if this rank has the parameter or a shard of it
    error: float  # largest difference
    scale: float  # largest element of the full gradient
    tolerance: float
    rounding: float  # machine epsilon of the dtype


def compare(comm: Communicator, pairs: list[Pair], tolerance: float | None) -> ModelReport:
    """Compare the current gradients. The report lacks the losses. Every rank must call it, with pairs of the same
    names."""
    local_rows = [_row(pair, tolerance) for pair in progress.over(pairs, "comparing", "gradient", own=comm.rank == 0)]
    width = len(_Row.__annotations__)
    flat = gathered(comm, [number for row in local_rows for number in row], torch.float64)
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
    for pair, allowed, relative, rank in wrong[:_MAX_EXPLAINED]:
        where = broadcast_object(comm, _where(pair, rank) if comm.rank == rank else "", rank)
        differences.append(Difference(pair.name, relative, where, *_explain(comm, pair, allowed)))
    parameters = sum(any(row.has for row in rows) for rows in table)
    return ModelReport(parameters, error, (), math.nan, len(wrong), tuple(differences))


def max_abs(x: Tensor) -> float:
    """Return the largest absolute value, or NaN if there is a NaN."""
    return float(x.abs().max()) if x.numel() else 0.0


def to_double(x: Tensor) -> Tensor:
    """Return x as a dense tensor in double precision."""
    dense = x.detach() if x.layout == torch.strided else x.detach().to_dense()
    return dense.to(torch.complex128 if x.is_complex() else torch.float64)


def _gradient(parameter: Tensor) -> Tensor:
    """Return the gradient; None counts as zeros."""
    return to_double(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)


def _row(pair: Pair, tolerance: float | None) -> _Row:
    actual, expected = pair.gradients()
    scale = max_abs(_gradient(pair.full))
    if pair.local is None:
        return _Row(0.0, 0.0, scale, 0.0, 0.0)
    dtypes = (pair.local.dtype, pair.full.dtype)
    allowed = max(TOLERANCES.get(dtype, 0.1) for dtype in dtypes) if tolerance is None else float(tolerance)
    return _Row(1.0, max_abs(actual - expected), scale, allowed, max(torch.finfo(dtype).eps for dtype in dtypes))


def _where(pair: Pair, rank: int) -> str:
    """Describe the largest difference on this rank."""
    actual, expected = pair.gradients()
    difference = (actual - expected).abs().nan_to_num(nan=math.inf)
    at = int(difference.argmax())
    numbers = torch.arange(pair.full.numel(), device=pair.full.device).view(pair.full.shape)
    index = [int(i) for i in torch.unravel_index(pair.take_shard(numbers).reshape(-1)[at], pair.full.shape)]
    actual_value, expected_value = (float(gradient.reshape(-1)[at].real) for gradient in (actual, expected))
    error = max_abs(actual - expected)
    return f"rank {rank} has {actual_value:.6g} at {index}, expected {expected_value:.6g}: off by {error:.3g}"


# ------------------------------------------------------------------------------------------------ the explanations


def _explain(comm: Communicator, pair: Pair, allowed: float) -> tuple[str | None, str]:
    """Return (the explanation that fits, advice)."""
    actual, expected = pair.gradients()

    def first_fit(guesses: list[tuple[Tensor, float]]) -> int | None:
        """Return the index of the first guess that is right on every rank. A guess is (gradient, tolerance factor)."""
        fits = [pair.local is None or max_abs(gradient - expected) <= allowed * times for gradient, times in guesses]
        ranks = gathered(comm, fits)
        return next((at for at in range(len(guesses)) if all(row[at] for row in ranks)), None)

    counts = [
        count for count in range(1, comm.size + 1) if comm.size % count == 0
    ]  # N and its divisors: sizes of mesh axes
    factors = [*reversed(counts[1:]), *(1 / count for count in counts[1:])]
    fit = first_fit([(actual / factor, max(1.0, 1 / factor)) for factor in factors])
    if fit is not None:
        return "factor", _advice_on_factor(factors[fit], comm.size)
    total = _sum(comm, pair, actual)
    fit = first_fit([(total / count, 1.0) for count in counts])
    if fit is not None:
        return "missing sum", _advice_on_sum(counts[fit])
    return None, _NO_EXPLANATION


def _sum(comm: Communicator, pair: Pair, gradient: Tensor) -> Tensor:
    """Sum the gradient over the ranks that hold the same shard."""
    full = torch.zeros_like(pair.full, dtype=gradient.dtype, device=comm.device)
    if pair.local is not None:
        pair.take_shard(full).copy_(gradient)
    total = torch.view_as_real(full).contiguous() if full.is_complex() else full.contiguous()
    comm.all_reduce(total, total)
    full = torch.view_as_complex(total) if full.is_complex() else total
    return pair.take_shard(full).to(pair.full.device)


_NO_EXPLANATION = (
    "not explained: neither a constant factor nor a missing sum over all ranks fits. Possible causes: "
    'grad="replicated" where ranks do different computations on the output (docs/conventions.md), the slice of another '
    "rank, a sum that omits a rank, an operation that the reference does not have"
)


def _advice_on_factor(factor: float, ranks: int) -> str:
    if factor > 1:
        return (
            f"factor: {factor:g} times the gradient, on {ranks} ranks. Between this parameter and the loss, an "
            'operation has grad="sum" although every rank does the same computation on its output (pass '
            'grad="replicated"), or gradients are summed over ranks twice, or summed instead of averaged'
        )
    return (
        f"factor: 1/{1 / factor:g} of the gradient, on {ranks} ranks. Between this parameter and the loss, an "
        'operation has grad="replicated" although ranks do different computations on its output (pass grad="sum"), or '
        "gradients are averaged over ranks twice, or averaged instead of summed"
    )


def _advice_on_sum(times: int) -> str:
    if times > 1:
        return (
            f"missing sum: the gradients of the ranks add up to {times} times the correct one. After backward(), "
            "average the gradients over all ranks, or sum them over an axis of the mesh"
        )
    return (
        "missing sum: the gradients of the ranks add up to the correct one. Call ad.set_shard(parameter, "
        "ad.Shard(comm, None, parameter.shape, partial=True)) and, after backward() (here: finish=), "
        "ad.finish_gradients(model); or apply ad.copy(x, comm) before the ranks do different computations on x, e.g. "
        "multiply it by their columns"
    )
