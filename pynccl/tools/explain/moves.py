"""Which element of which rank goes where: a row for each way in which elements travel between ranks.

A row has the blocks in the memory of each rank before and after, and the edges (source, target) along which something
travels. From source to target goes source's block number `target`, or all of it where source has one block; it arrives
as target's block number `source`, or as all of it. Adjoints are rows of the same table. `execute` holds the moves
against what the library has written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

HALO = 1  # elements of each halo

Edges = list[tuple[int, int]]  # (source, target)
Cuts = tuple[tuple[int, ...], ...]  # for each rank, the sizes of the blocks in its memory


@dataclass(frozen=True)
class Setup:
    """Who takes part. counts: elements of each rank's block; root: also the rank that sends, of send_recv."""

    ranks: int
    counts: tuple[int, ...]
    root: int = 0
    by_counts: bool = False

    @property
    def elements(self) -> int:
        """Of a block where all are alike."""
        return self.counts[0]

    def sent(self, source: int, target: int) -> int:
        """Elements from one rank to another in an all-to-all: counts[k] to the rank that is k further on."""
        return self.counts[(target - source) % self.ranks]

    @property
    def edges(self) -> Edges:
        """The messages of permute: a ring."""
        return [(rank, (rank + 1) % self.ranks) for rank in range(self.ranks)]

    @property
    def edge(self) -> tuple[int, int]:
        """The message of send_recv: from root to the next rank."""
        return self.root, (self.root + 1) % self.ranks


class Move(NamedTuple):
    """Element `at` of rank `source` goes to place `to` of rank `target`."""

    source: int
    at: int
    target: int
    to: int


class Way(NamedTuple):
    """before, after   blocks in memory; an element that nothing moves to is 0
    edges           (source, target) of what travels
    collective      the method of Communicator; "": sends and receives, or nothing is sent
    text            what happens, in words; "": the name of the collective
    """

    before: Callable[[Setup], Cuts]
    after: Callable[[Setup], Cuts]
    edges: Callable[[Setup], Edges]
    collective: str = ""
    text: str = ""


def moves(name: str, setup: Setup) -> Iterator[Move]:
    """Every element that travels in this row of WAYS."""
    if name == "halo_exchange":
        yield from _halo_moves(setup)
    elif name == "halo_reduce":
        yield from (Move(target, to, source, at) for source, at, target, to in _halo_moves(setup))
    else:
        way = WAYS[name]
        before, after = way.before(setup), way.after(setup)
        for source, target in way.edges(setup):
            at, count = _place(before[source], target)
            to, _ = _place(after[target], source)
            yield from (Move(source, at + i, target, to + i) for i in range(count))


def _place(cuts: tuple[int, ...], peer: int) -> tuple[int, int]:
    """(first element, elements) of what is sent to or comes from a peer."""
    return (sum(cuts[:peer]), cuts[peer]) if len(cuts) > 1 else (0, cuts[0])


def _halo_moves(setup: Setup) -> Iterator[Move]:
    """The interior and the outer halos stay; each inner halo becomes the neighbour's border."""
    last, size = setup.ranks - 1, setup.elements + 2 * HALO
    for rank in range(setup.ranks):
        stays = range(0 if rank == 0 else HALO, size if rank == last else size - HALO)
        yield from (Move(rank, i, rank, i) for i in stays)
        if rank < last:
            yield from (Move(rank, size - 2 * HALO + i, rank + 1, i) for i in range(HALO))
            yield from (Move(rank + 1, HALO + i, rank, size - HALO + i) for i in range(HALO))


# ----------------------------------------------------------------------------------------------------- blocks in memory


def _whole(setup: Setup) -> Cuts:
    return ((setup.elements,),) * setup.ranks


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
    return ((HALO, setup.elements, HALO),) * setup.ranks


# ---------------------------------------------------------------------------------------------------------------- edges


def _all_pairs(setup: Setup) -> Edges:
    return [(source, target) for source in range(setup.ranks) for target in range(setup.ranks)]


def _to_root(setup: Setup) -> Edges:
    return [(rank, setup.root) for rank in range(setup.ranks)]


def _from_root(setup: Setup) -> Edges:
    return _back(_to_root(setup))


def _to_itself(setup: Setup) -> Edges:
    return [(rank, rank) for rank in range(setup.ranks)]


def _back(edges: Edges) -> Edges:
    return [(target, source) for source, target in edges]


_MESSAGES, _REVERSED = "sends and receives", "sends and receives, edges reversed"

WAYS: dict[str, Way] = {
    "all_reduce": Way(_whole, _whole, _all_pairs, "all_reduce"),
    "reduce": Way(_whole, _whole, _to_root, "reduce"),
    "broadcast": Way(_whole, _whole, _from_root, "broadcast"),
    "reduce_scatter": Way(_blocks, _own, _all_pairs, "reduce_scatter"),
    "all_gather": Way(_own, _blocks, _all_pairs, "all_gather"),
    "scatter": Way(_blocks_at_root, _own, _from_root, "scatter"),
    "gather": Way(_own, _blocks_at_root, _to_root, "gather"),
    "all_to_all": Way(_outgoing, _incoming, _all_pairs, "all_to_all"),
    "all_to_all_back": Way(_incoming, _outgoing, _all_pairs, "all_to_all"),
    "permute": Way(_whole, _whole, lambda setup: setup.edges, text=_MESSAGES),
    "permute_back": Way(_whole, _whole, lambda setup: _back(setup.edges), text=_REVERSED),
    "send_recv": Way(_whole, _whole, lambda setup: [setup.edge], text="send and recv"),
    "send_recv_back": Way(_whole, _whole, lambda setup: _back([setup.edge]), text="send and recv, the other way"),
    "halo_exchange": Way(_haloed, _haloed, _all_pairs, text="borders sent to the neighbours"),
    "halo_reduce": Way(_haloed, _haloed, _all_pairs, text="halos sent back and added"),
    "copy": Way(_whole, _whole, _to_itself, text="nothing is sent"),
    "split": Way(_blocks, _own, _to_itself, text="nothing is sent: each rank takes its own block"),
    "at_root": Way(
        _whole,
        _whole,
        lambda setup: [(setup.root, setup.root)],
        text="nothing is sent: root keeps its own, the others have 0",
    ),
}
