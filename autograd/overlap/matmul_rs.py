"""matmul_reduce_scatter: partial products summed over the ranks, each keeping its rows; a slice travels while the next
one is multiplied.

N ranks; x is [s, .., in/N], w [out, in/N] as in F.linear; rows are all dimensions but the last, N*m in all.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from pynccl import Communicator
from pynccl.bindings.values import attribute

from ..arguments import check_divisible
from ..collective import require_grad, run
from ..ops.all_gather import AllGather
from ..ops.all_reduce import AllReduce
from ..torch_internals import reshaped
from ..wire import Dtype
from . import unfused
from .config import Overlap, as_config
from .gathering import gather
from .lanes import Lane
from .matmul import add_sum_rows, linear_into, linear_rows, sum_rows
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


def matmul_reduce_scatter(
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
    """reduce_scatter(x @ w.T, dim 0) + bias.   x [s, .., in/N], w [out, in/N], bias [out] -> [s/N, .., out]

    The adjoint: dy is all-gathered; dbias is the sum of all ranks' rows. The bias is added once, after the sum.

    The options are those of `all_gather_matmul`; reduce_dtype is that of the forward sum

    ValueError, TypeError on every rank for what does not fit together, before anything is launched.
    """
    name = "matmul_reduce_scatter"
    unfused.check_input(name, x, w, comm)
    check_divisible(name, x, 0, comm, "cut it otherwise")
    config = as_config(name, overlap, "row")
    reduce_dtype = checked_reduce_dtype(name, x, reduce_dtype)
    parameter, main_grad = w, main_grad_of(name, w, grad_accumulation_fusion)
    w = unfused.into_main_grad(w, main_grad)
    rows = x.numel() // max(x.shape[-1], 1)
    if cast := tensors_for(comm, config, rows, x, w, bias):
        options = Options(comm, config, reduce_dtype, main_grad, parameter, owner, attribute(overlap, "workspace"))
        x, w, bias = cast
        forward = decided(options, name, rows, w, config)
        backwards = (
            torch.is_grad_enabled() and decided(options, "row_backward", rows, w, config.backward).method != "off"
        )
        if forward.method != "off" or backwards:
            y: Tensor = MatmulReduceScatter.apply(require_grad(x), w, bias, options, forward)
            return y
    return unfused.matmul_reduce_scatter(x, w, comm, bias, reduce_dtype)


class MatmulReduceScatter(Function):
    """Row-parallel, into a sequence that is cut over the ranks.

    forward    x [s, .., in/N] -> y [s/N, .., out]     y = reduce_scatter(x @ w.T) + bias
    backward   gy [s/N, .., out] -> dx, dw, dbias      G = all_gather(gy)     dx = G @ w     dw = G.T @ x
                                                       dbias = sum of G's rows
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, options: Options, decision: Decision) -> Tensor:
        size = options.comm.size
        a = flat_rows(x).unflatten(0, (size, -1))
        y = a.new_empty(a.shape[1], w.shape[0])
        with opened(options, decision, options.config, a) as (lanes, work, cut):

            def multiply(lane: Lane, ranks: slice, at: slice, into: Tensor) -> None:
                lane.run(linear_rows if into.dtype is a.dtype else linear_into, a[ranks, at], w.t(), out=into)

            reduce_scatter(Sums(lanes, work, y, options.reduce_dtype or y.dtype), cut, multiply)
        if bias is not None:
            y.add_(bias)
        ctx.has_bias = bias is not None
        ctx.save_for_backward(x, w)
        remember(ctx, "matmul_reduce_scatter", options)
        return reshaped(y, (x.shape[0] // size, *x.shape[1:-1], w.shape[0]))  # no view: it may be changed in place

    @staticmethod
    @in_backward
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        (gy,) = cotangents
        x, w = ctx.saved_tensors
        check_backward(ctx)
        if torch.is_grad_enabled() or not is_plain(gy, x, w):
            return *_composed(ctx, gy, x, w), None, None
        return *_on_lanes(ctx, gy, x, w), None, None


def _on_lanes(ctx: Any, gy: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    options: Options = ctx.options
    size, config = options.comm.size, options.config.backward
    a = flat_rows(x).unflatten(0, (size, -1))
    own = flat_rows(gy)
    dx = torch.empty_like(a) if ctx.needs_input_grad[0] else None
    decision = decided(options, "row_backward", a.shape[0] * a.shape[1], w, config)
    db = own.new_empty(w.shape[0], dtype=_wide(own.dtype)) if ctx.has_bias and ctx.needs_input_grad[2] else None
    with opened(options, decision, config, own) as (lanes, work, cut):
        pieces = gather(lanes, work, own, cut)
        grad = WeightGrad(options, w, ctx.needs_input_grad[1], sum(len(piece.blocks) for piece in pieces))
        begun = False
        for piece in pieces:
            lane = lanes.compute(piece.arrived)
            if dx is not None:
                for block in piece.blocks:
                    lane.run(linear_rows, block.rows, w, out=block.of(dx))
            if piece.arrived is not None:
                lanes.main.wait(piece.arrived)
            for block in piece.blocks:
                grad.add(lanes, block.rows, block.of(a))
                if db is not None and begun:
                    lanes.main.run(add_sum_rows, block.rows, db, out=db)
                elif db is not None:
                    lanes.main.run(sum_rows, block.rows, out=db)
                begun = True
    return None if dx is None else dx.view(x.shape), grad.result(), None if db is None else db.to(own.dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype.itemsize < 4 else dtype


def _composed(ctx: Any, gy: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The same of operations that have derivatives."""
    options: Options = ctx.options
    g = run(options.comm, AllGather, gy, 0, "sum", None, options.reduce_dtype)
    dx = g @ w if ctx.needs_input_grad[0] else None
    dw = unfused.weight_grad(g, x) if ctx.needs_input_grad[1] else None
    db = None
    if ctx.has_bias:  # every rank has the bias: its gradient is equal on all of them, and so are what derives it again
        own = gy.reshape(-1, gy.shape[-1]).sum(0)
        db = run(options.comm, AllReduce, own, "sum", "replicated", options.reduce_dtype)
    return dx, dw, db
