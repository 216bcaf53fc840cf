"""Modules that sum, copy and repartition tensors between partitions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..arguments import check_call, checked
from ..collective import require_grad
from ..ops.all_reduce import all_reduce
from ..torch_internals import reshaped
from ..wire import sum_tensors
from .cartesian import Partition, check_partition
from .transfer import (
    AxisSlices,
    Block,
    Region,
    assemble,
    even_slices,
    full_region,
    gather_shapes,
    intersection,
    shape_of,
    slices,
    transfer,
)


@checked
def zero_volume_tensor(dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
    """Return a tensor without elements, of shape (0,): the input and output of an inactive rank."""
    return torch.empty(0, dtype=dtype, device=device)


class AllSumReduce(torch.nn.Module):
    """Sum tensors over the ranks that differ in `axes_reduce` only; each of these ranks gets the sum.

    forward    x [..] -> y [..]     y = sum of x over those ranks
    backward   g [..] -> [..]       the same

    partition    the ranks and their coordinates
    axes_reduce  axes of the partition to sum over; without axes, y is a clone of x

    On (2, 2, 3) ranks with axes_reduce=(1, 2), each y is the sum of 6 tensors. An inactive rank passes a tensor of
    volume zero and gets a clone of it.
    """

    __call__: Callable[..., Tensor]  # for type checkers: nn.Module's returns Any

    def __init__(self, partition: Partition, axes_reduce: int | Iterable[int]) -> None:
        check_partition("AllSumReduce", partition, "partition")
        super().__init__()
        self.partition = partition
        self.axes_reduce = partition.check_axes("AllSumReduce", axes_reduce)
        self.comm = partition.axes_comm(self.axes_reduce) if self.axes_reduce else None

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum.   x [..] -> [..]; inactive rank: no elements -> the same"""
        check_call("AllSumReduce", x, self.partition.comm)
        if not self.partition.active and x.numel():
            raise ValueError(
                f"AllSumReduce: rank {self.partition.comm.rank} is not in {self.partition}, but passes a tensor "
                f"{tuple(x.shape)}; pass ad.partition.zero_volume_tensor(device=comm.device)"
            )
        return require_grad(x).clone() if self.comm is None else all_reduce(x, self.comm, grad="sum")

    def extra_repr(self) -> str:
        return f"{self.partition}, axes_reduce={self.axes_reduce}"


class _BetweenPartitions(torch.nn.Module):
    """Base class: moves data from partition P_x to partition P_y of the same communicator.

    The transfer is point to point. In every call the ranks exchange shapes and dtypes by an all-gather, for which the
    CPU waits."""

    __call__: Callable[..., Tensor]  # for type checkers: nn.Module's returns Any

    def __init__(self, P_x: Partition, P_y: Partition) -> None:
        for name, partition in (("P_x", P_x), ("P_y", P_y)):
            check_partition(type(self).__name__, partition, name)
        super().__init__()
        if P_x.comm is not P_y.comm:
            raise ValueError(f"{type(self).__name__}: {P_x} and {P_y} have different communicators; use the same one")
        self.P_x, self.P_y = P_x, P_y
        self.comm = P_x.comm

    def extra_repr(self) -> str:
        return f"{self.P_x} -> {self.P_y}"

    def _shapes(self, x: Tensor) -> tuple[list[tuple[int, ...]], Tensor]:
        """Return the shape of x at each position of P_x, and x in the dtype of the active ranks."""
        return gather_shapes(type(self).__name__, x, self.comm, self.P_x.ranks)


class _FullTensors(_BetweenPartitions):
    """Base class: sends full tensors, and sums the received ones.

    pairs  (position in P_x of the sender, position in P_y of the receiver)
    """

    pairs: list[tuple[int, int]]

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's tensor on P_y.   x [..] on P_x -> [..] on P_y; elsewhere both have no elements"""
        shapes, x = self._shapes(x)
        first: dict[int, int] = {}  # position in P_y -> position in P_x of its first sender
        for source, target in self.pairs:
            other = first.setdefault(target, source)
            if shapes[source] != shapes[other]:
                raise ValueError(
                    f"{type(self).__name__}: rank {self.P_x.ranks[source]} has a tensor {shapes[source]}, rank "
                    f"{self.P_x.ranks[other]} {shapes[other]}; tensors that are summed must have the same shape"
                )
        at, to = self.P_x.position, self.P_y.position
        sends = [
            Block(self.P_y.ranks[target], full_region(shapes[at])) for source, target in self.pairs if source == at
        ]
        recvs = [
            Block(self.P_x.ranks[source], full_region(shapes[source])) for source, target in self.pairs if target == to
        ]
        received, pieces = transfer(x, self.comm, sends, recvs)
        if len(pieces) == 1:
            return reshaped(received, pieces[0].shape)
        return sum_tensors(pieces) if pieces else received


