"""Partitions: coordinates, cached communicators, and the sums, copies and cuts between them; inactive ranks too."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from ranks import RankPool, each_size
from torch import Tensor

import pynccl
import pynccl_autograd as ad
from pynccl import Communicator

EXACT = {"rtol": 0.0, "atol": 0.0}


def integers(*shape: int, seed: int) -> Tensor:
    """Integer-valued, so that sums are exact in any order."""
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)).double()


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gradient(y: Tensor, x: Tensor, g: Tensor) -> Tensor:
    (dx,) = torch.autograd.grad(y, x, g)
    return dx


def total(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(tensors)).sum(0)


def input_on(partition: ad.Partition, *shape: int) -> Tensor:
    """Integers that differ by rank; of volume zero, and of another type, on inactive ranks."""
    if not partition.active:
        return ad.zero_volume_tensor()
    return integers(*shape, seed=partition.comm.rank).requires_grad_()


def threads(n: int, function: Callable[[Communicator], Any]) -> list[Any]:
    """function(comm) on n ranks that are threads of this process."""
    unique_id = pynccl.get_unique_id()
    results: list[Any] = [None] * n
    failures: list[BaseException] = []

    def rank(r: int) -> None:
        try:
            comm = Communicator.init(n, unique_id, r, device=r, timeout=30.0)
            try:
                results[r] = function(comm)
                comm.destroy()
            except BaseException:
                comm.abort()  # so that the others do not wait
                raise
        except BaseException as error:
            failures.append(error)

    running = [threading.Thread(target=rank, args=(r,)) for r in range(n)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(60)
    if failures:
        raise failures[0]
    assert not any(thread.is_alive() for thread in running), "some ranks did not finish"
    return results


# The example of DistDL's document: 12 ranks as 2 x 2 x 3, reduced along the last two axes


def document_example(comm: Communicator) -> dict[str, Any]:
    partition = ad.CartesianPartition(comm, (2, 2, 3))
    layer = ad.AllSumReduce(partition, axes_reduce=(1, 2))
    x = integers(3, 7, 5, seed=comm.rank).requires_grad_()
    y = layer(x)
    dx = gradient(y, x, integers(3, 7, 5, seed=100 + comm.rank))
    error = ad.testing.check_adjoint(layer, random(3, 7, 5, seed=comm.rank), comm)
    found = {"at": partition.coordinates, "y": y.detach(), "dx": dx, "error": error, "summed": layer.comm.size}
    partition.destroy()
    return found


def test_the_2_x_2_x_3_example_of_the_all_sum_reduce_document() -> None:
    results = threads(12, document_example)
    grid = np.arange(12).reshape(2, 2, 3)
    for r, found in enumerate(results):
        assert found["at"] == tuple(int(i) for i in np.argwhere(grid == r)[0])
        assert found["summed"] == 6
        peers = [int(q) for q in grid[found["at"][0]].reshape(-1)]
        assert r in peers and len(peers) == 6
        torch.testing.assert_close(found["y"], total([integers(3, 7, 5, seed=q) for q in peers]), **EXACT)
        torch.testing.assert_close(found["dx"], total([integers(3, 7, 5, seed=100 + q) for q in peers]), **EXACT)
        assert found["error"] <= 1e-12


# Partitions


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
    """2 ranks of n as 2 x 1; the others are inactive."""
    partition = ad.CartesianPartition(comm, (2, 1))
    expected = {(0,): [0, 1], 1: [comm.rank], (0, 1): [0, 1], (): [comm.rank]}
    for axes, members in expected.items():
        layer = ad.AllSumReduce(partition, axes)
        x = input_on(partition, 2, 3)
        y = layer(x)
        assert y is not x and (y.data_ptr() != x.data_ptr() or not x.numel())
        if partition.active:
            torch.testing.assert_close(y, total([integers(2, 3, seed=q) for q in members]), **EXACT)
        else:
            assert y.shape == (0,) and y.dtype == x.dtype
        x = random(2, 3, seed=comm.rank) if partition.active else ad.zero_volume_tensor(torch.float64)
        assert ad.testing.check_adjoint(layer, x, comm) <= 1e-12
    partition.destroy()


@each_size
def test_all_sum_reduce_is_self_adjoint_and_clones_without_axes_and_on_inactive_ranks(ranks: RankPool, n: int) -> None:
    ranks.run(n, check_all_sum_reduce)


def second_derivative(comm: Communicator) -> None:
    """L = sum over ranks of y**3 / 6 for the sum y of x: dL/dx = N y**2 / 2; summed and derived again, N**2 y."""
    partition = ad.CartesianPartition(comm, (comm.size,))
    layer = ad.AllSumReduce(partition, 0)
    x = random(2, seed=comm.rank).requires_grad_()
    y = layer(x)
    (dx,) = torch.autograd.grad((y**3 / 6).sum(), x, create_graph=True)
    (ddx,) = torch.autograd.grad(dx.sum(), x)
    torch.testing.assert_close(dx, comm.size * y**2 / 2)
    torch.testing.assert_close(ddx, comm.size**2 * y)
    partition.destroy()


def test_all_sum_reduce_has_second_derivatives(ranks: RankPool) -> None:
    ranks.run(2, second_derivative)


# Between partitions


def cases(comm: Communicator) -> list[tuple[ad.Partition, ad.Partition]]:
    """(small, large) of 4 ranks: by NumPy's rule small.shape broadcasts to large.shape."""
    grid = ad.CartesianPartition(comm, (2, 2), ranks=[2, 0, 3, 1])
    return [
        (ad.Partition(comm, [1]), ad.Partition(comm, [0, 1, 2])),
        (ad.Partition(comm, [3]), ad.Partition(comm, [0, 2])),  # rank 1 is in neither
        (ad.CartesianPartition(comm, (1, 2), ranks=[1, 2]), grid),
        (ad.CartesianPartition(comm, (2, 1), ranks=[3, 2]), grid),
        (ad.Partition(comm, [0, 3]), grid),  # fewer axes: as (1, 2)
        (grid, grid),
    ]


