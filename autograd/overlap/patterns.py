"""A linear layer with the collective before or behind it: a slice travels while another one is multiplied.

N ranks; x is [s, .., in] with the sequence in dimension 0, w is [out, in] as in F.linear; rows are all dimensions but
the last. Four functions, each with its autograd Function:

    all_gather_matmul        x [s/N, .., in]     -> y [s, .., out]      dx is reduce-scattered
    matmul_reduce_scatter    x [s, .., in/N]     -> y [s/N, .., out]    gy is all-gathered
    matmul_all_reduce        x [s, .., in/N]     -> y [s, .., out]      nothing travels
    copy_matmul              x [s, .., in] equal -> y [s, .., out/N]    dx is all-reduced
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Literal, overload

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from pynccl import Communicator

from ..arguments import check_divisible
from ..collective import run
from ..ops.all_gather import AllGather, ReduceScatter
from ..ops.all_reduce import AllReduce, CopyView
from ..torch_internals import reshaped
from ..wire import Dtype
from . import unfused
from .config import Overlap, OverlapConfig
from .gathering import from_window, gather, keep
from .matmul import add, add_sum_rows, linear_rows, sum_rows
from .passes import (
    Call,
    Grads,
    WeightGrad,
    backward_of,
    flat_rows,
    opened,
    remember,
)
from .reducing import Sums, all_reduce, reduce_scatter
from .slices import Flight, Slices
from .trials import Decision


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

    overlap                   "auto": tries the ways in its first calls, and keeps the fastest, which may be not to
                              overlap; "off"; OverlapConfig(...); a dict of TransformerEngine's keys
    reduce_dtype              type of the sum in the backward reduce-scatter
    grad_accumulation_fusion  dw is added to w.main_grad, and w.grad left alone
    return_gathered           return (y, all_gather(x)), both differentiable
    owner                     the module for which "auto" decides, and that `overlap.report()` is to name

    ValueError, TypeError on every rank for what does not fit together, before anything is launched.
    """
    call = Call("all_gather_matmul", "column", x, w, comm, overlap, reduce_dtype, grad_accumulation_fusion, owner)

    def overlapped(x: Tensor, w: Tensor, bias: Tensor | None, call: Call, decision: Decision) -> Any:
        keeps = return_gathered or call.config.save_gathered
        y, *gathered = AllGatherMatmul.apply(x, w, bias, call, decision, keeps)
        return (y, gathered[0]) if return_gathered else y

    def composed(x: Tensor, w: Tensor, bias: Tensor | None) -> Any:
        return unfused.all_gather_matmul(x, w, comm, bias, call.reduce_dtype, return_gathered)

    rows = x.numel() // max(x.shape[-1], 1) * comm.size
    return call.run(x, bias, rows, ("all_gather_matmul", "column_backward"), overlapped, composed)


class AllGatherMatmul(Function):
    """Column-parallel, of a sequence that is cut over the ranks.

    forward    x [s/N, .., in] -> y [s, .., out], X [s, .., in]     X = all_gather(x)     y = X @ w.T + bias
    backward   gy, gX -> dx [s/N, .., in], dw, dbias                dx = reduce_scatter(gy @ w + gX)
                                                                    dw = gy.T @ X         dbias = sum of gy's rows

    X is an output only where it is kept; else the backward pass gathers x once more, which dgrad hides.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, call: Call, decision: Decision, kept: bool
    ) -> tuple[Tensor, ...]:
        size = call.comm.size
        if decision.method == "off":
            y, whole = unfused.all_gather_matmul(x, w, call.comm, bias, call.reduce_dtype, True)
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
    call: Call = ctx.of
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
    call = Call(name, "row", x, w, comm, overlap, reduce_dtype, grad_accumulation_fusion, owner)
    check_divisible(name, x, 0, comm, "cut it otherwise")

    def overlapped(x: Tensor, w: Tensor, bias: Tensor | None, call: Call, decision: Decision) -> Any:
        return MatmulReduceScatter.apply(x, w, bias, call, decision)

    def composed(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        return unfused.matmul_reduce_scatter(x, w, comm, bias, call.reduce_dtype)

    y: Tensor = call.run(x, bias, x.numel() // max(x.shape[-1], 1), (name, "row_backward"), overlapped, composed)
    return y


class MatmulReduceScatter(Function):
    """Row-parallel, into a sequence that is cut over the ranks.

    forward    x [s, .., in/N] -> y [s/N, .., out]     y = reduce_scatter(x @ w.T) + bias
    backward   gy [s/N, .., out] -> dx, dw, dbias      G = all_gather(gy)     dx = G @ w     dw = G.T @ x
                                                       dbias = sum of G's rows
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, call: Call, decision: Decision) -> Tensor:
        size = call.comm.size
        if decision.method == "off":
            y = unfused.matmul_reduce_scatter(x, w, call.comm, bias, call.reduce_dtype)
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
    call: Call = ctx.of
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


