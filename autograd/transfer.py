"""Blocks of tensors between ranks, point to point: what the modules between partitions are made of.

Everything here is a composition of slices and one all_to_all, so all derivatives follow from those.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from pynccl import Communicator

from .functions import all_to_all

Region = tuple[slice, ...]  # with start and stop

MAX_DIMS = 16
_DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.complex128,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
    torch.bool,
)


class Block(NamedTuple):
    """A region of this rank's tensor, and the rank it goes to or comes from."""

    rank: int
    region: Region


def whole(shape: Sequence[int]) -> Region:
    return tuple(slice(0, size) for size in shape)


def cuts(size: int, parts: int) -> list[slice]:
    """`size` rows as `parts` neighbouring slices, the first size % parts of them larger by one."""
    small, larger = divmod(size, parts)
    starts = [i * small + min(i, larger) for i in range(parts + 1)]
    return [slice(start, stop) for start, stop in pairwise(starts)]


def within(own: Region, other: Region) -> Region:
    """The part of `own` that is also in `other`, counted from the start of `own`. Empty where they do not meet."""
    region = []
    for mine, theirs in zip(own, other, strict=True):
        start = max(mine.start, theirs.start)
        region.append(slice(start - mine.start, max(start, min(mine.stop, theirs.stop)) - mine.start))
    return tuple(region)


def shape_of(region: Region) -> tuple[int, ...]:
    return tuple(part.stop - part.start for part in region)


def transfer(
    x: Tensor, comm: Communicator, sends: Sequence[Block], recvs: Sequence[Block], shape: Sequence[int] | None
) -> Tensor:
    """A tensor of `shape` to which each received block is added in its region; 0 elsewhere.

    sends  regions of x; one rank may be named once at most, here and in recvs
    shape  None: nothing is received; the result has volume zero

    Every rank of comm must call it, so that every rank has a node of the all-to-all.
    """
    parts = {block.rank: x[block.region].reshape(-1) for block in sends}
    send_splits = [parts[rank].numel() if rank in parts else 0 for rank in range(comm.size)]
    counts = {block.rank: torch.Size(shape_of(block.region)).numel() for block in recvs}
    recv_splits = [counts.get(rank, 0) for rank in range(comm.size)]
    # x itself is part of it although nothing of it is sent: so the gradient of x is defined, as zeros
    flat = torch.cat([x.reshape(-1)[:0], *(parts[rank] for rank in sorted(parts))])
    received = all_to_all(flat, comm, send_splits=send_splits, recv_splits=recv_splits)
    pieces = received.split(recv_splits)
    if shape is None:
        return received
    if len(recvs) == 1 and recvs[0].region == whole(shape):
        return pieces[recvs[0].rank].reshape(tuple(shape))
    y = received.new_zeros(tuple(shape))
    for block in recvs:
        y[block.region].add_(pieces[block.rank].view(shape_of(block.region)))
    return y


def describe(what: str, x: Tensor, comm: Communicator, ranks: Sequence[int]) -> tuple[list[tuple[int, ...]], Tensor]:
    """The shapes of the tensors of `ranks`, on every rank of comm; and x, which there may be empty, in their type.

    Errors are raised on every rank alike: one that raised before the all-gather would let the others wait."""
    known = x.dtype in _DTYPES and x.dim() <= MAX_DIMS
    row = [_DTYPES.index(x.dtype), x.dim(), *x.shape, *[0] * (MAX_DIMS - x.dim())] if known else [-1] * (2 + MAX_DIMS)
    own = torch.tensor(row, device=comm.device)
    table = own.new_empty(comm.size, len(row))
    comm.all_gather(own, table)
    rows = table.tolist()
    if any(row[0] < 0 for row in rows):
        wrong = [rank for rank, row in enumerate(rows) if row[0] < 0]
        raise TypeError(
            f"{what}: the tensors of ranks {wrong} have a type or a number of dimensions that is not known here; "
            f"expected one of {_DTYPES}, with up to {MAX_DIMS} dimensions"
        )
    shapes = [tuple(row[2 : 2 + row[1]]) for row in rows]
    for rank, shape in enumerate(shapes):
        if rank not in ranks and torch.Size(shape).numel():
            raise ValueError(
                f"{what}: rank {rank} is not in the partition of ranks {tuple(ranks)}, but passes a tensor {shape}; "
                "expected one of volume zero"
            )
    dtypes = {rank: _DTYPES[rows[rank][0]] for rank in ranks}
    if len(set(dtypes.values())) > 1:
        raise TypeError(f"{what}: tensors have types {dtypes} (by rank), expected one type")
    x = x if comm.rank in ranks else x.to(device=own.device, dtype=dtypes[ranks[0]])
    return [shapes[rank] for rank in ranks], x
