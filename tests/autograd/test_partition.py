"""Partitions: coordinates, and the sums, copies and cuts between them beside NumPy; inactive ranks too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from ranks import RankPool
from reference import bits
from torch import Tensor

import pynccl_autograd as ad
from pynccl import Communicator

EXACT = {"rtol": 0.0, "atol": 0.0}
Sizes = Sequence[Sequence[int]]  # of the blocks along each axis


def integers(*shape: int, seed: int) -> Tensor:
    """Integer-valued, so that sums are exact in any order."""
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)).double()


def nothing(dtype: torch.dtype = torch.float64) -> Tensor:
    return ad.zero_volume_tensor(dtype)


def check_communicators(comm: Communicator) -> None:
    partition = ad.CartesianPartition(comm, (1, 3), ranks=[3, 0, 2])
    at = {3: (0, 0), 0: (0, 1), 2: (0, 2)}.get(comm.rank)
    assert partition.coordinates == at
    assert partition.active == (at is not None)
    row = partition.axes_comm(1)
    assert partition.axes_comm((-1,)) is row
    column = partition.axes_comm([0])
    everything = partition.axes_comm((0, 1))
    if at is None:
        assert row is None and column is None and everything is None
    else:
        assert (row.size, row.rank) == (3, at[1])  # ordered by position, not by rank
        assert (column.size, column.rank) == (1, 0)
        assert (everything.size, everything.rank) == (3, at[1])
    assert [partition.rank_at((0, i)) for i in range(3)] == [3, 0, 2]
    line = ad.Partition(comm, [2, 1])
    assert line.shape == (2,) and line.coordinates == {2: (0,), 1: (1,)}.get(comm.rank)
    partition.destroy()


def test_coordinates_and_communicators_follow_the_order_of_the_ranks_given(ranks: RankPool) -> None:
    ranks.run(4, check_communicators)


def check_all_sum_reduce(comm: Communicator) -> None:
    """Every set of axes of grids that leave ranks out, beside NumPy's sum over those axes; second derivatives."""
    for shape, members in (((2, 1), [0, 1]), ((1, 2, 2), [3, 1, 0, 2]), ((1, 1), [2]), ((3,), [1, 2, 3])):
        partition = ad.CartesianPartition(comm, shape, members)
        values = np.stack([integers(2, 3, seed=q).numpy() for q in members]).reshape(*shape, 2, 3)
        for chosen in range(2 ** len(shape)):
            axes = tuple(axis for axis in range(len(shape)) if chosen >> axis & 1)
            summed = np.broadcast_to(values.sum(axes, keepdims=True), values.shape)
            layer = ad.AllSumReduce(partition, axes_reduce=axes)
            x = integers(2, 3, seed=comm.rank) if partition.active else nothing()
            wanted = torch.from_numpy(summed[partition.coordinates].copy()) if partition.active else x
            torch.testing.assert_close(layer(x), wanted, **EXACT)
            assert ad.testing.check_adjoint(layer, x, comm) <= 1e-12
            if partition.active:  # L = the ranks' sums of y**3: dL/dx = 3 m y**2 where m ranks meet; twice, 6 m**2 y
                met = int(np.prod([shape[axis] for axis in axes]))
                leaf = x.clone().requires_grad_()
                y = layer(leaf)
                (dx,) = torch.autograd.grad((y**3).sum(), leaf, create_graph=True)
                (ddx,) = torch.autograd.grad(dx.sum(), leaf)
                torch.testing.assert_close(dx, 3 * met * wanted**2, **EXACT)
                torch.testing.assert_close(ddx, 6 * met**2 * wanted, **EXACT)
        partition.destroy()


def test_all_sum_reduce_beside_numpy_for_every_set_of_axes(ranks: RankPool) -> None:
    ranks.run(4, check_all_sum_reduce)


# Copies and sums: partitions that overlap or not, in a world that may be larger than both

GRIDS = [
    ((1,), [0], (4,), [0, 1, 2, 3]),
    ((1,), [3], (2,), [0, 1]),
    ((1, 2), [1, 2], (2, 2), [2, 0, 3, 1]),
    ((2, 1), [3, 2], (2, 2), [2, 0, 3, 1]),
    ((1, 1, 2), [1, 3], (1, 2, 2), [0, 1, 2, 3]),
    ((2,), [0, 3], (2, 2), [0, 1, 2, 3]),  # fewer axes: as (1, 2)
    ((2, 2), [2, 0, 3, 1], (2, 2), [2, 0, 3, 1]),
]


