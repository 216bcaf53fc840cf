"""Partitions: ordered, shaped sets of ranks over which tensors are cut; sums, copies and cuts between them.

A CartesianPartition gives 12 ranks the shape (2, 2, 3), say; position p of the partition has the coordinates of p in C
order. Ranks of the communicator that are not in a partition are inactive: for them, a tensor on it is one of volume
zero (`zero_volume_tensor`). Every rank of the communicator, inactive or not, makes and calls partitions and the modules
here, in the same order, and enters the backward pass (see functions.py; pass outputs that it does not use to `anchor`).

After DistDL's layers of the same names. The convention of gradient is "sum": the true adjoint.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from pynccl import Communicator

from .functions import all_reduce
from .transfer import Block, Region, cuts, describe, shape_of, transfer, whole, within


def zero_volume_tensor(dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
    """What an inactive rank passes, and gets: no elements, shape (0,)."""
    return torch.empty(0, dtype=dtype, device=device)


class Partition:
    """An ordered set of ranks of a communicator, as a line: shape (len(ranks),).

    ranks        the ranks of `comm` at positions 0, 1, ..; the same list on every rank
    shape        ranks per axis
    active       whether this rank is in it
    position     this rank's, in `ranks`; None if inactive
    coordinates  this rank's, one per axis; None if inactive
    """

    def __init__(self, comm: Communicator, ranks: Iterable[int]) -> None:
        self._set(comm, tuple(ranks), None)

    def _set(self, comm: Communicator, ranks: tuple[int, ...], shape: tuple[int, ...] | None) -> None:
        valid = all(isinstance(rank, int) and 0 <= rank < comm.size for rank in ranks)
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
        return len(self.ranks)

    @property
    def active(self) -> bool:
        return self.comm.rank in self.ranks

    @property
    def position(self) -> int | None:
        return self.ranks.index(self.comm.rank) if self.active else None

    @property
    def coordinates(self) -> tuple[int, ...] | None:
        return None if self.position is None else self.coordinates_of(self.position)

    def coordinates_of(self, position: int) -> tuple[int, ...]:
        """The coordinates of a position: the last axis varies fastest."""
        coordinates = []
        for size in reversed(self.shape):
            position, coordinate = divmod(position, size)
            coordinates.append(coordinate)
        return tuple(reversed(coordinates))

    def rank_at(self, coordinates: Sequence[int]) -> int:
        """The rank in `comm` of the position with these coordinates."""
        position = 0
        for coordinate, size in zip(coordinates, self.shape, strict=True):
            position = position * size + coordinate
        return self.ranks[position]

    def axes_comm(self, axes: int | Iterable[int]) -> Communicator | None:
        """The communicator of the ranks whose coordinates differ from this rank's in `axes` only, ordered by position.

        None on inactive ranks. The first call for a set of axes is a collective of every rank of `comm`, inactive ones
        too; later ones return the same communicator.
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
        """`axes` as numbers >= 0, in order."""
        given = (axes,) if isinstance(axes, int) else tuple(axes)
        n = len(self.shape)
        if not all(isinstance(axis, int) and -n <= axis < n for axis in given):
            raise ValueError(f"{what}: axes is {given}, expected axes of the partition's shape {self.shape}")
        return tuple(sorted({axis % n for axis in given}))

    def destroy(self) -> None:
        """Destroy the communicators made here, not `comm`. Every rank should call it."""
        while self._communicators:
            _, communicator = self._communicators.popitem()
            if communicator is not None:
                communicator.destroy()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(shape={self.shape}, ranks={self.ranks})"


class CartesianPartition(Partition):
    """Ranks as a grid in C order, as NumPy lays out an array of this shape.

    shape  ranks per axis, e.g. (2, 2, 3)
    ranks  of `comm`, prod(shape) of them; None: the first ones
    """

    def __init__(self, comm: Communicator, shape: Sequence[int], ranks: Iterable[int] | None = None) -> None:
        sizes = tuple(shape)
        count = math.prod(sizes)
        if not sizes or not all(isinstance(size, int) and size > 0 for size in sizes):
            raise ValueError(f"CartesianPartition: shape is {sizes}, expected ranks per axis, each >= 1")
        members = tuple(range(count) if ranks is None else ranks)
        if len(members) != count or count > comm.size:
            raise ValueError(
                f"CartesianPartition: shape {sizes} is of {count} ranks, given {len(members)} of a communicator of "
                f"{comm.size}"
            )
        self._set(comm, members, sizes)


