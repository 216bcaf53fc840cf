"""halo_exchange: fill halos with the borders of the neighbouring ranks. Notation: see ops/__init__.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import pynccl
from pynccl import Communicator
from pynccl.bindings.values import shown

from ..agreement import check_on_all_ranks
from ..arguments import as_int, as_list, check_call, check_dim
from ..collective import Collective, CollectiveCall, operation
from ..wire import Prepared, RecvBuffer, contiguous_copy, recv_buffer, recv_from, send_to, sum_tensors, to_wire

Halo = int | tuple[int, int] | Sequence[tuple[int, int]]


@operation
def halo_exchange(x: Tensor, comm: Communicator, dim: int, halo: Halo) -> Any:
    """Overwrite the halos of x along `dim` with the adjacent rows of the neighbouring ranks r - 1 and r + 1.

    forward    x [.., left + interior + right, ..] -> y, same shape     halo of y_r = border of the neighbour's interior
    backward   g, same shape -> same shape      the gradient of each halo is added at the neighbour that it came from

    x     this rank's block with its halos
    comm  communicator of the ranks that take part
    dim   dimension along which the ranks hold consecutive blocks
    halo  width of both halos, or (left, right), or a list of (left, right) for every rank, the same list on all ranks

    There is no grad=: the ranks' outputs differ, so the backward pass is always the exact adjoint (as grad="sum").

    The left halo of the first rank and the right halo of the last rank keep their values.

    ValueError if the interior (x without its halos) is narrower than the adjacent halos of the neighbours. Only that
    rank raises; with PYNCCL_CHECK=1 every rank does. Every rank must call it and run its backward pass. Notation:
    help(ad.ops).
    """
    check_call("halo_exchange", x, comm)
    dim = check_dim("halo_exchange", x, dim)
    widths = check_on_all_ranks(
        comm, lambda: f"halo_exchange along {dim}, halo={halo}", lambda: check_halo(x, dim, halo, comm)
    )
    return comm, CollectiveCall(HaloExchange, x, (dim, *widths))


class HaloExchange(Collective):
    """Overwrite the halos of x along `dim` with the neighbours' borders. The Function behind `halo_exchange`.

    borders  widths that the left and the right neighbour need of this rank: (right, left) for equal halos on all ranks

    forward    x [.., left + interior + right, ..] -> y, same shape     halo of y_r = border of the neighbour's interior
    backward   g, same shape -> same shape                              halo_reduce(g)
    """

    name = "halo_exchange"
    schema = "int dim, int left, int right, int[] borders"
    dim_indices = (0,)

    @staticmethod
    def adjoint(g: Tensor, comm: Communicator, shape: torch.Size, *params: Any) -> CollectiveCall:
        return CollectiveCall(HaloReduce, g, params)

    @staticmethod
    def prepare(x: Tensor, comm: Communicator, dim: int, left: int, right: int, borders: Sequence[int]) -> Prepared:
        low, inner_low, inner_high, high = _bands(x, dim, left, right, borders)
        launch, from_left, from_right = _neighbours(comm, inner_low, inner_high, low, high)

        def result() -> Tensor:
            y = contiguous_copy(x)
            for band, part in zip(_bands(y, dim, left, right, borders)[::3], (from_left, from_right), strict=True):
                if part is not None:
                    band.copy_(part.result())
            return y

        return Prepared(launch, result)


class HaloReduce(Collective):
    """Add each halo to the neighbour's border that it came from, and zero it here: the adjoint of `HaloExchange`.

    forward    x [.., left + interior + right, ..] -> y, same shape     border of y_r += halo of the neighbour
    backward   g, same shape -> same shape                              halo_exchange(g)
    """

    name = "halo_reduce"
    schema = "int dim, int left, int right, int[] borders"
    dim_indices = (0,)

    @staticmethod
    def adjoint(g: Tensor, comm: Communicator, shape: torch.Size, *params: Any) -> CollectiveCall:
        return CollectiveCall(HaloExchange, g, params)

    @staticmethod
    def prepare(x: Tensor, comm: Communicator, dim: int, left: int, right: int, borders: Sequence[int]) -> Prepared:
        low, inner_low, inner_high, high = _bands(x, dim, left, right, borders)
        launch, from_left, from_right = _neighbours(comm, low, high, inner_low, inner_high)

        def result() -> Tensor:
            y = contiguous_copy(x)
            own_low, own_inner_low, own_inner_high, own_high = _bands(y, dim, left, right, borders)
            for part, halo, border in ((from_left, own_low, own_inner_low), (from_right, own_high, own_inner_high)):
                if part is not None:
                    halo.zero_()
                    border.copy_(sum_tensors([border, part.result()]))
            return y

        return Prepared(launch, result)


def _bands(x: Tensor, dim: int, left: int, right: int, borders: Sequence[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return views along dim: left halo, border for the left neighbour, border for the right neighbour, right halo."""
    size = x.shape[dim]
    to_left, to_right = borders
    return (
        x.narrow(dim, 0, left),
        x.narrow(dim, left, to_left),
        x.narrow(dim, size - right - to_right, to_right),
        x.narrow(dim, size - right, right),
    )


