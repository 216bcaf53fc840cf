"""Which element goes where: one function for each way in which elements travel between ranks, or stay on one.

The same table serves collectives and their adjoints, since an adjoint is made of collectives: operations.py. Whether
the moves say what the library really does is checked at each run: execute.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

HALO = 1  # elements of each halo


class Move(NamedTuple):
    """Element `at` of rank `source` goes to place `to` of rank `target`."""

    source: int
    at: int
    target: int
    to: int


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

    @property
    def starts(self) -> list[int]:
        """Where each block begins in all of them one after the other."""
        return list(accumulate(self.counts, initial=0))[: self.ranks]

    def sent(self, source: int, target: int) -> int:
        """Elements from one rank to another in an all-to-all: counts[k] to the rank that is k further on."""
        return self.counts[(target - source) % self.ranks]

    @property
    def edges(self) -> list[tuple[int, int]]:
        """(source, target) of each message of permute: a ring."""
        return [(rank, (rank + 1) % self.ranks) for rank in range(self.ranks)]

    @property
    def edge(self) -> tuple[int, int]:
        """(source, target) of the one message of send_recv: from root to its neighbour."""
        return self.root, (self.root + 1) % self.ranks


Cuts = tuple[tuple[int, ...], ...]  # for each rank, the sizes of the blocks in its memory


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


def _all_reduce(setup: Setup) -> Iterator[Move]:
    for target in range(setup.ranks):
        for source in range(setup.ranks):
            yield from (Move(source, i, target, i) for i in range(setup.elements))


def _reduce(setup: Setup) -> Iterator[Move]:
    return (move for move in _all_reduce(setup) if move.target == setup.root)


def _broadcast(setup: Setup) -> Iterator[Move]:
    return (move for move in _all_reduce(setup) if move.source == setup.root)


def _at_root(setup: Setup) -> Iterator[Move]:
    return (move for move in _reduce(setup) if move.source == setup.root)


def _reduce_scatter(setup: Setup) -> Iterator[Move]:
    for target, start in enumerate(setup.starts):
        for source in range(setup.ranks):
            yield from (Move(source, start + i, target, i) for i in range(setup.counts[target]))


def _split(setup: Setup) -> Iterator[Move]:
    return (move for move in _reduce_scatter(setup) if move.source == move.target)


def _scatter(setup: Setup) -> Iterator[Move]:
    return (move for move in _reduce_scatter(setup) if move.source == setup.root)


def _all_gather(setup: Setup) -> Iterator[Move]:
    for source, start in enumerate(setup.starts):
        for target in range(setup.ranks):
            yield from (Move(source, i, target, start + i) for i in range(setup.counts[source]))


def _gather(setup: Setup) -> Iterator[Move]:
    return (move for move in _all_gather(setup) if move.target == setup.root)


def _all_to_all(setup: Setup) -> Iterator[Move]:
    outgoing, incoming = _outgoing(setup), _incoming(setup)
    for source in range(setup.ranks):
        for target in range(setup.ranks):
            at, to = sum(outgoing[source][:target]), sum(incoming[target][:source])
            yield from (Move(source, at + i, target, to + i) for i in range(setup.sent(source, target)))


def _along(*edges: tuple[int, int], elements: int) -> Iterator[Move]:
    return (Move(source, i, target, i) for source, target in edges for i in range(elements))


def _back(setup: Setup, edges: list[tuple[int, int]]) -> Iterator[Move]:
    return _along(*((target, source) for source, target in edges), elements=setup.elements)


def _halo_exchange(setup: Setup) -> Iterator[Move]:
    last, size = setup.ranks - 1, setup.elements + 2 * HALO
    for rank in range(setup.ranks):
        stays = range(0 if rank == 0 else HALO, size if rank == last else size - HALO)
        yield from (Move(rank, i, rank, i) for i in stays)
        if rank < last:
            yield from (Move(rank, size - 2 * HALO + i, rank + 1, i) for i in range(HALO))
            yield from (Move(rank + 1, HALO + i, rank, size - HALO + i) for i in range(HALO))


def _halo_reduce(setup: Setup) -> Iterator[Move]:
    return (Move(target, to, source, at) for source, at, target, to in _halo_exchange(setup))


def _same(setup: Setup) -> Iterator[Move]:
    return (Move(rank, i, rank, i) for rank in range(setup.ranks) for i in range(setup.elements))


def _same_own(setup: Setup) -> Iterator[Move]:
    return (Move(rank, i, rank, i) for rank, count in enumerate(setup.counts) for i in range(count))


class Way(NamedTuple):
    """before, after: the blocks in memory; an element that nothing moves to is 0."""

    before: Callable[[Setup], Cuts]
    after: Callable[[Setup], Cuts]
    moves: Callable[[Setup], Iterator[Move]]


WAYS: dict[str, Way] = {
    "all_reduce": Way(_whole, _whole, _all_reduce),
    "reduce": Way(_whole, _whole, _reduce),
    "broadcast": Way(_whole, _whole, _broadcast),
    "reduce_scatter": Way(_blocks, _own, _reduce_scatter),
    "all_gather": Way(_own, _blocks, _all_gather),
    "scatter": Way(_blocks_at_root, _own, _scatter),
    "gather": Way(_own, _blocks_at_root, _gather),
    "all_to_all": Way(_outgoing, _incoming, _all_to_all),
    "all_to_all_back": Way(_incoming, _outgoing, lambda setup: (Move(*m[2:], *m[:2]) for m in _all_to_all(setup))),
    "permute": Way(_whole, _whole, lambda setup: _along(*setup.edges, elements=setup.elements)),
    "permute_back": Way(_whole, _whole, lambda setup: _back(setup, setup.edges)),
    "send_recv": Way(_whole, _whole, lambda setup: _along(setup.edge, elements=setup.elements)),
    "send_recv_back": Way(_whole, _whole, lambda setup: _back(setup, [setup.edge])),
    "halo_exchange": Way(_haloed, _haloed, _halo_exchange),
    "halo_reduce": Way(_haloed, _haloed, _halo_reduce),
    # On each rank alone, without a message:
    "copy": Way(_whole, _whole, _same),
    "scale": Way(_whole, _whole, _same),
    "scale_own": Way(_own, _own, _same_own),
    "split": Way(_blocks, _own, _split),
    "at_root": Way(_whole, _whole, _at_root),
}
LOCAL = ("copy", "scale", "scale_own", "split", "at_root")
