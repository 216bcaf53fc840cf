"""The differentiable collectives, as functions.

Notation: N ranks, this rank r; x_q, y_q, g_q are rank q's input, output and cotangent. Two conventions of gradient:

grad="sum"         the loss is the sum of all ranks' losses; cotangents may differ from rank to rank. The true adjoint.
grad="replicated"  every rank computes the same loss from the output, so that cotangents are equal on all ranks.

They differ by a factor of N, hence `grad=` has no default where they differ. Inputs and cotangents are never changed,
and may be non-contiguous, of stride 0, of size 0, or 0-dimensional. Every output is a tensor of its own, also on one
rank: it is no view, shares no memory with the input, and may be changed in place.

Every rank must run the backward pass of every call, in the same order: the adjoints communicate too. Therefore an
output has a gradient function on every rank, also where the input needs no gradient (use torch.no_grad() for data and
metrics); pass outputs that a rank does not use to `anchor`. torch.autograd.grad(loss, inputs) enters only what leads to
those inputs, so ask on every rank for inputs behind the same calls. Under torch.compile no node is added: there,
requires_grad must be the same on all ranks.

`reduce_dtype` is the type in which a sum travels and is computed (torch.float32 for a bfloat16 tensor, say); the result
has the input's type. `splits` are the sizes of all ranks' slices along `dim`, the same list on every rank; None: equal.
Errors are ValueError / TypeError, raised before anything is launched.

all_reduce, all_gather and reduce_scatter also take a list or tuple of tensors, of any shapes and types, and return the
list of their outputs: as one NCCL group, backwards too. The other arguments hold for each of the tensors; all ranks
pass as many. An output that is not used has a cotangent of zeros. max, min and prod go one by one, as does everything
under torch.compile.

`ad.AllReduce`, `ad.ReduceScatter`, ... are the autograd Functions; `start` (asynchronous.py) takes these functions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Concatenate, Literal, NamedTuple, ParamSpec, Protocol, overload

import torch
from torch import Tensor

from pynccl import Communicator

from .agreement import checked_alike, learnt_splits
from .arguments import (
    Grad,
    Halo,
    Splits,
    check_dim,
    check_divisible,
    check_edges,
    check_exchange,
    check_grad,
    check_halo,
    check_meetings,
    check_op,
    check_own,
    check_rank,
    check_splits,
    check_total,
)
from .coalesced import run_together
from .collective import Call, run
from .exchanges import AllToAll, HaloExchange, Permute
from .extremes import Extremum, Product
from .inputs import check_call, check_reduce_dtype, check_reduction
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


class OfLists(Protocol[P]):
    """A function that also takes a list or tuple of tensors, all of them launched as one group: coalesced.py."""

    plan: Callable[..., Any]

    @overload
    def __call__(self, x: Tensor, *args: P.args, **kwargs: P.kwargs) -> Tensor: ...
    @overload
    def __call__(self, x: list[Tensor] | tuple[Tensor, ...], *args: P.args, **kwargs: P.kwargs) -> list[Tensor]: ...


def _operation(plan: Callable[P, Any]) -> Callable[P, Tensor]:
    """The function that runs what `plan` makes of its arguments; `start` takes the plan instead."""

    @functools.wraps(plan)
    def run_now(*args: P.args, **kwargs: P.kwargs) -> Tensor:
        comm, (function, x, params) = plan(*args, **kwargs)
        return run(comm, function, x, *params)

    run_now.plan = plan  # type: ignore[attr-defined]
    run_now.__annotations__ = {**plan.__annotations__, "return": "Tensor"}
    return run_now


def _of_lists(plan: Callable[Concatenate[Tensor, P], Any]) -> OfLists[P]:
    """The function that runs what `plan` makes of its arguments, for one tensor or for each of several."""

    @functools.wraps(plan)
    def run_now(x: Any, *args: P.args, **kwargs: P.kwargs) -> Any:
        if not isinstance(x, (list, tuple)):
            comm, (function, x, params) = plan(x, *args, **kwargs)
            return run(comm, function, x, *params)
        plans = []
        for at, one in enumerate(x):
            try:
                plans.append(plan(one, *args, **kwargs))
            except (TypeError, ValueError) as error:
                raise type(error)(f"{error} (x is tensor {at} of {len(x)} in the list)") from None
        return run_together(plans[0][0], [call for _, call in plans]) if plans else []

    run_now.plan = plan  # type: ignore[attr-defined]
    run_now.__annotations__ = {**plan.__annotations__, "return": "Tensor"}
    return run_now  # type: ignore[return-value]


@_of_lists
def all_reduce(
    x: Tensor,
    comm: Communicator,
    op: Op | Literal["max", "min", "prod"] | PreMul = "sum",
    *,
    grad: Grad,
    reduce_dtype: Dtype = None,
) -> Any:
    """y_r = sum_q x_q on every rank.  [..] -> [..], a new tensor also on one rank; a list of tensors -> a list.

    op  "sum", "avg" (/ N; of integers towards zero), "max", "min", "prod", or PreMul(scale): sum_q scale_q * x_q

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
    if name == "prod":
        return comm, Call(Product, x, (grad, reduce_dtype))
    if name in ("max", "min"):
        if x.is_complex():
            raise TypeError(
                f"all_reduce: complex numbers ({x.dtype}) have no {name}; pass their abs(), or the real part"
            )
        return comm, Call(Extremum, x, (name, grad, reduce_dtype))
    return comm, Call(AllReduce, x, (name, grad, reduce_dtype))


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


