"""What moves between partitions, beside NumPy: uneven cuts, tensors of one's own, every type, all derivatives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from ranks import RankPool, each_size
from reference import bits
from torch import Tensor

import pynccl_autograd as ad
from pynccl import Communicator

EXACT = {"rtol": 0.0, "atol": 0.0}
Sizes = Sequence[Sequence[int]]  # of the blocks along each axis


def integers(*shape: int, seed: int) -> Tensor:
    """Integer-valued, so that sums are exact in any order."""
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)).double()


def even(shape: Sequence[int], grid: Sequence[int]) -> list[list[int]]:
    return [[len(part) for part in np.array_split(np.arange(size), n)] for size, n in zip(shape, grid, strict=True)]


def block(full: Tensor, partition: ad.Partition, sizes: Sizes | None = None) -> Tensor:
    """This rank's block of `full` by NumPy's split; volume zero on inactive ranks."""
    if partition.coordinates is None:
        return torch.empty(0, dtype=full.dtype)
    part = full.detach().numpy()
    cut = even(full.shape, partition.shape) if sizes is None else sizes
    for axis, (along, at) in enumerate(zip(cut, partition.coordinates, strict=True)):
        part = np.split(part, np.cumsum(along)[:-1], axis)[at]
    return torch.from_numpy(part.copy())


# Repartition of what is cut unevenly


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


def check_uneven(comm: Communicator) -> None:
    for P_x, sizes_x, P_y in uneven_cases(comm):
        shape = [sum(along) for along in sizes_x]
        full, g = integers(*shape, seed=1), integers(*shape, seed=2)
        layer = ad.Repartition(P_x, P_y)
        x = block(full, P_x, sizes_x).requires_grad_()
        y = layer(x)
        torch.testing.assert_close(y, block(full, P_y), **EXACT)
        (dx,) = torch.autograd.grad(y, x, block(g, P_y))
        torch.testing.assert_close(dx, block(g, P_x, sizes_x), **EXACT)


def test_repartition_takes_blocks_of_any_sizes_that_tile_the_tensor(ranks: RankPool) -> None:
    ranks.run(4, check_uneven)


def check_derivatives(comm: Communicator) -> list[float]:
    """Second order by finite differences; forward mode and vmap against the layer of the tangent and of each sample."""
    P_x, P_y = ad.CartesianPartition(comm, (3, 1)), ad.CartesianPartition(comm, (1, 2), ranks=[1, 2])
    layer = ad.Repartition(P_x, P_y)
    copies = ad.partition.Broadcast(ad.Partition(comm, [1]), ad.Partition(comm, [0, 1, 2]))
    sums = ad.SumReduce(ad.Partition(comm, [0, 1, 2]), ad.Partition(comm, [2]))
    x = integers(comm.rank + 1, 3, seed=comm.rank)
    z = integers(2, 3, seed=10 + comm.rank)
    found = []
    for fn, leaf in ((layer, x), (sums, z), (copies, z if comm.rank == 1 else ad.zero_volume_tensor(torch.float64))):
        found.append(ad.testing.check_gradients(lambda t, fn=fn: fn(t.sin()) ** 2, leaf, comm, samples=2))
        found.append(ad.testing.check_adjoint(fn, leaf, comm))
        tangent = torch.ones_like(leaf)
        moved = torch.func.jvp(fn, (leaf,), (tangent,))
        torch.testing.assert_close(moved, (fn(leaf), fn(tangent)), **EXACT)
        batch = torch.stack([leaf, 2 * leaf])
        torch.testing.assert_close(torch.func.vmap(fn)(batch), torch.stack([fn(leaf), fn(2 * leaf)]), **EXACT)
    return found


def test_layers_between_partitions_have_all_derivatives(ranks: RankPool) -> None:
    for found in ranks.run(3, check_derivatives):
        assert len(found) == 6 and max(found[0::2]) <= 1 and max(found[1::2]) <= 1e-12


def wrong_cuts(comm: Communicator) -> list[str]:
    grid = ad.CartesianPartition(comm, (2, 2))
    line = ad.CartesianPartition(comm, (1, 4))
    calls: list[Callable[[], object]] = [
        lambda: ad.Repartition(grid, line)(torch.zeros(3 if comm.rank == 3 else 2, 5)),
        lambda: ad.Repartition(grid, line)(torch.zeros(2, comm.rank)),
        lambda: ad.Repartition(grid, line)(torch.zeros(2, 5).to_sparse()),
        lambda: ad.SumReduce(line, line)([1.0] if comm.rank == 2 else torch.zeros(2)),
    ]
    messages = []
    for call in calls:
        with pytest.raises((ValueError, TypeError)) as caught:
            call()
        messages.append(str(caught.value))
    comm.barrier()  # nobody waits for anything
    return messages


def test_cuts_that_do_not_fit_are_named_on_every_rank_alike(ranks: RankPool) -> None:
    expected = [
        "rank 3, at (1, 1) of (2, 2), has a block (3, 5), but rank 2, at (1, 0), has a block (2, 5); expected one size "
        "along axis 0, in which both have the coordinate 1",
        "rank 2, at (1, 0) of (2, 2), has a block (2, 2), but rank 0, at (0, 0), has a block (2, 0)",
        "expected dense tensors of",
        "what ranks [2] pass is no tensor",
    ]
    for messages in ranks.run(4, wrong_cuts):
        for text, message in zip(expected, messages, strict=True):
            assert text in message


# Results are tensors of their own


def check_own(comm: Communicator) -> list[str]:
    """Changed in place, then differentiated: d(2y)/dx; no result is a view or shares memory with its input."""
    n, first = comm.size, ad.Partition(comm, [0])
    everyone, half = ad.Partition(comm, range(comm.size)), ad.Partition(comm, range((comm.size + 1) // 2))
    alone = comm.split(comm.rank)
    one = ad.Partition(alone, [0])
    layers: dict[str, tuple[Callable[[Tensor], Tensor], ad.Partition]] = {
        "broadcast": (ad.partition.Broadcast(first, everyone), first),
        "broadcast to itself": (ad.partition.Broadcast(half, half), half),
        "sum": (ad.SumReduce(everyone, first), everyone),
        "sum of one": (ad.SumReduce(half, half), half),
        "repartition": (ad.Repartition(everyone, half), everyone),
        "repartition to itself": (ad.Repartition(half, half), half),
        "repartition to one": (ad.Repartition(half, first), half),
        "all_sum_reduce": (ad.AllSumReduce(half, 0), half),
        "all_sum_reduce, complex": (lambda t: ad.AllSumReduce(half, 0)((1 + 1j) * t), half),
        "all_sum_reduce, no axes": (ad.AllSumReduce(half, ()), half),
        "halo_exchange": (lambda t: ad.halo_exchange(t, comm, 0, 1), everyone),
        "one rank, broadcast": (ad.partition.Broadcast(one, one), everyone),
        "one rank, sum": (ad.SumReduce(one, one), everyone),
        "one rank, repartition": (ad.Repartition(one, one), everyone),
        "one rank, all_sum_reduce": (ad.AllSumReduce(one, 0), everyone),
        "one rank, halo_exchange": (lambda t: ad.halo_exchange(t, alone, 0, 1), everyone),
    }
    for name, (layer, P_x) in layers.items():
        for needs_gradient in (False, True):
            x = integers(4, seed=comm.rank) if P_x.active else ad.zero_volume_tensor(torch.float64)
            x.requires_grad_(needs_gradient)
            before, expected = x.detach().clone(), layer(x).detach().clone()
            y = layer(x)
            assert not y._is_view(), name
            assert not y.numel() or y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr(), name
            y.mul_(2)
            y[:1] += 1
            torch.testing.assert_close(x.detach(), before, **EXACT, msg=name)
            expected = 2 * expected
            expected[:1] += 1
            torch.testing.assert_close(y.detach(), expected, **EXACT, msg=name)
            if needs_gradient:
                (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
                (plain,) = torch.autograd.grad(layer(x), x, torch.ones_like(y))
                torch.testing.assert_close(dx, 2 * plain, **EXACT, msg=name)
    alone.destroy()
    assert n == comm.size
    return list(layers)


@pytest.mark.parametrize("n", [2, 3])
def test_results_are_tensors_of_their_own_that_may_be_changed_in_place(ranks: RankPool, n: int) -> None:
    assert all(len(names) == 16 for names in ranks.run(n, check_own))


# Types


def patterns(dtype: torch.dtype, count: int, seed: int) -> Tensor:
    """Every pattern of bits that there is, NaN and -0 among them."""
    raw = torch.randint(0, 256, (count * dtype.itemsize,), generator=torch.Generator().manual_seed(seed))
    return (raw % 2 if dtype is torch.bool else raw).to(torch.uint8).view(dtype)


def check_types(comm: Communicator) -> int:
    """Copies are bitwise equal for every type; sums, for those that are added in one way or another."""
    P_x, P_y = ad.CartesianPartition(comm, (2,)), ad.CartesianPartition(comm, (3,))
    one = ad.Partition(comm, [2])
    types = [dtype for dtype in ad.partition.transfer.DTYPES if dtype is not None]
    for dtype in types:
        full = patterns(dtype, 12, 1)
        x = full[[slice(0, 5), slice(5, 12)][comm.rank]] if P_x.active else ad.zero_volume_tensor(dtype)
        y = ad.Repartition(P_x, P_y)(x)
        assert torch.equal(bits(y), bits(full[4 * comm.rank : 4 * comm.rank + 4])), dtype
        y = ad.partition.Broadcast(one, P_y)(full if comm.rank == 2 else ad.zero_volume_tensor())
        assert torch.equal(bits(y), bits(full)) and y.dtype is dtype, dtype
    for dtype in types:
        if "float4" in str(dtype) or "e8m0" in str(dtype):
            continue
        x = torch.tensor([1, 0, 1, 1]).to(dtype)
        y = ad.SumReduce(P_y, one)(x)
        wanted = x.to(torch.complex64) * (1 if dtype is torch.bool else 3)
        assert y.dtype is dtype and torch.equal(y.to(torch.complex64), wanted if comm.rank == 2 else wanted[:0]), dtype
    return len(types)


def test_every_type_travels_between_partitions_bit_by_bit(ranks: RankPool) -> None:
    assert min(ranks.run(3, check_types)) >= 20


def check_all_sum_reduce_types(comm: Communicator) -> None:
    partition = ad.Partition(comm, [0, 2])
    layer = ad.AllSumReduce(partition, 0)
    for dtype in (torch.int64, torch.int32, torch.uint8, torch.float16, torch.bfloat16, torch.float8_e4m3fn):
        for shape in ((2, 3), (0,), (2, 0, 3), ()):
            x = torch.full(shape, comm.rank + 1.0).to(dtype) if partition.active else ad.zero_volume_tensor(dtype)
            y = layer(x)
            assert y.dtype is dtype and y.shape == x.shape
            assert y.float().unique().tolist() == ([4.0] if y.numel() else [])
            assert y.requires_grad == dtype.is_floating_point  # on every rank, inactive ones too
            if y.requires_grad and y.dtype is not torch.float8_e4m3fn:
                y.sum().backward()
    partition.destroy()


def test_all_sum_reduce_of_integers_small_floats_and_nothing(ranks: RankPool) -> None:
    ranks.run(3, check_all_sum_reduce_types)


# After DistDL's tests of its layers: partitions that overlap or not, in a world that may be larger than both


GRIDS = [
    ((1,), [0], (4,), [0, 1, 2, 3]),
    ((1,), [0], (3,), [1, 2, 3]),
    ((1,), [3], (2,), [0, 1]),
    ((1, 2), [0, 1], (2, 2), [0, 1, 2, 3]),
    ((1, 2), [2, 3], (2, 2), [0, 1, 2, 3]),
    ((1, 1, 2), [0, 1], (2, 2, 1), [0, 1, 2, 3]),
    ((1, 1, 2), [1, 3], (1, 2, 2), [0, 1, 2, 3]),
    ((2,), [0, 3], (2, 2), [0, 1, 2, 3]),
]


def copied_from(small: ad.Partition, large: ad.Partition) -> dict[int, int] | None:
    """Of each rank of `large`, the rank of `small` that NumPy's broadcasting takes it from; None: they do not fit."""
    try:
        spread = np.broadcast_to(np.array(small.ranks).reshape(small.shape), large.shape)
    except ValueError:
        return None
    return dict(zip(large.ranks, spread.reshape(-1).tolist(), strict=True))


