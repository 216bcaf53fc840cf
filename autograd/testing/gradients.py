"""check_gradients: compare gradients of a distributed function with finite differences across ranks.

Change one element on one rank up and down, evaluate the function on all ranks, and sum the losses of all ranks: the
slope must equal that rank's gradient at this element. The same with the gradient itself checks second derivatives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pynccl import Communicator
from pynccl.bindings.values import instance, integer, ordered, shown

from ..agreement import broadcast_object, gathered
from ..arguments import check_comm, checked

_SECOND_ORDER_HELP = (
    "the gradients themselves are right, but their derivatives are not. Does the backward pass call a communicator "
    "directly, use detached tensors, or @once_differentiable? Use functions of pynccl_autograd there, or pass "
    "second_order=False if you do not need second derivatives"
)

Loss = Callable[[], Tensor]  # this rank's loss, a real scalar, for the current values of the leaves

# For central differences in double precision with steps of about 1e-6: truncation error 1e-12, rounding error 1e-10.
MAX_SEED = 1 << 40  # the generators are seeded with multiples of the seed
STEP, RTOL, ATOL = 1e-6, 1e-5, 1e-7
_FIRST_ORDER = "gradient"
CONVENTION_HINT = "; check grad= of the operations, and replicated= of this check, against docs/conventions.md"


class GradientError(AssertionError):
    """A gradient differs from the finite difference. Raised on every rank."""


def check_fn(operation: str, fn: object) -> None:
    if not callable(fn):
        raise TypeError(f"{operation}: fn is {shown(fn)}, expected a function of tensors")


class _Leaf(NamedTuple):
    name: str
    tensor: Tensor
    gradient: Tensor
    shared: bool = False  # one logical value that all ranks hold: changed on all of them


class _Comparison(NamedTuple):
    """One comparison. Numbers only, so that it can be gathered."""

    error: float  # relative to the tolerance: wrong above 1
    position: int  # index of the real number in the leaf
    gradient: float
    slope: float


@checked
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
    """Check the first and second derivatives of fn against finite differences across ranks.

    Returns the largest error divided by its tolerance, which is atol + rtol * |slope|.

    fn            fn(*inputs) -> one tensor; communicates over comm and is differentiable at the inputs
    inputs        this rank's inputs, one tensor or several, float64 or complex128; they may differ between ranks
    replicated    True if the output is one logical value that all ranks hold: the cotangent is then equal on all ranks,
                  and counted once
    second_order  also differentiate the gradients, with respect to the inputs and the cotangent
    samples       number of elements to check per input and rank, drawn at random; None: all
    step          step of the finite differences
    seed          seed of the cotangent and of the samples

    Every rank must call it with the same options. GradientError on every rank if a derivative is wrong; it names the
    rank, input, index, gradient and slope. ValueError for inputs of lower precision.
    """
    check_comm("check_gradients", comm, inputs=inputs)
    check_fn("check_gradients", fn)
    seed = integer(seed, "check_gradients: seed", -MAX_SEED, MAX_SEED)
    samples = None if samples is None else integer(samples, "check_gradients: samples", 1)
    for name, value in (("step", step), ("rtol", rtol), ("atol", atol)):
        if not 0 <= value < math.inf:
            raise ValueError(f"check_gradients: {name} is {shown(value)}, expected a number >= 0")
    expected = "a tensor of float64 or complex128, or a list of them"
    originals = [inputs] if isinstance(inputs, Tensor) else ordered(inputs, "check_gradients: inputs", expected)
    if not originals:
        raise ValueError(f"check_gradients: inputs is empty, expected {expected}")
    for position, x in enumerate(originals):
        instance(x, Tensor, f"check_gradients: input {position}", expected)
        if x.dtype not in (torch.float64, torch.complex128):
            raise ValueError(
                f"check_gradients: input {position} is {x.dtype}; finite differences need float64 or complex128"
            )
    xs = [x.detach().clone().requires_grad_() for x in originals]
    names = [f"input {position}" if len(xs) > 1 else "the input" for position in range(len(xs))]
    check = _Check(comm, samples, step, rtol, atol, seed)
    output = fn(*xs)
    instance(output, Tensor, "check_gradients: the output of fn", "a torch.Tensor")

    w = _random_like(output, seed, 0 if replicated else comm.rank + 1).requires_grad_()
    counted = 0.0 if replicated and comm.rank else 1.0

    def gradients(create_graph: bool = False) -> list[Tensor]:
        return gradients_of(fn(*xs), xs, w, create_graph)

    leaves = [_Leaf(name, x, dx) for name, x, dx in zip(names, xs, gradients(), strict=True)]
    worst = check.run(_FIRST_ORDER, lambda: _inner(fn(*xs), w) * counted, leaves)
    if second_order:
        vs = [_random_like(x, seed, 1000 + comm.rank) for x in xs]

        def slope_along_v() -> Tensor:
            return sum((_inner(dx, v) for dx, v in zip(gradients(True), vs, strict=True)), w.real.new_zeros(()))

        try:
            slope = slope_along_v()
        except ValueError as error:  # a call of the binding in the backward pass: see pynccl/interop/tensors.py
            raise GradientError(f"{_SECOND_ORDER_HELP}: {error}") from error
        seconds = gradients_of(slope, [*xs, w])
        leaves = [
            _Leaf(name, x, ddx) for name, x, ddx in zip([*names, "the cotangent"], [*xs, w], seconds, strict=True)
        ]
        leaves[-1] = leaves[-1]._replace(shared=replicated)
        worst = max(worst, check.run("second derivative", slope_along_v, leaves))
    return worst


def gradients_of(
    y: Tensor, inputs: Sequence[Tensor], cotangent: Tensor | None = None, create_graph: bool = False
) -> list[Tensor]:
    """torch.autograd.grad, with zeros for inputs that y does not depend on, so that all ranks continue."""
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
        """Compare all leaves on all ranks, and return the largest error. GradientError if it exceeds the tolerance."""
        worst, at = _Comparison(0.0, 0, 0.0, 0.0), (0, leaves[0])
        for leaf in leaves:
            for owner in (0,) if leaf.shared else range(self.comm.size):
                found = self._worst_on(owner, loss, leaf)
                if not found.error <= worst.error:  # NaN counts as worst
                    worst, at = found, (owner, leaf)
        if not worst.error <= 1:
            owner, leaf = at
            text = self._describe(leaf, worst) if self.comm.rank == owner else ""  # only the owner knows the shape
            text = f"wrong {what}: rank {owner}, {leaf.name}, {broadcast_object(self.comm, text, owner)}"
            raise GradientError(text + (CONVENTION_HINT if what == _FIRST_ORDER else f"; {_SECOND_ORDER_HELP}"))
        return worst.error

    def _worst_on(self, owner: int, loss: Loss, leaf: _Leaf) -> _Comparison:
        """Change elements on rank `owner`, and return its worst comparison on all ranks."""
        comm, moving = self.comm, leaf.shared or self.comm.rank == owner
        values, gradient = _reals(leaf.tensor.detach()), _reals(leaf.gradient.detach().resolve_conj().contiguous())
        count = gathered(comm, [values.numel()])[owner][0]
        generator = torch.Generator().manual_seed(self.seed)
        indices = torch.randperm(count, generator=generator)[: self.samples].tolist()
        worst = _Comparison(0.0, 0, 0.0, 0.0)
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
                worst = _Comparison(error, index, mine, slope)
        error, position, mine, slope = gathered(comm, worst, torch.float64)[owner]
        return _Comparison(error, int(position), mine, slope)

    def _describe(self, leaf: _Leaf, comparison: _Comparison) -> str:
        index, part, shape = comparison.position, "", tuple(leaf.tensor.shape)
        if leaf.tensor.is_complex():
            index, part = index // 2, (" (real part)", " (imaginary part)")[index % 2]
        place = tuple(int(i) for i in torch.unravel_index(torch.tensor(index), shape))
        return (
            f"index {place}{part}, of shape {shape}: the backward pass gives {comparison.gradient:.10g}, finite "
            f"differences give {comparison.slope:.10g} (losses summed over {self.comm.size} ranks)"
        )


def _reals(x: Tensor) -> Tensor:
    """Return a flat view of x as real numbers."""
    return (torch.view_as_real(x) if x.is_complex() else x).view(-1)


def _inner(a: Tensor, b: Tensor) -> Tensor:
    """Return the real inner product. Its gradient follows torch's convention for complex numbers."""
    return (a * b.conj()).real.sum() if a.is_complex() else (a * b).sum()


def _random_like(x: Tensor, seed: int, stream: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed * 1_000_003 + stream)
    return torch.randn(x.shape, generator=generator, dtype=x.dtype).to(x.device)
