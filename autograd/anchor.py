"""anchor: outputs that a rank does not use still enter its backward pass, which the other ranks wait for."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function


class Anchor(Function):
    """The loss, which from here on depends on the outputs too, by nothing.

    forward    loss [..], outputs -> loss [..]
    backward   g [..] -> g, and 0 for each output
    """

    @staticmethod
    def forward(loss: Tensor, *outputs: Tensor) -> Tensor:
        return loss.view_as(loss)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        _, *outputs = inputs
        # Without memory: a stride of 0. The outputs themselves are not kept, only what a zero needs to know.
        ctx.zeros = [out.new_zeros(()) for out in outputs]
        ctx.shapes = [out.shape for out in outputs]

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor, ...]:
        (g,) = cotangents
        return g, *(zero.expand(shape) for zero, shape in zip(ctx.zeros, ctx.shapes, strict=True))

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor | None:
        return None if tangents[0] is None else tangents[0].view_as(tangents[0])

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *tensors: Tensor) -> tuple[Tensor, int | None]:
        return Anchor.apply(*tensors), in_dims[0]


def anchor(loss: Tensor, *outputs: Tensor) -> Tensor:
    """The loss, whose backward pass also enters the collectives that made `outputs`, with a cotangent of 0.

    For what one rank computes and does not use while its peers do: loss = ad.anchor(loss, y). Outputs that need no
    gradient, integers for example, are ignored."""
    reached = [out for out in outputs if out.requires_grad]
    if not reached:
        return loss
    anchored: Tensor = Anchor.apply(loss, *reached)
    return anchored