def check_distdl(comm: Communicator, dtype: torch.dtype) -> int:
    done = 0
    for shape_x, ranks_x, shape_y, ranks_y in GRIDS:
        small = ad.CartesianPartition(comm, shape_x, ranks_x)
        large = ad.CartesianPartition(comm, shape_y, ranks_y)
        origin = copied_from(small, large)
        if origin is None:
            for layer in (ad.partition.Broadcast, lambda a, b: ad.SumReduce(b, a)):
                with pytest.raises(ValueError, match="does not broadcast"):
                    layer(small, large)
            continue
        done += 1
        goals = [q for q in range(comm.size) if origin.get(q) == comm.rank]
        values = [integers(7, 3, seed=q).to(dtype) for q in range(comm.size)]
        mine, nothing = values[comm.rank], torch.empty(0, dtype=dtype)
        copy = values[origin[comm.rank]] if large.active else nothing
        total = torch.stack([values[q] for q in goals]).sum(0) if small.active else nothing
        pairs: tuple[tuple[Any, ...], ...] = (
            (ad.partition.Broadcast(small, large), small, large, copy, total),
            (ad.SumReduce(large, small), large, small, total, copy),
        )
        for layer, P_x, P_y, expected, adjoint in pairs:
            x = (mine.clone() if P_x.active else nothing.clone()).requires_grad_()
            y = layer(x)
            torch.testing.assert_close(y, expected, **EXACT)
            (dx,) = torch.autograd.grad(y, x, mine if P_y.active else nothing)
            torch.testing.assert_close(dx, adjoint if P_x.active else nothing, **EXACT)
            assert ad.testing.check_adjoint(layer, x, comm) <= ad.testing.TOLERANCE[dtype]
    return done


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_broadcast_and_sum_reduce_beside_numpy_on_the_partitions_of_distdl(ranks: RankPool, dtype: torch.dtype) -> None:
    assert ranks.run(4, check_distdl, dtype) == [7] * 4


