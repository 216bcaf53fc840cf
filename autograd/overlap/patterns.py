"""The autograd Functions of a linear layer with a collective before or after it; see functions.py.

Each Function implements its forward and backward pass twice: on lanes, and without overlap. The latter uses the
operations of unfused.py, or differentiable operations if a second derivative is needed.
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
from .passes import Grads, MatmulCall, WeightGrad, backward_of, flat_rows, open_pass, save_call
from .reducing import Sums, all_reduce, reduce_scatter
from .schedules import Decision
from .slices import PendingSlices


class AllGatherMatmul(Function):
    """Column-parallel, with a sequence that is sharded over the ranks.

    forward    x [s/N, .., in] -> y [s, .., out], X [s, .., in]     X = all_gather(x)     y = X @ w.T + bias
    backward   gy, gX -> dx [s/N, .., in], dw, dbias                dx = reduce_scatter(gy @ w + gX)
                                                                    dw = gy.T @ X         dbias = sum of gy's rows

    X is an output only if it is kept. Otherwise the backward pass gathers x again, hidden behind dgrad.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, call: MatmulCall, decision: Decision, kept: bool
    ) -> tuple[Tensor, ...]:
        size = call.comm.size
        if decision.method == "off":
            y, full = unfused.all_gather_matmul(x, w, call.comm, bias, call.reduce_dtype, True)
            y, full = reshaped(y, y.shape), reshaped(full, full.shape)  # not views, as below
        else:
            local = flat_rows(x)
            y = local.new_empty(size, len(local), w.shape[0])
            full = local.new_empty(size, *local.shape) if kept else None
            with open_pass(call, decision, call.config, local) as (lanes, work, chunking):
                for piece in gather(lanes, work, local, chunking, full):
                    lane = lanes.compute(piece.arrived)
                    for block in piece.blocks:
                        lane.run(linear_rows, block.rows, w.t(), bias, out=block.of(y))
                    if full is not None:
                        keep(lane, piece, full)
            shape = (x.shape[0] * size, *x.shape[1:-1])
            y = reshaped(y, (*shape, w.shape[0]))  # not a view: the caller may modify it in place
            full = None if full is None else reshaped(full, (*shape, x.shape[-1]))
        ctx.shape, ctx.has_bias = x.shape, bias is not None
        ctx.set_materialize_grads(False)
        if kept:
            ctx.save_for_backward(None, w, full if ctx.needs_input_grad[1] else None)
        else:
            ctx.save_for_backward(x, w)
        save_call(ctx, call)
        return (y, full) if kept else (y,)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        gy, g_full = (*cotangents, None)[:2]
        x, w, *kept = ctx.saved_tensors
        comm, reduce_dtype = ctx.matmul_call.comm, ctx.matmul_call.reduce_dtype
        if gy is None:
            gy = w.new_zeros(ctx.shape[0] * comm.size, *ctx.shape[1:-1], w.shape[0])
        full = kept[0] if kept else None  # only the gradient of the weight needs it

        def composed() -> Grads:
            d_full = gy @ w if g_full is None else gy @ w + g_full
            dx = run(comm, ReduceScatter, d_full, 0, "sum", None, reduce_dtype)
            gathered = full if x is None else run(comm, AllGather, x, 0, "sum", None, reduce_dtype)
            dw = unfused.weight_grad(gy, gathered) if ctx.needs_input_grad[1] and gathered is not None else None
            return dx, dw, _bias_grad(ctx, gy)

        def on_lanes(decision: Decision, config: OverlapConfig) -> Grads:
            return _column_backward(ctx, gy, g_full, x, w, full, decision, config)

        return *backward_of(ctx, (gy, g_full, w), composed, on_lanes), None, None, None


def _column_backward(
    ctx: Any,
    gy: Tensor,
    g_full: Tensor | None,
    x: Tensor | None,
    w: Tensor,
    full: Tensor | None,
    decision: Decision,
    config: OverlapConfig,
) -> Grads:
    call: MatmulCall = ctx.matmul_call
    size = call.comm.size
    g = flat_rows(gy).unflatten(0, (size, -1))
    dx = g.new_empty(g.shape[1], w.shape[1])
    addend = None if g_full is None else flat_rows(g_full).unflatten(0, (size, -1))
    grad = WeightGrad(call, w, ctx.needs_input_grad[1])
    db = g.new_empty(w.shape[0]) if _needs_bias_grad(ctx) else None
    local = None if x is None else flat_rows(x)  # may copy, so do it before the lanes start
    with open_pass(call, decision, config, g) as (lanes, work, chunking):
        arrived = None
        if local is not None:
            full = work.empty("gathered", (size, *local.shape), local)

        def gather_again() -> None:
            nonlocal arrived
            if local is not None and full is not None:  # on every rank, even one that needs no weight gradient
                lanes.comm.wait(lanes.start)
                lanes.collective("all_gather", from_window(lanes, work, local, full), full)
                arrived = lanes.comm.record()

        def weight_and_bias() -> None:
            if db is not None:
                lanes.main.run(sum_rows, g, out=db)
            if grad.needed and full is not None:
                if arrived is not None:
                    lanes.main.wait(arrived)
                grad.add(lanes, g, full.reshape(size, -1, w.shape[1]))

        sums = Sums(lanes, work, g, w, dx, call.reduce_dtype or dx.dtype, addend)
        reduce_scatter(sums, chunking, weight_and_bias, gather_again)
    return dx.view(ctx.shape), grad.result(), db


