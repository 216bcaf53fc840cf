"""The model: which element of which rank goes where, forwards in an operation and backwards in its adjoint.

A row of WAYS has the blocks in the memory of each rank before and after, and the edges (source, target) along which
something travels. From source to target goes source's block number `target`, or all of it where source has one block;
it arrives as target's block number `source`, or as all of it. The adjoint's moves are the same ones the other way.
The root, where there is one, is rank 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

Edges = Iterable[tuple[int, int]]  # (source, target)
Cuts = tuple[tuple[int, ...], ...]  # for each rank, the sizes of the blocks in its memory


class Move(NamedTuple):
    """Element `at` of rank `source` goes to place `to` of rank `target`."""

    source: int
    at: int
    target: int
    to: int


class Way(NamedTuple):
    """Blocks in memory before and after (what nothing moves to is 0), and the edges along which something travels.

    size          elements of a block
    before, after (ranks, size) -> blocks
    """

    size: int
    before: Callable[[int, int], Cuts]
    after: Callable[[int, int], Cuts]
    edges: Callable[[int], Edges]


def sizes(name: str, ranks: int) -> tuple[list[int], list[int]]:
    """Elements of each rank before and after."""
    way = WAYS[name]
    before, after = (list(map(sum, cut(ranks, way.size))) for cut in (way.before, way.after))
    return before, after


def forward(name: str, ranks: int) -> list[Move]:
    """Every element that travels in this row of WAYS; what a rank keeps moves from itself to itself."""
    way = WAYS[name]
    if name == "halo_exchange":
        return _halo_moves(ranks, way.size)
    before, after = way.before(ranks, way.size), way.after(ranks, way.size)
    found = []
    for source, target in way.edges(ranks):
        at, to = _start(before[source], target), _start(after[target], source)
        found += [Move(source, at + i, target, to + i) for i in range(way.size)]
    return found


def backward(name: str, ranks: int, one_output: bool, one_input: bool) -> list[Move]:
    """The moves of the adjoint: those of the forward, the other way.

    one_output  all ranks go on alike with y: what stays on its rank is the whole cotangent, and nothing else moves
    one_input   x is one value, equal on all ranks: each has a part of its gradient, and all get the sum
    """
    there = forward(name, ranks)
    if one_output:
        there = [move for move in there if move.source == move.target]
    inputs = range(ranks) if one_input else (None,)
    return [Move(m.target, m.to, m.source if rank is None else rank, m.at) for m in there for rank in inputs]


def _start(cuts: tuple[int, ...], peer: int) -> int:
    """The first element of what is sent to or comes from a peer."""
    return sum(cuts[:peer]) if len(cuts) > 1 else 0


def _halo_moves(ranks: int, interior: int) -> list[Move]:
    """The interior and the outer halos stay; each inner halo becomes the neighbour's border."""
    last = ranks - 1
    found = []
    for rank in range(ranks):
        stays = range(0 if rank == 0 else 1, interior + (2 if rank == last else 1))
        found += [Move(rank, i, rank, i) for i in stays]
        if rank < last:
            found += [Move(rank, interior, rank + 1, 0), Move(rank + 1, 1, rank, interior + 1)]
    return found


# ------------------------------------------------------------------------------------------------- blocks and edges


def _own(ranks: int, size: int) -> Cuts:
    return ((size,),) * ranks


def _blocks(ranks: int, size: int) -> Cuts:
    return ((size,) * ranks,) * ranks


def _blocks_at_root(ranks: int, size: int) -> Cuts:
    return ((size,) * ranks, *((),) * (ranks - 1))


def _haloed(ranks: int, size: int) -> Cuts:
    return ((1, size, 1),) * ranks


def _all_pairs(ranks: int) -> Edges:
    return [(source, target) for source in range(ranks) for target in range(ranks)]


def _to_root(ranks: int) -> Edges:
    return [(rank, 0) for rank in range(ranks)]


def _from_root(ranks: int) -> Edges:
    return [(0, rank) for rank in range(ranks)]


def _to_itself(ranks: int) -> Edges:
    return [(rank, rank) for rank in range(ranks)]


def _around(ranks: int) -> Edges:
    return [(rank, (rank + 1) % ranks) for rank in range(ranks)]


WAYS: dict[str, Way] = {
    "all_reduce": Way(3, _own, _own, _all_pairs),
    "reduce_scatter": Way(1, _blocks, _own, _all_pairs),
    "all_gather": Way(1, _own, _blocks, _all_pairs),
    "broadcast": Way(2, _own, _own, _from_root),
    "reduce": Way(2, _own, _own, _to_root),
    "scatter": Way(1, _blocks_at_root, _own, _from_root),
    "gather": Way(1, _own, _blocks_at_root, _to_root),
    "all_to_all": Way(1, _blocks, _blocks, _all_pairs),
    "permute": Way(2, _own, _own, _around),
    "send_recv": Way(2, _own, _own, lambda ranks: [(0, 1)]),
    "halo_exchange": Way(3, _haloed, _haloed, _all_pairs),
    "copy": Way(2, _own, _own, _to_itself),
    "split": Way(1, _blocks, _own, _to_itself),
}
