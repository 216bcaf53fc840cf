"""Sums, copies and cuts of tensors between partitions, as modules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..arguments import check_call
from ..collective import require_grad
from ..ops.all_reduce import all_reduce
from ..torch_internals import reshaped
from ..wire import added
from .cartesian import Partition, check_partition
from .transfer import (
    Block,
    Cuts,
    Region,
    assembled,
    cuts,
    describe,
    shape_of,
    slices,
    transfer,
    whole,
    within,
)


def zero_volume_tensor(dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
    """What an inactive rank passes, and gets: no elements, shape (0,)."""
    return torch.empty(0, dtype=dtype, device=device)


class AllSumReduce(torch.nn.Module):
    """Sums subtensors over the ranks that differ in `axes_reduce` only, on each of them.

    forward    x [..] -> y [..]     y = sum of x over those ranks
    backward   g [..] -> [..]       the same

    On (2, 2, 3) ranks with axes_reduce=(1, 2), each y is the sum of 6 subtensors. Without axes: a clone. An inactive
    rank passes a tensor of volume zero and gets a clone of it.
    """

    __call__: Callable[..., Tensor]  # for type checkers, to whom that of nn.Module gives Any

    def __init__(self, partition: Partition, axes_reduce: int | Iterable[int]) -> None:
        check_partition("AllSumReduce", partition, "partition")
        super().__init__()
        self.partition = partition
        self.axes_reduce = partition.check_axes("AllSumReduce", axes_reduce)
        self.comm = partition.axes_comm(self.axes_reduce) if self.axes_reduce else None

    def forward(self, x: Tensor) -> Tensor:
        check_call("AllSumReduce", x, self.partition.comm)
        if not self.partition.active and x.numel():
            raise ValueError(
                f"AllSumReduce: rank {self.partition.comm.rank} is not in {self.partition}, but passes a tensor "
                f"{tuple(x.shape)}; expected one of volume zero"
            )
        return require_grad(x).clone() if self.comm is None else all_reduce(x, self.comm, grad="sum")

    def extra_repr(self) -> str:
        return f"{self.partition}, axes_reduce={self.axes_reduce}"


class _Between(torch.nn.Module):
    """A movement of data from partition P_x to partition P_y of the same communicator.

    It is point to point: every rank sends to each of its partners. Shapes and type are told to all ranks at every call,
    by an all-gather that the CPU waits for."""

    __call__: Callable[..., Tensor]  # for type checkers, to whom that of nn.Module gives Any

    def __init__(self, P_x: Partition, P_y: Partition) -> None:
        for name, partition in (("P_x", P_x), ("P_y", P_y)):
            check_partition(type(self).__name__, partition, name)
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


class _OfWhole(_Between):
    """Sends whole subtensors and sums what arrives.

    pairs  (position in P_x, position in P_y): from where to where
    """

    pairs: list[tuple[int, int]]

    def forward(self, x: Tensor) -> Tensor:
        shapes, x = self._shapes(x)
        first: dict[int, int] = {}  # position in P_y -> the first one in P_x of what arrives there
        for source, target in self.pairs:
            other = first.setdefault(target, source)
            if shapes[source] != shapes[other]:
                raise ValueError(
                    f"{type(self).__name__}: rank {self.P_x.ranks[source]} has a tensor {shapes[source]}, rank "
                    f"{self.P_x.ranks[other]} {shapes[other]}; those that are summed must have one shape"
                )
        at, to = self.P_x.position, self.P_y.position
        sends = [Block(self.P_y.ranks[target], whole(shapes[at])) for source, target in self.pairs if source == at]
        recvs = [Block(self.P_x.ranks[source], whole(shapes[source])) for source, target in self.pairs if target == to]
        received, pieces = transfer(x, self.comm, sends, recvs)
        if len(pieces) == 1:
            return reshaped(received, pieces[0].shape)
        return added(pieces) if pieces else received


class Broadcast(_OfWhole):
    """Copies subtensors to all the ranks that NumPy's broadcasting of P_x.shape to P_y.shape gives them.

    forward    x [..] on P_x -> y [..] on P_y     y at c = x at (c, with 0 along the axes in which P_x has 1 rank)
    backward   g [..] on P_y -> [..] on P_x       sum of g over the copies: SumReduce(P_y, P_x)

    A rank that is not in P_y gets a tensor of volume zero.
    """

    def __init__(self, P_x: Partition, P_y: Partition) -> None:
        super().__init__(P_x, P_y)
        self.pairs = [(small, large) for large, small in enumerate(_broadcast_origins("Broadcast", P_x, P_y))]


class SumReduce(_OfWhole):
    """Sums the subtensors of the ranks that Broadcast(P_y, P_x) copies to.

    forward    x [..] on P_x -> y [..] on P_y     y at c = sum of x over the ranks that broadcasting gives c's copy
    backward   g [..] on P_y -> [..] on P_x       Broadcast(P_y, P_x)

    A rank that is not in P_y gets a tensor of volume zero.
    """

    def __init__(self, P_x: Partition, P_y: Partition) -> None:
        super().__init__(P_x, P_y)
        self.pairs = list(enumerate(_broadcast_origins("SumReduce", P_y, P_x)))


class Repartition(_Between):
    """A tensor that is cut over P_x, cut over P_y.

    forward    x [block on P_x] -> y [block on P_y]
    backward   Repartition(P_y, P_x), with the cuts of x

    The partitions have as many axes as the tensor has dimensions. x may be cut anywhere, as long as the blocks tile the
    tensor: those with the same coordinate along an axis have the same size along it, which may be 0. y is cut evenly,
    the first blocks larger by one where a dimension is not divisible. A rank that is not in P_y gets a tensor of volume
    zero.
    """

    def __init__(self, P_x: Partition, P_y: Partition) -> None:
        super().__init__(P_x, P_y)
        if len(P_x.shape) != len(P_y.shape):
            raise ValueError(f"Repartition: from {P_x.shape} to {P_y.shape}, expected the same number of axes")

    def forward(self, x: Tensor) -> Tensor:
        shapes, x = self._shapes(x)
        x_cuts = self._cuts_of(shapes)
        y_cuts = [cuts(axis[-1].stop, n) for axis, n in zip(x_cuts, self.P_y.shape, strict=True)]
        sends = self._common(self.P_x, x_cuts, self.P_y, y_cuts)
        recvs = self._common(self.P_y, y_cuts, self.P_x, x_cuts)
        received, pieces = transfer(x, self.comm, sends, recvs)
        if self.P_y.position is None:
            return received
        return assembled(received, recvs, pieces, shape_of(_region(self.P_y, self.P_y.position, y_cuts)))

    @staticmethod
    def _common(own: Partition, own_cuts: Cuts, others: Partition, other_cuts: Cuts) -> list[Block]:
        """The parts of this rank's block on `own` that are in the blocks on `others`; none if inactive on `own`."""
        if own.position is None:
            return []
        region = _region(own, own.position, own_cuts)
        return [
            Block(rank, within(region, _region(others, position, other_cuts)))
            for position, rank in enumerate(others.ranks)
        ]

    def _cuts_of(self, shapes: Sequence[tuple[int, ...]]) -> Cuts:
        """How x is cut, from its blocks, which must agree on it."""
        grid, ranks = self.P_x.shape, self.P_x.ranks
        first: list[dict[int, int]] = [{} for _ in grid]  # of each axis and coordinate, the first position there
        for position, shape in enumerate(shapes):
            at = self.P_x.coordinates_of(position)
            if len(shape) != len(grid):
                raise ValueError(
                    f"Repartition: rank {ranks[position]} has a tensor {shape} on a partition {grid}; expected as many "
                    "dimensions as the partition has axes"
                )
            for axis, size in enumerate(shape):
                other = first[axis].setdefault(at[axis], position)
                if shapes[other][axis] != size:
                    raise ValueError(
                        f"Repartition: rank {ranks[position]}, at {at} of {grid}, has a block {shape}, but rank "
                        f"{ranks[other]}, at {self.P_x.coordinates_of(other)}, has a block {shapes[other]}; expected "
                        f"one size along axis {axis}, in which both have the coordinate {at[axis]}"
                    )
        return [
            slices([shapes[positions[i]][axis] for i in range(len(positions))]) for axis, positions in enumerate(first)
        ]


def _region(partition: Partition, position: int, cuts_by_axis: Cuts) -> Region:
    """The part of the global tensor that belongs to a position."""
    at = partition.coordinates_of(position)
    return tuple(axis[i] for axis, i in zip(cuts_by_axis, at, strict=True))


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
