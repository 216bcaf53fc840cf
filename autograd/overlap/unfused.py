"""A matmul and its collective without overlap: the reference for every overlapped schedule.

N ranks; x is [s, .., in] with the sequence in dimension 0, w is [out, in] as in F.linear.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from pynccl import Communicator
from pynccl.bindings.values import shown

from ..arguments import check_call, check_comm
from ..collective import run
from ..ops.all_gather import AllGather, ReduceScatter, all_gather, reduce_scatter
from ..ops.all_reduce import AllReduce, CopyView, all_reduce, copy_view
from ..torch_internals import accumulates
from ..wire import Dtype

Grads = tuple[Tensor | None, Tensor | None, Tensor | None]  # of x, w, bias


def all_gather_matmul(
    x: Tensor,
    w: Tensor,
    comm: Communicator,
    bias: Tensor | None = None,
    reduce_dtype: Dtype = None,
    return_gathered: bool = False,
) -> Any:
    """Return all_gather(x, dim 0) @ w.T + bias.   x [s/N, .., in], w [out, in] -> [s, .., out]

    The backward pass reduce-scatters dx."""
    full = all_gather(x, comm, 0, grad="sum", reduce_dtype=reduce_dtype)
    y = F.linear(full, w, bias)
    return (y, full) if return_gathered else y


def matmul_reduce_scatter(
    x: Tensor,
    w: Tensor,
    comm: Communicator,
    bias: Tensor | None = None,
    reduce_dtype: Dtype = None,
) -> Tensor:
    """Return reduce_scatter(x @ w.T, dim 0) + bias.   x [s, .., in/N], w [out, in/N] -> [s/N, .., out]

    The backward pass all-gathers dy and sums the gradient of the bias over the ranks' shards of the sequence."""
    y = reduce_scatter(F.linear(x, w), comm, 0, reduce_dtype=reduce_dtype)
    return y if bias is None else y + copy_view(bias, comm).to(y.dtype)  # y may have the autocast type


def matmul_all_reduce(
    x: Tensor,
    w: Tensor,
    comm: Communicator,
    bias: Tensor | None = None,
    reduce_dtype: Dtype = None,
) -> Tensor:
    """Return all_reduce(x @ w.T) + bias.   x [s, .., in/N], w [out, in/N] -> [s, .., out]

    dy must be equal on all ranks."""
    partial = F.linear(x, w)
    y = all_reduce(partial, comm, grad="replicated", reduce_dtype=reduce_dtype)
    return y if bias is None else y + bias.to(y.dtype)


def copy_matmul(
    x: Tensor,
    w: Tensor,
    comm: Communicator,
    bias: Tensor | None = None,
    reduce_dtype: Dtype = None,
) -> Tensor:
    """Return x @ w.T + bias.   x [s, .., in], equal on all ranks, w [out/N, in] -> [s, .., out/N]

    The backward pass all-reduces dx."""
    check_call("copy_matmul", x, comm)
    return F.linear(run(comm, CopyView, x, reduce_dtype), w, bias)


def into_main_grad(w: Tensor, main_grad: Tensor) -> Tensor:
    """Return w; the backward pass adds its gradient to main_grad instead of returning it."""
    y: Tensor = IntoMainGrad.apply(w, main_grad)
    return y


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
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, None]:
        (g,) = cotangents
        if not accumulates(ctx.parameter):
            return g, None
        if g is not None:  # None: an overlapped pass has added it
            with torch.no_grad():
                ctx.main_grad.add_(g)
        return _placeholder_grad(ctx.parameter), None


def _placeholder_grad(parameter: Any) -> Tensor | None:
    """Return the gradient to report for a parameter whose gradient was added to main_grad.

    It is None, unless the parameter has the attribute `grad_added_to_main_grad`, which code with gradient hooks sets.
    Then set the attribute to True and return zeros, which take no memory."""
    if not hasattr(parameter, "grad_added_to_main_grad"):
        return None
    parameter.grad_added_to_main_grad = True
    zeros: Tensor = parameter.new_zeros(()).expand(parameter.shape)
    return zeros


# ---------------------------------------------------------------------------------------------- backward passes
# The gradients of x, w and bias, differentiable themselves; None: not needed. See the Functions of linear.py.


