"""check_adjoint: is the backward pass of a linear function its adjoint?

For a linear F on the stacked inputs of all ranks, the backward F* is right if and only if
<F x, y> = <x, F* y> for all x and y, with inner products over all ranks. Random x and y that differ by rank find a
wrong factor, a wrong slice or a forgotten sum with certainty.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pynccl import Communicator
from pynccl.bindings.values import integer, shown

from ..agreement import gathered
from ..arguments import check_call, type_name
from ..torch_internals import has_no_values
from .gradients import CONVENTION, gradients_of

_LARGEST_SEED = 1 << 40  # torch's generators are given multiples of it
# Rounding error of an inner product of random data, with room: about sqrt(count) * eps in practice.
TOLERANCE: dict[torch.dtype, float] = {
    torch.float64: 1e-12,
    torch.complex128: 1e-12,
    torch.float32: 1e-5,
    torch.complex64: 1e-5,
}


class AdjointError(AssertionError):
    """Forward and backward are not adjoint. Raised on every rank."""


def check_adjoint(
    fn: Callable[[Tensor], Tensor],
    x: Tensor,
    comm: Communicator,
    *,
    replicated: bool = False,
    tolerance: float | None = None,
    seed: int = 0,
) -> float:
    """Check |<F x, y> - <x, F* y>| <= tolerance * max(|F x||y|, |x||F* y|); returns the left side over the maximum.

    fn          linear in its argument; communicates over comm
    x           this rank's input: its shape, type and device are used, and its values
    replicated  the output is one logical value held by all ranks: the cotangent is equal on all and counted once
    tolerance   None: 1e-12 in double precision, 1e-5 in single, the largest of those of the ranks' inputs

    Every rank must call it. Raises AdjointError on every rank alike. A rank that takes no part may have an input of
    size 0, of any type, and an output without a gradient function.
    """
    _check_values("check_adjoint", x, comm)
    seed = integer(seed, "check_adjoint: seed", -_LARGEST_SEED, _LARGEST_SEED)
    tolerance = _tolerance(x, comm, check_tolerance("check_adjoint", tolerance))
    x = x.detach().clone().requires_grad_()
    fx = fn(x)
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
            f"rank {comm.rank}){CONVENTION}"
        )
    return error


def _tolerance(x: Tensor, comm: Communicator, given: float | None) -> float:
    """The same on all ranks: an input without elements says nothing about precision."""
    own = given if given is not None else TOLERANCE.get(x.dtype, math.inf) if x.numel() else 0.0
    tolerance = max(row[0] for row in gathered(comm, [own], torch.float64))
    if given is None and math.isinf(tolerance):
        raise ValueError(
            f"check_adjoint: no default tolerance for the type of some rank's input, which is {x.dtype} on rank "
            f"{comm.rank}; pass tolerance=, or a float64 input"
        )
    return tolerance


def _dot(a: Tensor, b: Tensor) -> float:
    """The real inner product."""
    a, b = a.detach().reshape(-1), b.detach().reshape(-1)
    if a.is_complex():
        return float((a.to(torch.complex128) * b.to(torch.complex128).conj()).real.sum())
    return float((a.double() * b.double()).sum())


def _check_values(operation: str, x: Tensor, comm: Communicator) -> None:
    """That x is a tensor of numbers that have derivatives, with memory that holds them."""
    check_call(operation, x, comm)
    if x.numel() and not (x.is_floating_point() or x.is_complex()):
        raise TypeError(f"{operation}: x is {x.dtype}, which has no derivative; pass x.to(torch.float64)")
    if has_no_values(x):
        raise TypeError(
            f"{operation}: x is a {type_name(type(x))} on {x.device} without values; pass a tensor that has some"
        )


def check_tolerance(operation: str, tolerance: Any) -> float | None:
    real = isinstance(tolerance, numbers.Real) and not isinstance(tolerance, bool)
    if tolerance is not None and not (real and tolerance >= 0):
        raise ValueError(f"{operation}: tolerance is {shown(tolerance)}, expected a number >= 0, or None")
    return None if tolerance is None else float(tolerance)