def check_copies_and_sums(comm: Communicator) -> None:
    for shape_x, ranks_x, shape_y, ranks_y in GRIDS:
        small = ad.CartesianPartition(comm, shape_x, ranks_x)
        large = ad.CartesianPartition(comm, shape_y, ranks_y)
        spread = np.broadcast_to(np.array(ranks_x).reshape(shape_x), shape_y).reshape(-1).tolist()
        origin = dict(zip(ranks_y, spread, strict=True))  # by NumPy itself
        goals = [q for q in range(comm.size) if origin.get(q) == comm.rank]
        values = [integers(7, 3, seed=q) for q in range(comm.size)]
        mine = values[comm.rank]
        copy = values[origin[comm.rank]] if large.active else nothing()
        total = torch.stack([values[q] for q in goals]).sum(0) if small.active else nothing()
        pairs: tuple[tuple[Any, ...], ...] = (
            (ad.partition.Broadcast(small, large), small, large, copy, total),
            (ad.SumReduce(large, small), large, small, total, copy),
        )
        for layer, P_x, P_y, expected, adjoint in pairs:
            x = (mine.clone() if P_x.active else nothing()).requires_grad_()
            y = layer(x)
            assert y.requires_grad  # on every rank: the backward pass is a collective
            torch.testing.assert_close(y, expected, **EXACT)
            (dx,) = torch.autograd.grad(y, x, mine if P_y.active else nothing())
            torch.testing.assert_close(dx, adjoint if P_x.active else nothing(), **EXACT)
            assert ad.testing.check_adjoint(layer, x, comm) <= 1e-12


def test_broadcast_and_sum_reduce_follow_numpys_broadcasting(ranks: RankPool) -> None:
    ranks.run(4, check_copies_and_sums)


# Cuts


def even(shape: Sequence[int], grid: Sequence[int]) -> list[list[int]]:
    return [[len(part) for part in np.array_split(np.arange(size), n)] for size, n in zip(shape, grid, strict=True)]


def block(full: Tensor, partition: ad.Partition, sizes: Sizes | None = None) -> Tensor:
    """This rank's block of `full` by NumPy's split; volume zero on inactive ranks."""
    if partition.coordinates is None:
        return nothing(full.dtype)
    part = full.detach().numpy()
    cut = even(full.shape, partition.shape) if sizes is None else sizes
    for axis, (along, at) in enumerate(zip(cut, partition.coordinates, strict=True)):
        part = np.split(part, np.cumsum(along)[:-1], axis)[at]
    return torch.from_numpy(part.copy())


def uneven_cases(comm: Communicator) -> list[tuple[ad.Partition, Sizes, ad.Partition]]:
    """(P_x, sizes of x, P_y) on 4 ranks: overlapping, disjoint and permuted partitions, empty blocks."""
    line, column = ad.CartesianPartition(comm, (1, 4)), ad.CartesianPartition(comm, (4, 1))
    grid = ad.CartesianPartition(comm, (2, 2), ranks=[2, 0, 3, 1])
    pair, others = ad.CartesianPartition(comm, (2, 1), ranks=[3, 1]), ad.CartesianPartition(comm, (1, 2), ranks=[0, 2])
    return [
        (line, [[3], [16, 13, 13, 13]], grid),
        (column, [[5, 0, 1, 2], [4]], column),
        (grid, [[0, 5], [7, 2]], pair),
        (pair, [[1, 6], [5]], others),
        (others, [[2], [0, 3]], line),
        (grid, [[3, 3], [0, 0]], line),
    ]


def check_repartition(comm: Communicator) -> None:
    grids = [ad.CartesianPartition(comm, shape) for shape in ((1, 1), (1, 3), (2, 2), (4, 1))]
    grids.append(ad.CartesianPartition(comm, (1, 2), ranks=[3, 1]))
    sizes = [(4, 6), (5, 7), (3, 1)]  # even, uneven, and with empty blocks
    cases = uneven_cases(comm)
    for i, P_x in enumerate(grids):
        cases += [(P_x, even(sizes[(i + 2 * j) % 3], P_x.shape), P_y) for j, P_y in enumerate(grids)]
    cube = ad.CartesianPartition(comm, (1, 2, 1)), ad.CartesianPartition(comm, (1, 1, 4), [3, 2, 1, 0])
    cases += [(cube[i], even((3, 7, 5), cube[i].shape), cube[1 - i]) for i in (0, 1)]
    for P_x, sizes_x, P_y in cases:
        shape = [sum(along) for along in sizes_x]
        full, g = integers(*shape, seed=1), integers(*shape, seed=2)
        x = block(full, P_x, sizes_x).requires_grad_()
        y = ad.Repartition(P_x, P_y)(x)
        torch.testing.assert_close(y, block(full, P_y), **EXACT)
        (dx,) = torch.autograd.grad(y, x, block(g, P_y))
        torch.testing.assert_close(dx, block(g, P_x, sizes_x), **EXACT)


