"""The one place where collectives touch memory: tensors of any kind in, contiguous buffers to NCCL, tensors out.

Every function here prepares one operation, and returns an `Exchange` that launches and finishes it. In between lies the
stream: a caller may launch on a side stream, and finish where the result is used. What NCCL does not know is dealt with
here: dimensions other than the first, uneven splits, a type to reduce in, complex numbers (as pairs of reals), bool,
strides. Nothing here is differentiable, and nothing checks: see arguments.py.

N ranks, this rank r. `splits` are the sizes of all ranks' slices along `dim`; None: equal ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import pynccl
from pynccl import Communicator

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
    send = _to_wire(x, reduce_dtype)
    recv = torch.empty_like(send)
    return Exchange(lambda stream: comm.all_reduce(send, recv, op, stream=stream), lambda: _from_wire(recv, x))


def reduce_scatter(
    x: Tensor, comm: Communicator, dim: int, op: str, splits: Splits, reduce_dtype: torch.dtype | None
) -> Exchange:
    send = _to_wire(x.movedim(dim, 0), reduce_dtype)
    rows = send.shape[0] // comm.size if splits is None else splits[comm.rank]
    recv = send.new_empty((rows, *send.shape[1:]))

    def issue(stream: Any) -> None:
        if splits is None:
            comm.reduce_scatter(send, recv, op, stream=stream)
            return
        with pynccl.group():
            for root, part in enumerate(send.split(list(splits))):
                if part.numel():
                    comm.reduce(part, recv if root == comm.rank else None, op, root, stream=stream)

    return Exchange(issue, lambda: _from_wire(recv, x).movedim(0, dim).contiguous())


def all_gather(x: Tensor, comm: Communicator, dim: int, splits: Splits) -> Exchange:
    send = _to_wire(x.movedim(dim, 0))
    rows = send.shape[0] * comm.size if splits is None else sum(splits)
    recv = send.new_empty((rows, *send.shape[1:]))

    def issue(stream: Any) -> None:
        if splits is None:
            comm.all_gather(send, recv, stream=stream)
            return
        with pynccl.group():
            for root, part in enumerate(recv.split(list(splits))):
                if part.numel():
                    comm.broadcast(send if root == comm.rank else part, part, root, stream=stream)

    return Exchange(issue, lambda: _from_wire(recv, x).movedim(0, dim).contiguous())


def broadcast(x: Tensor, comm: Communicator, root: int) -> Exchange:
    send = _to_wire(x)
    recv = torch.empty_like(send)
    return Exchange(lambda stream: comm.broadcast(send, recv, root, stream=stream), lambda: _from_wire(recv, x))


def reduce(x: Tensor, comm: Communicator, root: int, op: str, reduce_dtype: torch.dtype | None) -> Exchange:
    send = _to_wire(x, reduce_dtype)
    recv = torch.empty_like(send) if comm.rank == root else None
    return Exchange(
        lambda stream: comm.reduce(send, recv, op, root, stream=stream),
        lambda: _zeros(x, x.shape) if recv is None else _from_wire(recv, x),
    )


def scatter(x: Tensor, comm: Communicator, root: int, dim: int, splits: Sequence[int]) -> Exchange:
    """x on ranks other than root gives the other dimensions and the type."""
    front = x.movedim(dim, 0)
    send = _to_wire(front if comm.rank == root else front[:0])
    recv = send.new_empty((splits[comm.rank], *send.shape[1:]))

    def issue(stream: Any) -> None:
        if _equal(splits):
            comm.scatter(send if comm.rank == root else None, recv, root, stream=stream)
            return
        with pynccl.group():
            for peer, part in enumerate(send.split(list(splits)) if comm.rank == root else ()):
                _send(comm, part, peer, stream)
            _recv(comm, recv, root, stream)

    return Exchange(issue, lambda: _from_wire(recv, x).movedim(0, dim).contiguous())


def gather(x: Tensor, comm: Communicator, root: int, dim: int, splits: Sequence[int], rest: int) -> Exchange:
    """Ranks other than root get zeros, of size `rest` along `dim`."""
    send = _to_wire(x.movedim(dim, 0))
    recv = send.new_empty((sum(splits), *send.shape[1:])) if comm.rank == root else None

    def issue(stream: Any) -> None:
        if _equal(splits):
            comm.gather(send, recv, root, stream=stream)
            return
        with pynccl.group():
            _send(comm, send, root, stream)
            for peer, part in enumerate(() if recv is None else recv.split(list(splits))):
                _recv(comm, part, peer, stream)

    def finish() -> Tensor:
        if recv is None:
            return _zeros(x, (*x.shape[:dim], rest, *x.shape[dim + 1 :]))
        return _from_wire(recv, x).movedim(0, dim).contiguous()

    return Exchange(issue, finish)


def all_to_all(
    x: Tensor, comm: Communicator, split_dim: int, concat_dim: int, send_splits: Splits, recv_splits: Splits
) -> Exchange:
    n = comm.size
    sizes = [x.shape[split_dim] // n] * n if send_splits is None else list(send_splits)
    parts = [_to_wire(part) for part in x.split(sizes, split_dim)]
    send = torch.cat([part.reshape(-1) for part in parts])
    shapes = [list(parts[comm.rank].shape) for _ in range(n)]
    for shape, rows in zip(shapes, recv_splits or [parts[comm.rank].shape[concat_dim]] * n, strict=True):
        shape[concat_dim] = rows
    counts = [torch.Size(shape).numel() for shape in shapes]
    recv = send.new_empty(sum(counts))
    received = recv.split(counts)

    def issue(stream: Any) -> None:
        if send_splits is None and recv_splits is None:  # on all ranks alike: sizes may look equal on one of them only
            comm.all_to_all(send, recv, stream=stream)
            return
        with pynccl.group():
            for peer, part in enumerate(send.split([part.numel() for part in parts])):
                _send(comm, part, peer, stream)
            for peer, part in enumerate(received):
                _recv(comm, part, peer, stream)

    def finish() -> Tensor:
        pieces = [_from_wire(part.view(shape), x) for part, shape in zip(received, shapes, strict=True)]
        return torch.cat(pieces, concat_dim)

    return Exchange(issue, finish)


def permute(x: Tensor, comm: Communicator, targets: Sequence[int], sources: Sequence[int]) -> Exchange:
    """x goes to every one of `targets`; the result is the sum of what comes from `sources`. Own edges stay here."""
    send = _to_wire(x)
    received = [(source, torch.empty_like(send)) for source in sources if source != comm.rank]
    loops = list(sources).count(comm.rank)

    def issue(stream: Any) -> None:
        with pynccl.group():
            for target in targets:
                if target != comm.rank:
                    _send(comm, send, target, stream)
            for source, part in received:
                _recv(comm, part, source, stream)

    def finish() -> Tensor:
        parts = [_from_wire(part, x) for _, part in received]
        parts += [x.clone(memory_format=torch.contiguous_format) for _ in range(loops)]
        if not parts:
            return _zeros(x, x.shape)
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total

    return Exchange(issue, finish)


def halo_exchange(x: Tensor, comm: Communicator, dim: int, left: int, right: int) -> Exchange:
    """The borders of the neighbours' interiors overwrite the halos of x."""
    low, inner_low, inner_high, high = _bands(x, dim, left, right)
    issue, from_left, from_right = _neighbours(comm, inner_low, inner_high, low, high)

    def finish() -> Tensor:
        y = x.clone(memory_format=torch.contiguous_format)
        for band, part in zip(_bands(y, dim, left, right)[::3], (from_left, from_right), strict=True):
            if part is not None:
                band.copy_(_from_wire(part, x))
        return y

    return Exchange(issue, finish)


