"""check_gradients: gradients of a distributed function against finite differences across ranks.

One element on one rank is moved up and down, all ranks evaluate, and the losses of all ranks are summed: the slope is
what that rank's gradient must have there. The same of the gradient itself gives second derivatives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pynccl import Communicator

from ..agreement import broadcast_object, gathered

_NOT_TWICE = (
    "the gradients themselves are right, and their derivatives are not: is the backward pass made of plain calls of a "
    "communicator, of detached tensors, or @once_differentiable? Make it of functions of pynccl_autograd; or pass "
    "second_order=False, if nobody differentiates it twice"
)

Loss = Callable[[], Tensor]  # this rank's share, a real scalar, of the present values of the leaves

# Of a central difference in double precision, with steps of about 1e-6: truncation 1e-12, rounding 1e-10.
STEP, RTOL, ATOL = 1e-6, 1e-5, 1e-7
_FIRST = "gradient"
CONVENTION = (
    "; is grad= of the operations that of what the ranks do with the output, and replicated= here? docs/conventions.md"
)


class GradientError(AssertionError):
    """A gradient is not the slope. Raised on every rank."""


class _Leaf(NamedTuple):
    name: str
    tensor: Tensor
    gradient: Tensor
    shared: bool = False  # one logical value held by all ranks: moved on all of them


class _Found(NamedTuple):
    """One comparison; numbers only, so that it can be told to all ranks."""

    error: float  # relative to the tolerance: wrong above 1
    position: int  # of the real number in the leaf
    gradient: float
    slope: float


def check_gradients(
    fn: Callable[..., Tensor],
    inputs: Tensor | Sequence[Tensor],
    comm: Communicator,
    *,
    replicated: bool = False,
    second_order: bool = True,
    samples: int | None = 16,
    step: float = STEP,
    rtol: float = RTOL,
    atol: float = ATOL,
    seed: int = 0,
) -> float:
    """Check fn's gradients, first and second order, for this rank's inputs; returns the largest error over tolerance.

    fn            fn(*inputs) -> one tensor; communicates over comm, differentiable at the inputs
    inputs        this rank's inputs, float64 or complex128, one tensor or several; they may differ by rank
    replicated    the output is one logical value held by all ranks: its cotangent is equal on all and counted once
    second_order  also differentiate the gradients, by the inputs and by the cotangent
    samples       elements that are moved, per input and rank, drawn at random; None: all

    The tolerance is atol + rtol * |slope|. Every rank must call it, with the same options. GradientError on every rank
    alike, naming rank, input, index, the gradient and the slope; ValueError for inputs of lower precision.
    """
    given = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    for position, x in enumerate(given):
        if x.dtype not in (torch.float64, torch.complex128):
            raise ValueError(
                f"check_gradients: input {position} is {x.dtype}; finite differences need float64 or complex128"
            )
    xs = [x.detach().clone().requires_grad_() for x in given]
    names = [f"input {position}" if len(xs) > 1 else "the input" for position in range(len(xs))]
    check = _Check(comm, samples, step, rtol, atol, seed)
    output = fn(*xs)

    w = _random_like(output, seed, 0 if replicated else comm.rank + 1).requires_grad_()
    counted = 0.0 if replicated and comm.rank else 1.0

    def gradients(create_graph: bool = False) -> list[Tensor]:
        return gradients_of(fn(*xs), xs, w, create_graph)

    leaves = [_Leaf(name, x, dx) for name, x, dx in zip(names, xs, gradients(), strict=True)]
    worst = check.run(_FIRST, lambda: _inner(fn(*xs), w) * counted, leaves)
    if second_order:
        vs = [_random_like(x, seed, 1000 + comm.rank) for x in xs]

        def slope_along_v() -> Tensor:
            return sum((_inner(dx, v) for dx, v in zip(gradients(True), vs, strict=True)), w.real.new_zeros(()))

        try:
            of = slope_along_v()
        except ValueError as error:  # a plain call in the backward pass: see pynccl/interop/tensors.py
            raise GradientError(f"{_NOT_TWICE}: {error}") from error
        seconds = gradients_of(of, [*xs, w])
        leaves = [
            _Leaf(name, x, ddx) for name, x, ddx in zip([*names, "the cotangent"], [*xs, w], seconds, strict=True)
        ]
        leaves[-1] = leaves[-1]._replace(shared=replicated)
        worst = max(worst, check.run("second derivative", slope_along_v, leaves))
    return worst


def gradients_of(
    y: Tensor, inputs: Sequence[Tensor], cotangent: Tensor | None = None, create_graph: bool = False
) -> list[Tensor]:
    """torch.autograd.grad, and zeros where y does not depend on an input: the other ranks go on, too."""
    if not y.requires_grad:
        return [torch.zeros_like(x) for x in inputs]
    return list(torch.autograd.grad(y, inputs, cotangent, create_graph=create_graph, materialize_grads=True))


class _Check(NamedTuple):
    comm: Communicator
    samples: int | None
    step: float
    rtol: float
    atol: float
    seed: int

    def run(self, what: str, loss: Loss, leaves: Sequence[_Leaf]) -> float:
        """Compare all leaves on all ranks; GradientError for the worst, if it is beyond tolerance."""
        worst, at = _Found(0.0, 0, 0.0, 0.0), (0, leaves[0])
        for leaf in leaves:
            for owner in (0,) if leaf.shared else range(self.comm.size):
                found = self._worst_on(owner, loss, leaf)
                if not found.error <= worst.error:  # NaN counts as worst
                    worst, at = found, (owner, leaf)
        if not worst.error <= 1:
            owner, leaf = at
            text = self._describe(leaf, worst) if self.comm.rank == owner else ""  # who knows the shape
            text = f"wrong {what}: rank {owner}, {leaf.name}, {broadcast_object(self.comm, text, owner)}"
            raise GradientError(text + (CONVENTION if what == _FIRST else f"; {_NOT_TWICE}"))
        return worst.error

    def _worst_on(self, owner: int, loss: Loss, leaf: _Leaf) -> _Found:
        """Move elements on `owner`; what it found, on all ranks."""
        comm, moving = self.comm, leaf.shared or self.comm.rank == owner
        values, gradient = _reals(leaf.tensor.detach()), _reals(leaf.gradient.detach().resolve_conj().contiguous())
        count = gathered(comm, [values.numel()])[owner][0]
        generator = torch.Generator().manual_seed(self.seed)
        indices = torch.randperm(count, generator=generator)[: self.samples].tolist()
        worst = _Found(0.0, 0, 0.0, 0.0)
        for index in indices:
            sides = []
            for step in (self.step, -self.step):
                before = values[index].clone() if moving else None
                if before is not None:
                    values[index] += step
                share = loss().detach().double().reshape(1)
                if before is not None:
                    values[index] = before
                comm.all_reduce(share, share)
                sides.append(float(share))
            slope = (sides[0] - sides[1]) / (2 * self.step)
            mine = float(gradient[index]) if moving else 0.0
            error = abs(mine - slope) / (self.atol + self.rtol * abs(slope))
            if moving and not error <= worst.error:
                worst = _Found(error, index, mine, slope)
        error, position, mine, slope = gathered(comm, worst, torch.float64)[owner]
        return _Found(error, int(position), mine, slope)

    def _describe(self, leaf: _Leaf, found: _Found) -> str:
        index, part, shape = found.position, "", tuple(leaf.tensor.shape)
        if leaf.tensor.is_complex():
            index, part = found.position // 2, (" (real part)", " (imaginary part)")[found.position % 2]
        place = tuple(int(i) for i in torch.unravel_index(torch.tensor(index), shape))
        return (
            f"index {place}{part}, of shape {shape}: the backward pass gives {found.gradient:.10g}, finite differences "
            f"{found.slope:.10g} (the losses of {self.comm.size} ranks summed)"
        )


def _reals(x: Tensor) -> Tensor:
    """A flat view of x as real numbers."""
    return (torch.view_as_real(x) if x.is_complex() else x).view(-1)


def _inner(a: Tensor, b: Tensor) -> Tensor:
    """The real inner product, whose gradient is what torch calls the gradient, of complex numbers too."""
    return (a * b.conj()).real.sum() if a.is_complex() else (a * b).sum()


def _random_like(x: Tensor, seed: int, stream: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed * 1_000_003 + stream)
    return torch.randn(x.shape, generator=generator, dtype=x.dtype).to(x.device)
