"""How each collective is launched: tensors of any kind in, contiguous buffers to NCCL, tensors out.

Every function here prepares one operation, and returns an `Exchange` that launches and finishes it. In between lies the
stream: a caller may launch on a side stream, and finish where the result is used. What NCCL does not know is dealt with
here: dimensions other than the first, uneven splits; types are wire.py's. Every result is a tensor of its own, which
shares no memory with x and is no view. Nothing here is differentiable, and nothing checks: see arguments.py.

N ranks, this rank r. `splits` are the sizes of all ranks' slices along `dim`; None: equal ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import pynccl
from pynccl import Communicator

from .wire import Landing, added, landing, leads, own, to_wire, units, zeros

Splits = Sequence[int] | None


class Exchange(NamedTuple):
    """issue(stream) launches the communication (None: on the current stream); finish() then makes the result.

    The two hold references to all buffers, so whoever launches on a side stream keeps the Exchange until the current
    stream has waited for it. finish() alone gives a tensor of the right shape and strides, which is what tracing needs.
    """

    issue: Callable[[Any], object]
    finish: Callable[[], Tensor]


def nothing(stream: Any) -> None:
    """The `issue` of operations that need no communication."""


def all_reduce(x: Tensor, comm: Communicator, op: str, reduce_dtype: torch.dtype | None) -> Exchange:
    send = to_wire(x, reduce_dtype)
    recv, finish = _like(x, send, reduce_dtype)
    return Exchange(lambda stream: comm.all_reduce(send, recv, op, stream=stream), finish)


def reduce_scatter(
    x: Tensor, comm: Communicator, dim: int, op: str, splits: Splits, reduce_dtype: torch.dtype | None
) -> Exchange:
    send = to_wire(x.movedim(dim, 0), reduce_dtype)
    rows = x.shape[dim] // comm.size if splits is None else splits[comm.rank]
    recv, finish = landing(x, _resized(x, dim, rows), dim, reduce_dtype)

    def issue(stream: Any) -> None:
        if splits is None:
            comm.reduce_scatter(send, recv, op, stream=stream)
        else:
            counts = _counts(x, dim, splits, 2 if x.is_complex() else 1)
            comm.reduce_scatter_v(send, recv, op, counts=counts, stream=stream)

    return Exchange(issue, finish)


def all_gather(x: Tensor, comm: Communicator, dim: int, splits: Splits) -> Exchange:
    send = to_wire(x.movedim(dim, 0))
    rows = x.shape[dim] * comm.size if splits is None else sum(splits)
    recv, finish = landing(x, _resized(x, dim, rows), dim)

    def issue(stream: Any) -> None:
        if splits is None:
            comm.all_gather(send, recv, stream=stream)
        else:
            comm.all_gather_v(send, recv, counts=_counts(x, dim, splits), stream=stream)

    return Exchange(issue, finish)


def broadcast(x: Tensor, comm: Communicator, root: int) -> Exchange:
    send = to_wire(x)
    recv, finish = _like(x, send)
    return Exchange(lambda stream: comm.broadcast(send, recv, root, stream=stream), finish)


def reduce(x: Tensor, comm: Communicator, root: int, op: str, reduce_dtype: torch.dtype | None) -> Exchange:
    send = to_wire(x, reduce_dtype)
    if comm.rank != root:
        return Exchange(lambda stream: comm.reduce(send, None, op, root, stream=stream), lambda: zeros(x, x.shape))
    recv, finish = _like(x, send, reduce_dtype)
    return Exchange(lambda stream: comm.reduce(send, recv, op, root, stream=stream), finish)


def scatter(x: Tensor, comm: Communicator, root: int, dim: int, splits: Sequence[int]) -> Exchange:
    """x on ranks other than root gives the other dimensions and the type."""
    send = to_wire(x.movedim(dim, 0)) if comm.rank == root else None
    recv, finish = landing(x, _resized(x, dim, splits[comm.rank]), dim)

    def issue(stream: Any) -> None:
        if _equal(splits):
            comm.scatter(send, recv, root, stream=stream)
        else:
            comm.scatter_v(send, recv, root, counts=_counts(x, dim, splits), stream=stream)

    return Exchange(issue, finish)


def gather(x: Tensor, comm: Communicator, root: int, dim: int, splits: Sequence[int], rest: int) -> Exchange:
    """Ranks other than root get zeros, of size `rest` along `dim`."""
    send = to_wire(x.movedim(dim, 0))
    recv, finish = None, lambda: zeros(x, _resized(x, dim, rest))
    if comm.rank == root:
        recv, finish = landing(x, _resized(x, dim, sum(splits)), dim)

    def issue(stream: Any) -> None:
        if _equal(splits):
            comm.gather(send, recv, root, stream=stream)
        else:
            comm.gather_v(send, recv, root, counts=_counts(x, dim, splits), stream=stream)

    return Exchange(issue, finish)


def all_to_all(
    x: Tensor, comm: Communicator, split_dim: int, concat_dim: int, send_splits: Splits, recv_splits: Splits
) -> Exchange:
    n = comm.size
    sizes = [x.shape[split_dim] // n] * n if send_splits is None else list(send_splits)
    parts = [x] if leads(x.shape, split_dim) else x.split(sizes, split_dim)
    send = to_wire(x) if len(parts) == 1 else torch.cat([to_wire(part).reshape(-1) for part in parts])
    part = _resized(x, split_dim, sizes[comm.rank])
    rows = [part[concat_dim]] * n if recv_splits is None else list(recv_splits)
    shapes = [(*part[:concat_dim], size, *part[concat_dim + 1 :]) for size in rows]
    counts = [torch.Size(shape).numel() for shape in shapes]
    in_order = leads(part, concat_dim)
    recv, finish = landing(x, (*part[:concat_dim], sum(rows), *part[concat_dim + 1 :]) if in_order else (sum(counts),))

    def issue(stream: Any) -> None:
        if send_splits is None and recv_splits is None:  # on all ranks alike: sizes may look equal on one of them only
            comm.all_to_all(send, recv, stream=stream)
            return
        sent, received = _counts(x, split_dim, sizes), [count * units(x.dtype) for count in counts]
        comm.all_to_all_v(send, recv, send_counts=sent, recv_counts=received, stream=stream)

    def concatenated() -> Tensor:
        pieces = finish().split(counts)
        return torch.cat([piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)], concat_dim)

    return Exchange(issue, finish if in_order else concatenated)


def permute(x: Tensor, comm: Communicator, targets: Sequence[int], sources: Sequence[int]) -> Exchange:
    """x goes to every one of `targets`; the result is the sum of what comes from `sources`. Own edges stay here."""
    send = to_wire(x)
    landings = [(source, _like(x, send)) for source in sources if source != comm.rank]
    loops = list(sources).count(comm.rank)

    def issue(stream: Any) -> None:
        with pynccl.group():
            for target in targets:
                if target != comm.rank:
                    _send(comm, send, target, stream)
            for source, (recv, _) in landings:
                _recv(comm, recv, source, stream)

    def finish() -> Tensor:
        parts = [finish_one() for _, (_, finish_one) in landings] + [own(x) for _ in range(loops)]
        return added(parts) if parts else zeros(x, x.shape)

    return Exchange(issue, finish)


def halo_exchange(x: Tensor, comm: Communicator, dim: int, left: int, right: int, borders: Splits = None) -> Exchange:
    """The borders of the neighbours' interiors overwrite the halos of x.

    borders  widths that the left neighbour and the right one need of this rank; None: right and left"""
    low, inner_low, inner_high, high = _bands(x, dim, left, right, borders)
    issue, from_left, from_right = _neighbours(comm, inner_low, inner_high, low, high)

    def finish() -> Tensor:
        y = own(x)
        for band, part in zip(_bands(y, dim, left, right, borders)[::3], (from_left, from_right), strict=True):
            if part is not None:
                band.copy_(part.finish())
        return y

    return Exchange(issue, finish)


def halo_reduce(x: Tensor, comm: Communicator, dim: int, left: int, right: int, borders: Splits = None) -> Exchange:
    """The adjoint: halos go back to where they came from, are added there, and become 0 here."""
    low, inner_low, inner_high, high = _bands(x, dim, left, right, borders)
    issue, from_left, from_right = _neighbours(comm, low, high, inner_low, inner_high)

    def finish() -> Tensor:
        y = own(x)
        own_low, own_inner_low, own_inner_high, own_high = _bands(y, dim, left, right, borders)
        for part, halo, border in ((from_left, own_low, own_inner_low), (from_right, own_high, own_inner_high)):
            if part is not None:
                halo.zero_()
                border.copy_(added([border, part.finish()]))
        return y

    return Exchange(issue, finish)


def split(x: Tensor, comm: Communicator, dim: int, splits: Splits) -> Exchange:
    rows = [x.shape[dim] // comm.size] * comm.size if splits is None else list(splits)
    part = x.narrow(dim, sum(rows[: comm.rank]), rows[comm.rank])
    return Exchange(nothing, lambda: own(part))


def copy(x: Tensor) -> Exchange:
    return Exchange(nothing, lambda: own(x))


def at_root(x: Tensor, comm: Communicator, root: int) -> Exchange:
    return copy(x) if comm.rank == root else Exchange(nothing, lambda: zeros(x, x.shape))


def _like(x: Tensor, send: Tensor, dtype: torch.dtype | None = None) -> tuple[Tensor, Callable[[], Tensor]]:
    """`landing` for a result of the shape of x; the shortest way where nothing is to be converted."""
    if send.dtype is x.dtype:  # then send has its shape too
        recv = torch.empty_like(send)
        return recv, lambda: recv
    return landing(x, x.shape, dtype=dtype)


def _resized(x: Tensor, dim: int, rows: int) -> tuple[int, ...]:
    return (*x.shape[:dim], rows, *x.shape[dim + 1 :])


def _counts(x: Tensor, dim: int, rows: Sequence[int], per_element: int | None = None) -> list[int]:
    """Elements of the wire in so many rows of x along `dim`."""
    width = torch.Size([*x.shape[:dim], *x.shape[dim + 1 :]]).numel()
    width *= units(x.dtype) if per_element is None else per_element
    return [size * width for size in rows]


def _equal(splits: Sequence[int]) -> bool:
    return all(rows == splits[0] for rows in splits)


def _send(comm: Communicator, part: Tensor, peer: int, stream: Any) -> None:
    if part.numel():
        comm.send(part, peer, stream=stream)


def _recv(comm: Communicator, part: Tensor, peer: int, stream: Any) -> None:
    if part.numel():
        comm.recv(part, peer, stream=stream)


def _bands(x: Tensor, dim: int, left: int, right: int, borders: Splits) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Along dim: left halo, border that the left neighbour needs, border that the right one needs, right halo."""
    size = x.shape[dim]
    to_left, to_right = (right, left) if borders is None else borders
    return (
        x.narrow(dim, 0, left),
        x.narrow(dim, left, to_left),
        x.narrow(dim, size - right - to_right, to_right),
        x.narrow(dim, size - right, right),
    )


def _neighbours(
    comm: Communicator, to_left: Tensor, to_right: Tensor, like_left: Tensor, like_right: Tensor
) -> tuple[Callable[[Any], None], Landing | None, Landing | None]:
    """(issue, what comes from the left, what comes from the right); None at the ends of the line."""
    sides = []
    for peer, band, like in ((comm.rank - 1, to_left, like_left), (comm.rank + 1, to_right, like_right)):
        exists = 0 <= peer < comm.size
        sides.append((peer, to_wire(band), landing(like, like.shape)) if exists else None)

    def issue(stream: Any) -> None:
        with pynccl.group():
            for side in sides:
                if side is not None:
                    peer, send, (recv, _) = side
                    _send(comm, send, peer, stream)
                    _recv(comm, recv, peer, stream)

    left, right = sides
    return issue, left and left[2], right and right[2]
