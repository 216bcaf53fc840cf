"""CommOverlapHelper, CommOverlap, CommOverlapP2P beside the unsharded layer: where ranks are, buffers of their own."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from deferred import deferred_lanes
from ranks import RankPool
from schedule import Schedule, races
from torch import Tensor

import pynccl_autograd as ad
from pynccl import Communicator
from pynccl.comm.observing import Observer, observing
from pynccl_autograd import OverlapConfig
from pynccl_autograd.overlap.comm_overlap import COLLECTIVES
from pynccl_autograd.overlap.lanes import Lane

ROWS, WIDTH, HIDDEN = 24, 16, 36


def on_hosts(comm: Communicator, hosts: list[str]) -> tuple[int, ...]:
    os.environ["NCCL_HOSTID"] = hosts[comm.rank]
    helper = ad.CommOverlapHelper(comm)
    return helper.rank, helper.size, helper.node_id, helper.num_nodes, helper.local_rank, helper.local_size


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        ("aabb", [(0, 2, 0, 2), (0, 2, 1, 2), (1, 2, 0, 2), (1, 2, 1, 2)]),
        ("abba", [(0, 2, 0, 2), (1, 2, 0, 2), (1, 2, 1, 2), (0, 2, 1, 2)]),
        ("abcc", [(0, 3, 0, 1), (1, 3, 0, 1), (2, 3, 0, 2), (2, 3, 1, 2)]),
    ],
)
def test_a_helper_knows_which_ranks_share_a_host(ranks: RankPool, hosts: str, expected: list[Any]) -> None:
    found = ranks.run(4, on_hosts, list(hosts))
    assert found == [(rank, 4, *where) for rank, where in enumerate(expected)]


def helped(comm: Communicator) -> list[list[float]]:
    helper = ad.CommOverlapHelper(comm)
    helper.barrier()
    mine = torch.full((2,), float(comm.rank))
    into = torch.empty(comm.size * 2)
    assert helper.all_gather(mine, into) is into
    assert into.tolist() == helper.all_gather(mine).flatten().tolist()
    gathered: list[list[float]] = helper.all_gather(mine).tolist()
    return gathered


def test_a_helper_gathers_and_waits(ranks: RankPool) -> None:
    assert ranks.run(3, helped) == [[[float(q)] * 2 for q in range(3)]] * 3


def made(comm: Communicator, kind: str) -> Any:
    helper = ad.CommOverlapHelper(comm)
    shape = (ROWS, max(WIDTH, HIDDEN))
    if kind in ("ring", "capped ring"):
        most = 4 if kind == "capped ring" else None
        return ad.CommOverlapP2P(helper, shape, torch.float64, aggregate=comm.size > 2, num_comm_ctas=most)
    by_copies = {"copy_engines": kind == "copy engines", "deterministic": kind in ("exchange", "copy engines")}
    return ad.CommOverlap(helper, shape, torch.float64, num_splits=3, **by_copies)


def check_layers(comm: Communicator, kind: str) -> str:
    """Both layers of an MLP with one object; two steps in the same buffers."""
    torch.manual_seed(2)
    up, down = torch.nn.Linear(WIDTH, HIDDEN).double(), torch.nn.Linear(HIDDEN, WIDTH).double()
    overlap = made(comm, kind)
    options = {"sequence_parallel": True, "dtype": torch.float64, "overlap": overlap}
    column = ad.ColumnParallelLinear(WIDTH, HIDDEN, comm, **options)
    row = ad.RowParallelLinear(HIDDEN, WIDTH, comm, **options)
    column.load_full(up.weight, up.bias)
    row.load_full(down.weight, down.bias)
    before = overlap.nbytes
    for seed in range(2):
        torch.manual_seed(seed)
        x, g = torch.randn(2, ROWS, WIDTH, dtype=torch.float64)
        whole, own = x.clone().requires_grad_(), x.chunk(comm.size)[comm.rank].clone().requires_grad_()
        layers: tuple[Any, ...] = (up, down, column, row)
        for layer in layers:
            layer.zero_grad()
        down(up(whole).relu()).backward(g)
        y = row(column(own).relu())
        y.backward(g.chunk(comm.size)[comm.rank])
        pairs = [
            (own.grad, whole.grad.chunk(comm.size)[comm.rank]),  # type: ignore[union-attr]
            (column.weight.grad, up.weight.grad.chunk(comm.size)[comm.rank]),  # type: ignore[union-attr]
            (column.bias.grad, up.bias.grad.chunk(comm.size)[comm.rank]),  # type: ignore[union-attr]
            (row.weight.grad, down.weight.grad.chunk(comm.size, 1)[comm.rank]),  # type: ignore[union-attr]
            (row.bias.grad, down.bias.grad),
            (y, down(up(x).relu()).chunk(comm.size)[comm.rank]),
        ]
        for found, expected in pairs:
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    assert overlap.nbytes == before
    memory: str = overlap.memory
    overlap.close()
    overlap.close()
    return memory


@pytest.mark.parametrize(("n", "kind"), [(2, "slices"), (3, "ring"), (4, "exchange"), (2, "copy engines")])
def test_layers_with_buffers_of_their_own_equal_the_unsharded_ones(ranks: RankPool, n: int, kind: str) -> None:
    assert ranks.run(n, check_layers, kind) == ["window"] * n


class Calls(Observer):
    """Collectives whose buffers are not both in some memory."""

    def __init__(self, memory: Iterable[Tensor]) -> None:
        self._storages = {buffer.untyped_storage().data_ptr() for buffer in memory}
        self.all = 0
        self.outside: list[str] = []

    def ran(self, lane: Lane, name: str, reads: Any, writes: Any, begin: Any, end: Any) -> None:
        if name in COLLECTIVES:
            self.all += 1
            if any(t.untyped_storage().data_ptr() not in self._storages for t in (*reads, *writes)):
                self.outside.append(name)


def in_windows(comm: Communicator, deterministic: bool, save_gathered: bool) -> tuple[int, list[str], list[str], str]:
    helper, shape = ad.CommOverlapHelper(comm), (ROWS, HIDDEN)
    overlap = ad.CommOverlap(
        helper, shape, torch.float64, num_splits=3, deterministic=deterministic, save_gathered=save_gathered
    )
    calls = Calls(overlap.workspace._buffers.values())
    with observing(calls), ad.overlap.report() as report, deferred_lanes(), Schedule() as schedule:
        for sequence_parallel in (True, False):
            options: Any = {"sequence_parallel": sequence_parallel, "dtype": torch.float64, "overlap": overlap}
            column = ad.ColumnParallelLinear(12, HIDDEN, comm, **options)
            row = ad.RowParallelLinear(HIDDEN, 12, comm, **options)
            x = torch.randn(ROWS // comm.size if sequence_parallel else ROWS, 12, dtype=torch.float64)
            row(column(x)).sum().backward()
    overlap.close()
    return calls.all, calls.outside, [text for log in schedule.logs for text in races(log)], str(report)


@pytest.mark.parametrize(("n", "deterministic", "save_gathered"), [(2, True, False), (3, False, True)])
def test_collectives_send_from_windows_into_windows(
    ranks: RankPool, n: int, deterministic: bool, save_gathered: bool
) -> None:
    """Of one buffer elsewhere NCCL uses neither symmetric kernels nor copy engines."""
    for calls, outside, found, text in ranks.run(n, in_windows, deterministic, save_gathered):
        assert calls >= 18 and not outside and not found
        assert text.count("; in symmetric windows") == 6 and "not in symmetric" not in text


def capped(comm: Communicator, end: str) -> None:
    """A child of the ranks' communicator, so that it can end."""
    parent = comm.split(0, comm.rank)
    assert parent is not None
    config = OverlapConfig("ring", num_comm_ctas=4, dgrad=OverlapConfig("ring", num_comm_ctas=2))
    options: Any = {"sequence_parallel": True, "overlap": config}
    layers = [ad.RowParallelLinear(WIDTH * comm.size, WIDTH, parent, **options) for _ in range(2)]
    children = parent.dependents
    caps = [child.config.max_ctas for child in children if child.config]
    assert caps == [4, 2]  # made with the first layer, and once
    for layer in layers:
        layer(torch.ones(comm.size, WIDTH)).sum().backward()
    with made(parent, "capped ring") as overlap:  # whose windows are those of the communicator that carries
        assert overlap.workspace.carrier is children[0]
        overlap.matmul_reduce_scatter(torch.ones(ROWS, WIDTH).double(), torch.ones(HIDDEN, WIDTH).double())
    assert parent.dependents == children
    getattr(parent, end)()
    assert not any(child.alive for child in children)
    comm.barrier()


