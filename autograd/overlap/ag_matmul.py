"""all_gather_matmul: the rows of all ranks times a weight; a slice is multiplied while the next one arrives.

N ranks; x is [s/N, .., in], w [out, in] as in F.linear; rows are all dimensions but the last, m here, N*m in all.
"""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.autograd import Function

from pynccl import Communicator
from pynccl.bindings.values import attribute

from ..collective import require_grad, run
from ..ops.all_gather import AllGather, ReduceScatter
from ..torch_internals import reshaped
from ..wire import Dtype
from . import unfused
from .config import Overlap, as_config
from .gathering import from_window, gather, keep
from .lanes import Lane
from .matmul import linear_into, linear_plus, linear_rows, sum_rows
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
from .planner import Decision
from .reducing import Sums, reduce_scatter


@overload
def all_gather_matmul(
    x: Tensor,
    w: Tensor,
    comm: Communicator,
    bias: Tensor | None = None,
    *,
    overlap: Overlap = "auto",
    reduce_dtype: Dtype = None,
    grad_accumulation_fusion: bool = False,
    owner: Any = None,
) -> Tensor: ...
@overload
def all_gather_matmul(
    x: Tensor,
    w: Tensor,
    comm: Communicator,
    bias: Tensor | None = None,
    *,
    overlap: Overlap = "auto",
    reduce_dtype: Dtype = None,
    grad_accumulation_fusion: bool = False,
    return_gathered: Literal[True],
) -> tuple[Tensor, Tensor]: ...
def all_gather_matmul(
    x: Tensor,
    w: Tensor,
    comm: Communicator,
    bias: Tensor | None = None,
    *,
    overlap: Overlap = "auto",
    reduce_dtype: Dtype = None,
    grad_accumulation_fusion: bool = False,
    return_gathered: bool = False,
    owner: Any = None,
) -> Any:
    """all_gather(x, dim 0) @ w.T + bias.   x [s/N, .., in], w [out, in], bias [out] -> [s, .., out]

    The adjoint: dx is reduce-scattered, dw and dbias are sums over all rows.

    overlap                   "auto": as the planner decides, which may be not to; "off"; OverlapConfig(...); a dict
    reduce_dtype              type of the sum in the backward reduce-scatter
    grad_accumulation_fusion  dw is added to w.main_grad, and w.grad left alone
    return_gathered           return (y, all_gather(x)), both differentiable
    owner                     the module that `overlap.report()` is to name

    ValueError, TypeError on every rank for what does not fit together, before anything is launched.
    """
    name = "all_gather_matmul"
    unfused.check_input(name, x, w, comm)
    config = as_config(name, overlap, "column")
    reduce_dtype = checked_reduce_dtype(name, x, reduce_dtype)
    parameter, main_grad = w, main_grad_of(name, w, grad_accumulation_fusion)
    w = unfused.into_main_grad(w, main_grad)
    rows = x.numel() // max(x.shape[-1], 1) * comm.size
    if cast := tensors_for(comm, config, rows, x, w, bias):
        options = Options(comm, config, reduce_dtype, main_grad, parameter, owner, attribute(overlap, "workspace"))
        x, w, bias = cast
        forward = decided(options, name, rows, w, config)
        backwards = (
            torch.is_grad_enabled() and decided(options, "column_backward", rows, w, config.backward).method != "off"
        )
        if forward.method != "off" or backwards:
            y, *gathered = AllGatherMatmul.apply(
                require_grad(x), w, bias, options, forward, return_gathered or config.save_gathered
            )
            return (y, gathered[0]) if return_gathered else y
    return unfused.all_gather_matmul(x, w, comm, bias, reduce_dtype, return_gathered)


