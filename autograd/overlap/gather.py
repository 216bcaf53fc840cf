"""All-gathers whose rows arrive in pieces: by slices, around the ring, in bulk, or without overlap.

N ranks, this rank r. x [m, k]: this rank's rows; the gathered tensor is [M, k], M = N*m. A piece is a list of blocks
that one event covers; the matmul of its blocks can start after the event. The first piece is this rank's own rows,
whose matmul hides the arrival of the next piece. Without overlap there is one piece with all rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from .lanes import Lane, Lanes, Pass, Point, Serial
from .matmul import copy


def by_rank(full: Tensor, size: int) -> Tensor:
    """Return a tensor [M, k] as [N, m, k]."""
    return full.view(size, -1, full.shape[1])


class Block(NamedTuple):
    """Rows of the tensor of all ranks, in a tensor of their own.

    data   [q, rows, ..]: the rows `at` of q neighboring ranks out of `size`. [rows, ..] if `ranks` is None: the rows
           `at` of the whole tensor"""

    data: Tensor
    at: slice
    ranks: slice | None = None
    size: int = 1

    def of(self, full: Tensor) -> Tensor:
        """Return these rows of a tensor [M, ..]."""
        if self.ranks is not None:
            return by_rank(full, self.size)[self.ranks, self.at]
        return full if self.data.shape[0] == full.shape[0] else full[self.at]


class Piece(NamedTuple):
    """The blocks that are available after `arrived`. None: without a wait, this rank's own or without overlap"""

    arrived: Point | None
    blocks: list[Block]


def bounds(rows: int, chunks: int) -> list[slice]:
    """Split `rows` into at most `chunks` non-empty slices, whose sizes differ by at most one row."""
    return blocks_of(rows, max(1, min(chunks, rows)))


def blocks_of(rows: int, count: int) -> list[slice]:
    """Split `rows` into `count` slices; some are empty if there are fewer rows."""
    ends = [rows * j // count for j in range(count + 1)]
    return [slice(begin, end) for begin, end in itertools.pairwise(ends)]


def all_gather(p: Pass, x: Tensor, full: Tensor | None = None) -> list[Piece]:
    """Launch the all-gather of x, and return its pieces in the order of their arrival.

    full  [M, k]: output for all rows, if the caller keeps them; complete after `keep` of each piece, when the lanes
          have been joined"""
    if isinstance(p, Serial):
        full, arrived = gather_whole(p, x, full)
        return [Piece(arrived, [Block(full, slice(0, full.shape[0]))])]
    ring, slices = p.method == "ring", bounds(x.shape[0], p.chunks)
    whole = len(slices) == 1 and not ring and not p.buffers.window  # one collective, which may write to `full`
    received = full
    if received is None or not (ring or whole):
        received = p.buffers.empty("gathered", (p.size * x.shape[0], x.shape[1]), x)
    p.comm.wait(p.start)
    if full is not None and not whole:
        p.main.run(copy, x, out=by_rank(full, p.size)[p.rank])
    own = Block(x[None], slice(0, x.shape[0]), slice(p.rank, p.rank + 1), p.size)
    arriving = _around_the_ring(p, x, received) if ring else _by_slices(p, x, received, slices)
    return [Piece(None, [own]), *arriving]


def gather_whole(p: Pass, x: Tensor, full: Tensor | None = None) -> tuple[Tensor, Point | None]:
    """Launch the all-gather of x in one collective, into a buffer unless there is an output. Return (full, arrived)."""
    if full is None:
        full = p.buffers.empty("gathered", (p.size * x.shape[0], x.shape[1]), x)
    p.comm.wait(p.start)
    gather_rows(p, x, full)
    return full, p.comm.record()


def gather_rows(p: Pass, x: Tensor, gathered: Tensor) -> None:
    """Launch the all-gather of x [n, k] into gathered [N*n, k].

    For a window, x is first copied there, into this rank's block: NCCL uses symmetric kernels and copy engines only if
    both buffers of a call are in windows."""
    if p.buffers.window:
        own = by_rank(gathered, p.size)[p.rank]
        p.comm.run(copy, x, out=own)
        x = own
    p.collective("all_gather", x, gathered)


def keep(lane: Lane | Serial, piece: Piece, full: Tensor) -> None:
    """Copy a piece of other ranks to `full`, unless it was received there. `all_gather` copies the own rows."""
    for block in piece.blocks:
        into = block.of(full)
        if piece.arrived is not None and into.data_ptr() != block.data.data_ptr():
            lane.run(copy, block.data, out=into)


def _by_slices(p: Lanes, x: Tensor, received: Tensor, slices: list[slice]) -> Iterator[Piece]:
    """A collective writes the rows of its slice contiguously, rank by rank."""
    others = [ranks for ranks in (slice(0, p.rank), slice(p.rank + 1, p.size)) if ranks.start < ranks.stop]
    for at in slices:
        gathered = received[p.size * at.start : p.size * at.stop]
        gather_rows(p, x[at], gathered)
        rows = by_rank(gathered, p.size)
        yield Piece(p.comm.record(), [Block(rows[ranks], at, ranks, p.size) for ranks in others])


def _around_the_ring(p: Lanes, x: Tensor, received: Tensor) -> Iterator[Piece]:
    """In step i, each rank sends to the next rank the block that it received in step i-1, first its own."""
    rows, per_piece, sent = by_rank(received, p.size), 2 if p.aggregate else 1, x
    for step in range(1, p.size, per_piece):
        sources = [(p.rank - i) % p.size for i in range(step, min(step + per_piece, p.size))]
        for source in sources:
            p.send_recv(sent, rows[source])
            sent = rows[source]
        # Neighbors, which arrive in descending order, are one block, for a larger matmul.
        first, last = sources[-1], sources[0]
        blocks = [slice(first, last + 1)] if first <= last else [slice(source, source + 1) for source in sources]
        at = slice(0, x.shape[0])
        yield Piece(p.comm.record(), [Block(rows[ranks], at, ranks, p.size) for ranks in blocks])
