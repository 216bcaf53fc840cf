"""Partitions: sums, broadcasts and repartitions compared with NumPy, also with inactive ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from ranks import RankPool
from torch import Tensor

import pynccl_autograd as ad
from pynccl import Communicator

EXACT = {"rtol": 0.0, "atol": 0.0}
Sizes = Sequence[Sequence[int]]  # block sizes along each axis


def integers(*shape: int, seed: int) -> Tensor:
    """Return integer values, so that sums are exact in any order."""
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)).double()


def zero_volume(dtype: torch.dtype = torch.float64) -> Tensor:
    return ad.zero_volume_tensor(dtype)


def check_all_sum_reduce(comm: Communicator) -> None:
    """Compare sums over every set of axes with NumPy, on grids that leave ranks out."""
    for shape, members in (((2, 1), [0, 1]), ((1, 2, 2), [3, 1, 0, 2]), ((3,), [1, 2, 3])):
        partition = ad.CartesianPartition(comm, shape, members)
        values = np.stack([integers(2, 3, seed=q).numpy() for q in members]).reshape(*shape, 2, 3)
        for mask in range(2 ** len(shape)):
            axes = tuple(axis for axis in range(len(shape)) if mask >> axis & 1)
            summed = np.broadcast_to(values.sum(axes, keepdims=True), values.shape)
            layer = ad.AllSumReduce(partition, axes_reduce=axes)
            x = integers(2, 3, seed=comm.rank) if partition.active else zero_volume()
            expected = torch.from_numpy(summed[partition.coordinates].copy()) if partition.active else x
            torch.testing.assert_close(layer(x), expected, **EXACT)
            assert ad.testing.check_adjoint(layer, x, comm) <= 1e-12
        assert ad.testing.check_gradients(lambda t, f=layer: f(t) ** 3, x, comm, samples=2) <= 1
        partition.destroy()


def test_sums_along_any_set_of_axes(ranks: RankPool) -> None:
    ranks.run(4, check_all_sum_reduce)


# Broadcasts and sums: overlapping and disjoint partitions, some smaller than the world

GRIDS = [
    ((1,), [0], (4,), [0, 1, 2, 3]),
    ((1,), [3], (2,), [0, 1]),
    ((2, 1), [3, 2], (2, 2), [2, 0, 3, 1]),
    ((1, 1, 2), [1, 3], (1, 2, 2), [0, 1, 2, 3]),
    ((2,), [0, 3], (2, 2), [0, 1, 2, 3]),  # fewer axes: broadcasts like (1, 2)
]


def check_copies_and_sums(comm: Communicator) -> None:
    for shape_x, ranks_x, shape_y, ranks_y in GRIDS:
        small = ad.CartesianPartition(comm, shape_x, ranks_x)
        large = ad.CartesianPartition(comm, shape_y, ranks_y)
        spread = np.broadcast_to(np.array(ranks_x).reshape(shape_x), shape_y).reshape(-1).tolist()
        origin = dict(zip(ranks_y, spread, strict=True))
        goals = [q for q in range(comm.size) if origin.get(q) == comm.rank]
        values = [integers(7, 3, seed=q) for q in range(comm.size)]
        own_value = values[comm.rank]
        copy = values[origin[comm.rank]] if large.active else zero_volume()
        total = torch.stack([values[q] for q in goals]).sum(0) if small.active else zero_volume()
        pairs: tuple[tuple[Any, ...], ...] = (
            (ad.partition.Broadcast(small, large), small, large, copy, total),
            (ad.SumReduce(large, small), large, small, total, copy),
        )
        for layer, P_x, P_y, expected, adjoint in pairs:
            x = (own_value.clone() if P_x.active else zero_volume()).requires_grad_()
            y = layer(x)
            assert y.requires_grad  # on every rank: the backward pass is a collective
            torch.testing.assert_close(y, expected, **EXACT)
            (dx,) = torch.autograd.grad(y, x, own_value if P_y.active else zero_volume())
            torch.testing.assert_close(dx, adjoint if P_x.active else zero_volume(), **EXACT)
            assert ad.testing.check_gradients(lambda t, f=layer: f(t.sin()) ** 2, x, comm, samples=2) <= 1


def test_broadcast_and_sum_reduce_follow_numpys_broadcasting(ranks: RankPool) -> None:
    ranks.run(4, check_copies_and_sums)


# Repartitions


def even_sizes(shape: Sequence[int], grid: Sequence[int]) -> list[list[int]]:
    return [[len(part) for part in np.array_split(np.arange(size), n)] for size, n in zip(shape, grid, strict=True)]


def block(full: Tensor, partition: ad.Partition, sizes: Sizes | None = None) -> Tensor:
    """Return this rank's block of `full` by NumPy's split; zero-volume on inactive ranks."""
    if partition.coordinates is None:
        return zero_volume(full.dtype)
    array = full.detach().numpy()
    sizes_per_axis = even_sizes(full.shape, partition.shape) if sizes is None else sizes
    for axis, (along, at) in enumerate(zip(sizes_per_axis, partition.coordinates, strict=True)):
        array = np.split(array, np.cumsum(along)[:-1], axis)[at]
    return torch.from_numpy(array.copy())


def check_repartition(comm: Communicator) -> None:
    """Overlapping, disjoint and permuted partitions; even and uneven blocks, some empty."""
    line, column = ad.CartesianPartition(comm, (1, 4)), ad.CartesianPartition(comm, (4, 1))
    grid = ad.CartesianPartition(comm, (2, 2), ranks=[2, 0, 3, 1])
    pair, others = ad.CartesianPartition(comm, (2, 1), ranks=[3, 1]), ad.CartesianPartition(comm, (1, 2), ranks=[0, 2])
    cases: list[tuple[ad.Partition, Sizes, ad.Partition]] = [
        (line, [[3], [16, 13, 13, 13]], grid),
        (column, [[5, 0, 1, 2], [4]], column),
        (grid, [[0, 5], [7, 2]], pair),
        (pair, [[1, 6], [5]], others),
        (others, [[2], [0, 3]], line),
        (grid, [[3, 3], [0, 0]], line),
    ]
    sizes, grids = [(4, 6), (5, 7), (3, 1)], [line, column, grid, pair, others]
    for i in range(5):
        cases += [(grids[i], even_sizes(sizes[(i + j) % 3], grids[i].shape), grids[j]) for j in range(5)]
    for P_x, sizes_x, P_y in cases:
        shape = [sum(along) for along in sizes_x]
        full, g = integers(*shape, seed=1), integers(*shape, seed=2)
        x = block(full, P_x, sizes_x).requires_grad_()
        layer = ad.Repartition(P_x, P_y)
        y = layer(x)
        torch.testing.assert_close(y, block(full, P_y), **EXACT)
        (dx,) = torch.autograd.grad(y, x, block(g, P_y))
        torch.testing.assert_close(dx, block(g, P_x, sizes_x), **EXACT)
    # The last layer: second order by finite differences, forward mode and vmap.
    assert ad.testing.check_gradients(lambda t: layer(t.sin()) ** 2, x, comm, samples=2) <= 1
    leaf, tangent = x.detach(), torch.ones_like(x)
    torch.testing.assert_close(torch.func.jvp(layer, (leaf,), (tangent,))[1], layer(tangent), **EXACT)
    batch = torch.stack([leaf, 2 * leaf])
    torch.testing.assert_close(torch.func.vmap(layer)(batch)[1], layer(2 * leaf), **EXACT)


def test_repartition_takes_blocks_of_any_size_and_splits_like_numpy(ranks: RankPool) -> None:
    ranks.run(4, check_repartition)


def check_mistakes(comm: Communicator) -> None:
    r, x = comm.rank, torch.zeros(2, 2)
    pair, line, last = ad.Partition(comm, [0, 1]), ad.Partition(comm, [0, 1, 2]), ad.Partition(comm, [2])
    flat = ad.CartesianPartition(comm, (3, 1))
    moved = ad.Repartition(flat, flat)
    cases: list[tuple[Any, str]] = [
        (lambda: ad.Partition(comm, [0, 0]), "ranks is (0, 0), expected one or more of 0..2, each once"),
        (lambda: ad.partition.Broadcast(pair, line), "(2,) does not broadcast to (3,)"),
        (lambda: ad.Repartition(pair, ad.CartesianPartition(comm, (1, 2))), "expected the same number of axes"),
        (
            lambda: ad.SumReduce(pair, last)(x),
            "rank 2 is not in the partition of ranks (0, 1), but passes a tensor (2, 2)",
        ),
        (lambda: ad.SumReduce(line, last)(torch.zeros(2 + r)), "rank 1 has a tensor (3,), rank 0 (2,)"),
        (
            lambda: moved(torch.zeros(2, 2 + r)),
            "rank 1, at (1, 0) of (3, 1), has a block (2, 3), but rank 0, at (0, 0), has a block (2, 2); expected the "
            "same size along axis 1, in which both have the coordinate 0",
        ),
        (lambda: ad.SumReduce(line, line)([1.0] if r == 2 else x), "ranks [2] did not pass a supported tensor"),
        (lambda: ad.Repartition(line, pair)(x), "rank 0 has a tensor (2, 2) on a partition (3,)"),
        (lambda: ad.Repartition(line, pair)(x[0].to((torch.int64, torch.int8)[r % 2])), "expected one dtype"),
    ]
    for call, text in cases:
        with pytest.raises((ValueError, TypeError)) as caught:
            call()
        assert text in str(caught.value), text
    comm.barrier()  # no rank is left waiting


def test_mistakes_raise_on_every_rank(ranks: RankPool) -> None:
    ranks.run(3, check_mistakes)
