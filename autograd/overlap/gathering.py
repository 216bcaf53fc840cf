"""All-gathers whose rows arrive in pieces: by slices, around the ring, or in bulk.

N ranks, this rank r. x [m, k]: this rank's rows; the gathered tensor is [N, m, k]. A piece is a list of blocks that one
event covers; the matmul of its blocks can start after the event. The first piece is this rank's own rows, whose matmul
hides the arrival of the next piece.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

from torch import Tensor

from .lanes import Lane, Lanes, Point
from .matmul import copy
from .workspace import Workspace


class Block(NamedTuple):
    """rows [q, n, k] of q neighboring ranks: full[ranks, at]."""

    rows: Tensor
    ranks: slice
    at: slice

    def of(self, stack: Tensor) -> Tensor:
        """Return the same rows of another tensor [N, m, ..]."""
        return stack[self.ranks, self.at]


class Piece(NamedTuple):
    """The blocks that are available after `arrived`. arrived None: available from the start"""

    arrived: Point | None
    blocks: list[Block]


class Chunking(NamedTuple):
    """How the rows of a pass are chunked; see `schedules.Schedule`."""

    method: str
    chunks: int
    aggregate: bool = False


def bounds(rows: int, chunks: int) -> list[slice]:
    """Split `rows` into at most `chunks` non-empty slices, whose sizes differ by at most one row."""
    chunks = max(1, min(chunks, rows))
    ends = [rows * j // chunks for j in range(chunks + 1)]
    return [slice(begin, end) for begin, end in itertools.pairwise(ends)]


def gather(lanes: Lanes, work: Workspace, x: Tensor, chunking: Chunking, full: Tensor | None = None) -> list[Piece]:
    """Launch the all-gather of x, and return its pieces in the order of their arrival.

    full  [N, m, k]: output for all rows, if the caller keeps them; complete when the lanes have been joined"""
    lanes.comm.wait(lanes.start)
    if chunking.method == "ring":
        return _around_the_ring(lanes, work, x, chunking, full)
    chunks = bounds(len(x), chunking.chunks)
    if len(chunks) == 1 and (full is None or not work.window):
        return _in_bulk(lanes, work, x, full)
    return _by_slices(lanes, work, x, chunks, full)


def from_window(lanes: Lanes, work: Workspace, x: Tensor, gathered: Tensor) -> Tensor:
    """Return the send buffer of an all-gather of x [m, k] into gathered [N, m, k].

    It is x, or for a window a copy of x in this rank's block: NCCL uses symmetric kernels and copy engines only if both
    buffers of a call are in windows."""
    if not work.window:
        return x
    place = gathered[lanes.nccl.rank]
    lanes.comm.run(copy, x, out=place)
    return place


def _own(lanes: Lanes, x: Tensor) -> Piece:
    rank = lanes.nccl.rank
    return Piece(None, [Block(x[None], slice(rank, rank + 1), slice(0, len(x)))])


def _others(lanes: Lanes, rows: Tensor, at: slice) -> list[Block]:
    """Return the blocks of all other ranks. rows [N, n, k]"""
    rank, size = lanes.nccl.rank, lanes.nccl.size
    ranges = (slice(0, rank), slice(rank + 1, size))
    return [Block(rows[ranks], ranks, at) for ranks in ranges if ranks.start < ranks.stop]


def _in_bulk(lanes: Lanes, work: Workspace, x: Tensor, full: Tensor | None) -> list[Piece]:
    if full is None:
        full = work.empty("gathered", (lanes.nccl.size, *x.shape), x)
    lanes.collective("all_gather", from_window(lanes, work, x, full), full)
    return [_own(lanes, x), Piece(lanes.comm.record(), _others(lanes, full, slice(0, len(x))))]


def _by_slices(lanes: Lanes, work: Workspace, x: Tensor, chunks: list[slice], full: Tensor | None) -> list[Piece]:
    """The slices need a buffer of their own: a collective writes the rows of its slice contiguously, rank by rank."""
    size = lanes.nccl.size
    arrivals = work.empty("gathered", (size * x.shape[0], *x.shape[1:]), x)
    pieces = [_own(lanes, x)]
    if full is not None:
        lanes.main.run(copy, x, out=full[lanes.nccl.rank])
    for at in chunks:
        rows = arrivals[size * at.start : size * at.stop]
        by_rank = rows.unflatten(0, (size, -1))
        lanes.collective("all_gather", from_window(lanes, work, x[at], by_rank), rows)
        blocks = _others(lanes, by_rank, at)
        pieces.append(Piece(lanes.comm.record(), blocks))
    return pieces


def keep(lane: Lane, piece: Piece, full: Tensor) -> None:
    """Copy a piece to `full`, unless it was received there."""
    for block in piece.blocks:
        into = block.of(full)
        if piece.arrived is not None and into.data_ptr() != block.rows.data_ptr():
            lane.run(copy, block.rows, out=into)


def _around_the_ring(lanes: Lanes, work: Workspace, x: Tensor, chunking: Chunking, full: Tensor | None) -> list[Piece]:
    """In step i, each rank sends to the next rank the block that it received in step i-1."""
    rank, size = lanes.nccl.rank, lanes.nccl.size
    if full is None:
        full = work.empty("gathered", (size, *x.shape), x)
    else:
        lanes.main.run(copy, x, out=full[rank])
    pieces, at = [_own(lanes, x)], slice(0, len(x))
    per_piece = 2 if chunking.aggregate else 1
    blocks: list[Block] = []
    sent = x
    for step in range(1, size):
        source = (rank - step) % size
        lanes.send_recv(sent, (rank + 1) % size, full[source], (rank - 1) % size)
        sent = full[source]
        blocks.append(Block(full[source : source + 1], slice(source, source + 1), at))
        if len(blocks) == per_piece or step == size - 1:
            pieces.append(Piece(lanes.comm.record(), _joined(blocks, full)))
            blocks = []
    return pieces


def _joined(blocks: list[Block], full: Tensor) -> list[Block]:
    """Merge blocks of neighboring ranks into one, for a larger matmul."""
    first = min(block.ranks.start for block in blocks)
    if [block.ranks.start - first for block in reversed(blocks)] != list(range(len(blocks))):
        return blocks
    ranks = slice(first, first + len(blocks))
    return [Block(full[ranks], ranks, blocks[0].at)]
