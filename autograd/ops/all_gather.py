"""all_gather, reduce_scatter, split. The adjoint of all_gather is reduce_scatter under "sum", split under "replicated".

Notation: see ops/__init__.py.
"""

from __future__ import annotations

from typing import Any, overload

import torch
from torch import Tensor

from pynccl import Communicator

from ..arguments import (
    Grad,
    Op,
    check_call,
    check_dim,
    check_grad,
    check_op,
    check_own_split,
    check_reduce_dtype,
    check_reduction,
    check_splits,
    check_splittable,
    require_grad_keyword,
)
from ..collective import Collective, CollectiveCall, divide_if_avg, operation
from ..wire import Dtype, Prepared, Splits, contiguous_copy, counts, local_result, recv_buffer, resized_shape, to_wire
from .coalesced import Tensors, operation_of_lists


@overload
def all_gather(
    x: Tensor, comm: Communicator, dim: int = 0, *, grad: Grad, splits: Splits = None, reduce_dtype: Dtype = None
) -> Tensor: ...
@overload
def all_gather(
    x: Tensors, comm: Communicator, dim: int = 0, *, grad: Grad, splits: Splits = None, reduce_dtype: Dtype = None
) -> list[Tensor]: ...
@operation_of_lists
@require_grad_keyword
def all_gather(
    x: Tensor, comm: Communicator, dim: int = 0, *, grad: Grad, splits: Splits = None, reduce_dtype: Dtype = None
) -> Any:
    """Concatenate the tensors of all ranks along `dim`, on every rank.

    forward    x [.., s, ..] -> y [.., N*s, ..]     y = concat_q x_q; a 0-d x gives y [N]
    backward   g [.., N*s, ..] -> [.., s, ..]       "sum": reduce_scatter(g)    "replicated": g[slice r]

    x             a tensor, or a list or tuple of tensors (one NCCL group); a list returns a list
    comm          communicator of the ranks that take part
    dim           dimension to concatenate along
    grad          "replicated" if every rank does the same computation on y;
                  "sum" if ranks do different computations on y, e.g. each multiplies it by its own columns of a weight
    splits        size along `dim` of each rank's tensor, the same list on every rank; None: equal sizes
    reduce_dtype  dtype of the sum in the backward reduce-scatter; None: that of x

    ValueError or TypeError for wrong arguments, before anything is launched. Every rank must call it and run its
    backward pass. Notation: help(ad.ops).
    """
    check_call("all_gather", x, comm)
    check_grad("all_gather", grad)
    reduce_dtype = check_reduce_dtype("all_gather", x, reduce_dtype)
    if x.dim() == 0:
        x = x.reshape(1)
    dim = check_dim("all_gather", x, dim)
    splits = check_splits("all_gather", splits, comm)
    if splits is not None:
        check_own_split("all_gather", x, dim, splits, comm, "splits")
    return comm, CollectiveCall(AllGather, x, (dim, grad, splits, reduce_dtype))


class AllGather(Collective):
    """Concatenate the tensors of all ranks along `dim`, on every rank. The Function behind `all_gather`.

    forward    x [.., s, ..] -> y [.., N*s, ..]     y = concat_q x_q
    backward   g [.., N*s, ..] -> [.., s, ..]       "sum": reduce_scatter(g)    "replicated": g[slice r]
    """

    name = "all_gather"
    schema = "int dim, str grad, SymInt[]? splits, ScalarType? reduce_dtype"
    dim_indices = (0,)
    grad_index = 1

    @staticmethod
    def adjoint(
        g: Tensor, comm: Communicator, shape: torch.Size, dim: int, grad: str, splits: Splits, reduce_dtype: Dtype
    ) -> CollectiveCall:
        if grad == "sum":
            return CollectiveCall(ReduceScatter, g, (dim, "sum", splits, reduce_dtype))
        return CollectiveCall(Split, g, (dim, splits))

    @staticmethod
    def prepare(x: Tensor, comm: Communicator, dim: int, grad: str, splits: Splits, reduce_dtype: Dtype) -> Prepared:
        send = to_wire(x.movedim(dim, 0))
        rows = x.shape[dim] * comm.size if splits is None else sum(splits)
        recv, result = recv_buffer(x, resized_shape(x, dim, rows), dim)

        def launch(stream: Any) -> None:
            if splits is None:
                comm.all_gather(send, recv, stream=stream)
            else:
                comm.all_gather_v(send, recv, counts=counts(x, dim, splits), stream=stream)

        return Prepared(launch, result)


