"""broadcast, reduce, scatter, gather: collectives with a root. Notation: see ops/__init__.py.

broadcast under "sum" and reduce are adjoint to each other, and so are scatter and gather.
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
    check_call,
    check_dim,
    check_divisible,
    check_grad,
    check_op,
    check_own_split,
    check_rank,
    check_reduce_dtype,
    check_reduction,
    check_splits,
    check_total,
    require_grad_keyword,
)
from ..collective import Collective, CollectiveCall, divide_if_avg, operation
from ..wire import (
    Dtype,
    Prepared,
    Splits,
    contiguous_copy,
    counts,
    local_result,
    recv_buffer,
    recv_buffer_like,
    resized_shape,
    to_wire,
)


@operation
@require_grad_keyword
def broadcast(x: Tensor, comm: Communicator, root: int, *, grad: Grad, reduce_dtype: Dtype = None) -> Any:
    """Copy x of rank `root` to every rank.

    forward    x [..] -> y [..]     y_r = x_root
    backward   g [..] -> [..]       root: "sum": sum_q g_q    "replicated": g     other ranks: 0

    x             on root, the tensor to send; on the other ranks, a tensor of the same shape and dtype (its values are
                  ignored)
    comm          communicator of the ranks that take part
    root          rank that sends
    grad          "replicated" if every rank does the same computation on y;
                  "sum" if ranks do different computations on y
    reduce_dtype  dtype of the sum in the backward reduce; None: that of x

    ValueError or TypeError for wrong arguments of this rank, before anything is launched. Whether ranks pass different
    shapes or dtypes is checked only with PYNCCL_CHECK=1. Every rank must call it and run its backward pass. Notation:
    help(ad.ops).
    """
    check_call("broadcast", x, comm)
    check_grad("broadcast", grad)
    root = check_rank("broadcast", comm, root)
    reduce_dtype = check_reduce_dtype("broadcast", x, reduce_dtype)
    return comm, CollectiveCall(Broadcast, x, (root, grad, reduce_dtype))


class Broadcast(Collective):
    """Root's tensor, on every rank. The Function behind `broadcast`.

    forward    x [..] -> y [..]     y_r = x_root
    backward   g [..] -> [..]       root: sum_q g_q ("replicated": g)     other ranks: 0
    """

    name = "broadcast"
    schema = "int root, str grad, ScalarType? reduce_dtype"
    grad_index = 1

    @staticmethod
    def adjoint(
        g: Tensor, comm: Communicator, shape: torch.Size, root: int, grad: str, reduce_dtype: Dtype
    ) -> CollectiveCall:
        if grad == "sum":
            return CollectiveCall(Reduce, g, (root, "sum", reduce_dtype))
        return CollectiveCall(AtRoot, g, (root, reduce_dtype))

    @staticmethod
    def prepare(x: Tensor, comm: Communicator, root: int, grad: str, reduce_dtype: Dtype) -> Prepared:
        send = to_wire(x)
        recv, result = recv_buffer_like(x, send)
        return Prepared(lambda stream: comm.broadcast(send, recv, root, stream=stream), result)


class AtRoot(Collective):
    """Keep a replicated tensor on root and return zeros elsewhere: the adjoint of `Broadcast` under "replicated".

    forward    x [..] -> y [..]     root: x     other ranks: 0
    backward   g [..] -> [..]       broadcast(g)
    """

    name = "at_root"
    schema = "int root, ScalarType? reduce_dtype"

    @staticmethod
    def adjoint(g: Tensor, comm: Communicator, shape: torch.Size, root: int, reduce_dtype: Dtype) -> CollectiveCall:
        return CollectiveCall(Broadcast, g, (root, "replicated", reduce_dtype))

    @staticmethod
    def prepare(x: Tensor, comm: Communicator, root: int, reduce_dtype: Dtype) -> Prepared:
        return local_result(lambda: contiguous_copy(x) if comm.rank == root else x.new_zeros(x.shape))


@operation
def reduce(x: Tensor, comm: Communicator, root: int, op: Op = "sum", *, reduce_dtype: Dtype = None) -> Any:
    """Sum x over all ranks, on rank `root`. The other ranks get zeros.

    forward    x [..] -> y [..]     root: sum_q x_q ("avg": / N)     other ranks: 0
    backward   g [..] -> [..]       broadcast(g) ("avg": / N)

    x             this rank's term of the sum
    comm          communicator of the ranks that take part
    root          rank that receives the sum
    op            "sum" or "avg"
    reduce_dtype  dtype in which the sum is communicated and computed; None: that of x

    There is no grad=: the ranks' outputs differ, so the backward pass is always the exact adjoint (as grad="sum").

    ValueError or TypeError for wrong arguments, before anything is launched. Every rank must call it and run its
    backward pass. Notation: help(ad.ops).
    """
    check_call("reduce", x, comm)
    op = check_op("reduce", op)
    root = check_rank("reduce", comm, root)
    reduce_dtype = check_reduction("reduce", x, op, reduce_dtype)
    return comm, CollectiveCall(Reduce, x, (root, op, reduce_dtype))


class Reduce(Collective):
    """Sum (or average) over ranks, on root. The Function behind `reduce`.

    forward    x [..] -> y [..]     root: sum_q x_q     other ranks: 0      avg: / N
    backward   g [..] -> [..]       broadcast(g)                            avg: / N
    """

    name = "reduce"
    schema = "int root, str op, ScalarType? reduce_dtype"

    @staticmethod
    def adjoint(
        g: Tensor, comm: Communicator, shape: torch.Size, root: int, op: str, reduce_dtype: Dtype
    ) -> CollectiveCall:
        return CollectiveCall(Broadcast, divide_if_avg(g, op, comm), (root, "sum", reduce_dtype))

    @staticmethod
    def prepare(x: Tensor, comm: Communicator, root: int, op: Op, reduce_dtype: Dtype) -> Prepared:
        send = to_wire(x, reduce_dtype)
        recv, result = None, lambda: x.new_zeros(x.shape)
        if comm.rank == root:
            recv, result = recv_buffer_like(x, send, reduce_dtype)
        return Prepared(lambda stream: comm.reduce(send, recv, op, root, stream=stream), result)


@operation
def scatter(x: Tensor, comm: Communicator, root: int, dim: int = 0, *, splits: Splits = None) -> Any:
    """Split x of rank `root` along `dim`, and return slice r on rank r.

    forward    x [.., S, ..] -> y [.., s_r, ..]     y_r = x_root[slice r]
    backward   g [.., s_r, ..] -> [.., S, ..]       root: gather(g)     other ranks: 0

    x       on root, the tensor to split; on the other ranks, a tensor of the same shape and dtype, whose values are
            ignored. With `splits`, its size along `dim` may differ there, e.g. be 0
    comm    communicator of the ranks that take part
    root    rank that sends
    dim     dimension to split; its size must be divisible by N, unless `splits` is given
    splits  size along `dim` of each rank's slice, the same list on every rank; None: equal sizes

    There is no grad=: the ranks' outputs differ, so the backward pass is always the exact adjoint (as grad="sum").

    ValueError or TypeError for wrong arguments of this rank, before anything is launched. Whether ranks pass different
    shapes or dtypes is checked only with PYNCCL_CHECK=1. Every rank must call it and run its backward pass. Notation:
    help(ad.ops).
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
    return comm, CollectiveCall(Scatter, x, (root, dim, sizes))


