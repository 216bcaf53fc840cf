"""check_adjoint: check that the backward pass of a linear function is its adjoint.

For a linear F on the stacked inputs of all ranks, the backward F* is correct if and only if
<F x, y> = <x, F* y> for all x and y, with inner products over all ranks. Random x and y that differ between ranks
reveal a wrong factor, a wrong slice or a missing sum with probability 1.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pynccl import Communicator
from pynccl.bindings.values import instance, integer, shown

from ..agreement import gathered
from ..arguments import check_call, checked, type_name
from ..torch_internals import has_no_values
from .gradients import CONVENTION_HINT, MAX_SEED, check_fn, gradients_of

# Bound on the rounding error of an inner product of random data, which is about sqrt(count) * eps in practice.
TOLERANCE: dict[torch.dtype, float] = {
    torch.float64: 1e-12,
    torch.complex128: 1e-12,
    torch.float32: 1e-5,
    torch.complex64: 1e-5,
}


class AdjointError(AssertionError):
    """The backward pass is not the adjoint of the forward pass. Raised on every rank."""


@checked
def check_adjoint(
    fn: Callable[[Tensor], Tensor],
    x: Tensor,
    comm: Communicator,
    *,
    replicated: bool = False,
    tolerance: float | None = None,
    seed: int = 0,
) -> float:
    """Check that the backward pass of a linear function is its adjoint.

    For random y, check |<F x, y> - <x, F* y>| <= tolerance * max(|F x||y|, |x||F* y|), with inner products over all
    ranks, and return the left side divided by the maximum.

    fn          function of one tensor, linear, that communicates over comm
    x           this rank's input
    replicated  True if the output is one logical value that all ranks hold: the cotangent is then equal on all ranks,
                and its inner product is counted once
    tolerance   None: 1e-12 in double precision, 1e-5 in single precision; the largest of those of the ranks' inputs
    seed        seed of y

    Every rank must call it. AdjointError on every rank if the check fails; TypeError or ValueError for wrong arguments.
    A rank that does not take part may pass an empty input of any dtype, and its output may have no grad_fn.
    """
    check_fn("check_adjoint", fn)
    _check_values("check_adjoint", x, comm)
    seed = integer(seed, "check_adjoint: seed", -MAX_SEED, MAX_SEED)
    tolerance = _tolerance(x, comm, check_tolerance("check_adjoint", tolerance))
    x = x.detach().clone().requires_grad_()
    fx = fn(x)
    instance(fx, Tensor, "check_adjoint: the output of fn", "a torch.Tensor")
    generator = torch.Generator().manual_seed(seed * 1_000_003 + (0 if replicated else comm.rank + 1))
    drawn = torch.complex128 if fx.is_complex() else torch.float64
    y = torch.randn(fx.shape, generator=generator, dtype=drawn).to(fx)
    dx = gradients_of(fx, [x], y)[0]
    counted = 0.0 if replicated and comm.rank else 1.0
    outputs = [counted * _dot(a, b) for a, b in ((fx, y), (fx, fx), (y, y))]
    inputs = [_dot(a, b) for a, b in ((x, dx), (x, x), (dx, dx))]
    rows = gathered(comm, [*outputs, *inputs], torch.float64)
    fx_y, fx2, y2, x_dx, x2, dx2 = map(sum, zip(*rows, strict=True))
    scale = max((fx2 * y2) ** 0.5, (x2 * dx2) ** 0.5)
    error = abs(fx_y - x_dx) / scale if scale else abs(fx_y - x_dx)
    if not error <= tolerance:
        raise AdjointError(
            f"not adjoint: <F x, y> = {fx_y:.17g}, <x, F* y> = {x_dx:.17g} over {comm.size} ranks; relative difference "
            f"{error:.3g}, expected <= {tolerance:g} ({x.dtype}, input {tuple(x.shape)}, output {tuple(fx.shape)} on "
            f"rank {comm.rank}){CONVENTION_HINT}"
        )
    return error


def _tolerance(x: Tensor, comm: Communicator, tolerance: float | None) -> float:
    """Return the largest tolerance of all ranks. Empty inputs do not count."""
    local = tolerance if tolerance is not None else TOLERANCE.get(x.dtype, math.inf) if x.numel() else 0.0
    largest = max(row[0] for row in gathered(comm, [local], torch.float64))
    if tolerance is None and math.isinf(largest):
        raise ValueError(
            f"check_adjoint: no default tolerance for the dtype of some rank's input ({x.dtype} on rank {comm.rank}); "
            "pass tolerance=, or a float64 input"
        )
    return largest


def _dot(a: Tensor, b: Tensor) -> float:
    """Return the real inner product."""
    a, b = a.detach().reshape(-1), b.detach().reshape(-1)
    if a.is_complex():
        return float((a.to(torch.complex128) * b.to(torch.complex128).conj()).real.sum())
    return float((a.double() * b.double()).sum())


def _check_values(operation: str, x: Tensor, comm: Communicator) -> None:
    """Check that x is a tensor with values, of a differentiable dtype."""
    check_call(operation, x, comm)
    if x.numel() and not (x.is_floating_point() or x.is_complex()):
        raise TypeError(f"{operation}: x is {x.dtype}, which is not differentiable; pass x.to(torch.float64)")
    if has_no_values(x):
        raise TypeError(
            f"{operation}: x is a {type_name(type(x))} on {x.device} without values; pass a tensor with values"
        )


def check_tolerance(operation: str, tolerance: Any) -> float | None:
    real = isinstance(tolerance, numbers.Real) and not isinstance(tolerance, bool)
    if tolerance is not None and not (real and tolerance >= 0):
        raise ValueError(f"{operation}: tolerance is {shown(tolerance)}, expected a number >= 0, or None")
    return None if tolerance is None else float(tolerance)