class MatmulReduceScatter(Function):
    """Row-parallel, with an output sequence that is sharded over the ranks.

    forward    x [s, .., in/N] -> y [s/N, .., out]     y = reduce_scatter(x @ w.T) + bias
    backward   gy [s/N, .., out] -> dx, dw, dbias      G = all_gather(gy)     dx = G @ w     dw = G.T @ x
                                                       dbias = sum of G's rows
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, call: MatmulCall, decision: Decision) -> Tensor:
        size = call.comm.size
        if decision.method == "off":
            y = unfused.matmul_reduce_scatter(x, w, call.comm, bias, call.reduce_dtype)
            y = reshaped(y, y.shape)  # not a view: the caller may modify it in place
        else:
            a = flat_rows(x).unflatten(0, (size, -1))
            y = a.new_empty(a.shape[1], w.shape[0])
            with open_pass(call, decision, call.config, a) as (lanes, work, chunking):
                reduce_scatter(Sums(lanes, work, a, w.t(), y, call.reduce_dtype or y.dtype), chunking)
            if bias is not None:
                y.add_(bias)
            y = reshaped(y, (x.shape[0] // size, *x.shape[1:-1], w.shape[0]))  # not a view, as above
        ctx.has_bias = bias is not None
        ctx.save_for_backward(x, w)
        save_call(ctx, call)
        return y

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        (gy,) = cotangents
        x, w = ctx.saved_tensors
        comm, reduce_dtype = ctx.matmul_call.comm, ctx.matmul_call.reduce_dtype

        def composed() -> Grads:
            g = run(comm, AllGather, gy, 0, "sum", None, reduce_dtype)
            dx = g @ w if ctx.needs_input_grad[0] else None
            dw = unfused.weight_grad(g, x) if ctx.needs_input_grad[1] else None
            db = None
            if ctx.has_bias:  # replicated, and so are its gradient and the second derivatives
                local = gy.reshape(-1, gy.shape[-1]).sum(0)
                db = run(comm, AllReduce, local, "sum", "replicated", reduce_dtype)
            return dx, dw, db

        def on_lanes(decision: Decision, config: OverlapConfig) -> Grads:
            return _row_backward(ctx, gy, x, w, decision, config)

        return *backward_of(ctx, (gy, x, w), composed, on_lanes), None, None


def _row_backward(ctx: Any, gy: Tensor, x: Tensor, w: Tensor, decision: Decision, config: OverlapConfig) -> Grads:
    call: MatmulCall = ctx.matmul_call
    a = flat_rows(x).unflatten(0, (call.comm.size, -1))
    local = flat_rows(gy)
    dx = torch.empty_like(a) if ctx.needs_input_grad[0] else None
    wide = torch.float32 if local.dtype.itemsize < 4 else local.dtype
    db = local.new_empty(w.shape[0], dtype=wide) if _needs_bias_grad(ctx) else None
    with open_pass(call, decision, config, local) as (lanes, work, chunking):
        pieces = gather(lanes, work, local, chunking)
        grad = WeightGrad(call, w, ctx.needs_input_grad[1], sum(len(piece.blocks) for piece in pieces))
        started = False
        for piece in pieces:
            lane = lanes.compute(piece.arrived)
            if dx is not None:
                for block in piece.blocks:
                    lane.run(linear_rows, block.rows, w, out=block.of(dx))
            if piece.arrived is not None:
                lanes.main.wait(piece.arrived)
            for block in piece.blocks:
                grad.add(lanes, block.rows, block.of(a))
                if db is not None and started:
                    lanes.main.run(add_sum_rows, block.rows, db, out=db)
                elif db is not None:
                    lanes.main.run(sum_rows, block.rows, out=db)
                started = True
    return None if dx is None else dx.view(x.shape), grad.result(), None if db is None else db.to(local.dtype)


class MatmulAllReduce(Function):
    """Row-parallel, with an output sequence that is replicated.

    forward    x [s, .., in/N] -> y [s, .., out]      y = all_reduce(x @ w.T) + bias; with hand_off: y_1 [s_1, out], ..
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
        pending: PendingSlices | None,
    ) -> tuple[Tensor, ...]:
        a = flat_rows(x)
        y = a.new_empty(len(a), w.shape[0])

        with ExitStack() as stack:
            lanes, work, chunking = stack.enter_context(open_pass(call, decision, call.config, a))

            def on_issued(at: slice) -> None:
                if bias is not None:
                    lanes.comm.run(add, bias, y[at], out=y[at])
                if pending is not None:
                    pending.add(lanes, at)

            all_reduce(Sums(lanes, work, a[None], w.t(), y, call.reduce_dtype or y.dtype), chunking, on_issued)
            if pending is not None:
                pending.attach(lanes, stack.pop_all())
        ctx.has_bias = bias is not None
        ctx.save_for_backward(x, w)
        save_call(ctx, call)
        if pending is not None:
            return pending.slices(y)
        return (reshaped(y, (*x.shape[:-1], w.shape[0])),)  # not a view: the caller may modify it in place

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        x, w = ctx.saved_tensors
        comm, reduce_dtype = ctx.matmul_call.comm, ctx.matmul_call.reduce_dtype
        full = cotangents[0] if len(cotangents) == 1 else torch.cat(cotangents)

        def composed() -> Grads:
            function, gy, params = AllReduce.adjoint(full, comm, full.shape, "sum", "replicated", reduce_dtype)
            db = _bias_grad(ctx, gy)
            gy = run(comm, function, gy, *params)
            dx = gy @ w if ctx.needs_input_grad[0] else None
            dw = unfused.weight_grad(gy, x) if ctx.needs_input_grad[1] else None
            return dx, dw, db

        return *backward_of(ctx, (full, x, w), composed, replicated=full), None, None, None


