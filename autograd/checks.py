"""Do all ranks enter the same backward passes? `anchor` sees to it, and PYNCCL_CHECK=1 compares them.

The engine decides the order of a backward pass, so ranks whose forward passes agree may still disagree there: one has
an output unused, or a branch of its own. Each forward call on a communicator gets a number, the same on all ranks since
forward calls are compared too (pynccl/comm/consistency.py); before an adjoint, the ranks exchange number, operation and
line, and compare cotangents that must be equal.
"""

from __future__ import annotations

import math
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from pynccl import Communicator, NcclInvalidUsage
from pynccl.comm.consistency import compare_rows, exchange
from pynccl.watch.frames import call_site

from .levels import DependentZeros, beneath
from .torch_internals import reentrant_checkpoints, transforms_active

_PAIRWISE = ("permute", "halo_exchange", "halo_reduce")  # sends and receives: not all ranks need join
# Largest difference of "replicated" cotangents, beside the largest of them: rounding in another order on each rank.
_SLACK = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def anchor(loss: Tensor, *outputs: Tensor) -> Tensor:
    """The loss, whose backward pass also enters the collectives that made `outputs`, with a cotangent of 0.

    For what one rank computes and does not use while its peers do: loss = ad.anchor(loss, y). Outputs that need no
    gradient, integers for example, are ignored. The values of the outputs do not matter, NaN and infinities included.

    It holds for derivatives of any order: the zeros depend on all the outputs of the call, as if they met in one loss.
    Outputs that never meet on the other ranks belong to an anchor each, where the gradient of only one of them is
    differentiated further. Under torch.compile it holds for the first order, which is all that torch.compile has."""
    x: Any
    for x in (loss, *outputs):
        if not isinstance(x, Tensor):
            role = "loss" if x is loss else "an output"
            raise TypeError(f"anchor: {role} is a {type(x).__name__}, expected a torch.Tensor")
    within_levels = transforms_active()  # where requires_grad speaks of the innermost one only
    reached = [
        out for out in outputs if out.requires_grad or (within_levels and (out.is_floating_point() or out.is_complex()))
    ]
    if not reached:
        return loss
    if torch.compiler.is_compiling():
        return _compiled(loss, reached)
    anchored: Tensor = Anchor.apply(loss, *(Mark.apply(out) for out in reached))
    return anchored


def _compiled(loss: Tensor, outputs: list[Tensor]) -> Tensor:
    """The same by operations that torch.compile traces; filled, and not multiplied by 0, because of NaN."""
    for out in outputs:
        zero = out.masked_fill(torch.ones_like(out, dtype=torch.bool), 0).sum()
        loss = loss + (zero.real if out.is_complex() else zero).to(loss.dtype)
    return loss


class Mark(Function):
    """A number 0 that stands for an output, so that the output's memory is not kept.

    forward    out [..] -> 0 []
    backward   g [] -> g [..], which is 0: see Anchor
    """

    @staticmethod
    def forward(out: Tensor) -> Tensor:
        return out.new_zeros(())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.shape = inputs[0].shape

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Tensor:
        return cotangents[0].expand(ctx.shape)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Tensor:
        return beneath(Mark.apply, *tangents)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None], out: Tensor) -> tuple[Tensor, None]:
        return Mark.apply(out), None


class Anchor(Function):
    """The loss, which from here on depends on the outputs too, by nothing.

    forward    loss [..], marks [] -> loss [..]
    backward   g [..] -> g, and for each mark a 0 that depends on g and on all marks, as what the other ranks make of
               the outputs does: so the backward of a backward enters the outputs' collectives too
    """

    @staticmethod
    def forward(loss: Tensor, *marks: Tensor) -> Tensor:
        return loss.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        _, *marks = inputs
        ctx.save_for_backward(*marks)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor, ...]:
        (g,) = cotangents
        marks = ctx.saved_tensors
        return g, *(DependentZeros.apply(mark, g, *marks) for mark in marks)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Tensor:
        return beneath(torch.clone, tangents[0])

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *tensors: Tensor) -> tuple[Tensor, int | None]:
        return Anchor.apply(*tensors), in_dims[0]