def check_distdl_all_sum_reduce(comm: Communicator) -> None:
    """Every set of axes of grids that leave ranks out, beside NumPy's sum over those axes."""
    for shape, members in (((2, 1), [0, 1]), ((1, 2, 2), [3, 1, 0, 2]), ((1, 1), [2]), ((3,), [1, 2, 3])):
        partition = ad.CartesianPartition(comm, shape, members)
        values = np.stack([integers(2, 3, seed=q).numpy() for q in members]).reshape(*shape, 2, 3)
        for chosen in range(2 ** len(shape)):
            axes = tuple(axis for axis in range(len(shape)) if chosen >> axis & 1)
            summed = np.broadcast_to(values.sum(axes, keepdims=True), values.shape)
            layer = ad.AllSumReduce(partition, axes)
            x = integers(2, 3, seed=comm.rank) if partition.active else ad.zero_volume_tensor(torch.float64)
            wanted = torch.from_numpy(summed[partition.coordinates].copy()) if partition.active else x
            torch.testing.assert_close(layer(x), wanted, **EXACT)
            assert ad.testing.check_adjoint(layer, x, comm) <= 1e-12
        partition.destroy()


def test_all_sum_reduce_beside_numpy_for_every_set_of_axes(ranks: RankPool) -> None:
    ranks.run(4, check_distdl_all_sum_reduce)