class AllGatherMatmul(Function):
    """Column-parallel, of a sequence that is cut over the ranks.

    forward    x [s/N, .., in] -> y [s, .., out], X [s, .., in]     X = all_gather(x)     y = X @ w.T + bias
    backward   gy, gX -> dx [s/N, .., in], dw, dbias                dx = reduce_scatter(gy @ w + gX)
                                                                    dw = gy.T @ X         dbias = sum of gy's rows

    X is an output only where it is kept; else the backward pass gathers x once more, which dgrad hides.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, options: Options, decision: Decision, kept: bool
    ) -> tuple[Tensor, ...]:
        comm = options.comm
        own = flat_rows(x)
        y = own.new_empty(comm.size, len(own), w.shape[0])
        whole = own.new_empty(comm.size, *own.shape) if kept else None
        with opened(options, decision, options.config, own) as (lanes, work, cut):
            for piece in gather(lanes, work, own, cut, whole):
                lane = lanes.compute(piece.arrived)
                for block in piece.blocks:
                    lane.run(linear_rows, block.rows, w.t(), bias, out=block.of(y))
                if whole is not None:
                    keep(lane, piece, whole)
        shape = (x.shape[0] * comm.size, *x.shape[1:-1])
        ctx.shape, ctx.has_bias = x.shape, bias is not None
        ctx.set_materialize_grads(False)
        y = reshaped(y, (*shape, w.shape[0]))  # no view: the caller may change it in place
        if whole is None:
            ctx.save_for_backward(x, w)
            remember(ctx, "all_gather_matmul", options)
            return (y,)
        whole = reshaped(whole, (*shape, x.shape[-1]))
        ctx.save_for_backward(None, w, whole if ctx.needs_input_grad[1] else None)
        remember(ctx, "all_gather_matmul", options)
        return y, whole

    @staticmethod
    @in_backward
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        gy, g_whole = (*cotangents, None)[:2]
        x, w, *kept = ctx.saved_tensors
        check_backward(ctx)
        options: Options = ctx.options
        if gy is None:
            gy = w.new_zeros(ctx.shape[0] * options.comm.size, *ctx.shape[1:-1], w.shape[0])
        whole = kept[0] if kept else None  # which only the gradient of the weight needs
        if torch.is_grad_enabled() or not is_plain(gy, g_whole, w):
            found = _composed(ctx, gy, g_whole, x, w, whole)
        else:
            found = _on_lanes(ctx, gy, g_whole, x, w, whole)
        return *found, None, None, None


def _on_lanes(
    ctx: Any, gy: Tensor, g_whole: Tensor | None, x: Tensor | None, w: Tensor, whole: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    options: Options = ctx.options
    size, config = options.comm.size, options.config.backward
    g = flat_rows(gy).unflatten(0, (size, -1))
    dx = g.new_empty(g.shape[1], w.shape[1])
    more = None if g_whole is None else flat_rows(g_whole).unflatten(0, (size, -1))
    grad = WeightGrad(options, w, ctx.needs_input_grad[1])
    db = g.new_empty(w.shape[0]) if ctx.has_bias and ctx.needs_input_grad[2] else None
    decision = decided(options, "column_backward", size * g.shape[1], w, config)
    own = None if x is None else flat_rows(x)  # a copy, if need be, before the lanes begin
    with opened(options, decision, config, g) as (lanes, work, cut):
        arrived = None
        if own is not None:
            whole = work.empty("gathered", (size, *own.shape), own)

        def gather_anew() -> None:
            nonlocal arrived
            if own is not None and whole is not None:  # on every rank, whether or not it needs its weight's gradient
                lanes.comm.wait(lanes.begun)
                lanes.collective("all_gather", from_window(lanes, work, own, whole), whole)
                arrived = lanes.comm.record()

        def multiply(lane: Lane, ranks: slice, at: slice, into: Tensor) -> None:
            if more is not None:
                lane.run(linear_plus, g[ranks, at], w, more[ranks, at], out=into)
            else:
                lane.run(linear_rows if into.dtype is g.dtype else linear_into, g[ranks, at], w, out=into)

        def weight_and_bias() -> None:
            if db is not None:
                lanes.main.run(sum_rows, g, out=db)
            if grad.wanted and whole is not None:
                if arrived is not None:
                    lanes.main.wait(arrived)
                grad.add(lanes, g, whole.reshape(size, -1, w.shape[1]))

        sums = Sums(lanes, work, dx, options.reduce_dtype or dx.dtype)
        reduce_scatter(sums, cut, multiply, weight_and_bias, gather_anew)
    return dx.view(ctx.shape), grad.result(), db


def _composed(
    ctx: Any, gy: Tensor, g_whole: Tensor | None, x: Tensor | None, w: Tensor, whole: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The same of operations that have derivatives."""
    options: Options = ctx.options
    comm = options.comm
    d_whole = gy @ w if g_whole is None else gy @ w + g_whole
    dx = run(comm, ReduceScatter, d_whole, 0, "sum", None, options.reduce_dtype)
    if x is not None:
        whole = run(comm, AllGather, x, 0, "sum", None, options.reduce_dtype)
    dw = unfused.weight_grad(gy, whole) if ctx.needs_input_grad[1] and whole is not None else None
    db = gy.reshape(-1, gy.shape[-1]).sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None
    return dx, dw, db
