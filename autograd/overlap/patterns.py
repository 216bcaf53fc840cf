"""The autograd Functions of a linear layer with a collective before or behind it; see functions.py.

Each has its forward pass and its backward pass on lanes, and what both come to without them: the operations of
unfused.py, where a call is decided not to overlap, and such as have derivatives, where those are wanted.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from ..collective import run
from ..ops.all_gather import AllGather, ReduceScatter
from ..ops.all_reduce import AllReduce, CopyView
from ..torch_internals import reshaped
from . import unfused
from .config import OverlapConfig
from .gathering import from_window, gather, keep
from .matmul import add, add_sum_rows, linear_rows, sum_rows
from .passes import Grads, MatmulCall, WeightGrad, backward_of, flat_rows, opened, remember
from .reducing import Sums, all_reduce, reduce_scatter
from .slices import Flight
from .trials import Decision


class AllGatherMatmul(Function):
    """Column-parallel, of a sequence that is cut over the ranks.

    forward    x [s/N, .., in] -> y [s, .., out], X [s, .., in]     X = all_gather(x)     y = X @ w.T + bias
    backward   gy, gX -> dx [s/N, .., in], dw, dbias                dx = reduce_scatter(gy @ w + gX)
                                                                    dw = gy.T @ X         dbias = sum of gy's rows

    X is an output only where it is kept; else the backward pass gathers x once more, which dgrad hides.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, call: MatmulCall, decision: Decision, kept: bool
    ) -> tuple[Tensor, ...]:
        size = call.comm.size
        if decision.method == "off":
            y, whole = unfused.all_gather_matmul(x, w, call.comm, bias, call.reduce_dtype, True)
            y, whole = reshaped(y, y.shape), reshaped(whole, whole.shape)  # no views, as below
        else:
            own = flat_rows(x)
            y = own.new_empty(size, len(own), w.shape[0])
            whole = own.new_empty(size, *own.shape) if kept else None
            with opened(call, decision, call.config, own) as (lanes, work, cut):
                for piece in gather(lanes, work, own, cut, whole):
                    lane = lanes.compute(piece.arrived)
                    for block in piece.blocks:
                        lane.run(linear_rows, block.rows, w.t(), bias, out=block.of(y))
                    if whole is not None:
                        keep(lane, piece, whole)
            shape = (x.shape[0] * size, *x.shape[1:-1])
            y = reshaped(y, (*shape, w.shape[0]))  # no view: the caller may change it in place
            whole = None if whole is None else reshaped(whole, (*shape, x.shape[-1]))
        ctx.shape, ctx.has_bias = x.shape, bias is not None
        ctx.set_materialize_grads(False)
        if kept:
            ctx.save_for_backward(None, w, whole if ctx.needs_input_grad[1] else None)
        else:
            ctx.save_for_backward(x, w)
        remember(ctx, call)
        return (y, whole) if kept else (y,)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        gy, g_whole = (*cotangents, None)[:2]
        x, w, *kept = ctx.saved_tensors
        comm, reduce_dtype = ctx.of.comm, ctx.of.reduce_dtype
        if gy is None:
            gy = w.new_zeros(ctx.shape[0] * comm.size, *ctx.shape[1:-1], w.shape[0])
        whole = kept[0] if kept else None  # which only the gradient of the weight needs

        def composed() -> Grads:
            d_whole = gy @ w if g_whole is None else gy @ w + g_whole
            dx = run(comm, ReduceScatter, d_whole, 0, "sum", None, reduce_dtype)
            every = whole if x is None else run(comm, AllGather, x, 0, "sum", None, reduce_dtype)
            dw = unfused.weight_grad(gy, every) if ctx.needs_input_grad[1] and every is not None else None
            return dx, dw, _bias_grad(ctx, gy)

        def on_lanes(decision: Decision, config: OverlapConfig) -> Grads:
            return _column_backward(ctx, gy, g_whole, x, w, whole, decision, config)

        return *backward_of(ctx, (gy, g_whole, w), composed, on_lanes), None, None, None