def check_distdl_repartition(comm: Communicator, dtype: torch.dtype) -> None:
    grids = [
        ad.CartesianPartition(comm, (1, 2, 1)),
        ad.CartesianPartition(comm, (2, 2, 1)),
        ad.CartesianPartition(comm, (1, 1, 2), [2, 3]),
        ad.CartesianPartition(comm, (1, 1, 4), [3, 2, 1, 0]),
        ad.CartesianPartition(comm, (1, 1, 1), [1]),
    ]
    full, g = integers(3, 7, 5, seed=1).to(dtype), integers(3, 7, 5, seed=2).to(dtype)
    for P_x in grids:
        for P_y in grids:
            x = block(full, P_x).requires_grad_()
            layer = ad.Repartition(P_x, P_y)
            y = layer(x)
            torch.testing.assert_close(y, block(full, P_y), **EXACT)
            (dx,) = torch.autograd.grad(y, x, block(g, P_y))
            torch.testing.assert_close(dx, block(g, P_x), **EXACT)
            assert ad.testing.check_adjoint(layer, x, comm) <= ad.testing.TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_repartition_beside_numpy_on_the_partitions_of_distdl(ranks: RankPool, dtype: torch.dtype) -> None:
    ranks.run(4, check_distdl_repartition, dtype)


def traced(comm: Communicator) -> tuple[list[float], str]:
    """Between the graphs of torch.compile a layer runs as ever; fake tensors are refused before anything is asked."""
    torch._dynamo.reset()
    layer = ad.Repartition(ad.Partition(comm, [0, 1]), ad.Partition(comm, [1]))
    x = torch.full((comm.rank + 1,), comm.rank + 1.0, requires_grad=True)
    y = torch.compile(lambda t: layer(t * 2) + 1, backend="aot_eager")(x)
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(), pytest.raises(NotImplementedError) as caught:
        layer(torch.ones(2))
    return [*y.tolist(), *dx.tolist()], str(caught.value)


def test_layers_between_partitions_under_torch_compile_and_fake_tensors(ranks: RankPool) -> None:
    (first, message), (second, _) = ranks.run(2, traced)
    assert first == [2.0] and second == [3.0, 5.0, 5.0, 2.0, 2.0]
    assert "Repartition: the ranks tell each other the shapes of their tensors, which cannot be traced" in message


@each_size
def test_partitions_of_any_order_of_ranks_are_cut_in_that_order(ranks: RankPool, n: int) -> None:
    for rank, (position, values) in enumerate(ranks.run(n, reversed_line)):
        assert position == n - 1 - rank
        assert values == [float(v) for v in range(2 * position, 2 * position + 2)]


def reversed_line(comm: Communicator) -> tuple[int | None, list[float]]:
    n = comm.size
    line, back = ad.Partition(comm, range(n)), ad.Partition(comm, reversed(range(n)))
    x = torch.arange(2 * n)[2 * comm.rank : 2 * comm.rank + 2].double()
    return back.position, ad.Repartition(line, back)(x).tolist()