def column_backward(
    call: Any, dy: Tensor, dx_full: Tensor | None, x: Tensor | None, w: Tensor, x_full: Tensor | None,
    needs_dw: bool, needs_db: bool,
) -> Grads:  # fmt: skip
    dx = None
    if call.needs_dx:
        partial = dy @ w if dx_full is None else dy @ w + dx_full
        dx = run(call.comm, ReduceScatter, partial, 0, "sum", None, call.reduce_dtype)
    if x is not None:  # on every rank, even one that needs no weight gradient
        x_full = run(call.comm, AllGather, x, 0, "sum", None, call.reduce_dtype)
    return dx, _weight_grad(dy, x_full, needs_dw), _bias_grad(dy, needs_db)


def row_backward(call: Any, dy: Tensor, x: Tensor, w: Tensor, needs_dx: bool, needs_dw: bool, has_bias: bool) -> Grads:
    dy_full = run(call.comm, AllGather, dy, 0, "sum", None, call.reduce_dtype)
    db = _bias_grad(dy, has_bias)
    if db is not None:  # replicated, and so are its gradient and the second derivatives
        db = run(call.comm, AllReduce, db, "sum", "replicated", call.reduce_dtype)
    return dy_full @ w if needs_dx else None, _weight_grad(dy_full, x, needs_dw), db


def all_reduce_backward(
    call: Any, dy: Tensor, x: Tensor, w: Tensor, needs_dx: bool, needs_dw: bool, needs_db: bool
) -> Grads:
    db = _bias_grad(dy, needs_db)
    dy = run(call.comm, CopyView, dy, call.reduce_dtype)
    return dy @ w if needs_dx else None, _weight_grad(dy, x, needs_dw), db


def copy_backward(call: Any, dy: Tensor, x: Tensor, w: Tensor, needs_dw: bool, needs_db: bool) -> Grads:
    dx = None
    if call.needs_dx:
        dx = run(call.comm, AllReduce, dy @ w, "sum", "replicated", call.reduce_dtype)
        x = run(call.comm, CopyView, x, call.reduce_dtype)  # as in the forward pass
    return dx, _weight_grad(dy, x, needs_dw), _bias_grad(dy, needs_db)


def _weight_grad(dy: Tensor, x: Tensor | None, needed: bool) -> Tensor | None:
    """Return dy.T @ x over all rows.   dy [.., n], x [.., k] -> [n, k]"""
    return dy.reshape(-1, dy.shape[-1]).t() @ x.reshape(-1, x.shape[-1]) if needed and x is not None else None


def _bias_grad(dy: Tensor, needed: bool) -> Tensor | None:
    """Return the sum of dy's rows."""
    return dy.reshape(-1, dy.shape[-1]).sum(0) if needed else None


# ---------------------------------------------------------------------------------------------- arguments


def check_input(operation: str, x: Tensor, w: Tensor, comm: Communicator, bias: Tensor | None) -> None:
    """Check that x can be communicated over comm and multiplied with w, and that bias fits; the errors name the
    operation."""
    if type(comm) is not Communicator:
        check_comm(operation, comm, x=x, w=w)
    check_call(operation, x, comm)
    if torch.compiler.is_compiling():
        return
    if not isinstance(w, Tensor) or w.dim() != 2:
        raise TypeError(f"{operation}: w is {shown(w)}, expected a weight [out, in], a torch.Tensor")
    if not x.dim() or x.shape[-1] != w.shape[1]:
        raise ValueError(
            f"{operation}: x has shape {tuple(x.shape)}, expected [.., {w.shape[1]}] for a weight of shape "
            f"{tuple(w.shape)} on this rank"
        )
    if x.dtype is not w.dtype and not torch.is_autocast_enabled(x.device.type):
        raise TypeError(
            f"{operation}: x is {x.dtype}, the weight {w.dtype}; pass x.to({w.dtype}), or use torch.autocast"
        )
    if x.device != w.device:
        raise ValueError(f"{operation}: x is on {x.device}, the weight on {w.device}; move one of them")
    if bias is None:
        return
    if not isinstance(bias, Tensor):
        raise TypeError(f"{operation}: bias is {shown(bias)}, expected a torch.Tensor, or None")
    if bias.shape != w.shape[:1]:
        raise ValueError(
            f"{operation}: bias has shape {tuple(bias.shape)}, expected {tuple(w.shape[:1])}, the out features of w "
            f"{tuple(w.shape)}"
        )
    if bias.dtype is not w.dtype and not torch.is_autocast_enabled(x.device.type):
        raise TypeError(f"{operation}: bias is {bias.dtype}, the weight {w.dtype}; pass bias.to({w.dtype})")
    if bias.device != w.device:
        raise ValueError(f"{operation}: bias is on {bias.device}, expected {w.device}, the device of w")
