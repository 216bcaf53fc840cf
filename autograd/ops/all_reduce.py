"""all_reduce, copy. The adjoint of all_reduce is itself under "sum", copy under "replicated".

extremes.py implements all_reduce with max, min and prod. Notation: see ops/__init__.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor

from pynccl import Communicator
from pynccl.bindings.values import shown

from ..arguments import (
    AnyOp,
    Grad,
    check_call,
    check_grad,
    check_op,
    check_reduce_dtype,
    check_reduction,
    require_grad_keyword,
)
from ..collective import Collective, CollectiveCall, divide_if_avg, operation, run
from ..wire import Dtype, Prepared, contiguous_copy, local_result, recv_buffer_like, to_wire
from .coalesced import Tensors, operation_of_lists


class PreMul(NamedTuple):
    """The operator sum_q scale_q * x_q of `all_reduce`. Each rank may pass a different scale.

    scale  a number, or a tensor that broadcasts to the shape of x; a tensor that requires grad gets a gradient
    """

    scale: complex | Tensor


# Nonlinear operators -> (x, op, grad, reduce_dtype) -> the call. extremes.py imports this file, because the derivatives
# of these operators use all_reduce, and adds its operators here.
NONLINEAR: dict[str, Callable[[Tensor, str, str, Dtype], CollectiveCall]] = {}


@overload
def all_reduce(
    x: Tensor, comm: Communicator, op: AnyOp | PreMul = "sum", *, grad: Grad, reduce_dtype: Dtype = None
) -> Tensor: ...
@overload
def all_reduce(
    x: Tensors, comm: Communicator, op: AnyOp | PreMul = "sum", *, grad: Grad, reduce_dtype: Dtype = None
) -> list[Tensor]: ...
@operation_of_lists
@require_grad_keyword
def all_reduce(
    x: Tensor,
    comm: Communicator,
    op: AnyOp | PreMul = "sum",
    *,
    grad: Grad,
    reduce_dtype: Dtype = None,
) -> Any:
    """Sum x over all ranks (or reduce it with another operator), on every rank.

    forward    x [..] -> y [..]     y_r = sum_q x_q                             "avg": / N
    backward   g [..] -> [..]       "sum": all_reduce(g)    "replicated": g     "avg": / N
               For the derivatives of "max" and "min" see `Extremum`; for "prod" see `Product`.

    x             a tensor, or a list or tuple of tensors (one NCCL group); a list returns a list
    comm          communicator of the ranks that take part
    op            "sum", "avg" (rounds integers towards zero), "max", "min", "prod" or PreMul(scale), the sum of
                  scale_q * x_q
    grad          "replicated" if every rank does the same computation on y;
                  "sum" if ranks do different computations on y
    reduce_dtype  dtype in which the sum is communicated and computed; None: that of x

    bool supports "max" (logical or) and "min" (logical and) only. The dtypes that NCCL cannot reduce (int16, some
    float8 variants) need reduce_dtype=.

    ValueError or TypeError for wrong arguments, before anything is launched. Every rank must call it and run its
    backward pass. Notation: help(ad.ops).
    """
    check_call("all_reduce", x, comm)
    check_grad("all_reduce", grad)
    if isinstance(op, PreMul):
        x, name = _scaled(x, op.scale), "sum"
    else:
        name = check_op("all_reduce", op, ("sum", "avg", "max", "min", "prod"))
    reduce_dtype = check_reduction("all_reduce", x, name, reduce_dtype)
    if name in NONLINEAR:
        return comm, NONLINEAR[name](x, name, grad, reduce_dtype)
    return comm, CollectiveCall(AllReduce, x, (name, grad, reduce_dtype))


class AllReduce(Collective):
    """Sum (or average) over ranks, on every rank. The Function behind `all_reduce`.

    forward    x [..] -> y [..]     y_r = sum_q x_q                 avg: / N
    backward   g [..] -> [..]       "sum": all_reduce(g)            avg: / N
                                    "replicated": g                 avg: / N
    """

    name = "all_reduce"
    schema = "str op, str grad, ScalarType? reduce_dtype"
    grad_index = 1

    @staticmethod
    def adjoint(
        g: Tensor, comm: Communicator, shape: torch.Size, op: str, grad: str, reduce_dtype: Dtype
    ) -> CollectiveCall:
        if grad == "sum":
            return CollectiveCall(AllReduce, g, (op, "sum", reduce_dtype))
        return CollectiveCall(CopyView, divide_if_avg(g, op, comm), (reduce_dtype,))

    @staticmethod
    def prepare(x: Tensor, comm: Communicator, op: AnyOp, grad: str, reduce_dtype: Dtype) -> Prepared:
        send = to_wire(x, reduce_dtype)
        recv, result = recv_buffer_like(x, send, reduce_dtype)
        return Prepared(lambda stream: comm.all_reduce(send, recv, op, stream=stream), result)


@operation
def copy(x: Tensor, comm: Communicator, *, reduce_dtype: Dtype = None) -> Any:
    """Return a copy of a replicated x. The backward pass sums the gradients over ranks.

    Call it before the ranks do different computations on x, e.g. before each multiplies it by its own columns of a
    weight.

    forward    x [..] -> y [..]     y_r = x, in new memory; nothing is communicated
    backward   g [..] -> [..]       all_reduce(g)

    x             a tensor that is equal on all ranks
    comm          communicator of the ranks that take part
    reduce_dtype  dtype of the sum in the backward all-reduce; None: that of x

    There is no grad=: the ranks do different computations on y, so the backward pass always sums.

    TypeError for wrong arguments of this rank. Whether ranks pass different shapes or dtypes is checked only with
    PYNCCL_CHECK=1. Every rank must call it and run its backward pass. Notation: help(ad.ops).
    """
    check_call("copy", x, comm)
    return comm, CollectiveCall(Copy, x, (check_reduce_dtype("copy", x, reduce_dtype),))


class Copy(Collective):
    """Copy a replicated tensor that the ranks then use differently. The Function behind `copy`.

    forward    x [..] -> y [..]     y_r = x, in new memory
    backward   g [..] -> [..]       all_reduce(g)
    """

    name = "copy"
    schema = "ScalarType? reduce_dtype"
    communicates = False

    @staticmethod
    def adjoint(g: Tensor, comm: Communicator, shape: torch.Size, reduce_dtype: Dtype) -> CollectiveCall:
        return CollectiveCall(AllReduce, g, ("sum", "replicated", reduce_dtype))

    @staticmethod
    def prepare(x: Tensor, comm: Communicator, reduce_dtype: Dtype) -> Prepared:
        return local_result(lambda: contiguous_copy(x))


def copy_view(x: Tensor, comm: Communicator) -> Tensor:
    """`copy` without copying: the output shares the memory of x and must not be modified."""
    check_call("copy", x, comm)
    return run(comm, CopyView, x, None)


class CopyView(Copy):
    """`Copy` without copying, for outputs that this package only reads: the output shares the memory of x.

    The custom operator is that of `Copy`, because an operator must not return its input."""

    @classmethod
    def forward(cls, x: Tensor, comm: Communicator, *params: Any) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def on_one_rank(x: Tensor, *params: Any) -> Tensor:
        return x


def _scaled(x: Tensor, scale: Any) -> Tensor:
    """Return x * scale in the dtype of x if it can hold the result, so that all ranks send one dtype."""
    if not isinstance(scale, (Tensor, int, float, complex)) or (isinstance(scale, int) and scale.bit_length() > 63):
        raise TypeError(f"all_reduce: the scale of PreMul is {shown(scale)}, expected a number or a tensor")
    shape = tuple(scale.shape) if isinstance(scale, Tensor) else ()
    from_last = zip(reversed(shape), reversed(x.shape), strict=False)
    if len(shape) > x.dim() or any(size not in (1, of_x) for size, of_x in from_last):
        raise ValueError(
            f"all_reduce: the scale of PreMul has shape {shape}, which does not broadcast to {tuple(x.shape)}, the "
            "shape of x; pass a scale whose shape does"
        )
    if isinstance(scale, Tensor) and (scale.layout is not x.layout or (shape and scale.device != x.device)):
        raise ValueError(f"all_reduce: the scale of PreMul is on {scale.device}, {scale.layout}; pass it as x is")
    y = x * scale
    kept = x.is_complex() or (x.is_floating_point() and not y.is_complex())
    return y.to(x.dtype) if kept else y