@_operation
def copy(x: Tensor, comm: Communicator, *, reduce_dtype: Dtype = None) -> Any:
    """y = x in memory of its own; gradients are summed over ranks.  For a replicated x that meets other work on each
    rank.  See `Copy`."""
    check_call("copy", x, comm)
    return comm, Call(Copy, x, (check_reduce_dtype("copy", x, reduce_dtype),))


@_of_lists
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
    check_call("reduce_scatter", x, comm)
    op = check_op("reduce_scatter", op)
    reduce_dtype = check_reduction("reduce_scatter", x, op, reduce_dtype)
    dim = check_dim("reduce_scatter", x, dim)
    splits = check_splits("reduce_scatter", splits, comm)
    if splits is None:
        check_divisible("reduce_scatter", x, dim, comm)
    else:
        check_total("reduce_scatter", x, dim, splits)
    return comm, Call(ReduceScatter, x, (dim, op, splits, reduce_dtype))


@_of_lists
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


@_operation
def split(x: Tensor, comm: Communicator, dim: int = 0, *, splits: Sequence[int] | None = None) -> Any:
    """y_r = x[slice r of `dim`] of a replicated x; gradients gathered.  [.., N*s, ..] -> [.., s, ..].  See `Split`."""
    check_call("split", x, comm)
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
    check_call("broadcast", x, comm)
    check_grad("broadcast", grad)
    root = check_rank("broadcast", comm, root)
    reduce_dtype = check_reduce_dtype("broadcast", x, reduce_dtype)
    return comm, Call(Broadcast, x, (root, grad, reduce_dtype))


@_operation
def reduce(x: Tensor, comm: Communicator, root: int, op: Op = "sum", *, reduce_dtype: Dtype = None) -> Any:
    """root: sum_q x_q ("avg": / N), others: zeros.  [..] -> [..].  See `Reduce`."""
    check_call("reduce", x, comm)
    op = check_op("reduce", op)
    root = check_rank("reduce", comm, root)
    reduce_dtype = check_reduction("reduce", x, op, reduce_dtype)
    return comm, Call(Reduce, x, (root, op, reduce_dtype))


@_operation
def scatter(x: Tensor, comm: Communicator, root: int, dim: int = 0, *, splits: Sequence[int] | None = None) -> Any:
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


@_operation
def gather(x: Tensor, comm: Communicator, root: int, dim: int = 0, *, splits: Sequence[int] | None = None) -> Any:
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

    Both None: equal parts. Otherwise all ranks pass them, the same ones of the two. Where both dimensions are the same
    and one list is missing, the ranks tell each other the sizes first: each call then costs one more, small exchange,
    which the CPU waits for, and torch.compile refuses it. PYNCCL_CHECK=1 finds ranks that pass others than the rest.
    """
    check_call("all_to_all", x, comm)
    split_dim = check_dim("all_to_all", x, split_dim, "split_dim")
    concat_dim = check_dim("all_to_all", x, concat_dim, "concat_dim")
    learn = split_dim == concat_dim and (send_splits is None) != (recv_splits is None)

    def options() -> str:
        given = [name for name, splits in (("send", send_splits), ("recv", recv_splits)) if splits is not None]
        return f"all_to_all from dimension {split_dim} to {concat_dim}, splits given: {', '.join(given) or 'none'}"

    def check() -> tuple[Splits, Splits]:
        return (None, None) if learn else check_exchange(x, comm, split_dim, concat_dim, send_splits, recv_splits)

    splits = checked_alike(comm, options, check)
    if learn:
        splits = learnt_splits(x, comm, split_dim, send_splits, recv_splits)
    return comm, Call(AllToAll, x, (split_dim, concat_dim, *splits))


@_operation
def permute(x: Tensor, comm: Communicator, edges: Iterable[tuple[int, int]]) -> Any:
    """y_r = sum of x_q over the edges (q, r), zeros without one.  [..] -> [..], the same on all ranks.  See `Permute`.

    edges  pairs (source, target), the same on all ranks; a source may have several targets and a target several sources
    """
    check_call("permute", x, comm)
    pairs = check_edges(comm, edges)
    check_meetings(x, pairs)
    targets = tuple(target for source, target in pairs if source == comm.rank)
    sources = tuple(source for source, target in pairs if target == comm.rank)
    return comm, Call(Permute, x, (targets, sources))


@_operation
def send_recv(x: Tensor, comm: Communicator, target: int | None = None, source: int | None = None) -> Any:
    """x goes to rank `target`; y is what rank `source` sends, zeros if None.  [..] -> [..].  See `Permute`.

    Only the ranks that are named need to call it, each naming its own partners; backwards the same."""
    check_call("send_recv", x, comm)
    targets = () if target is None else (check_rank("send_recv", comm, target, "target"),)
    sources = () if source is None else (check_rank("send_recv", comm, source, "source"),)
    return comm, Call(Permute, x, (targets, sources))


@_operation
def halo_exchange(x: Tensor, comm: Communicator, dim: int, halo: Halo) -> Any:
    """Ranks in a line: the neighbours' borders overwrite the halos of x along `dim`.  Same shape.  See `HaloExchange`.

    halo  width of both halos, or (left, right), or a list of (left, right) of every rank, the same list on all ranks;
          the outer ones of the first and the last rank are left alone

    The interior, all but the halos, must be as wide as what the neighbours need of it. A rank on which it is not raises
    ValueError; the others know it with PYNCCL_CHECK=1 only.
    """
    check_call("halo_exchange", x, comm)
    dim = check_dim("halo_exchange", x, dim)
    widths = checked_alike(
        comm, lambda: f"halo_exchange along {dim}, halo={halo}", lambda: check_halo(x, dim, halo, comm)
    )
    return comm, Call(HaloExchange, x, (dim, *widths))