class Broadcast(_FullTensors):
    """Copy tensors from P_x to P_y, by NumPy's rules for broadcasting P_x.shape to P_y.shape.

    forward    x [..] on P_x -> y [..] on P_y     y at c = x at c, with 0 along the axes in which P_x has 1 rank
    backward   g [..] on P_y -> [..] on P_x       sum of g over the copies: SumReduce(P_y, P_x)

    A rank that is not in P_y gets a tensor of volume zero.
    """

    def __init__(self, P_x: Partition, P_y: Partition) -> None:
        super().__init__(P_x, P_y)
        self.pairs = [(small, large) for large, small in enumerate(_broadcast_origins("Broadcast", P_x, P_y))]


class SumReduce(_FullTensors):
    """Sum the tensors of the ranks to which Broadcast(P_y, P_x) copies.

    forward    x [..] on P_x -> y [..] on P_y     y at c = sum of x over the ranks to which c is broadcast
    backward   g [..] on P_y -> [..] on P_x       Broadcast(P_y, P_x)

    A rank that is not in P_y gets a tensor of volume zero.
    """

    def __init__(self, P_x: Partition, P_y: Partition) -> None:
        super().__init__(P_x, P_y)
        self.pairs = list(enumerate(_broadcast_origins("SumReduce", P_y, P_x)))


class Repartition(_BetweenPartitions):
    """Redistribute a tensor that is split over P_x so that it is split over P_y.

    forward    x [block on P_x] -> y [block on P_y]
    backward   Repartition(P_y, P_x), with the block sizes of x

    The partitions have as many axes as the tensor has dimensions. The blocks of x can have any sizes, also 0, if they
    tile the tensor: blocks with the same coordinate along an axis have the same size along it. y is split evenly; if a
    dimension is not divisible, the first blocks are larger by one. A rank that is not in P_y gets a tensor of volume
    zero.
    """

    def __init__(self, P_x: Partition, P_y: Partition) -> None:
        super().__init__(P_x, P_y)
        if len(P_x.shape) != len(P_y.shape):
            raise ValueError(
                f"Repartition: P_x has the shape {P_x.shape}, P_y {P_y.shape}; expected the same number of axes"
            )

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's block on P_y.   x [block on P_x] -> [block on P_y]; elsewhere both have no elements"""
        shapes, x = self._shapes(x)
        x_slices = self._slices_of(shapes)
        y_slices = [even_slices(axis[-1].stop, n) for axis, n in zip(x_slices, self.P_y.shape, strict=True)]
        sends = self._intersections(self.P_x, x_slices, self.P_y, y_slices)
        recvs = self._intersections(self.P_y, y_slices, self.P_x, x_slices)
        received, pieces = transfer(x, self.comm, sends, recvs)
        if self.P_y.position is None:
            return received
        return assemble(received, recvs, pieces, shape_of(_region(self.P_y, self.P_y.position, y_slices)))

    @staticmethod
    def _intersections(
        own: Partition, own_slices: AxisSlices, others: Partition, other_slices: AxisSlices
    ) -> list[Block]:
        """Return the intersections of this rank's block on `own` with the blocks on `others`; none if inactive."""
        if own.position is None:
            return []
        region = _region(own, own.position, own_slices)
        return [
            Block(rank, intersection(region, _region(others, position, other_slices)))
            for position, rank in enumerate(others.ranks)
        ]

    def _slices_of(self, shapes: Sequence[tuple[int, ...]]) -> AxisSlices:
        """Return the slices of x along each axis, from the shapes of its blocks. ValueError if they do not tile x."""
        grid, ranks = self.P_x.shape, self.P_x.ranks
        first: list[dict[int, int]] = [{} for _ in grid]  # for each axis: coordinate -> first position that has it
        for position, shape in enumerate(shapes):
            at = self.P_x.coordinates_of(position)
            if len(shape) != len(grid):
                raise ValueError(
                    f"Repartition: rank {ranks[position]} has a tensor {shape} on a partition {grid}; expected x with "
                    "as many dimensions as the partition has axes"
                )
            for axis, size in enumerate(shape):
                other = first[axis].setdefault(at[axis], position)
                if shapes[other][axis] != size:
                    raise ValueError(
                        f"Repartition: rank {ranks[position]}, at {at} of {grid}, has a block {shape}, but rank "
                        f"{ranks[other]}, at {self.P_x.coordinates_of(other)}, has a block {shapes[other]}; expected "
                        f"the same size along axis {axis}, in which both have the coordinate {at[axis]}"
                    )
        return [
            slices([shapes[positions[i]][axis] for i in range(len(positions))]) for axis, positions in enumerate(first)
        ]


def _region(partition: Partition, position: int, slices_by_axis: AxisSlices) -> Region:
    """Return the region of the global tensor at a position."""
    at = partition.coordinates_of(position)
    return tuple(axis[i] for axis, i in zip(slices_by_axis, at, strict=True))


def _broadcast_origins(what: str, small: Partition, large: Partition) -> list[int]:
    """Return, for each position of `large`, the position of `small` from which NumPy's broadcasting takes it."""
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
