"""One autograd Function per collective, forward and adjoint side by side.

Notation: N ranks, this rank r; x_q, y_q, g_q are rank q's input, output and cotangent. Two conventions of gradient:

grad="sum"         the loss is the sum of all ranks' losses; cotangents may differ from rank to rank. The true adjoint.
grad="replicated"  every rank computes the same loss from the output, so that cotangents are equal on all ranks.

They differ by a factor of N, hence `grad=` has no default where they differ. Inputs and cotangents are never changed,
and may be non-contiguous, of stride 0, of size 0, or 0-dimensional. Every rank must run the backward pass of every
call, in the same order: the adjoints communicate too.

`reduce_dtype` is the type in which a sum travels and is computed (torch.float32 for a bfloat16 tensor, say); the result
has the input's type. Errors are ValueError / TypeError, raised before anything is launched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import Function

from pynccl import Communicator

Grad = Literal["sum", "replicated"]
Op = Literal["sum", "avg"]


class AllReduce(Function):
    """Sum (or mean) over ranks, on every rank.

    forward    x [..] -> y [..]     y_r = sum_q x_q                 avg: / N
    backward   g [..] -> [..]       "sum": all_reduce(g)            avg: / N
                                    "replicated": g                 avg: / N
    """

    @staticmethod
    def forward(x: Tensor, comm: Communicator, op: Op, grad: Grad, reduce_dtype: torch.dtype | None) -> Tensor:
        return _in_dtype(x, reduce_dtype, lambda t: comm.all_reduce(t, torch.empty_like(t), op))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.comm, ctx.op, ctx.grad, ctx.reduce_dtype = inputs

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        (g,) = cotangents
        if ctx.grad == "sum":
            dx = all_reduce(g, ctx.comm, ctx.op, grad="sum", reduce_dtype=ctx.reduce_dtype)
        else:
            dx = _scale(g, ctx.op, ctx.comm)
        return dx, None, None, None, None


class ReduceScatter(Function):
    """Sum (or mean) over ranks, of which rank r keeps slice r of dimension `dim`.

    forward    x [.., N*s, ..] -> y [.., s, ..]     y_r = (sum_q x_q)[slice r]      avg: / N
    backward   g [.., s, ..] -> [.., N*s, ..]       all_gather(g)                   avg: / N
    """

    @staticmethod
    def forward(x: Tensor, comm: Communicator, dim: int, op: Op, reduce_dtype: torch.dtype | None) -> Tensor:
        front = x.movedim(dim, 0)
        shape = (front.shape[0] // comm.size, *front.shape[1:])
        y = _in_dtype(front, reduce_dtype, lambda t: comm.reduce_scatter(t, t.new_empty(shape), op))
        return y.movedim(0, dim).contiguous()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.comm, ctx.dim, ctx.op, ctx.reduce_dtype = inputs

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        (g,) = cotangents
        dx = all_gather(_scale(g, ctx.op, ctx.comm), ctx.comm, ctx.dim, grad="sum", reduce_dtype=ctx.reduce_dtype)
        return dx, None, None, None, None


class AllGather(Function):
    """All ranks' tensors, concatenated along dimension `dim`, on every rank.

    forward    x [.., s, ..] -> y [.., N*s, ..]     y = concat_q x_q
    backward   g [.., N*s, ..] -> [.., s, ..]       "sum": reduce_scatter(g)    "replicated": g[slice r]
    """

    @staticmethod
    def forward(x: Tensor, comm: Communicator, dim: int, grad: Grad, reduce_dtype: torch.dtype | None) -> Tensor:
        front = x.movedim(dim, 0).contiguous()
        y = comm.all_gather(front, front.new_empty((front.shape[0] * comm.size, *front.shape[1:])))
        gathered: Tensor = y.movedim(0, dim).contiguous()
        return gathered

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.comm, ctx.dim, ctx.grad, ctx.reduce_dtype = inputs

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        (g,) = cotangents
        if ctx.grad == "sum":
            dx = reduce_scatter(g, ctx.comm, ctx.dim, reduce_dtype=ctx.reduce_dtype)
        else:
            dx = split(g, ctx.comm, ctx.dim)
        return dx, None, None, None, None


class Copy(Function):
    """A replicated tensor enters a region in which the ranks' work differs.

    forward    x [..] -> y [..]     y_r = x
    backward   g [..] -> [..]       all_reduce(g)
    """

    @staticmethod
    def forward(x: Tensor, comm: Communicator, reduce_dtype: torch.dtype | None) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.comm, ctx.reduce_dtype = inputs

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        (g,) = cotangents
        return all_reduce(g, ctx.comm, grad="sum", reduce_dtype=ctx.reduce_dtype), None, None


class Split(Function):
    """Rank r's slice of a replicated tensor.

    forward    x [.., N*s, ..] -> y [.., s, ..]     y_r = x[slice r]
    backward   g [.., s, ..] -> [.., N*s, ..]       all_gather(g)
    """

    @staticmethod
    def forward(x: Tensor, comm: Communicator, dim: int) -> Tensor:
        return x.chunk(comm.size, dim)[comm.rank].clone(memory_format=torch.contiguous_format)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.comm, ctx.dim = inputs

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        (g,) = cotangents
        return all_gather(g, ctx.comm, ctx.dim, grad="sum"), None, None


def all_reduce(
    x: Tensor, comm: Communicator, op: Op = "sum", *, grad: Grad, reduce_dtype: torch.dtype | None = None
) -> Tensor:
    """y_r = sum_q x_q ("avg": / N) on every rank.  [..] -> [..], a new tensor also on one rank.  See `AllReduce`."""
    _check_op("all_reduce", op)
    _check_grad("all_reduce", grad)
    if comm.size == 1:
        return x.clone()
    y: Tensor = AllReduce.apply(x, comm, op, grad, reduce_dtype)
    return y


def reduce_scatter(
    x: Tensor, comm: Communicator, dim: int = 0, op: Op = "sum", *, reduce_dtype: torch.dtype | None = None
) -> Tensor:
    """y_r = (sum_q x_q)[slice r of `dim`] ("avg": / N).  [.., N*s, ..] -> [.., s, ..].  See `ReduceScatter`."""
    _check_op("reduce_scatter", op)
    dim = _check_dim("reduce_scatter", x, dim)
    _check_divisible("reduce_scatter", x, dim, comm)
    if comm.size == 1:
        return x.clone()
    y: Tensor = ReduceScatter.apply(x, comm, dim, op, reduce_dtype)
    return y


def all_gather(
    x: Tensor, comm: Communicator, dim: int = 0, *, grad: Grad, reduce_dtype: torch.dtype | None = None
) -> Tensor:
    """y = concat_q x_q along `dim` on every rank.  [.., s, ..] -> [.., N*s, ..]; a 0-d x gives [N].  See `AllGather`.

    reduce_dtype  type of the sum in the backward reduce-scatter"""
    _check_grad("all_gather", grad)
    if x.dim() == 0:
        x = x.reshape(1)
    dim = _check_dim("all_gather", x, dim)
    if comm.size == 1:
        return x.clone()
    y: Tensor = AllGather.apply(x, comm, dim, grad, reduce_dtype)
    return y


def copy(x: Tensor, comm: Communicator, *, reduce_dtype: torch.dtype | None = None) -> Tensor:
    """y = x; gradients are summed over ranks.  For a replicated x that meets different work on each rank."""
    if comm.size == 1:
        return x
    y: Tensor = Copy.apply(x, comm, reduce_dtype)
    return y


def split(x: Tensor, comm: Communicator, dim: int = 0) -> Tensor:
    """y_r = x[slice r of `dim`] of a replicated x; gradients are gathered.  [.., N*s, ..] -> [.., s, ..]."""
    dim = _check_dim("split", x, dim)
    _check_divisible("split", x, dim, comm)
    if comm.size == 1:
        return x.clone()
    y: Tensor = Split.apply(x, comm, dim)
    return y


def _in_dtype(x: Tensor, dtype: torch.dtype | None, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """`reduce(x)` computed in `dtype`, in the type of x."""
    return reduce(x.to(dtype or x.dtype).contiguous()).to(x.dtype)


def _scale(g: Tensor, op: Op, comm: Communicator) -> Tensor:
    return g / comm.size if op == "avg" else g


def _check_op(operation: str, op: str) -> None:
    if op not in ("sum", "avg"):
        raise ValueError(f"{operation}: op is {op!r}, expected 'sum' or 'avg'")


def _check_grad(operation: str, grad: str) -> None:
    if grad not in ("sum", "replicated"):
        raise ValueError(
            f"{operation}: grad is {grad!r}, expected 'sum' (the loss is the sum of the ranks' losses) or 'replicated' "
            "(every rank computes the same loss from the output)"
        )


def _check_dim(operation: str, x: Tensor, dim: int) -> int:
    """`dim` as a number >= 0."""
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"{operation}: dim is {dim}, but the tensor has shape {tuple(x.shape)}")
    return dim % x.dim()


def _check_divisible(operation: str, x: Tensor, dim: int, comm: Communicator) -> None:
    if x.shape[dim] % comm.size:
        raise ValueError(
            f"{operation}: dimension {dim} of {tuple(x.shape)} has {x.shape[dim]} rows, not divisible by {comm.size} "
            "ranks; pad it"
        )
