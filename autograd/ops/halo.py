"""halo_exchange: ranks in a line, whose neighbours' borders are the halos. Notation: see ops/__init__.py."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

import pynccl
from pynccl import Communicator
from pynccl.bindings.values import attribute, shown

from ..agreement import checked_on_all_ranks
from ..arguments import as_int, check_call, check_dim
from ..collective import Call, Collective, operation
from ..wire import Prepared, RecvBuffer, Splits, added, own, recv_buffer, recv_from, send_to, to_wire

Halo = int | tuple[int, int] | Sequence[tuple[int, int]]


@operation
def halo_exchange(x: Tensor, comm: Communicator, dim: int, halo: Halo) -> Any:
    """Ranks in a line: the neighbours' borders overwrite the halos of x along `dim`.  Same shape.  See `HaloExchange`.

    halo  width of both halos, or (left, right), or a list of (left, right) of every rank, the same list on all ranks;
          the outer ones of the first and the last rank are left alone

    The interior, all but the halos, must be as wide as what the neighbours need of it. A rank on which it is not raises
    ValueError; the others know it with PYNCCL_CHECK=1 only.
    """
    check_call("halo_exchange", x, comm)
    dim = check_dim("halo_exchange", x, dim)
    widths = checked_on_all_ranks(
        comm, lambda: f"halo_exchange along {dim}, halo={halo}", lambda: check_halo(x, dim, halo, comm)
    )
    return comm, Call(HaloExchange, x, (dim, *widths))


class HaloExchange(Collective):
    """Ranks in a line; the neighbours' borders overwrite the halos of x along `dim`. The outer halos are left alone.

    borders  widths that the left neighbour and the right one need of this rank; None: right and left, as everywhere

    forward    x [.., left + interior + right, ..] -> y, same shape     halo of y_r = border of the neighbour's interior
    backward   g, same shape -> same shape                              halo_reduce(g)
    """

    name = "halo_exchange"
    schema = "int dim, int left, int right, int[]? borders=None"
    dims_at = (0,)

    @staticmethod
    def adjoint(g: Tensor, comm: Communicator, shape: torch.Size, *params: Any) -> Call:
        return Call(HaloReduce, g, params)

    @staticmethod
    def prepare(x: Tensor, comm: Communicator, dim: int, left: int, right: int, borders: Splits = None) -> Prepared:
        low, inner_low, inner_high, high = _bands(x, dim, left, right, borders)
        launch, from_left, from_right = _neighbours(comm, inner_low, inner_high, low, high)

        def result() -> Tensor:
            y = own(x)
            for band, part in zip(_bands(y, dim, left, right, borders)[::3], (from_left, from_right), strict=True):
                if part is not None:
                    band.copy_(part.result())
            return y

        return Prepared(launch, result)


class HaloReduce(Collective):
    """The halos go back to the neighbours they belong to, are added to their borders, and become 0 here.

    forward    x [.., left + interior + right, ..] -> y, same shape     border of y_r += halo of the neighbour
    backward   g, same shape -> same shape                              halo_exchange(g)
    """

    name = "halo_reduce"
    schema = "int dim, int left, int right, int[]? borders=None"
    dims_at = (0,)

    @staticmethod
    def adjoint(g: Tensor, comm: Communicator, shape: torch.Size, *params: Any) -> Call:
        return Call(HaloExchange, g, params)

    @staticmethod
    def prepare(x: Tensor, comm: Communicator, dim: int, left: int, right: int, borders: Splits = None) -> Prepared:
        low, inner_low, inner_high, high = _bands(x, dim, left, right, borders)
        launch, from_left, from_right = _neighbours(comm, low, high, inner_low, inner_high)

        def result() -> Tensor:
            y = own(x)
            own_low, own_inner_low, own_inner_high, own_high = _bands(y, dim, left, right, borders)
            for part, halo, border in ((from_left, own_low, own_inner_low), (from_right, own_high, own_inner_high)):
                if part is not None:
                    halo.zero_()
                    border.copy_(added([border, part.result()]))
            return y

        return Prepared(launch, result)


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
) -> tuple[Callable[[Any], None], RecvBuffer | None, RecvBuffer | None]:
    """(launch, what comes from the left, what comes from the right); None at the ends of the line."""
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


def check_halo(
    x: Tensor, dim: int, halo: Halo, comm: Communicator
) -> tuple[int, int] | tuple[int, int, tuple[int, int]]:
    """This rank's (left, right), and where they may differ by rank, what the neighbours have next to it."""
    halos, one = _halos(halo, comm)
    left, right = halos[comm.rank]
    to_left = halos[comm.rank - 1][1] if comm.rank else 0
    to_right = halos[comm.rank + 1][0] if comm.rank + 1 < comm.size else 0
    needed = max(left, right) if one else max(to_left, to_right)
    interior = x.shape[dim] - left - right
    if min(min(pair) for pair in halos) < 0 or interior < needed:
        raise ValueError(
            f"halo_exchange: halo is {halo} and dimension {dim} of {tuple(x.shape)} on rank {comm.rank} has "
            f"{x.shape[dim]} rows, of which {interior} are the interior; expected widths >= 0, and an interior of at "
            f"least {needed}, as wide as the halos next to it, so that a halo comes from one neighbour"
        )
    return (left, right) if one else (left, right, (to_left, to_right))


def _halos(halo: Any, comm: Communicator) -> tuple[list[tuple[int, int]], bool]:
    """(left, right) of every rank, and whether that was given once for all."""
    given = halo.tolist() if attribute(halo, "tolist") is not None else halo
    both = as_int(given)
    one = (both, both) if both is not None else _pair(given)
    if one is not None:
        return [one] * comm.size, True
    pairs = [_pair(pair) for pair in given] if isinstance(given, (list, tuple)) else [None]
    if None in pairs:
        raise TypeError(
            f"halo_exchange: halo is {shown(halo)}, expected a width, or a pair (left, right) of them, or a list of "
            "such pairs, one for each rank"
        )
    if len(pairs) != comm.size:
        raise ValueError(f"halo_exchange: halo is {halo}, expected a pair (left, right) for each of {comm.size} ranks")
    return [pair for pair in pairs if pair is not None], False


def _pair(given: Any) -> tuple[int, int] | None:
    sizes = tuple(map(as_int, given)) if isinstance(given, Iterable) else ()
    if len(sizes) != 2 or sizes[0] is None or sizes[1] is None:
        return None
    return sizes[0], sizes[1]
