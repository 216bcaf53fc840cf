"""Model of the data movement: which element of which rank goes where in an operation and in its adjoint.

Each entry of LAYOUTS has the blocks in every rank's memory before and after, and the edges (source, target) along which
data moves. Along an edge, source sends its block number `target`, or its only block; target stores it as block number
`source`, or as its only block. The adjoint's moves are the reverse. The root, if any, is rank 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

Edges = Iterable[tuple[int, int]]  # (source, target)
Blocks = tuple[tuple[int, ...], ...]  # for each rank, the sizes of the blocks in its memory


class Move(NamedTuple):
    """Element `at` of rank `source` goes to position `to` of rank `target`."""

    source: int
    at: int
    target: int
    to: int


class Layout(NamedTuple):
    """Blocks in memory before and after, and the edges along which data moves. Unwritten elements are 0.

    size           elements per block
    before, after  (ranks, size) -> blocks
    """

    size: int
    before: Callable[[int, int], Blocks]
    after: Callable[[int, int], Blocks]
    edges: Callable[[int], Edges]


def sizes(name: str, ranks: int) -> tuple[list[int], list[int]]:
    """Return the number of elements on each rank before and after."""
    layout = LAYOUTS[name]
    before, after = (list(map(sum, blocks(ranks, layout.size))) for blocks in (layout.before, layout.after))
    return before, after


def forward(name: str, ranks: int) -> list[Move]:
    """Return the moves of an operation. Elements that a rank keeps move from the rank to itself."""
    layout = LAYOUTS[name]
    if name == "halo_exchange":
        return _halo_moves(ranks, layout.size)
    before, after = layout.before(ranks, layout.size), layout.after(ranks, layout.size)
    found = []
    for source, target in layout.edges(ranks):
        at, to = _start(before[source], target), _start(after[target], source)
        found += [Move(source, at + i, target, to + i) for i in range(layout.size)]
    return found


def backward(name: str, ranks: int, replicated_output: bool, replicated_input: bool) -> list[Move]:
    """Return the moves of the adjoint: the forward moves reversed.

    replicated_output  all ranks do the same work with y: each has the full cotangent, so only local moves remain
    replicated_input   x is equal on all ranks: each rank has a partial gradient, and all ranks get the sum
    """
    moves = forward(name, ranks)
    if replicated_output:
        moves = [move for move in moves if move.source == move.target]
    inputs = range(ranks) if replicated_input else (None,)
    return [Move(m.target, m.to, m.source if rank is None else rank, m.at) for m in moves for rank in inputs]


def _start(blocks: tuple[int, ...], peer: int) -> int:
    """Return the offset of the block that is sent to or received from a peer."""
    return sum(blocks[:peer]) if len(blocks) > 1 else 0


def _halo_moves(ranks: int, interior: int) -> list[Move]:
    """Return the moves of halo_exchange: the neighbour's border moves into each inner halo, the rest stays."""
    last = ranks - 1
    found = []
    for rank in range(ranks):
        kept = range(0 if rank == 0 else 1, interior + (2 if rank == last else 1))
        found += [Move(rank, i, rank, i) for i in kept]
        if rank < last:
            found += [Move(rank, interior, rank + 1, 0), Move(rank + 1, 1, rank, interior + 1)]
    return found


# ------------------------------------------------------------------------------------------------- blocks and edges


def _one_block(ranks: int, size: int) -> Blocks:
    return ((size,),) * ranks


def _block_per_rank(ranks: int, size: int) -> Blocks:
    return ((size,) * ranks,) * ranks


def _blocks_at_root(ranks: int, size: int) -> Blocks:
    return ((size,) * ranks, *((),) * (ranks - 1))


def _with_halos(ranks: int, size: int) -> Blocks:
    return ((1, size, 1),) * ranks


def _all_pairs(ranks: int) -> Edges:
    return [(source, target) for source in range(ranks) for target in range(ranks)]


def _to_root(ranks: int) -> Edges:
    return [(rank, 0) for rank in range(ranks)]


def _from_root(ranks: int) -> Edges:
    return [(0, rank) for rank in range(ranks)]


def _local(ranks: int) -> Edges:
    return [(rank, rank) for rank in range(ranks)]


def _ring(ranks: int) -> Edges:
    return [(rank, (rank + 1) % ranks) for rank in range(ranks)]


LAYOUTS: dict[str, Layout] = {
    "all_reduce": Layout(3, _one_block, _one_block, _all_pairs),
    "reduce_scatter": Layout(1, _block_per_rank, _one_block, _all_pairs),
    "all_gather": Layout(1, _one_block, _block_per_rank, _all_pairs),
    "broadcast": Layout(2, _one_block, _one_block, _from_root),
    "reduce": Layout(2, _one_block, _one_block, _to_root),
    "scatter": Layout(1, _blocks_at_root, _one_block, _from_root),
    "gather": Layout(1, _one_block, _blocks_at_root, _to_root),
    "all_to_all": Layout(1, _block_per_rank, _block_per_rank, _all_pairs),
    "permute": Layout(2, _one_block, _one_block, _ring),
    "send_recv": Layout(2, _one_block, _one_block, lambda ranks: [(0, 1)]),
    "halo_exchange": Layout(3, _with_halos, _with_halos, _all_pairs),
    "copy": Layout(2, _one_block, _one_block, _local),
    "split": Layout(1, _block_per_rank, _one_block, _local),
}