def origin(small: ad.Partition, large: ad.Partition, rank: int) -> int:
    """The rank of `small` that `rank` of `large` has its copy from, by NumPy itself."""
    spread = np.broadcast_to(np.array(small.ranks).reshape(small.shape), large.shape).reshape(-1)
    return int(spread[large.ranks.index(rank)])


def check_broadcast(comm: Communicator) -> None:
    for small, large in cases(comm):
        layer = ad.partition.Broadcast(small, large)
        x = input_on(small, 3, 2)
        y = layer(x)
        assert y.requires_grad  # on every rank: the backward pass is a collective
        if large.active:
            expected = integers(3, 2, seed=origin(small, large, comm.rank))
            torch.testing.assert_close(y, expected, **EXACT)
        else:
            assert y.shape == (0,)
        x = x.detach().double().requires_grad_()
        dx = gradient(layer(x), x, integers(*y.shape, seed=50 + comm.rank))
        if small.active:
            copies = [q for q in large.ranks if origin(small, large, q) == comm.rank]
            torch.testing.assert_close(dx, total([integers(3, 2, seed=50 + q) for q in copies]), **EXACT)
        assert ad.testing.check_adjoint(layer, random(*x.shape, seed=comm.rank), comm) <= 1e-12


def check_sum_reduce(comm: Communicator) -> None:
    for small, large in cases(comm):
        layer = ad.SumReduce(large, small)
        x = input_on(large, 3, 2)
        y = layer(x)
        assert y.requires_grad
        if small.active:
            summed = [q for q in large.ranks if origin(small, large, q) == comm.rank]
            torch.testing.assert_close(y, total([integers(3, 2, seed=q) for q in summed]), **EXACT)
        else:
            assert y.shape == (0,)
        x = x.detach().double().requires_grad_()
        g = integers(*y.shape, seed=50 + comm.rank)
        dx = gradient(layer(x), x, g)
        copied = ad.partition.Broadcast(small, large)(g)  # the adjoint by its own layer
        torch.testing.assert_close(dx, copied, **EXACT)
        assert ad.testing.check_adjoint(layer, random(*x.shape, seed=comm.rank), comm) <= 1e-12