def halo_reduce(x: Tensor, comm: Communicator, dim: int, left: int, right: int) -> Exchange:
    """The adjoint: halos go back to where they came from, are added there, and become 0 here."""
    low, inner_low, inner_high, high = _bands(x, dim, left, right)
    issue, from_left, from_right = _neighbours(comm, low, high, inner_low, inner_high)

    def finish() -> Tensor:
        y = x.clone(memory_format=torch.contiguous_format)
        own_low, own_inner_low, own_inner_high, own_high = _bands(y, dim, left, right)
        for part, halo, border in ((from_left, own_low, own_inner_low), (from_right, own_high, own_inner_high)):
            if part is not None:
                halo.zero_()
                border.add_(_from_wire(part, x))
        return y

    return Exchange(issue, finish)


def split(x: Tensor, comm: Communicator, dim: int, splits: Splits) -> Exchange:
    rows = [x.shape[dim] // comm.size] * comm.size if splits is None else list(splits)
    own = x.narrow(dim, sum(rows[: comm.rank]), rows[comm.rank])
    return Exchange(nothing, lambda: own.clone(memory_format=torch.contiguous_format))


def copy(x: Tensor) -> Exchange:
    return Exchange(nothing, lambda: x.clone(memory_format=torch.contiguous_format))


def at_root(x: Tensor, comm: Communicator, root: int) -> Exchange:
    return copy(x) if comm.rank == root else Exchange(nothing, lambda: _zeros(x, x.shape))


def _to_wire(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Contiguous memory of a type that NCCL has. Complex numbers get a last dimension of size 2."""
    if x.is_complex():
        x = torch.view_as_real(x.resolve_conj())
    elif x.dtype is torch.bool and dtype is None:
        x = x.view(torch.uint8)
    if x.is_neg():  # a lazy minus sign, which its memory does not have
        x = x.resolve_neg()
    return (x if dtype is None or x.dtype is dtype else x.to(dtype)).contiguous()


def _from_wire(wire: Tensor, like: Tensor) -> Tensor:
    """What `_to_wire` did, undone, in the type of `like`."""
    dtype = like.dtype
    if wire.dtype is dtype:
        return wire
    if dtype is torch.bool:
        return wire.view(torch.bool)
    if dtype.is_complex:
        return torch.view_as_complex(wire.to(dtype.to_real()))
    return wire.to(dtype)


def _zeros(x: Tensor, shape: Sequence[int]) -> Tensor:
    return x.new_zeros(tuple(shape))


def _equal(splits: Sequence[int]) -> bool:
    return all(rows == splits[0] for rows in splits)


def _send(comm: Communicator, part: Tensor, peer: int, stream: Any) -> None:
    if part.numel():
        comm.send(part, peer, stream=stream)


def _recv(comm: Communicator, part: Tensor, peer: int, stream: Any) -> None:
    if part.numel():
        comm.recv(part, peer, stream=stream)


def _bands(x: Tensor, dim: int, left: int, right: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Along dim: left halo, border that the left neighbour needs, border that the right one needs, right halo."""
    size = x.shape[dim]
    return (
        x.narrow(dim, 0, left),
        x.narrow(dim, left, right),
        x.narrow(dim, size - right - left, left),
        x.narrow(dim, size - right, right),
    )


def _neighbours(
    comm: Communicator, to_left: Tensor, to_right: Tensor, like_left: Tensor, like_right: Tensor
) -> tuple[Callable[[Any], None], Tensor | None, Tensor | None]:
    """(issue, buffer from the left, buffer from the right); None at the ends of the line."""
    sides = []
    for peer, band, like in ((comm.rank - 1, to_left, like_left), (comm.rank + 1, to_right, like_right)):
        exists = 0 <= peer < comm.size
        sides.append((peer, _to_wire(band), torch.empty_like(_to_wire(like))) if exists else None)

    def issue(stream: Any) -> None:
        with pynccl.group():
            for side in sides:
                if side is not None:
                    peer, send, recv = side
                    _send(comm, send, peer, stream)
                    _recv(comm, recv, peer, stream)

    left, right = sides
    return issue, left and left[2], right and right[2]