class CopyMatmul(Function):
    """Column-parallel, with a sequence that is replicated.

    forward    x [s, .., in] -> y [s, .., out/N]     y = x @ w.T + bias
    backward   gy -> dx, dw, dbias                   dx = all_reduce(gy @ w)     dw = gy.T @ x
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, call: MatmulCall) -> Tensor:
        ctx.has_bias = bias is not None
        ctx.save_for_backward(x, w)
        save_call(ctx, call)
        y = F.linear(x, w, bias)
        return reshaped(y, y.shape)  # not a view, which F.linear may return: the caller may modify it in place

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        (gy,) = cotangents
        x, w = ctx.saved_tensors
        comm, reduce_dtype = ctx.matmul_call.comm, ctx.matmul_call.reduce_dtype

        def composed() -> Grads:
            dx = run(comm, AllReduce, gy @ w, "sum", "replicated", reduce_dtype)
            a = run(comm, CopyView, x, reduce_dtype)  # as in the forward pass
            return dx, unfused.weight_grad(gy, a) if ctx.needs_input_grad[1] else None, _bias_grad(ctx, gy)

        def on_lanes(decision: Decision, config: OverlapConfig) -> Grads:
            return _copy_backward(ctx, gy, x, w, decision, config)

        return *backward_of(ctx, (gy, x, w), composed, on_lanes), None


def _copy_backward(ctx: Any, gy: Tensor, x: Tensor, w: Tensor, decision: Decision, config: OverlapConfig) -> Grads:
    call: MatmulCall = ctx.matmul_call
    g = flat_rows(gy)
    dx = g.new_empty(len(g), w.shape[1])
    grad = WeightGrad(call, w, ctx.needs_input_grad[1])
    db = g.new_empty(w.shape[0]) if _needs_bias_grad(ctx) else None
    with open_pass(call, decision, config, g) as (lanes, work, chunking):
        all_reduce(Sums(lanes, work, g[None], w, dx, call.reduce_dtype or dx.dtype), chunking)
        if db is not None:
            lanes.main.run(sum_rows, g, out=db)
        grad.add(lanes, g[None], flat_rows(x)[None])
    return dx.view(x.shape), grad.result(), db


def _needs_bias_grad(ctx: Any) -> bool:
    return bool(ctx.has_bias and ctx.needs_input_grad[2])


def _bias_grad(ctx: Any, gy: Tensor) -> Tensor | None:
    """Return the sum of gy's rows, differentiable."""
    return gy.reshape(-1, gy.shape[-1]).sum(0) if _needs_bias_grad(ctx) else None