@pytest.mark.parametrize("end", ["destroy", "abort"])
def test_communicators_with_fewer_ctas_are_made_with_a_layer_and_end_with_their_parent(
    ranks: RankPool, end: str
) -> None:
    ranks.run(2, capped, end)


def too_small(comm: Communicator) -> None:
    with made(comm, "slices") as overlap:
        x, w = torch.ones(ROWS, 2 * HIDDEN, dtype=torch.float64), torch.ones(4, 2 * HIDDEN, dtype=torch.float64)
        with pytest.raises(ValueError, match=r"CommOverlap: its buffer 'gathered' has \d+ bytes, but \(.*\) of torch"):
            overlap.all_gather_matmul(x, w)
        x, w = torch.ones(ROWS // comm.size, WIDTH, dtype=torch.float64), torch.ones(4, WIDTH, dtype=torch.float64)
        assert overlap.all_gather_matmul(x, w).tolist() == [[float(WIDTH)] * 4] * ROWS  # and works on
    with pytest.raises(ValueError, match=r"do not use it after close\(\)"):
        overlap.all_gather_matmul(x, w)


def test_a_tensor_that_the_buffers_cannot_hold_is_refused_on_every_rank(ranks: RankPool) -> None:
    ranks.run(3, too_small)


def beside(comm: Communicator) -> tuple[list[float], list[float]]:
    with made(comm, "slices") as overlap:
        mine, gathered = torch.full((2,), comm.rank + 1.0), torch.empty(2 * comm.size)
        a = torch.ones(3, 3, requires_grad=True)
        with overlap.bulk("all_gather", mine, gathered) as arriving:
            y = (a @ a).sum()  # has a gradient, as everywhere
        assert arriving is gathered
        y.backward()
        summed = torch.ones(2)
        with overlap.bulk("all_reduce", summed, summed, "max"):
            pass
        assert a.grad is not None and a.grad.tolist() == [[6.0] * 3] * 3
        return gathered.tolist(), summed.tolist()


def test_a_whole_collective_runs_beside_a_block(ranks: RankPool) -> None:
    gathered = [float(q + 1) for q in range(3) for _ in range(2)]
    assert ranks.run(3, beside) == [(gathered, [1.0, 1.0])] * 3


def refused(comm: Communicator) -> None:
    helper = ad.CommOverlapHelper(comm)
    wrong: list[tuple[Any, type[Exception], str]] = [
        (lambda: ad.CommOverlapHelper(3), TypeError, "comm is 3, expected a pynccl.Communicator"),
        (lambda: ad.CommOverlap(comm, (8, 8)), TypeError, r"expected a CommOverlapHelper\(comm\)"),  # type: ignore[arg-type]
        (lambda: ad.CommOverlap(helper, (8,)), ValueError, "tensor_shape is .*expected"),
        (lambda: ad.CommOverlap(helper, (7, 8)), ValueError, "rows that 2 ranks can share equally"),
        (lambda: ad.CommOverlap(helper, (8, 8), torch.int32), TypeError, "dtype is torch.int32, expected"),
        (lambda: ad.CommOverlap(helper, (8, 8), num_splits=0), ValueError, "chunks is 0, expected an integer >= 1"),
        (lambda: ad.CommOverlapP2P(helper, (8, 8), aggregate=1), TypeError, "aggregate is 1, expected True or"),  # type: ignore[arg-type]
    ]
    for call, kind, text in wrong:
        with pytest.raises(kind, match=text):
            call()
    with (
        ad.CommOverlap(helper, (8, 8)) as overlap,
        pytest.raises(ValueError, match="collective is 'gather', expected"),
        overlap.bulk("gather", torch.ones(2), torch.ones(2)),
    ):
        pass


def test_what_has_no_meaning_is_refused(ranks: RankPool) -> None:
    ranks.run(2, refused)


def test_objects_print_what_they_are(ranks: RankPool) -> None:
    found = ranks.run(2, described)
    assert found[0] == (
        "CommOverlapHelper(rank 0 of 2, rank 0 of 2 on node 0 of 1)",
        "CommOverlap(slices, (24, 36) of torch.float64, 16384 bytes, window)",
    )


def described(comm: Communicator) -> tuple[str, str]:
    with made(comm, "slices") as overlap:
        return repr(overlap.helper), repr(overlap)