class Scatter(Collective):
    """Slice r of root's tensor along `dim`, on rank r. The Function behind `scatter`.

    forward    x [.., S, ..] -> y [.., s_r, ..]     y_r = x_root[slice r]
    backward   g [.., s_r, ..] -> [.., S, ..]       root: gather(g)     other ranks: 0
    """

    name = "scatter"
    schema = "int root, int dim, SymInt[] splits"
    dim_indices = (1,)

    @staticmethod
    def adjoint(
        g: Tensor, comm: Communicator, shape: torch.Size, root: int, dim: int, splits: Sequence[int]
    ) -> CollectiveCall:
        return CollectiveCall(Gather, g, (root, dim, splits, shape[dim]))

    @staticmethod
    def prepare(x: Tensor, comm: Communicator, root: int, dim: int, splits: Sequence[int]) -> Prepared:
        send = to_wire(x.movedim(dim, 0)) if comm.rank == root else None  # elsewhere x only gives shape and dtype
        recv, result = recv_buffer(x, resized_shape(x, dim, splits[comm.rank]), dim)

        def launch(stream: Any) -> None:
            if _equal(splits):
                comm.scatter(send, recv, root, stream=stream)
            else:
                comm.scatter_v(send, recv, root, counts=counts(x, dim, splits), stream=stream)

        return Prepared(launch, result)


