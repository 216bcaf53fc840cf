"""Gradients of weights that accumulate in weight.main_grad, for example in float32, instead of weight.grad: the option
grad_accumulation_fusion of linear layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from pynccl.bindings.values import shown

from .arguments import check_type
from .torch_internals import accumulates


def main_grad_of(operation: str, w: Tensor, fused: bool) -> Tensor | None:
    """Return w.main_grad if gradients are accumulated there (`fused`), else None."""
    check_type(f"{operation}: grad_accumulation_fusion", "bool", fused)
    if not fused:
        return None
    found = getattr(w, "main_grad", None)
    if isinstance(found, Tensor) and found.shape == w.shape and found.device == w.device:
        return found
    actual = f"{tuple(found.shape)} on {found.device}" if isinstance(found, Tensor) else shown(found)
    raise ValueError(
        f"{operation}: grad_accumulation_fusion=True adds to weight.main_grad, which is {actual}; "
        f"expected a tensor {tuple(w.shape)} on {w.device}; set weight.main_grad = torch.zeros_like(weight, "
        "dtype=torch.float32)"
    )


class IntoMainGrad(Function):
    """A weight whose gradient accumulates in main_grad, in passes that would add to its .grad.

    forward    w [..] -> w [..]
    backward   g [..] -> None; main_grad += g        torch.autograd.grad(.., w): returns g, main_grad is unchanged
    """

    @staticmethod
    def forward(ctx: Any, w: Tensor, main_grad: Tensor) -> Tensor:
        ctx.parameter, ctx.main_grad = w, main_grad
        ctx.set_materialize_grads(False)
        return w.view_as(w)

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> tuple[Tensor | None, None]:
        parameter: Any = ctx.parameter
        if not accumulates(parameter):
            return g, None
        if g is not None:  # None: an overlapped pass has added it
            with torch.no_grad():
                ctx.main_grad.add_(g)
        # The gradient to report is None, unless the parameter has this attribute, which code with gradient hooks sets.
        if not hasattr(parameter, "grad_added_to_main_grad"):
            return None, None
        parameter.grad_added_to_main_grad = True
        return parameter.new_zeros(()).expand(parameter.shape), None  # takes no memory