def test_repartition_takes_blocks_of_any_sizes_and_cuts_as_numpy_does(ranks: RankPool) -> None:
    ranks.run(4, check_repartition)


def check_derivatives(comm: Communicator) -> list[float]:
    """Second order by finite differences; forward mode and vmap against the layer of the tangent and of each sample."""
    P_x, P_y = ad.CartesianPartition(comm, (3, 1)), ad.CartesianPartition(comm, (1, 2), ranks=[1, 2])
    layer = ad.Repartition(P_x, P_y)
    copies = ad.partition.Broadcast(ad.Partition(comm, [1]), ad.Partition(comm, [0, 1, 2]))
    sums = ad.SumReduce(ad.Partition(comm, [0, 1, 2]), ad.Partition(comm, [2]))
    x = integers(comm.rank + 1, 3, seed=comm.rank)
    z = integers(2, 3, seed=10 + comm.rank)
    found = []
    for fn, leaf in ((layer, x), (sums, z), (copies, z if comm.rank == 1 else nothing())):
        found.append(ad.testing.check_gradients(lambda t, fn=fn: fn(t.sin()) ** 2, leaf, comm, samples=2))
        tangent = torch.ones_like(leaf)
        moved = torch.func.jvp(fn, (leaf,), (tangent,))
        torch.testing.assert_close(moved, (fn(leaf), fn(tangent)), **EXACT)
        batch = torch.stack([leaf, 2 * leaf])
        torch.testing.assert_close(torch.func.vmap(fn)(batch), torch.stack([fn(leaf), fn(2 * leaf)]), **EXACT)
    return found


def test_layers_between_partitions_have_all_derivatives(ranks: RankPool) -> None:
    for found in ranks.run(3, check_derivatives):
        assert len(found) == 3 and max(found) <= 1


# Types


def patterns(dtype: torch.dtype, count: int, seed: int) -> Tensor:
    """Every pattern of bits that there is, NaN and -0 among them."""
    raw = torch.randint(0, 256, (count * dtype.itemsize,), generator=torch.Generator().manual_seed(seed))
    return (raw % 2 if dtype is torch.bool else raw).to(torch.uint8).view(dtype)


def check_types(comm: Communicator) -> int:
    """Copies are bitwise equal for every type; sums, for those that are added in one way or another."""
    P_x, P_y = ad.CartesianPartition(comm, (2,)), ad.CartesianPartition(comm, (3,))
    one, ends = ad.Partition(comm, [2]), ad.Partition(comm, [0, 2])
    types = [dtype for dtype in ad.partition.transfer.DTYPES if dtype is not None]
    for dtype in types:
        full = patterns(dtype, 12, 1)
        x = full[[slice(0, 5), slice(5, 12)][comm.rank]] if P_x.active else nothing(dtype)
        y = ad.Repartition(P_x, P_y)(x)
        assert torch.equal(bits(y), bits(full[4 * comm.rank : 4 * comm.rank + 4])), dtype
        y = ad.partition.Broadcast(one, P_y)(full if comm.rank == 2 else ad.zero_volume_tensor())
        assert torch.equal(bits(y), bits(full)) and y.dtype is dtype, dtype
        if "float4" in str(dtype) or "e8m0" in str(dtype):
            continue
        x = torch.tensor([1, 0, 1, 1]).to(dtype)
        y = ad.SumReduce(P_y, one)(x)
        wanted = x.to(torch.complex64) * (1 if dtype is torch.bool else 3)
        assert y.dtype is dtype and torch.equal(y.to(torch.complex64), wanted if comm.rank == 2 else wanted[:0]), dtype
    layer = ad.AllSumReduce(ends, 0)
    for dtype in (torch.int64, torch.uint8, torch.float16, torch.bfloat16, torch.float8_e4m3fn):
        for shape in ((2, 3), (2, 0, 3), ()):
            x = torch.full(shape, comm.rank + 1.0).to(dtype) if ends.active else nothing(dtype)
            y = layer(x)
            assert y.dtype is dtype and y.shape == x.shape
            assert y.float().unique().tolist() == ([4.0] if y.numel() else [])
            assert y.requires_grad == dtype.is_floating_point  # on every rank, inactive ones too
    return len(types)