class AllSumReduce(torch.nn.Module):
    """Sums subtensors over the ranks that differ in `axes_reduce` only, on each of them.

    forward    x [..] -> y [..]     y = sum of x over those ranks
    backward   g [..] -> [..]       the same

    On (2, 2, 3) ranks with axes_reduce=(1, 2), each y is the sum of 6 subtensors. Without axes: a clone. An inactive
    rank passes a tensor of volume zero and gets a clone of it.
    """

    def __init__(self, partition: Partition, axes_reduce: int | Iterable[int]) -> None:
        super().__init__()
        self.partition = partition
        self.axes_reduce = partition.check_axes("AllSumReduce", axes_reduce)
        self.comm = partition.axes_comm(self.axes_reduce) if self.axes_reduce else None

    def forward(self, x: Tensor) -> Tensor:
        if not self.partition.active and x.numel():
            raise ValueError(
                f"AllSumReduce: rank {self.partition.comm.rank} is not in {self.partition}, but passes a tensor "
                f"{tuple(x.shape)}; expected one of volume zero"
            )
        return x.clone() if self.comm is None else all_reduce(x, self.comm, grad="sum")

    def extra_repr(self) -> str:
        return f"{self.partition}, axes_reduce={self.axes_reduce}"


class _Between(torch.nn.Module):
    """A movement of data from partition P_x to partition P_y of the same communicator.

    It is point to point: every rank sends to each of its partners. Shapes and type are told to all ranks at every call,
    by an all-gather that the CPU waits for."""

    def __init__(self, P_x: Partition, P_y: Partition) -> None:
        super().__init__()
        if P_x.comm is not P_y.comm:
            raise ValueError(f"{type(self).__name__}: {P_x} and {P_y} are over different communicators, expected one")
        self.P_x, self.P_y = P_x, P_y
        self.comm = P_x.comm

    def extra_repr(self) -> str:
        return f"{self.P_x} -> {self.P_y}"

    def _shapes(self, x: Tensor) -> tuple[list[tuple[int, ...]], Tensor]:
        """The shape of x at each position of P_x; and x, in the type of the active ranks."""
        return describe(type(self).__name__, x, self.comm, self.P_x.ranks)


class Broadcast(_Between):
    """Copies subtensors to all the ranks that NumPy's broadcasting of P_x.shape to P_y.shape gives them.

    forward    x [..] on P_x -> y [..] on P_y     y at c = x at (c, with 0 along the axes in which P_x has 1 rank)
    backward   g [..] on P_y -> [..] on P_x       sum of g over the copies: SumReduce(P_y, P_x)

    A rank that is not in P_y gets a tensor of volume zero.
    """

    def __init__(self, P_x: Partition, P_y: Partition) -> None:
        super().__init__(P_x, P_y)
        self._origins = _broadcast_origins("Broadcast", P_x, P_y)

    def forward(self, x: Tensor) -> Tensor:
        shapes, x = self._shapes(x)
        rank, position = self.comm.rank, self.P_x.position
        sends = [
            Block(target, whole(shapes[origin]))
            for target, origin in zip(self.P_y.ranks, self._origins, strict=True)
            if origin == position
        ]
        if not self.P_y.active:
            return transfer(x, self.comm, sends, [], None)
        origin = self._origins[self.P_y.ranks.index(rank)]
        recv = Block(self.P_x.ranks[origin], whole(shapes[origin]))
        return transfer(x, self.comm, sends, [recv], shapes[origin])


class SumReduce(_Between):
    """Sums the subtensors of the ranks that Broadcast(P_y, P_x) copies to.

    forward    x [..] on P_x -> y [..] on P_y     y at c = sum of x over the ranks that broadcasting gives c's copy
    backward   g [..] on P_y -> [..] on P_x       Broadcast(P_y, P_x)

    A rank that is not in P_y gets a tensor of volume zero.
    """

    def __init__(self, P_x: Partition, P_y: Partition) -> None:
        super().__init__(P_x, P_y)
        self._goals = _broadcast_origins("SumReduce", P_y, P_x)

    def forward(self, x: Tensor) -> Tensor:
        shapes, x = self._shapes(x)
        sends, recvs = [], []
        for position, goal in enumerate(self._goals):
            first = self._goals.index(goal)
            if shapes[position] != shapes[first]:
                raise ValueError(
                    f"SumReduce: rank {self.P_x.ranks[position]} has a tensor {shapes[position]}, "
                    f"rank {self.P_x.ranks[first]} {shapes[first]}; those that are summed must have one shape"
                )
            if position == self.P_x.position:
                sends.append(Block(self.P_y.ranks[goal], whole(shapes[position])))
            if goal == self.P_y.position:
                recvs.append(Block(self.P_x.ranks[position], whole(shapes[position])))
        own = shapes[self._goals.index(self.P_y.position)] if self.P_y.position is not None else None
        return transfer(x, self.comm, sends, recvs, own)


