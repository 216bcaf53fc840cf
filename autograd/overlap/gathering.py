"""Rows of all ranks, as they arrive: by slices, around the ring, or all at once.

N ranks, this rank r. x [m, k] are this rank's rows; the whole is [N, m, k]. A piece is what one event announces: the
matmul of its blocks can begin then. The first piece are this rank's own rows, which hide the arrival of the next.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

from torch import Tensor

from .lanes import Lane, Lanes, Point
from .matmul import copy
from .workspace import Workspace


class Block(NamedTuple):
    """rows [q, n, k] of q neighbouring ranks: whole[ranks, at]."""

    rows: Tensor
    ranks: slice
    at: slice

    def of(self, stack: Tensor) -> Tensor:
        """The same rows of another tensor [N, m, ..]."""
        return stack[self.ranks, self.at]


class Piece(NamedTuple):
    """What is there after `arrived`; None: from the start."""

    arrived: Point | None
    blocks: list[Block]


class Cut(NamedTuple):
    """How a pass is cut: see `trials.Way`."""

    method: str
    chunks: int
    aggregate: bool = False


def bounds(rows: int, chunks: int) -> list[slice]:
    """`rows` cut into at most `chunks` slices, none of them empty; sizes differ by one row at most."""
    chunks = max(1, min(chunks, rows))
    ends = [rows * j // chunks for j in range(chunks + 1)]
    return [slice(begin, end) for begin, end in itertools.pairwise(ends)]


def gather(lanes: Lanes, work: Workspace, x: Tensor, cut: Cut, whole: Tensor | None = None) -> list[Piece]:
    """Launch the all-gather of x; the pieces in the order of their arrival.

    whole  [N, m, k], where all rows are wanted in the end, besides; they are there when the lanes have been joined"""
    lanes.comm.wait(lanes.begun)
    if cut.method == "ring":
        return _around_the_ring(lanes, work, x, cut, whole)
    chunks = bounds(len(x), cut.chunks)
    if len(chunks) == 1 and (whole is None or not work.window):
        return _at_once(lanes, work, x, whole)
    return _by_slices(lanes, work, x, chunks, whole)


def from_window(lanes: Lanes, work: Workspace, x: Tensor, gathered: Tensor) -> Tensor:
    """What an all-gather of x [m, k] into gathered [N, m, k] is to send: x; of a window x copied to its place there.
    NCCL's symmetric kernels and copy engines take a call only if both of its buffers are in windows."""
    if not work.window:
        return x
    place = gathered[lanes.nccl.rank]
    lanes.comm.run(copy, x, out=place)
    return place


def _own(lanes: Lanes, x: Tensor) -> Piece:
    rank = lanes.nccl.rank
    return Piece(None, [Block(x[None], slice(rank, rank + 1), slice(0, len(x)))])


def _others(lanes: Lanes, rows: Tensor, at: slice) -> list[Block]:
    """Blocks of all ranks but this one. rows [N, n, k]"""
    rank, size = lanes.nccl.rank, lanes.nccl.size
    ranges = (slice(0, rank), slice(rank + 1, size))
    return [Block(rows[ranks], ranks, at) for ranks in ranges if ranks.start < ranks.stop]


def _at_once(lanes: Lanes, work: Workspace, x: Tensor, whole: Tensor | None) -> list[Piece]:
    if whole is None:
        whole = work.empty("gathered", (lanes.nccl.size, *x.shape), x)
    lanes.collective("all_gather", from_window(lanes, work, x, whole), whole)
    return [_own(lanes, x), Piece(lanes.comm.record(), _others(lanes, whole, slice(0, len(x))))]


def _by_slices(lanes: Lanes, work: Workspace, x: Tensor, chunks: list[slice], whole: Tensor | None) -> list[Piece]:
    """A collective delivers the rows of its slice rank after rank; so the slices lie apart from the whole."""
    size = lanes.nccl.size
    arrivals = work.empty("gathered", (size * x.shape[0], *x.shape[1:]), x)
    pieces = [_own(lanes, x)]
    if whole is not None:
        lanes.main.run(copy, x, out=whole[lanes.nccl.rank])
    for at in chunks:
        rows = arrivals[size * at.start : size * at.stop]
        by_rank = rows.unflatten(0, (size, -1))
        lanes.collective("all_gather", from_window(lanes, work, x[at], by_rank), rows)
        blocks = _others(lanes, by_rank, at)
        pieces.append(Piece(lanes.comm.record(), blocks))
    return pieces


def keep(lane: Lane, piece: Piece, whole: Tensor) -> None:
    """Write what arrived into the whole, unless it arrived there."""
    for block in piece.blocks:
        into = block.of(whole)
        if piece.arrived is not None and into.data_ptr() != block.rows.data_ptr():
            lane.run(copy, block.rows, out=into)


def _around_the_ring(lanes: Lanes, work: Workspace, x: Tensor, cut: Cut, whole: Tensor | None) -> list[Piece]:
    """Step i passes on to the next rank what step i-1 brought from the one before."""
    rank, size = lanes.nccl.rank, lanes.nccl.size
    if whole is None:
        whole = work.empty("gathered", (size, *x.shape), x)
    else:
        lanes.main.run(copy, x, out=whole[rank])
    pieces, at = [_own(lanes, x)], slice(0, len(x))
    together = 2 if cut.aggregate else 1
    blocks: list[Block] = []
    passed = x
    for step in range(1, size):
        source = (rank - step) % size
        lanes.send_recv(passed, (rank + 1) % size, whole[source], (rank - 1) % size)
        passed = whole[source]
        blocks.append(Block(whole[source : source + 1], slice(source, source + 1), at))
        if len(blocks) == together or step == size - 1:
            pieces.append(Piece(lanes.comm.record(), _joined(blocks, whole)))
            blocks = []
    return pieces


def _joined(blocks: list[Block], whole: Tensor) -> list[Block]:
    """Blocks of neighbouring ranks as one, for a larger matmul."""
    first = min(block.ranks.start for block in blocks)
    if [block.ranks.start - first for block in reversed(blocks)] != list(range(len(blocks))):
        return blocks
    ranks = slice(first, first + len(blocks))
    return [Block(whole[ranks], ranks, blocks[0].at)]