@operation
def gather(x: Tensor, comm: Communicator, root: int, dim: int = 0, *, splits: Splits = None) -> Any:
    """Concatenate the tensors of all ranks along `dim`, on rank `root`. The other ranks get an empty tensor.

    forward    x [.., s, ..] -> y       root: concat_q x_q [.., N*s, ..]     other ranks: [.., 0, ..]
    backward   g -> [.., s, ..]         g_root[slice r]

    x       a 0-d tensor counts as one of shape [1]
    comm    communicator of the ranks that take part
    root    rank that receives
    dim     dimension to concatenate along
    splits  size along `dim` of each rank's tensor, the same list on every rank; None: equal sizes

    There is no grad=: the ranks' outputs differ, so the backward pass is always the exact adjoint (as grad="sum").

    ValueError or TypeError for wrong arguments, before anything is launched. Every rank must call it and run its
    backward pass. Notation: help(ad.ops).
    """
    check_call("gather", x, comm)
    root = check_rank("gather", comm, root)
    if x.dim() == 0:
        x = x.reshape(1)
    dim = check_dim("gather", x, dim)
    sizes = check_splits("gather", splits, comm)
    if sizes is None:
        sizes = (x.shape[dim],) * comm.size
    check_own_split("gather", x, dim, sizes, comm, "splits")
    return comm, CollectiveCall(Gather, x, (root, dim, sizes, 0))


class Gather(Collective):
    """Concatenate the tensors of all ranks along `dim`, on root. The Function behind `gather`.

    forward    x [.., s_r, ..] -> y     root: concat_q x_q [.., S, ..]      other ranks: 0 [.., rest, ..]
    backward   g -> [.., s_r, ..]       g_root[slice r]
    """

    name = "gather"
    schema = "int root, int dim, SymInt[] splits, SymInt rest"
    dim_indices = (1,)

    @staticmethod
    def adjoint(
        g: Tensor, comm: Communicator, shape: torch.Size, root: int, dim: int, splits: Sequence[int], rest: int
    ) -> CollectiveCall:
        return CollectiveCall(Scatter, g, (root, dim, splits))

    @staticmethod
    def prepare(x: Tensor, comm: Communicator, root: int, dim: int, splits: Sequence[int], rest: int) -> Prepared:
        send = to_wire(x.movedim(dim, 0))
        recv, result = None, lambda: x.new_zeros(resized_shape(x, dim, rest))
        if comm.rank == root:
            recv, result = recv_buffer(x, resized_shape(x, dim, sum(splits)), dim)

        def launch(stream: Any) -> None:
            if _equal(splits):
                comm.gather(send, recv, root, stream=stream)
            else:
                comm.gather_v(send, recv, root, counts=counts(x, dim, splits), stream=stream)

        return Prepared(launch, result)


def _equal(splits: Sequence[int]) -> bool:
    return all(rows == splits[0] for rows in splits)