@overload
def reduce_scatter(
    x: Tensor, comm: Communicator, dim: int = 0, op: Op = "sum", *, splits: Splits = None, reduce_dtype: Dtype = None
) -> Tensor: ...
@overload
def reduce_scatter(
    x: Tensors, comm: Communicator, dim: int = 0, op: Op = "sum", *, splits: Splits = None, reduce_dtype: Dtype = None
) -> list[Tensor]: ...
@operation_of_lists
def reduce_scatter(
    x: Tensor, comm: Communicator, dim: int = 0, op: Op = "sum", *, splits: Splits = None, reduce_dtype: Dtype = None
) -> Any:
    """Sum x over all ranks and return this rank's slice of the sum along `dim`.

    forward    x [.., N*s, ..] -> y [.., s, ..]     y_r = (sum_q x_q)[slice r]      "avg": / N
    backward   g [.., s, ..] -> [.., N*s, ..]       all_gather(g)                   "avg": / N

    x             a tensor, or a list or tuple of tensors (one NCCL group); a list returns a list
    comm          communicator of the ranks that take part
    dim           dimension to split; its size must be divisible by N, unless `splits` is given
    op            "sum" or "avg"
    splits        size along `dim` of each rank's slice, the same list on every rank; None: equal sizes
    reduce_dtype  dtype in which the sum is communicated and computed; None: that of x

    There is no grad=: the ranks' outputs differ, so the backward pass is always the exact adjoint (as grad="sum").

    ValueError or TypeError for wrong arguments, before anything is launched. Every rank must call it and run its
    backward pass. Notation: help(ad.ops).
    """
    check_call("reduce_scatter", x, comm)
    op = check_op("reduce_scatter", op)
    reduce_dtype = check_reduction("reduce_scatter", x, op, reduce_dtype)
    dim = check_dim("reduce_scatter", x, dim)
    splits = check_splittable("reduce_scatter", x, dim, splits, comm)
    return comm, CollectiveCall(ReduceScatter, x, (dim, op, splits, reduce_dtype))


class ReduceScatter(Collective):
    """Sum (or average) over ranks; rank r keeps slice r along `dim`. The Function behind `reduce_scatter`.

    forward    x [.., N*s, ..] -> y [.., s, ..]     y_r = (sum_q x_q)[slice r]      avg: / N
    backward   g [.., s, ..] -> [.., N*s, ..]       all_gather(g)                   avg: / N
    """

    name = "reduce_scatter"
    schema = "int dim, str op, SymInt[]? splits, ScalarType? reduce_dtype"
    dim_indices = (0,)

    @staticmethod
    def adjoint(
        g: Tensor, comm: Communicator, shape: torch.Size, dim: int, op: str, splits: Splits, reduce_dtype: Dtype
    ) -> CollectiveCall:
        return CollectiveCall(AllGather, divide_if_avg(g, op, comm), (dim, "sum", splits, reduce_dtype))

    @staticmethod
    def prepare(x: Tensor, comm: Communicator, dim: int, op: Op, splits: Splits, reduce_dtype: Dtype) -> Prepared:
        send = to_wire(x.movedim(dim, 0), reduce_dtype)
        rows = x.shape[dim] // comm.size if splits is None else splits[comm.rank]
        recv, result = recv_buffer(x, resized_shape(x, dim, rows), dim, reduce_dtype)

        def launch(stream: Any) -> None:
            if splits is None:
                comm.reduce_scatter(send, recv, op, stream=stream)
            else:
                sizes = counts(x, dim, splits, 2 if x.is_complex() else 1)
                comm.reduce_scatter_v(send, recv, op, counts=sizes, stream=stream)

        return Prepared(launch, result)


@operation
def split(x: Tensor, comm: Communicator, dim: int = 0, *, splits: Splits = None) -> Any:
    """Return this rank's slice of a replicated x along `dim`. The backward pass gathers the gradients.

    forward    x [.., N*s, ..] -> y [.., s, ..]     y_r = x[slice r]; nothing is communicated
    backward   g [.., s, ..] -> [.., N*s, ..]       all_gather(g)

    x       a tensor that is equal on all ranks
    comm    communicator of the ranks that take part
    dim     dimension to split; its size must be divisible by N, unless `splits` is given
    splits  size along `dim` of each rank's slice, the same list on every rank; None: equal sizes

    There is no grad=: x is replicated, so the backward pass always gathers.

    ValueError or TypeError for wrong arguments. Every rank must call it and run its backward pass. Notation:
    help(ad.ops).
    """
    check_call("split", x, comm)
    dim = check_dim("split", x, dim)
    splits = check_splittable("split", x, dim, splits, comm)
    return comm, CollectiveCall(Split, x, (dim, splits))


class Split(Collective):
    """Slice r of a replicated tensor, on rank r. The Function behind `split`.

    forward    x [.., N*s, ..] -> y [.., s, ..]     y_r = x[slice r]
    backward   g [.., s, ..] -> [.., N*s, ..]       all_gather(g)
    """

    name = "split"
    schema = "int dim, SymInt[]? splits"
    dim_indices = (0,)
    communicates = False

    @staticmethod
    def adjoint(g: Tensor, comm: Communicator, shape: torch.Size, dim: int, splits: Splits) -> CollectiveCall:
        return CollectiveCall(AllGather, g, (dim, "replicated", splits, None))

    @staticmethod
    def prepare(x: Tensor, comm: Communicator, dim: int, splits: Splits) -> Prepared:
        rows = [x.shape[dim] // comm.size] * comm.size if splits is None else list(splits)
        part = x.narrow(dim, sum(rows[: comm.rank]), rows[comm.rank])
        return local_result(lambda: contiguous_copy(part))
