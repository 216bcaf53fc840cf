"""anchor: outputs that a rank does not use still enter its backward pass, which the other ranks wait for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from . import levels
from .levels import Nothing


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
        return levels.beneath(Mark.apply, *tangents)

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
        return g, *(Nothing.apply(mark, g, *marks) for mark in marks)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Tensor:
        return levels.beneath(torch.clone, tangents[0])

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *tensors: Tensor) -> tuple[Tensor, int | None]:
        return Anchor.apply(*tensors), in_dims[0]


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
    within_levels = torch._C._are_functorch_transforms_active()  # where requires_grad speaks of the innermost one only
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