def _column_backward(
    ctx: Any,
    gy: Tensor,
    g_whole: Tensor | None,
    x: Tensor | None,
    w: Tensor,
    whole: Tensor | None,
    decision: Decision,
    config: OverlapConfig,
) -> Grads:
    call: MatmulCall = ctx.of
    size = call.comm.size
    g = flat_rows(gy).unflatten(0, (size, -1))
    dx = g.new_empty(g.shape[1], w.shape[1])
    more = None if g_whole is None else flat_rows(g_whole).unflatten(0, (size, -1))
    grad = WeightGrad(call, w, ctx.needs_input_grad[1])
    db = g.new_empty(w.shape[0]) if _wants_bias(ctx) else None
    own = None if x is None else flat_rows(x)  # a copy, if need be, before the lanes begin
    with opened(call, decision, config, g) as (lanes, work, cut):
        arrived = None
        if own is not None:
            whole = work.empty("gathered", (size, *own.shape), own)

        def gather_anew() -> None:
            nonlocal arrived
            if own is not None and whole is not None:  # on every rank, whether or not it needs its weight's gradient
                lanes.comm.wait(lanes.begun)
                lanes.collective("all_gather", from_window(lanes, work, own, whole), whole)
                arrived = lanes.comm.record()

        def weight_and_bias() -> None:
            if db is not None:
                lanes.main.run(sum_rows, g, out=db)
            if grad.wanted and whole is not None:
                if arrived is not None:
                    lanes.main.wait(arrived)
                grad.add(lanes, g, whole.reshape(size, -1, w.shape[1]))

        sums = Sums(lanes, work, g, w, dx, call.reduce_dtype or dx.dtype, more)
        reduce_scatter(sums, cut, weight_and_bias, gather_anew)
    return dx.view(ctx.shape), grad.result(), db


class MatmulReduceScatter(Function):
    """Row-parallel, into a sequence that is cut over the ranks.

    forward    x [s, .., in/N] -> y [s/N, .., out]     y = reduce_scatter(x @ w.T) + bias
    backward   gy [s/N, .., out] -> dx, dw, dbias      G = all_gather(gy)     dx = G @ w     dw = G.T @ x
                                                       dbias = sum of G's rows
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, call: MatmulCall, decision: Decision) -> Tensor:
        size = call.comm.size
        if decision.method == "off":
            y = unfused.matmul_reduce_scatter(x, w, call.comm, bias, call.reduce_dtype)
            y = reshaped(y, y.shape)  # no view, as below
        else:
            a = flat_rows(x).unflatten(0, (size, -1))
            y = a.new_empty(a.shape[1], w.shape[0])
            with opened(call, decision, call.config, a) as (lanes, work, cut):
                reduce_scatter(Sums(lanes, work, a, w.t(), y, call.reduce_dtype or y.dtype), cut)
            if bias is not None:
                y.add_(bias)
            y = reshaped(y, (x.shape[0] // size, *x.shape[1:-1], w.shape[0]))  # no view: it may be changed in place
        ctx.has_bias = bias is not None
        ctx.save_for_backward(x, w)
        remember(ctx, call)
        return y

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        (gy,) = cotangents
        x, w = ctx.saved_tensors
        comm, reduce_dtype = ctx.of.comm, ctx.of.reduce_dtype

        def composed() -> Grads:
            g = run(comm, AllGather, gy, 0, "sum", None, reduce_dtype)
            dx = g @ w if ctx.needs_input_grad[0] else None
            dw = unfused.weight_grad(g, x) if ctx.needs_input_grad[1] else None
            db = None
            if ctx.has_bias:  # every rank has the bias: its gradient is equal on all, and so are what derives it again
                own = gy.reshape(-1, gy.shape[-1]).sum(0)
                db = run(comm, AllReduce, own, "sum", "replicated", reduce_dtype)
            return dx, dw, db

        def on_lanes(decision: Decision, config: OverlapConfig) -> Grads:
            return _row_backward(ctx, gy, x, w, decision, config)

        return *backward_of(ctx, (gy, x, w), composed, on_lanes), None, None


def _row_backward(ctx: Any, gy: Tensor, x: Tensor, w: Tensor, decision: Decision, config: OverlapConfig) -> Grads:
    call: MatmulCall = ctx.of
    a = flat_rows(x).unflatten(0, (call.comm.size, -1))
    own = flat_rows(gy)
    dx = torch.empty_like(a) if ctx.needs_input_grad[0] else None
    wide = torch.float32 if own.dtype.itemsize < 4 else own.dtype
    db = own.new_empty(w.shape[0], dtype=wide) if _wants_bias(ctx) else None
    with opened(call, decision, config, own) as (lanes, work, cut):
        pieces = gather(lanes, work, own, cut)
        grad = WeightGrad(call, w, ctx.needs_input_grad[1], sum(len(piece.blocks) for piece in pieces))
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


class MatmulAllReduce(Function):
    """Row-parallel, into a sequence that every rank has whole.

    forward    x [s, .., in/N] -> y [s, .., out]      y = all_reduce(x @ w.T) + bias; by slices: y_1 [s_1, out], ..
    backward   gy [s, .., out], equal on all ranks    dx = gy @ w     dw = gy.T @ x     dbias = sum of gy's rows
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor,
        bias: Tensor | None,
        call: MatmulCall,
        decision: Decision,
        flight: Flight | None,
    ) -> tuple[Tensor, ...]:
        a = flat_rows(x)
        y = a.new_empty(len(a), w.shape[0])

        with ExitStack() as stack:
            lanes, work, cut = stack.enter_context(opened(call, decision, call.config, a))

            def there(at: slice) -> None:
                if bias is not None:
                    lanes.comm.run(add, bias, y[at], out=y[at])
                if flight is not None:
                    flight.depart(lanes, at)

            all_reduce(Sums(lanes, work, a[None], w.t(), y, call.reduce_dtype or y.dtype), cut, there)
            if flight is not None:
                flight.take(lanes, stack.pop_all())
        ctx.has_bias = bias is not None
        ctx.save_for_backward(x, w)
        remember(ctx, call)
        if flight is not None:
            return flight.parts(y)
        return (reshaped(y, (*x.shape[:-1], w.shape[0])),)  # no view: the caller may change it in place

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        x, w = ctx.saved_tensors
        comm, reduce_dtype = ctx.of.comm, ctx.of.reduce_dtype
        whole = cotangents[0] if len(cotangents) == 1 else torch.cat(cotangents)

        def composed() -> Grads:
            function, gy, params = AllReduce.adjoint(whole, comm, whole.shape, "sum", "replicated", reduce_dtype)
            db = _bias_grad(ctx, gy)
            gy = run(comm, function, gy, *params)
            dx = gy @ w if ctx.needs_input_grad[0] else None
            dw = unfused.weight_grad(gy, x) if ctx.needs_input_grad[1] else None
            return dx, dw, db

        return *backward_of(ctx, (whole, x, w), composed, replicated=whole), None, None, None


