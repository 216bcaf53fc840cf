"""The functions of functions.py, and their backward passes, by collectives and matmuls that are differentiable: for
tracing, transforms, and derivatives of derivatives. The reference for every overlapped schedule.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ..collective import run
from ..ops.all_gather import AllGather, ReduceScatter, all_gather, reduce_scatter
from ..ops.all_reduce import AllReduce, CopyView, all_reduce, copy_view

Grads = tuple[Tensor | None, Tensor | None, Tensor | None]  # of x, w, bias


def all_gather_matmul(call: Any, x: Tensor, bias: Tensor | None, return_gathered: bool) -> Any:
    full = all_gather(x, call.comm, 0, grad="sum", reduce_dtype=call.reduce_dtype)
    y = F.linear(full, call.weight, bias)
    return (y, full) if return_gathered else y


def matmul_reduce_scatter(call: Any, x: Tensor, bias: Tensor | None) -> Tensor:
    """The backward pass sums the gradient of the bias over the ranks' shards of the sequence."""
    y = reduce_scatter(F.linear(x, call.weight), call.comm, 0, reduce_dtype=call.reduce_dtype)
    return y if bias is None else y + copy_view(bias, call.comm).to(y.dtype)  # y may have the autocast type


def matmul_all_reduce(call: Any, x: Tensor, bias: Tensor | None) -> Tensor:
    y = all_reduce(F.linear(x, call.weight), call.comm, grad="replicated", reduce_dtype=call.reduce_dtype)
    return y if bias is None else y + bias.to(y.dtype)


def copy_matmul(call: Any, x: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(run(call.comm, CopyView, x, call.reduce_dtype), call.weight, bias)


# ---------------------------------------------------------------------------------------------- backward passes
# The gradients of x, w and bias, differentiable themselves; None: not needed. See the Functions of linear.py.


def column_backward(
    ctx: Any, call: Any, dy: Tensor, dx_full: Tensor | None, x: Tensor | None, w: Tensor, x_full: Tensor | None
) -> Grads:
    dx = None
    if call.needs_dx:
        partial = dy @ w if dx_full is None else dy @ w + dx_full
        dx = run(call.comm, ReduceScatter, partial, 0, "sum", None, call.reduce_dtype)
    if x is not None:  # on every rank, even one that needs no weight gradient
        x_full = run(call.comm, AllGather, x, 0, "sum", None, call.reduce_dtype)
    return dx, _weight_grad(ctx, dy, x_full), _bias_grad(ctx, dy)


def row_backward(ctx: Any, call: Any, dy: Tensor, x: Tensor, w: Tensor) -> Grads:
    dy_full = run(call.comm, AllGather, dy, 0, "sum", None, call.reduce_dtype)
    db = None
    if ctx.has_bias:  # it is replicated, and so are its gradient and the second derivatives
        db = run(call.comm, AllReduce, _rows(dy).sum(0), "sum", "replicated", call.reduce_dtype)
    return dy_full @ w if call.needs_dx else None, _weight_grad(ctx, dy_full, x), db


def all_reduce_backward(ctx: Any, call: Any, dy: Tensor, x: Tensor, w: Tensor) -> Grads:
    db = _bias_grad(ctx, dy)
    dy = run(call.comm, CopyView, dy, call.reduce_dtype)
    return dy @ w if call.needs_dx else None, _weight_grad(ctx, dy, x), db


def copy_backward(ctx: Any, call: Any, dy: Tensor, x: Tensor, w: Tensor) -> Grads:
    dx = None
    if call.needs_dx:
        dx = run(call.comm, AllReduce, dy @ w, "sum", "replicated", call.reduce_dtype)
        x = run(call.comm, CopyView, x, call.reduce_dtype)  # as in the forward pass
    return dx, _weight_grad(ctx, dy, x), _bias_grad(ctx, dy)


def _weight_grad(ctx: Any, dy: Tensor, x: Tensor | None) -> Tensor | None:
    return _rows(dy).t() @ _rows(x) if ctx.needs_input_grad[1] and x is not None else None


def _bias_grad(ctx: Any, dy: Tensor) -> Tensor | None:
    return _rows(dy).sum(0) if ctx.needs_input_grad[2] else None


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])