def test_every_type_travels_between_partitions_bit_by_bit(ranks: RankPool) -> None:
    assert min(ranks.run(3, check_types)) >= 20


# What is wrong is said, on every rank


def messages(comm: Communicator) -> list[str]:
    r = comm.rank
    pair, line = ad.Partition(comm, [0, 1]), ad.Partition(comm, [0, 1, 2])
    flat = ad.CartesianPartition(comm, (3, 1))
    moved = ad.Repartition(flat, flat)
    calls: list[Callable[[], object]] = [
        lambda: ad.Partition(comm, [0, 0]),
        lambda: ad.Partition(comm, []),
        lambda: ad.CartesianPartition(comm, (2, 2)),
        lambda: ad.AllSumReduce(pair, 1),
        lambda: ad.partition.Broadcast(pair, line),
        lambda: ad.Repartition(pair, ad.CartesianPartition(comm, (1, 2))),
        lambda: ad.SumReduce(pair, ad.Partition(comm, [2]))(torch.zeros(2)),
        lambda: ad.SumReduce(line, ad.Partition(comm, [2]))(torch.zeros(2 + r)),
        lambda: moved(torch.zeros(2, 2 + r)),
        lambda: moved(torch.zeros(2, 5).to_sparse()),
        lambda: ad.SumReduce(line, line)([1.0] if r == 2 else torch.zeros(2)),
        lambda: ad.Repartition(line, pair)(torch.zeros(2, 2)),
        lambda: ad.Repartition(line, pair)(torch.zeros(2, dtype=(torch.int64, torch.int8)[r % 2])),
    ]
    found = []
    for call in calls:
        with pytest.raises((ValueError, TypeError)) as caught:
            call()
        found.append(str(caught.value))
    layer = ad.AllSumReduce(pair, 0)
    if r == 2:
        with pytest.raises(ValueError, match="expected one of volume zero"):
            layer(torch.ones(2))
    comm.barrier()  # nobody waits for anything
    return found


def test_mistakes_are_named_on_every_rank_alike(ranks: RankPool) -> None:
    expected = [
        "ranks is (0, 0), expected one or more of 0..2, each once",
        "ranks is (), expected",
        "shape (2, 2) is of 4 ranks",
        "axes is (1,), expected axes of the partition's shape (2,)",
        "(2,) does not broadcast to (3,)",
        "expected the same number of axes",
        "rank 2 is not in the partition of ranks (0, 1), but passes a tensor (2,)",
        "rank 1 has a tensor (3,), rank 0 (2,)",
        "rank 1, at (1, 0) of (3, 1), has a block (2, 3), but rank 0, at (0, 0), has a block (2, 2); expected one size "
        "along axis 1, in which both have the coordinate 0",
        "expected dense tensors of",
        "what ranks [2] pass is no tensor",
        "rank 0 has a tensor (2, 2) on a partition (3,)",
        "expected one type",
    ]
    for found in ranks.run(3, messages):
        for text, message in zip(expected, found, strict=True):
            assert text in message


def traced(comm: Communicator) -> tuple[list[float], str]:
    """Between the graphs of torch.compile a layer runs as ever; fake tensors are refused before anything is asked."""
    torch._dynamo.reset()
    layer = ad.Repartition(ad.Partition(comm, [0, 1]), ad.Partition(comm, [1]))
    x = torch.full((comm.rank + 1,), comm.rank + 1.0, requires_grad=True)
    y = torch.compile(lambda t: layer(t * 2) + 1, backend="eager")(x)
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(), pytest.raises(NotImplementedError) as caught:
        layer(torch.ones(2))
    return [*y.tolist(), *dx.tolist()], str(caught.value)


def test_layers_between_partitions_under_torch_compile_and_fake_tensors(ranks: RankPool) -> None:
    (first, message), (second, _) = ranks.run(2, traced)
    assert first == [2.0] and second == [3.0, 5.0, 5.0, 2.0, 2.0]
    assert "Repartition: the ranks tell each other the shapes of their tensors, which cannot be traced" in message
