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


def row_backward(call: Any, dy: Tensor, x: Tensor, w: Tensor, needs_dw: bool, has_bias: bool) -> Grads:
    dy_full = run(call.comm, AllGather, dy, 0, "sum", None, call.reduce_dtype)
    db = _bias_grad(dy, has_bias)
    if db is not None:  # replicated, and so are its gradient and the second derivatives
        db = run(call.comm, AllReduce, db, "sum", "replicated", call.reduce_dtype)
    return dy_full @ w if call.needs_dx else None, _weight_grad(dy_full, x, needs_dw), db


def all_reduce_backward(call: Any, dy: Tensor, x: Tensor, w: Tensor, needs_dw: bool, needs_db: bool) -> Grads:
    db = _bias_grad(dy, needs_db)
    dy = run(call.comm, CopyView, dy, call.reduce_dtype)
    return dy @ w if call.needs_dx else None, _weight_grad(dy, x, needs_dw), db


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