def test_broadcast_between_partitions_follows_numpy(ranks: RankPool) -> None:
    ranks.run(4, check_broadcast)


def test_sum_reduce_between_partitions_is_the_adjoint_of_broadcast(ranks: RankPool) -> None:
    ranks.run(4, check_sum_reduce)


def block(full: Tensor, partition: ad.Partition) -> Tensor:
    """This rank's block, by NumPy's array_split."""
    if partition.coordinates is None:
        return full.new_empty(0)
    part = full.detach().numpy()
    for axis, (size, at) in enumerate(zip(partition.shape, partition.coordinates, strict=True)):
        part = np.array_split(part, size, axis)[at]
    return torch.from_numpy(part.copy())


def check_repartition(comm: Communicator) -> None:
    shapes = [(1, 1), (2, 1), (1, 3), (2, 2), (4, 1)]
    grids = [ad.CartesianPartition(comm, shape) for shape in shapes]
    grids.append(ad.CartesianPartition(comm, (1, 2), ranks=[3, 1]))
    sizes = [(4, 6), (5, 7), (3, 1)]  # even, uneven, and with empty blocks
    for i, P_x in enumerate(grids):
        for j, P_y in enumerate(grids):
            size = sizes[(i + 2 * j) % 3]
            full, g = integers(*size, seed=1), integers(*size, seed=2)
            x = block(full, P_x).requires_grad_()
            y = ad.Repartition(P_x, P_y)(x)
            torch.testing.assert_close(y, block(full, P_y), **EXACT)
            torch.testing.assert_close(gradient(y, x, block(g, P_y)), block(g, P_x), **EXACT)
    x = block(random(5, 7, seed=3), grids[3])
    assert ad.testing.check_adjoint(ad.Repartition(grids[3], grids[5]), x, comm) <= 1e-12


def test_repartition_cuts_as_numpy_does_and_back(ranks: RankPool) -> None:
    ranks.run(4, check_repartition)


# What is wrong is said, on every rank


def messages(comm: Communicator) -> list[str]:
    pair, line = ad.Partition(comm, [0, 1]), ad.Partition(comm, [0, 1, 2])
    flat = ad.CartesianPartition(comm, (3, 1))
    calls: list[Callable[[], object]] = [
        lambda: ad.Partition(comm, [0, 0]),
        lambda: ad.Partition(comm, []),
        lambda: ad.CartesianPartition(comm, (2, 2)),
        lambda: ad.AllSumReduce(pair, 1),
        lambda: ad.partition.Broadcast(pair, line),
        lambda: ad.Repartition(pair, ad.CartesianPartition(comm, (1, 2))),
        lambda: ad.SumReduce(pair, ad.Partition(comm, [2]))(torch.zeros(2)),
        lambda: ad.SumReduce(line, ad.Partition(comm, [2]))(torch.zeros(2 + comm.rank)),
        lambda: ad.Repartition(flat, flat)(torch.zeros(2, 2 + comm.rank)),
        lambda: ad.Repartition(line, pair)(torch.zeros(2, 2)),
        lambda: ad.Repartition(line, pair)(torch.zeros(2, dtype=(torch.int64, torch.int8)[comm.rank % 2])),
    ]
    found = []
    for call in calls:
        with pytest.raises((ValueError, TypeError)) as caught:
            call()
        found.append(str(caught.value))
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
        "rank 0 has a tensor (2, 2) on a partition (3,)",
        "expected one type",
    ]
    for found in ranks.run(3, messages):
        for text, message in zip(expected, found, strict=True):
            assert text in message


def volume_on_an_inactive_rank(comm: Communicator) -> bool:
    layer = ad.AllSumReduce(ad.Partition(comm, [0]), 0)
    if comm.rank == 0:
        return bool(layer(torch.ones(2)).sum() == 2)
    with pytest.raises(ValueError, match="expected one of volume zero"):
        layer(torch.ones(2))
    return True


def test_an_inactive_rank_that_passes_data_is_told(ranks: RankPool) -> None:
    assert ranks.run(2, volume_on_an_inactive_rank) == [True, True]
