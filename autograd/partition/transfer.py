"""Point-to-point transfer of blocks of tensors between ranks, used by the modules between partitions.

It is a composition of slices and one all_to_all, from which all derivatives follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from pynccl import Communicator

from ..agreement import gathered
from ..arguments import storage_was_freed
from ..ops.all_to_all import all_to_all
from ..torch_internals import is_tracing, reshaped

Region = tuple[slice, ...]  # with start and stop
AxisSlices = list[list[slice]]  # of each dimension

MAX_DIMS = 16
# Supported dtypes: torch can create, copy and concatenate their tensors, and NCCL can send them or their bytes. Ranks
# exchange the index of a dtype, so append new names at the end.
_NAMES = (
    *("float64", "float32", "float16", "bfloat16", "complex64", "complex128", "int64", "int32", "int8", "uint8"),
    *("bool", "int16", "uint16", "uint32", "uint64", "complex32", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz"),
    *("float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
)
DTYPES = tuple(getattr(torch, name, None) for name in _NAMES)


class Block(NamedTuple):
    """A region of this rank's tensor, and the peer to which it is sent or from which it is received."""

    rank: int
    region: Region


def full_region(shape: Sequence[int]) -> Region:
    return tuple(slice(0, size) for size in shape)


def even_slices(size: int, parts: int) -> list[slice]:
    """Split `size` rows into `parts` consecutive slices. The first size % parts have one more row."""
    small, larger = divmod(size, parts)
    return slices([small + (i < larger) for i in range(parts)])


def slices(sizes: Sequence[int]) -> list[slice]:
    """Return consecutive slices of these sizes, starting at 0."""
    return [slice(start, stop) for start, stop in pairwise([0, *accumulate(sizes)])]


def intersection(own: Region, other: Region) -> Region:
    """Return the intersection of `own` and `other`, relative to the start of `own`. It can be empty."""
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
    """Send and receive blocks. Return the received data as one flat tensor, and views of it, one for each of `recvs`.

    sends  regions of x. Each rank can occur once in `sends`, and once in `recvs`

    Every rank of comm must call it, so that every rank has the all-to-all in its graph. So the result must depend on
    the views or on the flat tensor.
    """
    # As columns: the gradient of torch.cat for an empty 1-D tensor has no derivative of its own, so this rank would be
    # missing in the second backward pass.
    parts = {block.rank: x[block.region].reshape(-1, 1) for block in sends}
    send_splits = [parts[rank].numel() if rank in parts else 0 for rank in range(comm.size)]
    counts = {block.rank: torch.Size(shape_of(block.region)).numel() for block in recvs}
    recv_splits = [counts.get(rank, 0) for rank in range(comm.size)]
    # It includes an empty slice of x, so that the gradient of x is defined (zeros) even if nothing is sent.
    flat = torch.cat([x.reshape(-1, 1)[:0], *(parts[rank] for rank in sorted(parts))]).view(-1)
    received = all_to_all(flat, comm, send_splits=send_splits, recv_splits=recv_splits)
    lines = received.split(recv_splits)
    return received, [lines[block.rank].view(shape_of(block.region)) for block in recvs]


def assemble(received: Tensor, recvs: Sequence[Block], pieces: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    """Return a new tensor of `shape` that the pieces fill without overlap, bit for bit."""
    if any(block.region == full_region(shape) for block in recvs):
        return reshaped(received, shape)
    y = received.new_zeros(tuple(shape))
    for block, piece in zip(recvs, pieces, strict=True):
        y[block.region].copy_(piece)
    return y


@torch.compiler.disable(reason="the ranks exchange the shapes of their tensors, for which the CPU waits")
def gather_shapes(
    what: str, x: Tensor, comm: Communicator, ranks: Sequence[int]
) -> tuple[list[tuple[int, ...]], Tensor]:
    """Gather the shapes of the tensors on `ranks`, on every rank of comm. Return them, and x in the dtype of `ranks`.

    Errors are raised on all ranks, after the all-gather, so that no rank hangs."""
    if is_tracing():
        raise NotImplementedError(
            f"{what}: the ranks exchange the shapes of their tensors, which cannot be traced with fake tensors; call "
            "it outside of the tracing (torch.compile without fullgraph=True inserts a graph break)"
        )
    known = isinstance(x, Tensor) and x.layout is torch.strided and x.dtype in DTYPES and not x.is_nested
    known = known and x.dim() <= MAX_DIMS and not storage_was_freed(x)
    row = [DTYPES.index(x.dtype), x.dim(), *x.shape, *[0] * (MAX_DIMS - x.dim())] if known else [-1] * (2 + MAX_DIMS)
    rows = gathered(comm, row)
    if any(row[0] < 0 for row in rows):
        wrong = [rank for rank, row in enumerate(rows) if row[0] < 0]
        raise TypeError(
            f"{what}: ranks {wrong} did not pass a supported tensor as x (or its storage was freed); expected dense "
            f"ones of up to {MAX_DIMS} dimensions, of dtype {', '.join(_NAMES)}"
        )
    shapes = [tuple(row[2 : 2 + row[1]]) for row in rows]
    for rank, shape in enumerate(shapes):
        if rank not in ranks and torch.Size(shape).numel():
            raise ValueError(
                f"{what}: rank {rank} is not in the partition of ranks {tuple(ranks)}, but passes a tensor {shape}; "
                "pass ad.partition.zero_volume_tensor()"
            )
    dtypes = {rank: DTYPES[rows[rank][0]] for rank in ranks}
    if len(set(dtypes.values())) > 1:
        raise TypeError(f"{what}: tensors have dtypes {dtypes} (by rank), expected one dtype; convert them with x.to()")
    x = x if comm.rank in ranks else x.to(device=comm.device, dtype=dtypes[ranks[0]])
    return [shapes[rank] for rank in ranks], x
