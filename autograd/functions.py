"""The differentiable collectives, as functions.

Notation: N ranks, this rank r; x_q, y_q, g_q are rank q's input, output and cotangent. Two conventions of gradient:

grad="sum"         the loss is the sum of all ranks' losses; cotangents may differ from rank to rank. The true adjoint.
grad="replicated"  every rank computes the same loss from the output, so that cotangents are equal on all ranks.

They differ by a factor of N, hence `grad=` has no default where they differ. Inputs and cotangents are never changed,
and may be non-contiguous, of stride 0, of size 0, or 0-dimensional. Complex tensors travel as pairs of reals.

Every rank must run the backward pass of every call, in the same order: the adjoints communicate too. Therefore an
output has a gradient function on every rank, also where the input needs no gradient (use torch.no_grad() for data and
metrics); pass outputs that a rank does not use to `anchor`. torch.autograd.grad(loss, inputs) enters only what leads to
those inputs, so ask on every rank for inputs behind the same calls. Under torch.compile no node is added: there,
requires_grad must be the same on all ranks.

`reduce_dtype` is the type in which a sum travels and is computed (torch.float32 for a bfloat16 tensor, say); the result
has the input's type. `splits` are the sizes of all ranks' slices along `dim`, the same list on every rank; None: equal.
Errors are ValueError / TypeError, raised before anything is launched.

`ad.AllReduce`, `ad.ReduceScatter`, ... are the autograd Functions; `start` (asynchronous.py) takes these functions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple, ParamSpec

import torch
from torch import Tensor

from pynccl import Communicator

from .arguments import (
    Grad,
    check_dim,
    check_divisible,
    check_edges,
    check_grad,
    check_halo,
    check_op,
    check_own,
    check_rank,
    check_splits,
    check_total,
)
from .collective import Call, run
from .exchanges import AllToAll, HaloExchange, Permute
from .extremes import Extremum, Product
from .rooted import Broadcast, Gather, Reduce, Scatter
from .sums import AllGather, AllReduce, Copy, ReduceScatter, Split

Op = Literal["sum", "avg"]
Dtype = torch.dtype | None
P = ParamSpec("P")


class PreMul(NamedTuple):
    """The operator sum_q scale_q * x_q of `all_reduce`; each rank may give its own scale.

    scale  a number, or a tensor that broadcasts against x, which then gets its gradient too
    """

    scale: complex | Tensor


def _operation(plan: Callable[P, Any]) -> Callable[P, Tensor]:
    """The function that runs what `plan` makes of its arguments; `start` takes the plan instead."""

    @functools.wraps(plan)
    def run_now(*args: P.args, **kwargs: P.kwargs) -> Tensor:
        comm, (function, x, params) = plan(*args, **kwargs)
        return run(comm, function, x, *params)

    run_now.plan = plan  # type: ignore[attr-defined]
    run_now.__annotations__ = {**plan.__annotations__, "return": "Tensor"}
    return run_now


@_operation
def all_reduce(
    x: Tensor,
    comm: Communicator,
    op: Op | Literal["max", "min", "prod"] | PreMul = "sum",
    *,
    grad: Grad,
    reduce_dtype: Dtype = None,
) -> Any:
    """y_r = sum_q x_q on every rank.  [..] -> [..], a new tensor also on one rank.

    op  "sum", "avg" (/ N), "max", "min", "prod", or PreMul(scale): sum_q scale_q * x_q

    See `AllReduce`, `Extremum`, `Product`.
    """
    check_grad("all_reduce", grad)
    if isinstance(op, PreMul):
        return comm, Call(AllReduce, x * op.scale, ("sum", grad, reduce_dtype))
    check_op("all_reduce", op, ("sum", "avg", "max", "min", "prod"))
    if op == "prod":
        return comm, Call(Product, x, (grad, reduce_dtype))
    if op in ("max", "min"):
        if x.is_complex():
            raise TypeError(f"all_reduce: complex numbers ({x.dtype}) have no {op}; pass their abs(), or the real part")
        return comm, Call(Extremum, x, (op, grad, reduce_dtype))
    return comm, Call(AllReduce, x, (op, grad, reduce_dtype))


@_operation
def copy(x: Tensor, comm: Communicator, *, reduce_dtype: Dtype = None) -> Any:
    """y = x; gradients are summed over ranks.  For a replicated x that meets other work on each rank.  See `Copy`."""
    return comm, Call(Copy, x, (reduce_dtype,))


@_operation
def reduce_scatter(
    x: Tensor,
    comm: Communicator,
    dim: int = 0,
    op: Op = "sum",
    *,
    splits: Sequence[int] | None = None,
    reduce_dtype: Dtype = None,
) -> Any:
    """y_r = (sum_q x_q)[slice r of `dim`] ("avg": / N).  [.., N*s, ..] -> [.., s, ..].  See `ReduceScatter`."""
    check_op("reduce_scatter", op)
    dim = check_dim("reduce_scatter", x, dim)
    splits = check_splits("reduce_scatter", splits, comm)
    if splits is None:
        check_divisible("reduce_scatter", x, dim, comm)
    else:
        check_total("reduce_scatter", x, dim, splits)
    return comm, Call(ReduceScatter, x, (dim, op, splits, reduce_dtype))


@_operation
def all_gather(
    x: Tensor,
    comm: Communicator,
    dim: int = 0,
    *,
    grad: Grad,
    splits: Sequence[int] | None = None,
    reduce_dtype: Dtype = None,
) -> Any:
    """y = concat_q x_q along `dim` on every rank.  [.., s, ..] -> [.., N*s, ..]; a 0-d x gives [N].  See `AllGather`.

    reduce_dtype  type of the sum in the backward reduce-scatter
    """
    check_grad("all_gather", grad)
    if x.dim() == 0:
        x = x.reshape(1)
    dim = check_dim("all_gather", x, dim)
    splits = check_splits("all_gather", splits, comm)
    if splits is not None:
        check_own("all_gather", x, dim, splits, comm, "splits")
    return comm, Call(AllGather, x, (dim, grad, splits, reduce_dtype))


@_operation
def split(x: Tensor, comm: Communicator, dim: int = 0, *, splits: Sequence[int] | None = None) -> Any:
    """y_r = x[slice r of `dim`] of a replicated x; gradients gathered.  [.., N*s, ..] -> [.., s, ..].  See `Split`."""
    dim = check_dim("split", x, dim)
    splits = check_splits("split", splits, comm)
    if splits is None:
        check_divisible("split", x, dim, comm)
    else:
        check_total("split", x, dim, splits)
    return comm, Call(Split, x, (dim, splits))


@_operation
def broadcast(x: Tensor, comm: Communicator, root: int, *, grad: Grad, reduce_dtype: Dtype = None) -> Any:
    """y_r = x_root on every rank.  [..] -> [..]; x on the other ranks gives shape and type.  See `Broadcast`."""
    check_grad("broadcast", grad)
    check_rank("broadcast", comm, root)
    return comm, Call(Broadcast, x, (root, grad, reduce_dtype))


@_operation
def reduce(x: Tensor, comm: Communicator, root: int, op: Op = "sum", *, reduce_dtype: Dtype = None) -> Any:
    """root: sum_q x_q ("avg": / N), others: zeros.  [..] -> [..].  See `Reduce`."""
    check_op("reduce", op)
    check_rank("reduce", comm, root)
    return comm, Call(Reduce, x, (root, op, reduce_dtype))


@_operation
def scatter(x: Tensor, comm: Communicator, root: int, dim: int = 0, *, splits: Sequence[int] | None = None) -> Any:
    """y_r = x_root[slice r of `dim`].  [.., S, ..] -> [.., s_r, ..].  See `Scatter`.

    x on the other ranks: like root's; with splits=, any size along `dim` will do, 0 for example
    """
    check_rank("scatter", comm, root)
    dim = check_dim("scatter", x, dim)
    sizes = check_splits("scatter", splits, comm)
    if sizes is None:
        check_divisible("scatter", x, dim, comm)
        sizes = (x.shape[dim] // comm.size,) * comm.size
    elif comm.rank == root:
        check_total("scatter", x, dim, sizes)
    return comm, Call(Scatter, x, (root, dim, sizes))


@_operation
def gather(x: Tensor, comm: Communicator, root: int, dim: int = 0, *, splits: Sequence[int] | None = None) -> Any:
    """root: concat_q x_q along `dim`, others: size 0 along it.  [.., s, ..] -> [.., N*s, ..].  See `Gather`."""
    check_rank("gather", comm, root)
    if x.dim() == 0:
        x = x.reshape(1)
    dim = check_dim("gather", x, dim)
    sizes = check_splits("gather", splits, comm)
    if sizes is None:
        sizes = (x.shape[dim],) * comm.size
    check_own("gather", x, dim, sizes, comm, "splits")
    return comm, Call(Gather, x, (root, dim, sizes, 0))


@_operation
def all_to_all(
    x: Tensor,
    comm: Communicator,
    split_dim: int = 0,
    concat_dim: int = 0,
    *,
    send_splits: Sequence[int] | None = None,
    recv_splits: Sequence[int] | None = None,
) -> Any:
    """Part q of x along `split_dim` goes to rank q; what arrives is concatenated along `concat_dim`.  See `AllToAll`.

    send_splits  size along `split_dim` of the part for each rank
    recv_splits  size along `concat_dim` of the part from each rank

    Both None: equal parts. Otherwise all ranks pass them, where the two dimensions are the same both of them.
    """
    split_dim = check_dim("all_to_all", x, split_dim, "split_dim")
    concat_dim = check_dim("all_to_all", x, concat_dim, "concat_dim")
    sends = check_splits("all_to_all", send_splits, comm, "send_splits")
    recvs = check_splits("all_to_all", recv_splits, comm, "recv_splits")
    if sends is None and recvs is None:
        check_divisible("all_to_all", x, split_dim, comm, "pass send_splits= and recv_splits=")
        return comm, Call(AllToAll, x, (split_dim, concat_dim, None, None))
    if split_dim == concat_dim and (sends is None or recvs is None):
        raise ValueError(
            f"all_to_all: send_splits is {sends}, recv_splits is {recvs}; along one dimension ({split_dim}) both are "
            "needed, since this rank cannot know what the others send"
        )
    if sends is None:
        check_divisible("all_to_all", x, split_dim, comm, "pass send_splits=")
        sends = (x.shape[split_dim] // comm.size,) * comm.size
    check_total("all_to_all", x, split_dim, sends, "send_splits")
    if split_dim != concat_dim:
        recvs = (x.shape[concat_dim],) * comm.size if recvs is None else recvs
        check_own("all_to_all", x, concat_dim, recvs, comm, "recv_splits")
    return comm, Call(AllToAll, x, (split_dim, concat_dim, sends, recvs))


@_operation
def permute(x: Tensor, comm: Communicator, edges: Iterable[tuple[int, int]]) -> Any:
    """y_r = sum of x_q over the edges (q, r), zeros without one.  [..] -> [..], the same on all ranks.  See `Permute`.

    edges  pairs (source, target), the same on all ranks; a source may have several targets and a target several sources
    """
    return comm, Call(Permute, x, check_edges(comm, edges))


@_operation
def send_recv(x: Tensor, comm: Communicator, target: int | None = None, source: int | None = None) -> Any:
    """x goes to rank `target`; y is what rank `source` sends, zeros if None.  [..] -> [..].  See `Permute`.

    Only the ranks that are named need to call it, each naming its own partners; backwards the same."""
    for rank, name in ((target, "target"), (source, "source")):
        if rank is not None:
            check_rank("send_recv", comm, rank, name)
    return comm, Call(Permute, x, (() if target is None else (target,), () if source is None else (source,)))


@_operation
def halo_exchange(x: Tensor, comm: Communicator, dim: int, halo: int | tuple[int, int]) -> Any:
    """Ranks in a line: the neighbours' borders overwrite the halos of x along `dim`.  Same shape.  See `HaloExchange`.

    halo  width of both halos, or (left, right); the outer ones of the first and the last rank are left alone
    """
    dim = check_dim("halo_exchange", x, dim)
    return comm, Call(HaloExchange, x, (dim, *check_halo(x, dim, halo)))