class ForwardCall(NamedTuple):
    """A forward call."""

    number: int  # of the forward calls on its communicator
    operation: str
    line: str

    def __str__(self) -> str:
        return f"{self.operation}, forward call no. {self.number}, of {self.line}"


_calls: weakref.WeakKeyDictionary[Communicator, int] = weakref.WeakKeyDictionary()


def number_call(comm: Communicator, operation: str) -> ForwardCall:
    """Number this forward call."""
    number = _calls[comm] = _calls.get(comm, 0) + 1
    call = ForwardCall(number, operation, call_site())
    if operation not in _PAIRWISE and (regions := reentrant_checkpoints()):
        _compare_regions(comm, call, regions)
    return call


def _compare_regions(comm: Communicator, call: ForwardCall, regions: list[bool]) -> None:
    """Raise NcclInvalidUsage on every rank if some would have no backward pass of a reentrant checkpoint."""
    rows = exchange({comm: f"{'no' if False in regions else 'a'} gradient ({regions})\0{call}"})[comm]
    needs = [row.partition(" ")[0] for row in rows]
    if len({row.partition("\0")[0] for row in rows}) > 1:
        without = [rank for rank, need in enumerate(needs) if need == "no"]
        raise NcclInvalidUsage(
            f"{call}: within a reentrant checkpoint whose inputs need a gradient on some ranks, and none on ranks "
            f"{without} (PYNCCL_CHECK=1), which would therefore have no backward pass of it while the others wait\n"
            "  pass use_reentrant=False to torch.utils.checkpoint, or inputs that require a gradient on every rank"
        )


def compare_backward(comm: Communicator, call: ForwardCall, replicated: Tensor | None) -> None:
    """Raise NcclInvalidUsage on every rank unless all are at the adjoint of the same call.

    replicated: the cotangent that has to be equal on all ranks, None under the other convention."""
    if call.operation not in _PAIRWISE:
        text = f"backward of {call.operation}, forward call no. {call.number}, made\0{call.line}"
        remedy = (
            "every rank must enter the backward of every call, in the same order; where an output is unused on some "
            "rank, pass it to ad.anchor(loss, *outputs)"
        )
        compare_rows(exchange({comm: text})[comm], comm.rank, remedy, " in the backward pass")
    if replicated is not None and replicated.numel():
        _compare_cotangents(comm, call, replicated.detach())


def _compare_cotangents(comm: Communicator, call: ForwardCall, g: Tensor) -> None:
    wire = (torch.view_as_real(g.resolve_conj()) if g.is_complex() else g).to(torch.float64).contiguous()
    # NaN and the infinities are equal to their like only. Numbered, since libraries differ in the maximum of NaN.
    kinds = wire.isnan() + 2.0 * wire.isposinf() + 3.0 * wire.isneginf()
    sent = torch.stack([wire.nan_to_num(0.0, 0.0, 0.0), kinds])
    highest, lowest = (comm.all_reduce(sent, torch.empty_like(sent), op) for op in ("max", "min"))
    scale = torch.maximum(highest[0].abs(), lowest[0].abs()).max()
    spread, other_kind = highest - lowest
    real = g.dtype.to_real() if g.is_complex() else g.dtype
    if bool((spread <= _SLACK.get(real, 5e-2) * scale).all()) and not bool(other_kind.any()):
        return
    at = int(torch.where(other_kind > 0, math.inf, spread).argmax())
    values = [float(v) for v in comm.all_gather(wire.flatten()[at : at + 1], wire.new_empty(comm.size))]
    first = values[0]
    other = max(range(comm.size), key=lambda rank: _distance(values[rank], first))
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(at), wire.shape))
    raise NcclInvalidUsage(
        f'{call}: grad="replicated", but the cotangents differ between ranks (PYNCCL_CHECK=1): at index {index} '
        f"rank 0 has {first:.9g}, rank {other} has {values[other]:.9g}\n"
        "  every rank must do the same work on this output; if each goes on with its own (its columns, its samples), "
        'pass grad="sum"'
    )


def _distance(value: float, other: float) -> float:
    """Infinite between NaN or an infinity and anything else, 0 between two of a kind."""
    if math.isfinite(value) and math.isfinite(other):
        return abs(value - other)
    return 0.0 if value == other or (math.isnan(value) and math.isnan(other)) else math.inf