class Repartition(_Between):
    """A tensor that is cut evenly over P_x, cut evenly over P_y.

    forward    x [block on P_x] -> y [block on P_y]
    backward   Repartition(P_y, P_x)

    The partitions have as many axes as the tensor has dimensions. Where a dimension is not divisible, the first blocks
    are larger by one. A rank that is not in P_y gets a tensor of volume zero.
    """

    def __init__(self, P_x: Partition, P_y: Partition) -> None:
        super().__init__(P_x, P_y)
        if len(P_x.shape) != len(P_y.shape):
            raise ValueError(f"Repartition: from {P_x.shape} to {P_y.shape}, expected the same number of axes")

    def forward(self, x: Tensor) -> Tensor:
        shapes, x = self._shapes(x)
        total = self._global_shape(shapes)
        sends = self._common(self.P_x, self.P_y, total)
        recvs = self._common(self.P_y, self.P_x, total)
        at = self.P_y.position
        return transfer(x, self.comm, sends, recvs, None if at is None else shape_of(self._region(self.P_y, at, total)))

    def _common(self, own: Partition, others: Partition, total: Sequence[int]) -> list[Block]:
        """The parts of this rank's block on `own` that are in the blocks on `others`; none if inactive on `own`."""
        if own.position is None:
            return []
        region = self._region(own, own.position, total)
        return [
            Block(rank, within(region, self._region(others, position, total)))
            for position, rank in enumerate(others.ranks)
        ]

    @staticmethod
    def _region(partition: Partition, position: int, total: Sequence[int]) -> Region:
        """The part of the global tensor that belongs to a position."""
        at = partition.coordinates_of(position)
        return tuple(cuts(size, n)[i] for size, n, i in zip(total, partition.shape, at, strict=True))

    def _global_shape(self, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """From the blocks on the edges of the grid; every other one must fit."""
        grid = self.P_x.shape
        for rank, shape in zip(self.P_x.ranks, shapes, strict=True):
            if len(shape) != len(grid):
                raise ValueError(
                    f"Repartition: rank {rank} has a tensor {shape} on a partition {grid}; expected as many dimensions "
                    "as the partition has axes"
                )
        total = [0] * len(grid)
        for position, shape in enumerate(shapes):
            at = self.P_x.coordinates_of(position)
            for axis, size in enumerate(shape):
                if not any(at[:axis] + at[axis + 1 :]):
                    total[axis] += size
        for position, shape in enumerate(shapes):
            expected = shape_of(self._region(self.P_x, position, total))
            if shape != expected:
                raise ValueError(
                    f"Repartition: rank {self.P_x.ranks[position]}, at {self.P_x.coordinates_of(position)} of {grid}, "
                    f"has a block {shape}; expected {expected} of a tensor {tuple(total)} that is cut evenly, "
                    "the first blocks larger by one where it does not divide"
                )
        return tuple(total)


def _broadcast_origins(what: str, small: Partition, large: Partition) -> list[int]:
    """For each position of `large`, the position of `small` that NumPy's broadcasting takes it from."""
    sizes = (1,) * (len(large.shape) - len(small.shape)) + small.shape
    if len(sizes) != len(large.shape) or any(a not in (1, b) for a, b in zip(sizes, large.shape, strict=True)):
        raise ValueError(
            f"{what}: {small.shape} does not broadcast to {large.shape}; counted from the last axis, each size must "
            "be 1 or equal to the other's"
        )
    ahead = len(large.shape) - len(small.shape)
    origins = []
    for position in range(large.size):
        at = [0 if size == 1 else i for i, size in zip(large.coordinates_of(position), sizes, strict=True)]
        origins.append(small.ranks.index(small.rank_at(at[ahead:])))
    return origins
