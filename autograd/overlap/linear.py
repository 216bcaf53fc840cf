"""The autograd Functions of a linear layer with a collective before or after it; see functions.py.

N ranks with m rows each, M = N*m. A shard is this rank's part of a tensor; `full` tensors have the rows of all ranks.
In a pass p, work runs on lanes: p.main is the caller's stream, p.comm communicates, p.compute() is a lane for matmuls.
Without overlap, all of them are p.main, and there is one piece of a gather, or part of a sum, with all rows.

To be differentiated itself, or traced, a backward pass uses the operations of unfused.py. That of MatmulAllReduce,
which communicates nothing, always does.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from pynccl.watch.frames import attribute_calls

from . import unfused
from .call import Call, flat_rows, in_backward, needs_graph, shaped
from .gather import all_gather, gather_whole, keep
from .handoff import Slices
from .matmul import add, linear_plus, linear_rows
from .reduce import all_reduce, reduce_scatter


class _Linear(Function):
    """Base class: names the calls of its forward pass in the flight recorder."""

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """Skip the Python part of Function.apply, which only torch.func needs; under torch.func, unfused.py runs."""
        with attribute_calls(f"{cls.__name__}.forward"):
            return super(Function, cls).apply(*args)  # type: ignore[misc]


class AllGatherMatmul(_Linear):
    """Column-parallel, with a sequence that is sharded over the ranks.   n = out/N

    forward    x_shard [m, k], w [n, k]         x_full [M, k] = all_gather(x_shard)       y [M, n] = x_full @ w.T + bias
    backward   dy [M, n], dx_full [M, k]        dx_shard = reduce_scatter(dy @ w + dx_full)
                                                dw = dy.T @ x_full                        db = sum of dy's rows

    If x_full is kept, it is an output, so that derivatives reach it; dx_full is its cotangent. Otherwise the backward
    pass gathers x_shard again, in one collective issued first. With overlap, dy @ w runs meanwhile; with the ring only
    its first two parts, since the ring's steps come after the gather.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, call: Call, keeps: bool) -> tuple[Tensor, ...]:
        size, x_shard = call.comm.size, flat_rows(x)
        (n, k), m_full = w.shape, x_shard.shape[0] * size
        y = x_shard.new_empty(m_full, n)
        x_full = x_shard.new_empty(m_full, k) if keeps else None
        with call.forward_pass(x_shard) as p:
            for piece in all_gather(p, x_shard, x_full):
                lane = p.compute(after=piece.arrived)
                for block in piece.blocks:
                    lane.run(linear_rows, block.data, w.t(), bias, out=block.of(y))
                if x_full is not None:
                    keep(lane, piece, x_full)
        shape = (x.shape[0] * size, *x.shape[1:-1])
        y = shaped(y, shape)
        x_full = None if x_full is None else shaped(x_full, shape)
        ctx.set_materialize_grads(False)
        ctx.shape = x.shape
        ctx.save_for_backward(None if keeps else x, w, x_full if ctx.needs_input_grad[1] else None)
        call.save(ctx)
        return (y,) if x_full is None else (y, x_full)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dx_full: Tensor | None = None) -> tuple[Tensor | None, ...]:
        with in_backward(ctx) as call:
            x, w, x_full = ctx.saved_tensors
            if dy is None:
                dy = w.new_zeros(ctx.shape[0] * call.comm.size, *ctx.shape[1:-1], w.shape[0])
            if needs_graph(dy, dx_full, w):
                return *unfused.column_backward(ctx, call, dy, dx_full, x, w, x_full), None, None
            dy = flat_rows(dy)
            dx_full = None if dx_full is None else flat_rows(dx_full)
            x_shard = None if x is None else flat_rows(x)
            dx_shard = dy.new_empty(dy.shape[0] // call.comm.size, w.shape[1]) if call.needs_dx else None
            dw, db = call.parameter_grads(ctx, w)
            with call.backward_pass(dy) as p:
                sums = None if dx_shard is None else reduce_scatter(p, dx_shard, call.reduce_dtype)
                arrived = None
                if x_shard is not None:  # on every rank, even one that needs no weight gradient
                    x_full, arrived = gather_whole(p, x_shard)
                if sums is not None:
                    for part in sums:
                        lane = sums.lane()
                        if dx_full is None:
                            lane.run(linear_rows, part.of(dy), w, out=part.data)
                        else:
                            lane.run(linear_plus, part.of(dy), w, part.of(dx_full), out=part.data)
                        sums.launch(part, lane)
                db.add(p.main, dy)
                p.main.wait(arrived)
                if x_full is not None:
                    dw.add(p.main, dy, flat_rows(x_full))
                if sums is not None:
                    sums.finish()
            return None if dx_shard is None else dx_shard.view(ctx.shape), dw.result(), db.result(), None, None


class MatmulReduceScatter(_Linear):
    """Row-parallel, with an output sequence that is sharded over the ranks.   k = in/N

    forward    x [M, k], w [n, k]               y_shard [m, n] = reduce_scatter(x @ w.T) + bias
    backward   dy_shard [m, n]                  dy_full [M, n] = all_gather(dy_shard)     dx = dy_full @ w
                                                dw = dy_full.T @ x                        db = sum of dy_full's rows
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, call: Call) -> Tensor:
        x_rows = flat_rows(x)
        y_shard = x_rows.new_empty(x_rows.shape[0] // call.comm.size, w.shape[0])
        with call.forward_pass(x_rows) as p:
            sums = reduce_scatter(p, y_shard, call.reduce_dtype)
            for part in sums:
                lane = sums.lane()
                lane.run(linear_rows, part.of(x_rows), w.t(), out=part.data)
                sums.launch(part, lane)
            sums.finish()
        if bias is not None:
            y_shard.add_(bias)  # once, after the sum
        ctx.has_bias = bias is not None
        ctx.save_for_backward(x, w)
        call.save(ctx)
        return shaped(y_shard, (x.shape[0] // call.comm.size, *x.shape[1:-1]))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        with in_backward(ctx) as call:
            x, w = ctx.saved_tensors
            if needs_graph(dy, x, w):
                return *unfused.row_backward(ctx, call, dy, x, w), None
            dy_shard, x_rows = flat_rows(dy), flat_rows(x)
            dx = torch.empty_like(x_rows) if call.needs_dx else None
            with call.backward_pass(dy_shard) as p:
                arriving = all_gather(p, dy_shard)
                blocks = sum(len(piece.blocks) for piece in arriving)
                dw, db = call.parameter_grads(ctx, w, blocks)
                for piece in arriving:
                    lane = p.compute(after=piece.arrived)
                    if dx is not None:
                        for block in piece.blocks:
                            lane.run(linear_rows, block.data, w, out=block.of(dx))
                    p.main.wait(piece.arrived)
                    for block in piece.blocks:
                        dw.add(p.main, block.data, block.of(x_rows))
                        db.add(p.main, block.data)
            return None if dx is None else dx.view(x.shape), dw.result(), db.result(), None


class MatmulAllReduce(_Linear):
    """Row-parallel, with an output sequence that is replicated.   k = in/N

    forward    x [M, k], w [n, k]               y [M, n] = all_reduce(x @ w.T) + bias; with hand_off: y_1 [M_1, n], ..
    backward   dy [M, n], equal on all ranks    dx = dy @ w     dw = dy.T @ x             db = sum of dy's rows
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, call: Call, slices: Slices | None
    ) -> tuple[Tensor, ...]:
        x_rows = flat_rows(x)
        y = x_rows.new_empty(x_rows.shape[0], w.shape[0])
        run = call.forward_pass(x_rows)
        with run if slices is None else slices._keep_open(run) as p:
            sums = all_reduce(p, y, call.reduce_dtype)
            for part in sums:
                lane = sums.lane()
                lane.run(linear_rows, part.of(x_rows), w.t(), out=part.data)
                rows = sums.launch(part, lane)
                if rows is not None and bias is not None:
                    p.comm.run(add, bias, y[rows], out=y[rows])
                if rows is not None and slices is not None:
                    slices._add(p, rows)
        ctx.save_for_backward(x, w)
        call.save(ctx)
        return (shaped(y, x.shape[:-1]),) if slices is None else slices._of(y)

    @staticmethod
    def backward(ctx: Any, *dy_slices: Tensor) -> tuple[Tensor | None, ...]:
        dy = dy_slices[0] if len(dy_slices) == 1 else torch.cat(dy_slices)
        with in_backward(ctx, replicated=[dy]) as call:
            x, w = ctx.saved_tensors
            return *unfused.all_reduce_backward(ctx, call, dy, x, w), None, None


