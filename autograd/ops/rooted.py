"""broadcast, reduce, scatter, gather: collectives with a root.

broadcast under "sum" and reduce are adjoint to each other, and so are scatter and gather. Notation: see
ops/__init__.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pynccl import Communicator

from ..arguments import (
    Grad,
    Op,
    asks_for_grad,
    check_call,
    check_dim,
    check_divisible,
    check_grad,
    check_op,
    check_own,
    check_rank,
    check_reduce_dtype,
    check_reduction,
    check_splits,
    check_total,
)
from ..collective import Call, Collective, mean, operation
from ..wire import Dtype, Prepared, Splits, counts, local, own, recv_buffer, recv_buffer_like, resized, to_wire


@operation
@asks_for_grad
def broadcast(x: Tensor, comm: Communicator, root: int, *, grad: Grad, reduce_dtype: Dtype = None) -> Any:
    """y_r = x_root on every rank.  [..] -> [..]; x on the other ranks gives shape and type.  See `Broadcast`.

    grad          what every rank does with y: "replicated" if all go on alike, so that the gradients of y are equal on
                  all ranks, and that of root's x is root's; "sum" if each goes on with work of its own, so that it is
                  their sum
    reduce_dtype  type of that sum
    """
    check_call("broadcast", x, comm)
    check_grad("broadcast", grad)
    root = check_rank("broadcast", comm, root)
    reduce_dtype = check_reduce_dtype("broadcast", x, reduce_dtype)
    return comm, Call(Broadcast, x, (root, grad, reduce_dtype))


class Broadcast(Collective):
    """Root's tensor, on every rank.

    forward    x [..] -> y [..]     y_r = x_root
    backward   g [..] -> [..]       root: sum_q g_q ("replicated": g)     others: 0
    """

    name = "broadcast"
    schema = "int root, str grad, ScalarType? reduce_dtype"
    grad_at = 1

    @staticmethod
    def adjoint(g: Tensor, comm: Communicator, shape: torch.Size, root: int, grad: str, reduce_dtype: Dtype) -> Call:
        if grad == "sum":
            return Call(Reduce, g, (root, "sum", reduce_dtype))
        return Call(AtRoot, g, (root, reduce_dtype))

    @staticmethod
    def prepare(x: Tensor, comm: Communicator, root: int, grad: str, reduce_dtype: Dtype) -> Prepared:
        send = to_wire(x)
        recv, result = recv_buffer_like(x, send)
        return Prepared(lambda stream: comm.broadcast(send, recv, root, stream=stream), result)


class AtRoot(Collective):
    """A replicated tensor, on root only.

    forward    x [..] -> y [..]     root: x     others: 0
    backward   g [..] -> [..]       broadcast(g)
    """

    name = "at_root"
    schema = "int root, ScalarType? reduce_dtype"

    @staticmethod
    def adjoint(g: Tensor, comm: Communicator, shape: torch.Size, root: int, reduce_dtype: Dtype) -> Call:
        return Call(Broadcast, g, (root, "replicated", reduce_dtype))

    @staticmethod
    def prepare(x: Tensor, comm: Communicator, root: int, reduce_dtype: Dtype) -> Prepared:
        return local(lambda: own(x) if comm.rank == root else x.new_zeros(x.shape))


@operation
def reduce(x: Tensor, comm: Communicator, root: int, op: Op = "sum", *, reduce_dtype: Dtype = None) -> Any:
    """root: sum_q x_q ("avg": / N), others: zeros.  [..] -> [..].  See `Reduce`."""
    check_call("reduce", x, comm)
    op = check_op("reduce", op)
    root = check_rank("reduce", comm, root)
    reduce_dtype = check_reduction("reduce", x, op, reduce_dtype)
    return comm, Call(Reduce, x, (root, op, reduce_dtype))


class Reduce(Collective):
    """Sum (or mean) over ranks, on root.

    forward    x [..] -> y [..]     root: sum_q x_q     others: 0       avg: / N
    backward   g [..] -> [..]       broadcast(g)                        avg: / N
    """

    name = "reduce"
    schema = "int root, str op, ScalarType? reduce_dtype"

    @staticmethod
    def adjoint(g: Tensor, comm: Communicator, shape: torch.Size, root: int, op: str, reduce_dtype: Dtype) -> Call:
        return Call(Broadcast, mean(g, op, comm), (root, "sum", reduce_dtype))

    @staticmethod
    def prepare(x: Tensor, comm: Communicator, root: int, op: Op, reduce_dtype: Dtype) -> Prepared:
        send = to_wire(x, reduce_dtype)
        recv, result = None, lambda: x.new_zeros(x.shape)
        if comm.rank == root:
            recv, result = recv_buffer_like(x, send, reduce_dtype)
        return Prepared(lambda stream: comm.reduce(send, recv, op, root, stream=stream), result)


@operation
def scatter(x: Tensor, comm: Communicator, root: int, dim: int = 0, *, splits: Splits = None) -> Any:
    """y_r = x_root[slice r of `dim`].  [.., S, ..] -> [.., s_r, ..].  See `Scatter`.

    x on the other ranks: like root's; with splits=, any size along `dim` will do, 0 for example
    """
    check_call("scatter", x, comm)
    root = check_rank("scatter", comm, root)
    dim = check_dim("scatter", x, dim)
    sizes = check_splits("scatter", splits, comm)
    if sizes is None:
        check_divisible("scatter", x, dim, comm)
        sizes = (x.shape[dim] // comm.size,) * comm.size
    elif comm.rank == root:
        check_total("scatter", x, dim, sizes)
    return comm, Call(Scatter, x, (root, dim, sizes))


class Scatter(Collective):
    """Slice r of root's tensor along `dim`, on rank r.

    forward    x [.., S, ..] -> y [.., s_r, ..]     y_r = x_root[slice r]
    backward   g [.., s_r, ..] -> [.., S, ..]       root: gather(g)     others: 0
    """

    name = "scatter"
    schema = "int root, int dim, SymInt[] splits"
    dims_at = (1,)

    @staticmethod
    def adjoint(g: Tensor, comm: Communicator, shape: torch.Size, root: int, dim: int, splits: Sequence[int]) -> Call:
        return Call(Gather, g, (root, dim, splits, shape[dim]))

    @staticmethod
    def prepare(x: Tensor, comm: Communicator, root: int, dim: int, splits: Sequence[int]) -> Prepared:
        send = to_wire(x.movedim(dim, 0)) if comm.rank == root else None  # else x gives the other dimensions and type
        recv, result = recv_buffer(x, resized(x, dim, splits[comm.rank]), dim)

        def launch(stream: Any) -> None:
            if _equal(splits):
                comm.scatter(send, recv, root, stream=stream)
            else:
                comm.scatter_v(send, recv, root, counts=counts(x, dim, splits), stream=stream)

        return Prepared(launch, result)


@operation
def gather(x: Tensor, comm: Communicator, root: int, dim: int = 0, *, splits: Splits = None) -> Any:
    """root: concat_q x_q along `dim`, others: size 0 along it.  [.., s, ..] -> [.., N*s, ..].  See `Gather`."""
    check_call("gather", x, comm)
    root = check_rank("gather", comm, root)
    if x.dim() == 0:
        x = x.reshape(1)
    dim = check_dim("gather", x, dim)
    sizes = check_splits("gather", splits, comm)
    if sizes is None:
        sizes = (x.shape[dim],) * comm.size
    check_own("gather", x, dim, sizes, comm, "splits")
    return comm, Call(Gather, x, (root, dim, sizes, 0))


class Gather(Collective):
    """All ranks' tensors, concatenated along `dim`, on root.

    forward    x [.., s_r, ..] -> y     root: concat_q x_q [.., S, ..]      others: 0 [.., rest, ..]
    backward   g -> [.., s_r, ..]       g_root[slice r]
    """

    name = "gather"
    schema = "int root, int dim, SymInt[] splits, SymInt rest"
    dims_at = (1,)

    @staticmethod
    def adjoint(
        g: Tensor, comm: Communicator, shape: torch.Size, root: int, dim: int, splits: Sequence[int], rest: int
    ) -> Call:
        return Call(Scatter, g, (root, dim, splits))

    @staticmethod
    def prepare(x: Tensor, comm: Communicator, root: int, dim: int, splits: Sequence[int], rest: int) -> Prepared:
        send = to_wire(x.movedim(dim, 0))
        recv, result = None, lambda: x.new_zeros(resized(x, dim, rest))
        if comm.rank == root:
            recv, result = recv_buffer(x, resized(x, dim, sum(splits)), dim)

        def launch(stream: Any) -> None:
            if _equal(splits):
                comm.gather(send, recv, root, stream=stream)
            else:
                comm.gather_v(send, recv, root, counts=counts(x, dim, splits), stream=stream)

        return Prepared(launch, result)


def _equal(splits: Sequence[int]) -> bool:
    return all(rows == splits[0] for rows in splits)
