"""Blocks of tensors between ranks, point to point: what the modules between partitions are made of.

Everything here is a composition of slices and one all_to_all, so all derivatives follow from those.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from pynccl import Communicator

from ..agreement import gathered
from ..arguments import lost_its_memory
from ..ops.all_to_all import all_to_all
from ..torch_internals import is_tracing, reshaped

Region = tuple[slice, ...]  # with start and stop
Cuts = list[list[slice]]  # of each dimension

MAX_DIMS = 16
# The types that tensors between partitions may have: those of which torch can make, copy and join tensors, and NCCL
# knows them or their bytes. Ranks tell each other the position, so new names go to the end.
_NAMES = (
    *("float64", "float32", "float16", "bfloat16", "complex64", "complex128", "int64", "int32", "int8", "uint8"),
    *("bool", "int16", "uint16", "uint32", "uint64", "complex32", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz"),
    *("float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
)
DTYPES = tuple(getattr(torch, name, None) for name in _NAMES)


class Block(NamedTuple):
    """A region of this rank's tensor, and the rank it goes to or comes from."""

    rank: int
    region: Region


def whole(shape: Sequence[int]) -> Region:
    return tuple(slice(0, size) for size in shape)


def cuts(size: int, parts: int) -> list[slice]:
    """`size` rows as `parts` neighbouring slices, the first size % parts of them larger by one."""
    small, larger = divmod(size, parts)
    return slices([small + (i < larger) for i in range(parts)])


def slices(sizes: Sequence[int]) -> list[slice]:
    """Neighbouring slices of these sizes, from 0 on."""
    return [slice(start, stop) for start, stop in pairwise([0, *accumulate(sizes)])]


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
    x: Tensor, comm: Communicator, sends: Sequence[Block], recvs: Sequence[Block]
) -> tuple[Tensor, list[Tensor]]:
    """All that this rank receives in one line, and as pieces: views of it, one for each of `recvs`, in its shape.

    sends  regions of x; one rank may be named once at most, here and in recvs

    Every rank of comm must call it, so that every rank has a node of the all-to-all; a result that is not made of the
    pieces has to be made of the line.
    """
    # As columns: torch.cat gives an empty tensor of one dimension a gradient that has no derivatives of its own, and
    # then this rank would be missing in the second backward pass.
    parts = {block.rank: x[block.region].reshape(-1, 1) for block in sends}
    send_splits = [parts[rank].numel() if rank in parts else 0 for rank in range(comm.size)]
    counts = {block.rank: torch.Size(shape_of(block.region)).numel() for block in recvs}
    recv_splits = [counts.get(rank, 0) for rank in range(comm.size)]
    # x itself is part of it although nothing of it is sent: so the gradient of x is defined, as zeros
    flat = torch.cat([x.reshape(-1, 1)[:0], *(parts[rank] for rank in sorted(parts))]).view(-1)
    received = all_to_all(flat, comm, send_splits=send_splits, recv_splits=recv_splits)
    lines = received.split(recv_splits)
    return received, [lines[block.rank].view(shape_of(block.region)) for block in recvs]


def assembled(received: Tensor, recvs: Sequence[Block], pieces: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    """The tensor of `shape` that the pieces fill without overlap, bit for bit: a tensor of its own."""
    if any(block.region == whole(shape) for block in recvs):
        return reshaped(received, shape)
    y = received.new_zeros(tuple(shape))
    for block, piece in zip(recvs, pieces, strict=True):
        y[block.region].copy_(piece)
    return y


@torch.compiler.disable(reason="the ranks tell each other the shapes of their tensors, which the CPU waits for")
def describe(what: str, x: Tensor, comm: Communicator, ranks: Sequence[int]) -> tuple[list[tuple[int, ...]], Tensor]:
    """The shapes of the tensors of `ranks`, on every rank of comm; and x, which there may be empty, in their type.

    Errors are raised on every rank alike: one that raised before the all-gather would let the others wait."""
    if is_tracing():
        raise NotImplementedError(
            f"{what}: the ranks tell each other the shapes of their tensors, which cannot be traced with fake tensors; "
            "call it outside of the tracing (torch.compile without fullgraph=True runs it between its graphs)"
        )
    known = isinstance(x, Tensor) and x.layout is torch.strided and x.dtype in DTYPES and not x.is_nested
    known = known and x.dim() <= MAX_DIMS and not lost_its_memory(x)
    row = [DTYPES.index(x.dtype), x.dim(), *x.shape, *[0] * (MAX_DIMS - x.dim())] if known else [-1] * (2 + MAX_DIMS)
    rows = gathered(comm, row)
    if any(row[0] < 0 for row in rows):
        wrong = [rank for rank, row in enumerate(rows) if row[0] < 0]
        raise TypeError(
            f"{what}: what ranks {wrong} pass is no tensor, or has a type or a number of dimensions that is not known "
            f"here, or its storage was freed; expected dense tensors of {', '.join(_NAMES)}, with up to {MAX_DIMS} "
            "dimensions"
        )
    shapes = [tuple(row[2 : 2 + row[1]]) for row in rows]
    for rank, shape in enumerate(shapes):
        if rank not in ranks and torch.Size(shape).numel():
            raise ValueError(
                f"{what}: rank {rank} is not in the partition of ranks {tuple(ranks)}, but passes a tensor {shape}; "
                "expected one of volume zero"
            )
    dtypes = {rank: DTYPES[rows[rank][0]] for rank in ranks}
    if len(set(dtypes.values())) > 1:
        raise TypeError(f"{what}: tensors have types {dtypes} (by rank), expected one type")
    x = x if comm.rank in ranks else x.to(device=comm.device, dtype=dtypes[ranks[0]])
    return [shapes[rank] for rank in ranks], x