@overload
def matmul_all_reduce(
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
def matmul_all_reduce(
    x: Tensor,
    w: Tensor,
    comm: Communicator,
    bias: Tensor | None = None,
    *,
    overlap: Overlap = "auto",
    reduce_dtype: Dtype = None,
    grad_accumulation_fusion: bool = False,
    hand_off: Literal[True],
) -> Slices: ...
def matmul_all_reduce(
    x: Tensor,
    w: Tensor,
    comm: Communicator,
    bias: Tensor | None = None,
    *,
    overlap: Overlap = "auto",
    reduce_dtype: Dtype = None,
    grad_accumulation_fusion: bool = False,
    hand_off: bool = False,
    owner: Any = None,
) -> Any:
    """all_reduce(x @ w.T) + bias.   x [s, .., in/N], w [out, in/N], bias [out] -> [s, .., out]

    The adjoint communicates nothing: dy must be equal on all ranks, as where each computes the same loss.

    The options are those of `all_gather_matmul`; reduce_dtype is that of the forward sum
    hand_off    return `Slices` of the rows, each of which can be used as soon as it is there; x has to be [s, in/N].
                With overlap="auto" they are 4: what the caller does with each of them is nothing that a trial can time

    ValueError, TypeError on every rank for what does not fit together, before anything is launched.
    """
    name = "matmul_all_reduce"
    call = Call(name, "row", x, w, comm, overlap, reduce_dtype, grad_accumulation_fusion, owner)
    if hand_off and x.dim() != 2:
        raise ValueError(f"{name}: hand_off=True hands out rows of a matrix, but x is {tuple(x.shape)}; flatten it")
    if hand_off and call.config.method == "auto":
        call.config = replace(call.config, method="slices", chunks=call.config.chunks or 4, deterministic=False)

    def overlapped(x: Tensor, w: Tensor, bias: Tensor | None, call: Call, decision: Decision) -> Any:
        if hand_off:
            flight = Flight()
            return Slices(MatmulAllReduce.apply(x, w, bias, call, decision, flight), flight)
        return MatmulAllReduce.apply(x, w, bias, call, decision, None)[0]

    def composed(x: Tensor, w: Tensor, bias: Tensor | None) -> Any:
        y = unfused.matmul_all_reduce(x, w, comm, bias, call.reduce_dtype)
        return Slices((y,), Flight()) if hand_off else y

    return call.run(x, bias, x.numel() // max(x.shape[-1], 1), (name, None), overlapped, composed)


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
        call: Call,
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
    call = Call("copy_matmul", "column", x, w, comm, overlap, reduce_dtype, grad_accumulation_fusion, owner)

    def overlapped(x: Tensor, w: Tensor, bias: Tensor | None, call: Call, decision: None) -> Any:
        return CopyMatmul.apply(x, w, bias, call)

    def composed(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        return unfused.copy_matmul(x, w, comm, bias, call.reduce_dtype)

    y: Tensor = call.run(x, bias, x.numel() // max(x.shape[-1], 1), (None, "copy_backward"), overlapped, composed)
    return y


class CopyMatmul(Function):
    """Column-parallel, of a sequence that every rank has whole.

    forward    x [s, .., in] -> y [s, .., out/N]     y = x @ w.T + bias
    backward   gy -> dx, dw, dbias                   dx = all_reduce(gy @ w)     dw = gy.T @ x
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, call: Call) -> Tensor:
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
    call: Call = ctx.of
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