class CopyMatmul(Function):
    """Column-parallel, of a sequence that every rank has whole.

    forward    x [s, .., in] -> y [s, .., out/N]     y = x @ w.T + bias
    backward   gy -> dx, dw, dbias                   dx = all_reduce(gy @ w)     dw = gy.T @ x
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, call: MatmulCall) -> Tensor:
        ctx.has_bias = bias is not None
        ctx.save_for_backward(x, w)
        remember(ctx, call)
        y = F.linear(x, w, bias)
        return reshaped(y, y.shape)  # no view, as it may be now: the caller may change it in place

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        (gy,) = cotangents
        x, w = ctx.saved_tensors
        comm, reduce_dtype = ctx.of.comm, ctx.of.reduce_dtype

        def composed() -> Grads:
            dx = run(comm, AllReduce, gy @ w, "sum", "replicated", reduce_dtype)
            a = run(comm, CopyView, x, reduce_dtype)  # as the forward pass had it
            return dx, unfused.weight_grad(gy, a) if ctx.needs_input_grad[1] else None, _bias_grad(ctx, gy)

        def on_lanes(decision: Decision, config: OverlapConfig) -> Grads:
            return _copy_backward(ctx, gy, x, w, decision, config)

        return *backward_of(ctx, (gy, x, w), composed, on_lanes), None


def _copy_backward(ctx: Any, gy: Tensor, x: Tensor, w: Tensor, decision: Decision, config: OverlapConfig) -> Grads:
    call: MatmulCall = ctx.of
    g = flat_rows(gy)
    dx = g.new_empty(len(g), w.shape[1])
    grad = WeightGrad(call, w, ctx.needs_input_grad[1])
    db = g.new_empty(w.shape[0]) if _wants_bias(ctx) else None
    with opened(call, decision, config, g) as (lanes, work, cut):
        all_reduce(Sums(lanes, work, g[None], w, dx, call.reduce_dtype or dx.dtype), cut)
        if db is not None:
            lanes.main.run(sum_rows, g, out=db)
        grad.add(lanes, g[None], flat_rows(x)[None])
    return dx.view(x.shape), grad.result(), db


def _wants_bias(ctx: Any) -> bool:
    return bool(ctx.has_bias and ctx.needs_input_grad[2])


def _bias_grad(ctx: Any, gy: Tensor) -> Tensor | None:
    """The sum of gy's rows, differentiable."""
    return gy.reshape(-1, gy.shape[-1]).sum(0) if _wants_bias(ctx) else None
