"""all_reduce, copy: under "sum" all_reduce is adjoint to itself, under "replicated" to copy.

all_reduce of max, min and prod goes on in extremes.py. Notation: see ops/__init__.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor

from pynccl import Communicator

from ..arguments import (
    AnyOp,
    Grad,
    asks_for_grad,
    check_call,
    check_grad,
    check_op,
    check_reduce_dtype,
    check_reduction,
)
from ..collective import Call, Collective, mean, operation, run
from ..wire import Dtype, Prepared, local, own, recv_buffer_like, to_wire
from .coalesced import Tensors, operation_of_lists


class PreMul(NamedTuple):
    """The operator sum_q scale_q * x_q of `all_reduce`; each rank may give its own scale.

    scale  a number, or a tensor that broadcasts against x, which then gets its gradient too
    """

    scale: complex | Tensor


# The operators that are not linear, and what makes their calls of (x, op, grad, reduce_dtype). Their derivatives are
# made of all_reduce, so extremes.py stands above this file and adds them.
NONLINEAR: dict[str, Callable[[Tensor, str, str, Dtype], Call]] = {}


@overload
def all_reduce(
    x: Tensor, comm: Communicator, op: AnyOp | PreMul = "sum", *, grad: Grad, reduce_dtype: Dtype = None
) -> Tensor: ...
@overload
def all_reduce(
    x: Tensors, comm: Communicator, op: AnyOp | PreMul = "sum", *, grad: Grad, reduce_dtype: Dtype = None
) -> list[Tensor]: ...
@operation_of_lists
@asks_for_grad
def all_reduce(
    x: Tensor,
    comm: Communicator,
    op: AnyOp | PreMul = "sum",
    *,
    grad: Grad,
    reduce_dtype: Dtype = None,
) -> Any:
    """y_r = sum_q x_q on every rank.  [..] -> [..], a new tensor also on one rank; a list of tensors -> a list.

    op    "sum", "avg" (/ N; of integers towards zero), "max", "min", "prod", or PreMul(scale): sum_q scale_q * x_q
    grad  what every rank does with y: "replicated" if all go on alike, so that the gradients of y are equal on all
          ranks, and that of x is one of them; "sum" if each goes on with work of its own, so that it is their sum

    bool has "max" (logical or) and "min" (logical and). Integers and floats that NCCL cannot reduce (int16, float8
    variants) need reduce_dtype=; the functions that only copy take every type.

    See `AllReduce`, `Extremum`, `Product`.
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
    return comm, Call(AllReduce, x, (name, grad, reduce_dtype))


class AllReduce(Collective):
    """Sum (or mean) over ranks, on every rank.

    forward    x [..] -> y [..]     y_r = sum_q x_q                 avg: / N
    backward   g [..] -> [..]       "sum": all_reduce(g)            avg: / N
                                    "replicated": g                 avg: / N
    """

    name = "all_reduce"
    schema = "str op, str grad, ScalarType? reduce_dtype"
    grad_at = 1

    @staticmethod
    def adjoint(g: Tensor, comm: Communicator, shape: torch.Size, op: str, grad: str, reduce_dtype: Dtype) -> Call:
        if grad == "sum":
            return Call(AllReduce, g, (op, "sum", reduce_dtype))
        return Call(CopyView, mean(g, op, comm), (reduce_dtype,))

    @staticmethod
    def prepare(x: Tensor, comm: Communicator, op: AnyOp, grad: str, reduce_dtype: Dtype) -> Prepared:
        send = to_wire(x, reduce_dtype)
        recv, result = recv_buffer_like(x, send, reduce_dtype)
        return Prepared(lambda stream: comm.all_reduce(send, recv, op, stream=stream), result)


@operation
def copy(x: Tensor, comm: Communicator, *, reduce_dtype: Dtype = None) -> Any:
    """y = x in memory of its own; gradients are summed over ranks.  For a replicated x that meets other work on each
    rank.  See `Copy`."""
    check_call("copy", x, comm)
    return comm, Call(Copy, x, (check_reduce_dtype("copy", x, reduce_dtype),))


class Copy(Collective):
    """A replicated tensor enters a region in which the ranks' work differs.

    forward    x [..] -> y [..]     y_r = x, in memory of its own
    backward   g [..] -> [..]       all_reduce(g)
    """

    name = "copy"
    schema = "ScalarType? reduce_dtype"
    communicates = False

    @staticmethod
    def adjoint(g: Tensor, comm: Communicator, shape: torch.Size, reduce_dtype: Dtype) -> Call:
        return Call(AllReduce, g, ("sum", "replicated", reduce_dtype))

    @staticmethod
    def prepare(x: Tensor, comm: Communicator, reduce_dtype: Dtype) -> Prepared:
        return local(lambda: own(x))


def copy_view(x: Tensor, comm: Communicator) -> Tensor:
    """copy(x) in the memory of x, which must not be changed."""
    check_call("copy", x, comm)
    return run(comm, CopyView, x, None)


class CopyView(Copy):
    """Copy without the copy, for what this package reads only: the output shares the memory of x.

    As an operator it is Copy, since an operator must not return its input."""

    @classmethod
    def forward(cls, x: Tensor, comm: Communicator, *params: Any) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def alone(x: Tensor, *params: Any) -> Tensor:
        return x


def _scaled(x: Tensor, scale: Any) -> Tensor:
    """x * scale, in the type of x where that can hold it: all ranks' contributions have one type."""
    if not isinstance(scale, (Tensor, int, float, complex)):
        raise TypeError(f"all_reduce: the scale of PreMul is {scale!r}, expected a number or a tensor")
    shape = tuple(scale.shape) if isinstance(scale, Tensor) else ()
    from_last = zip(reversed(shape), reversed(x.shape), strict=False)
    if len(shape) > x.dim() or any(size not in (1, of_x) for size, of_x in from_last):
        raise ValueError(
            f"all_reduce: the scale of PreMul has shape {shape}, which does not broadcast to x's, {tuple(x.shape)}; "
            "pass one that does"
        )
    y = x * scale
    kept = x.is_complex() or (x.is_floating_point() and not y.is_complex())
    return y.to(x.dtype) if kept else y
