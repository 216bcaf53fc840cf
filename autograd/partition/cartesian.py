"""Partition, CartesianPartition: ordered, shaped sets of ranks over which a tensor is split."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from pynccl import Communicator
from pynccl.bindings.values import integer, listed, ordered, shown

from ..arguments import as_int, check_comm


class Partition:
    """An ordered set of ranks of a communicator, with shape (len(ranks),).

    comm   the communicator; every rank of it must make the partition
    ranks  ranks of `comm` at positions 0, 1, ..; the same on every rank

    Attributes:

    shape        number of ranks along each axis
    active       whether this rank is in the partition
    position     index of this rank in `ranks`; None if inactive
    coordinates  of this rank, one per axis; None if inactive
    """

    def __init__(self, comm: Communicator, ranks: Iterable[int]) -> None:
        check_comm(type(self).__name__, comm, ranks=ranks)
        self._set(comm, integers(type(self).__name__, "ranks", ranks), None)

    def _set(self, comm: Communicator, ranks: tuple[int, ...], shape: tuple[int, ...] | None) -> None:
        valid = all(0 <= rank < comm.size for rank in ranks)
        if not ranks or not valid or len(set(ranks)) != len(ranks):
            raise ValueError(
                f"{type(self).__name__}: ranks is {ranks}, expected one or more of 0..{comm.size - 1}, each once"
            )
        self.comm = comm
        self.ranks = ranks
        self.shape = (len(ranks),) if shape is None else shape
        self._communicators: dict[frozenset[int], Communicator | None] = {}

    @property
    def size(self) -> int:
        """Number of ranks in the partition."""
        return len(self.ranks)

    @property
    def active(self) -> bool:
        """Whether this rank is in the partition."""
        return self.comm.rank in self.ranks

    @property
    def position(self) -> int | None:
        """Index of this rank in `ranks`; None if inactive."""
        return self.ranks.index(self.comm.rank) if self.active else None

    @property
    def coordinates(self) -> tuple[int, ...] | None:
        """Coordinates of this rank, one per axis; None if inactive."""
        return None if self.position is None else self.coordinates_of(self.position)

    def coordinates_of(self, position: int) -> tuple[int, ...]:
        """Return the coordinates of a position. The last axis varies fastest."""
        position = integer(position, "coordinates_of: position", 0, len(self.ranks) - 1)
        coordinates = []
        for size in reversed(self.shape):
            position, coordinate = divmod(position, size)
            coordinates.append(coordinate)
        return tuple(reversed(coordinates))

    def rank_at(self, coordinates: Sequence[int]) -> int:
        """Return the rank of `comm` at these coordinates."""
        found = integers("rank_at", "coordinates", coordinates)
        if len(found) != len(self.shape) or not all(0 <= at < size for at, size in zip(found, self.shape, strict=True)):
            raise ValueError(f"rank_at: coordinates is {found}, expected one for each axis of {self.shape}")
        position = 0
        for coordinate, size in zip(found, self.shape, strict=True):
            position = position * size + coordinate
        return self.ranks[position]

    def axes_comm(self, axes: int | Iterable[int]) -> Communicator | None:
        """Return the communicator of the ranks whose coordinates differ from this rank's in `axes` only, ordered by
        position; None on inactive ranks.

        The first call for a set of axes is a collective of all ranks of `comm`, also inactive ones. Later calls return
        the same communicator.
        """
        key = frozenset(self.check_axes("axes_comm", axes))
        if key not in self._communicators:
            color = None
            if self.coordinates is not None:
                kept = [0 if axis in key else at for axis, at in enumerate(self.coordinates)]
                color = self.ranks.index(self.rank_at(kept))
            self._communicators[key] = self.comm.split(color, self.position or 0)
        return self._communicators[key]

    def check_axes(self, what: str, axes: int | Iterable[int]) -> tuple[int, ...]:
        """Return `axes` as sorted, nonnegative numbers."""
        single = as_int(axes)
        found = integers(what, "axes", axes) if single is None else (int(single),)
        n = len(self.shape)
        if not all(-n <= axis < n for axis in found):
            raise ValueError(
                f"{what}: axes is {found}, expected {-n}..{n - 1}, axes of the partition shape {self.shape}"
            )
        return tuple(sorted({axis % n for axis in found}))

    def destroy(self) -> None:
        """Destroy the communicators that `axes_comm` made, but not `comm`. Every rank should call it."""
        while self._communicators:
            _, communicator = self._communicators.popitem()
            if communicator is not None:
                communicator.destroy()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(shape={self.shape}, ranks={self.ranks})"


class CartesianPartition(Partition):
    """Ranks arranged as a grid in C order, like the entries of a NumPy array of this shape.

    comm   the communicator; every rank of it must make the partition
    shape  number of ranks along each axis, such as (2, 2, 3)
    ranks  prod(shape) ranks of `comm`, the same on every rank; None: the first ones
    """

    def __init__(self, comm: Communicator, shape: Sequence[int], ranks: Iterable[int] | None = None) -> None:
        check_comm("CartesianPartition", comm, shape=shape)
        sizes = integers("CartesianPartition", "shape", shape)
        count = math.prod(sizes)
        if not sizes or min(sizes) <= 0:
            raise ValueError(f"CartesianPartition: shape is {sizes}, expected numbers of ranks per axis, each >= 1")
        members = integers("CartesianPartition", "ranks", range(min(count, comm.size)) if ranks is None else ranks)
        if count > comm.size:
            raise ValueError(
                f"CartesianPartition: shape {sizes} needs {count} ranks, but the communicator has {comm.size}; pass a "
                "smaller shape"
            )
        if len(members) != count:
            raise ValueError(
                f"CartesianPartition: shape {sizes} needs {count} ranks, but ranks has {len(members)}; pass {count}"
            )
        self._set(comm, members, sizes)


def check_partition(operation: str, partition: object, name: str) -> None:
    if not isinstance(partition, Partition):
        raise TypeError(
            f"{operation}: {name} is {shown(partition)}, expected a Partition, such as "
            "ad.CartesianPartition(comm, shape)"
        )


def integers(operation: str, name: str, values: Any) -> tuple[int, ...]:
    """Return `values` as a tuple of ints. ValueError if they are not integers."""
    items = (listed if name == "axes" else ordered)(values, f"{operation}: {name}", "a sequence of integers")
    found = tuple(as_int(value) for value in items)
    if None in found:
        raise ValueError(f"{operation}: {name} is {shown(items)}, expected a sequence of integers")
    return tuple(map(int, found))