class CopyMatmul(_Linear):
    """Column-parallel, with a sequence that is replicated.   n = out/N

    forward    x [M, k], w [n, k]               y [M, n] = x @ w.T + bias
    backward   dy [M, n]                        dx = all_reduce(dy @ w)                   dw = dy.T @ x
                                                db = sum of dy's rows
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, call: Call) -> Tensor:
        ctx.save_for_backward(x, w)
        call.save(ctx)
        return shaped(F.linear(flat_rows(x), w, bias), x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        with in_backward(ctx) as call:
            x, w = ctx.saved_tensors
            if needs_graph(dy, x, w):
                return *unfused.copy_backward(ctx, call, dy, x, w), None
            dy_rows, x_rows = flat_rows(dy), flat_rows(x)
            dx = dy_rows.new_empty(dy_rows.shape[0], w.shape[1]) if call.needs_dx else None
            dw, db = call.parameter_grads(ctx, w)
            with call.backward_pass(dy_rows) as p:
                if dx is not None:
                    sums = all_reduce(p, dx, call.reduce_dtype)
                    for part in sums:
                        lane = sums.lane()
                        lane.run(linear_rows, part.of(dy_rows), w, out=part.data)
                        sums.launch(part, lane)
                db.add(p.main, dy_rows)
                dw.add(p.main, dy_rows, x_rows)
            return None if dx is None else dx.view(x.shape), dw.result(), db.result(), None
