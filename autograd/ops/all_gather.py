"""all_gather, reduce_scatter, split: all_gather is adjoint to reduce_scatter under "sum", to split under "replicated".

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
    asks_for_grad,
    check_call,
    check_cut,
    check_dim,
    check_grad,
    check_op,
    check_own,
    check_reduce_dtype,
    check_reduction,
    check_splits,
)
from ..collective import Call, Collective, mean, operation
from ..wire import Dtype, Prepared, Splits, counts, local, own, recv_buffer, resized, to_wire
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
@asks_for_grad
def all_gather(
    x: Tensor, comm: Communicator, dim: int = 0, *, grad: Grad, splits: Splits = None, reduce_dtype: Dtype = None
) -> Any:
    """y = concat_q x_q along `dim` on every rank.  [.., s, ..] -> [.., N*s, ..]; a 0-d x gives [N].  See `AllGather`.

    grad          what every rank does with y: "replicated" if all go on alike, so that the gradients of y are equal on
                  all ranks, and that of x is this rank's slice; "sum" if each goes on with work of its own, such as its
                  columns of a matmul, so that it is the slice of their sum
    splits        size along `dim` of each rank's part, where they are not equal
    reduce_dtype  type of the sum in the backward reduce-scatter
    """
    check_call("all_gather", x, comm)
    check_grad("all_gather", grad)
    reduce_dtype = check_reduce_dtype("all_gather", x, reduce_dtype)
    if x.dim() == 0:
        x = x.reshape(1)
    dim = check_dim("all_gather", x, dim)
    splits = check_splits("all_gather", splits, comm)
    if splits is not None:
        check_own("all_gather", x, dim, splits, comm, "splits")
    return comm, Call(AllGather, x, (dim, grad, splits, reduce_dtype))


class AllGather(Collective):
    """All ranks' tensors, concatenated along dimension `dim`, on every rank.

    forward    x [.., s, ..] -> y [.., N*s, ..]     y = concat_q x_q
    backward   g [.., N*s, ..] -> [.., s, ..]       "sum": reduce_scatter(g)    "replicated": g[slice r]
    """

    name = "all_gather"
    schema = "int dim, str grad, SymInt[]? splits, ScalarType? reduce_dtype"
    dims_at = (0,)
    grad_at = 1

    @staticmethod
    def adjoint(
        g: Tensor, comm: Communicator, shape: torch.Size, dim: int, grad: str, splits: Splits, reduce_dtype: Dtype
    ) -> Call:
        if grad == "sum":
            return Call(ReduceScatter, g, (dim, "sum", splits, reduce_dtype))
        return Call(Split, g, (dim, splits))

    @staticmethod
    def prepare(x: Tensor, comm: Communicator, dim: int, grad: str, splits: Splits, reduce_dtype: Dtype) -> Prepared:
        send = to_wire(x.movedim(dim, 0))
        rows = x.shape[dim] * comm.size if splits is None else sum(splits)
        recv, result = recv_buffer(x, resized(x, dim, rows), dim)

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
    """y_r = (sum_q x_q)[slice r of `dim`] ("avg": / N).  [.., N*s, ..] -> [.., s, ..].  See `ReduceScatter`."""
    check_call("reduce_scatter", x, comm)
    op = check_op("reduce_scatter", op)
    reduce_dtype = check_reduction("reduce_scatter", x, op, reduce_dtype)
    dim = check_dim("reduce_scatter", x, dim)
    splits = check_cut("reduce_scatter", x, dim, splits, comm)
    return comm, Call(ReduceScatter, x, (dim, op, splits, reduce_dtype))


class ReduceScatter(Collective):
    """Sum (or mean) over ranks, of which rank r keeps slice r of dimension `dim`.

    forward    x [.., N*s, ..] -> y [.., s, ..]     y_r = (sum_q x_q)[slice r]      avg: / N
    backward   g [.., s, ..] -> [.., N*s, ..]       all_gather(g)                   avg: / N
    """

    name = "reduce_scatter"
    schema = "int dim, str op, SymInt[]? splits, ScalarType? reduce_dtype"
    dims_at = (0,)

    @staticmethod
    def adjoint(
        g: Tensor, comm: Communicator, shape: torch.Size, dim: int, op: str, splits: Splits, reduce_dtype: Dtype
    ) -> Call:
        return Call(AllGather, mean(g, op, comm), (dim, "sum", splits, reduce_dtype))

    @staticmethod
    def prepare(x: Tensor, comm: Communicator, dim: int, op: Op, splits: Splits, reduce_dtype: Dtype) -> Prepared:
        send = to_wire(x.movedim(dim, 0), reduce_dtype)
        rows = x.shape[dim] // comm.size if splits is None else splits[comm.rank]
        recv, result = recv_buffer(x, resized(x, dim, rows), dim, reduce_dtype)

        def launch(stream: Any) -> None:
            if splits is None:
                comm.reduce_scatter(send, recv, op, stream=stream)
            else:
                sizes = counts(x, dim, splits, 2 if x.is_complex() else 1)
                comm.reduce_scatter_v(send, recv, op, counts=sizes, stream=stream)

        return Prepared(launch, result)


@operation
def split(x: Tensor, comm: Communicator, dim: int = 0, *, splits: Splits = None) -> Any:
    """y_r = x[slice r of `dim`] of a replicated x; gradients gathered.  [.., N*s, ..] -> [.., s, ..].  See `Split`."""
    check_call("split", x, comm)
    dim = check_dim("split", x, dim)
    splits = check_cut("split", x, dim, splits, comm)
    return comm, Call(Split, x, (dim, splits))


class Split(Collective):
    """Rank r's slice of a replicated tensor.

    forward    x [.., N*s, ..] -> y [.., s, ..]     y_r = x[slice r]
    backward   g [.., s, ..] -> [.., N*s, ..]       all_gather(g)
    """

    name = "split"
    schema = "int dim, SymInt[]? splits"
    dims_at = (0,)
    communicates = False

    @staticmethod
    def adjoint(g: Tensor, comm: Communicator, shape: torch.Size, dim: int, splits: Splits) -> Call:
        return Call(AllGather, g, (dim, "replicated", splits, None))

    @staticmethod
    def prepare(x: Tensor, comm: Communicator, dim: int, splits: Splits) -> Prepared:
        rows = [x.shape[dim] // comm.size] * comm.size if splits is None else list(splits)
        part = x.narrow(dim, sum(rows[: comm.rank]), rows[comm.rank])
        return local(lambda: own(part))
