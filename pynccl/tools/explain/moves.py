"""The model: which element of which rank goes where, forwards in an operation and backwards in its adjoint.

A row of WAYS has the blocks in the memory of each rank before and after, and the edges (source, target) along which
something travels. From source to target goes source's block number `target`, or all of it where source has one block;
it arrives as target's block number `source`, or as all of it. The adjoint's moves are the same ones the other way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

HALO = 1  # elements of each halo

Edges = Iterable[tuple[int, int]]  # (source, target)
Cuts = tuple[tuple[int, ...], ...]  # for each rank, the sizes of the blocks in its memory


@dataclass(frozen=True)
class Setup:
    """Who takes part. counts: elements of each rank's block; root: also the rank that sends, of send_recv."""

    ranks: int
    counts: tuple[int, ...]
    root: int = 0

    def sent(self, source: int, target: int) -> int:
        """Elements from one rank to another in an all-to-all: counts[k] to the rank that is k further on."""
        return self.counts[(target - source) % self.ranks]

    @property
    def uneven(self) -> bool:
        return len(set(self.counts)) > 1

    @property
    def target(self) -> int:
        """The receiver of send_recv."""
        return (self.root + 1) % self.ranks


class Move(NamedTuple):
    """Element `at` of rank `source` goes to place `to` of rank `target`."""

    source: int
    at: int
    target: int
    to: int


class Way(NamedTuple):
    """Blocks in memory before and after (what nothing moves to is 0), and the edges along which something travels."""

    before: Callable[[Setup], Cuts]
    after: Callable[[Setup], Cuts]
    edges: Callable[[Setup], Edges]


def forward(name: str, setup: Setup) -> list[Move]:
    """Every element that travels in this row of WAYS."""
    if name == "halo_exchange":
        return _halo_moves(setup)
    way = WAYS[name]
    before, after = way.before(setup), way.after(setup)
    found = []
    for source, target in way.edges(setup):
        at, count = _place(before[source], target)
        to, _ = _place(after[target], source)
        found += [Move(source, at + i, target, to + i) for i in range(count)]
    return found


def backward(name: str, setup: Setup, one_output: bool, one_input: bool) -> list[Move]:
    """The moves of the adjoint: those of the forward, the other way.

    one_output  all ranks go on alike with y: what stays on its rank is the whole cotangent, and nothing else moves
    one_input   x is one value, equal on all ranks: each has a part of its gradient, and all get the sum
    """
    there = forward(name, setup)
    if one_output:
        there = [move for move in there if move.source == move.target]
    inputs = range(setup.ranks) if one_input else (None,)
    return [Move(m.target, m.to, m.source if rank is None else rank, m.at) for m in there for rank in inputs]


def _place(cuts: tuple[int, ...], peer: int) -> tuple[int, int]:
    """(first element, elements) of what is sent to or comes from a peer."""
    return (sum(cuts[:peer]), cuts[peer]) if len(cuts) > 1 else (0, cuts[0])


def _halo_moves(setup: Setup) -> list[Move]:
    """The interior and the outer halos stay; each inner halo becomes the neighbour's border."""
    last, size = setup.ranks - 1, setup.counts[0] + 2 * HALO
    found = []
    for rank in range(setup.ranks):
        stays = range(0 if rank == 0 else HALO, size if rank == last else size - HALO)
        found += [Move(rank, i, rank, i) for i in stays]
        if rank < last:
            found += [Move(rank, size - 2 * HALO + i, rank + 1, i) for i in range(HALO)]
            found += [Move(rank + 1, HALO + i, rank, size - HALO + i) for i in range(HALO)]
    return found


# ------------------------------------------------------------------------------------------------- blocks and edges


def _own(setup: Setup) -> Cuts:
    return tuple((count,) for count in setup.counts)


def _blocks(setup: Setup) -> Cuts:
    return (setup.counts,) * setup.ranks


def _blocks_at_root(setup: Setup) -> Cuts:
    return tuple(setup.counts if rank == setup.root else () for rank in range(setup.ranks))


def _outgoing(setup: Setup) -> Cuts:
    ranks = range(setup.ranks)
    return tuple(tuple(setup.sent(source, target) for target in ranks) for source in ranks)


def _incoming(setup: Setup) -> Cuts:
    ranks = range(setup.ranks)
    return tuple(tuple(setup.sent(source, target) for source in ranks) for target in ranks)


def _haloed(setup: Setup) -> Cuts:
    return ((HALO, setup.counts[0], HALO),) * setup.ranks


def _all_pairs(setup: Setup) -> Edges:
    return [(source, target) for source in range(setup.ranks) for target in range(setup.ranks)]


def _to_root(setup: Setup) -> Edges:
    return [(rank, setup.root) for rank in range(setup.ranks)]


def _from_root(setup: Setup) -> Edges:
    return [(setup.root, rank) for rank in range(setup.ranks)]


def _to_itself(setup: Setup) -> Edges:
    return [(rank, rank) for rank in range(setup.ranks)]


def _around(setup: Setup) -> Edges:
    return [(rank, (rank + 1) % setup.ranks) for rank in range(setup.ranks)]


WAYS: dict[str, Way] = {
    "all_reduce": Way(_own, _own, _all_pairs),
    "reduce_scatter": Way(_blocks, _own, _all_pairs),
    "all_gather": Way(_own, _blocks, _all_pairs),
    "broadcast": Way(_own, _own, _from_root),
    "reduce": Way(_own, _own, _to_root),
    "scatter": Way(_blocks_at_root, _own, _from_root),
    "gather": Way(_own, _blocks_at_root, _to_root),
    "all_to_all": Way(_outgoing, _incoming, _all_pairs),
    "permute": Way(_own, _own, _around),
    "send_recv": Way(_own, _own, lambda setup: [(setup.root, setup.target)]),
    "halo_exchange": Way(_haloed, _haloed, _all_pairs),
    "copy": Way(_own, _own, _to_itself),
    "split": Way(_blocks, _own, _to_itself),
}
