"""copy_matmul: a replicated tensor times a weight that is cut over the ranks; the sum of dx travels while dw is made.

N ranks; x is [s, .., in] and equal on all of them, w [out/N, in] as in F.linear; rows are all dimensions but the last.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from pynccl import Communicator
from pynccl.bindings.values import attribute

from ..collective import require_grad, run
from ..ops.all_reduce import AllReduce, CopyView
from ..torch_internals import reshaped
from ..wire import Dtype
from . import unfused
from .config import Overlap, as_config
from .lanes import Lane
from .matmul import linear_into, linear_rows, sum_rows
from .passes import (
    Options,
    WeightGrad,
    check_backward,
    checked_reduce_dtype,
    decided,
    flat_rows,
    in_backward,
    is_plain,
    main_grad_of,
    opened,
    remember,
    tensors_for,
)
from .reducing import Sums, all_reduce


def copy_matmul(
    x: Tensor,
    w: Tensor,
    comm: Communicator,
    bias: Tensor | None = None,
    *,
    overlap: Overlap = "auto",
    reduce_dtype: Dtype = None,
    grad_accumulation_fusion: bool = False,
    owner: Any = None,
) -> Tensor:
    """x @ w.T + bias of an x that is equal on all ranks.   x [s, .., in], w [out/N, in] -> [s, .., out/N]

    The adjoint: dx is summed over the ranks (all_reduce), dw and dbias are this rank's own.

    The options are those of `all_gather_matmul`; reduce_dtype is that of dx's sum

    ValueError, TypeError on every rank for what does not fit together, before anything is launched.
    """
    name = "copy_matmul"
    unfused.check_input(name, x, w, comm)
    config = as_config(name, overlap, "column")
    reduce_dtype = checked_reduce_dtype(name, x, reduce_dtype)
    parameter, main_grad = w, main_grad_of(name, w, grad_accumulation_fusion)
    w = unfused.into_main_grad(w, main_grad)
    rows = x.numel() // max(x.shape[-1], 1)
    if torch.is_grad_enabled() and (cast := tensors_for(comm, config, rows, x, w, bias)):
        options = Options(comm, config, reduce_dtype, main_grad, parameter, owner, attribute(overlap, "workspace"))
        x, w, bias = cast
        if decided(options, "copy_backward", rows, w, config.backward).method != "off":
            y: Tensor = CopyMatmul.apply(require_grad(x), w, bias, options)
            return y
    return unfused.copy_matmul(x, w, comm, bias, reduce_dtype)


class CopyMatmul(Function):
    """Column-parallel, of a sequence that every rank has whole.

    forward    x [s, .., in] -> y [s, .., out/N]     y = x @ w.T + bias
    backward   gy -> dx, dw, dbias                   dx = all_reduce(gy @ w)     dw = gy.T @ x
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, options: Options) -> Tensor:
        ctx.has_bias = bias is not None
        ctx.save_for_backward(x, w)
        remember(ctx, "copy_matmul", options)
        y = F.linear(x, w, bias)
        return reshaped(y, y.shape)  # no view, as it may be now: the caller may change it in place

    @staticmethod
    @in_backward
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        (gy,) = cotangents
        x, w = ctx.saved_tensors
        check_backward(ctx)
        if torch.is_grad_enabled() or not is_plain(gy, x, w):
            return *_composed(ctx, gy, x, w), None
        return *_on_lanes(ctx, gy, x, w), None


def _on_lanes(ctx: Any, gy: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    options: Options = ctx.options
    config = options.config.backward
    g = flat_rows(gy)
    dx = g.new_empty(len(g), w.shape[1])
    grad = WeightGrad(options, w, ctx.needs_input_grad[1])
    db = g.new_empty(w.shape[0]) if ctx.has_bias and ctx.needs_input_grad[2] else None
    decision = decided(options, "copy_backward", len(g), w, config)
    with opened(options, decision, config, g) as (lanes, work, cut):

        def multiply(lane: Lane, _: slice, at: slice, into: Tensor) -> None:
            lane.run(linear_rows if into.dtype is g.dtype else linear_into, g[at][None], w, out=into)

        all_reduce(Sums(lanes, work, dx, options.reduce_dtype or dx.dtype), cut, multiply, lambda at: None)
        if db is not None:
            lanes.main.run(sum_rows, g, out=db)
        grad.add(lanes, g[None], flat_rows(x)[None])
    return dx.view(x.shape), grad.result(), db


def _composed(ctx: Any, gy: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The same of operations that have derivatives."""
    options: Options = ctx.options
    dx = run(options.comm, AllReduce, gy @ w, "sum", "replicated", options.reduce_dtype)
    x = run(options.comm, CopyView, x, options.reduce_dtype)  # as the forward pass had it
    dw = unfused.weight_grad(gy, x) if ctx.needs_input_grad[1] else None
    db = gy.reshape(-1, gy.shape[-1]).sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None
    return dx, dw, db