def _neighbours(
    comm: Communicator, to_left: Tensor, to_right: Tensor, like_left: Tensor, like_right: Tensor
) -> tuple[Callable[[Any], None], RecvBuffer | None, RecvBuffer | None]:
    """Return (launch, buffer from the left, buffer from the right); a buffer is None where there is no neighbour."""
    sides = []
    for peer, band, like in ((comm.rank - 1, to_left, like_left), (comm.rank + 1, to_right, like_right)):
        exists = 0 <= peer < comm.size
        sides.append((peer, to_wire(band), recv_buffer(like, like.shape)) if exists else None)

    def launch(stream: Any) -> None:
        with pynccl.group():
            for side in sides:
                if side is not None:
                    peer, send, (recv, _) = side
                    send_to(comm, send, peer, stream)
                    recv_from(comm, recv, peer, stream)

    left, right = sides
    return launch, left and left[2], right and right[2]


def check_halo(x: Tensor, dim: int, halo: Halo, comm: Communicator) -> tuple[int, int, tuple[int, int]]:
    """Return this rank's (left, right), and the widths that its neighbours need."""
    halos, equal = _halos(halo, comm)
    left, right = halos[comm.rank]
    to_left = halos[comm.rank - 1][1] if comm.rank else 0
    to_right = halos[comm.rank + 1][0] if comm.rank + 1 < comm.size else 0
    needed = max(left, right) if equal else max(to_left, to_right)
    if min(min(pair) for pair in halos) < 0:
        raise ValueError(f"halo_exchange: halo is {shown(halo)}, expected widths >= 0")
    if x.shape[dim] < left + right + needed:
        raise ValueError(
            f"halo_exchange: halos {(left, right)} need size {left + right + needed} along dim {dim} (the interior "
            f"must be as wide as the adjacent halos, {needed}), but x has {x.shape[dim]} on rank {comm.rank}; pass a "
            "narrower halo, or use fewer ranks"
        )
    return left, right, (right, left) if equal else (to_left, to_right)


def _halos(halo: Any, comm: Communicator) -> tuple[list[tuple[int, int]], bool]:
    """Return (left, right) of every rank, and whether one pair was given for all ranks."""
    both = as_int(halo)
    widths = None if both is not None else as_list(halo)
    common = (both, both) if both is not None else _pair(widths)
    if common is not None:
        return [common] * comm.size, True
    pairs = [_pair(pair) for pair in widths] if widths is not None else [None]
    if None in pairs:
        raise TypeError(
            f"halo_exchange: halo is {shown(halo)}, expected a width, a pair of widths (left, right), or a list with "
            "one pair for each rank"
        )
    if len(pairs) != comm.size:
        raise ValueError(f"halo_exchange: halo is {shown(halo)}, expected one pair for each of {comm.size} ranks")
    return [pair for pair in pairs if pair is not None], False


def _pair(value: Any) -> tuple[int, int] | None:
    sizes = tuple(map(as_int, as_list(value) or ()))
    if len(sizes) != 2 or sizes[0] is None or sizes[1] is None:
        return None
    return sizes[0], sizes[1]
