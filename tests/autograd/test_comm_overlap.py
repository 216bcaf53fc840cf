"""CommOverlapHelper, CommOverlap and CommOverlapP2P: node topology, and layers compared with unsharded ones."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from ranks import RankPool
from torch import Tensor

import pynccl_autograd as ad
from pynccl import Communicator
from pynccl_autograd import OverlapConfig
from pynccl_autograd.overlap.lanes import Lane, Observer, observing
from pynccl_autograd.overlap.te import COLLECTIVES

ROWS, WIDTH, HIDDEN = 24, 16, 36


def report_topology(comm: Communicator, hosts: str) -> tuple[int, ...]:
    os.environ["NCCL_HOSTID"] = hosts[comm.rank]
    helper = ad.CommOverlapHelper(comm)
    helper.barrier()
    mine, into = torch.full((2,), float(comm.rank)), torch.empty(comm.size * 2)
    assert helper.all_gather(mine, into) is into
    assert into.tolist() == helper.all_gather(mine).flatten().tolist() == [q // 2 for q in range(2 * comm.size)]
    return helper.rank, helper.size, helper.node_id, helper.num_nodes, helper.local_rank, helper.local_size


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        ("aabb", [(0, 2, 0, 2), (0, 2, 1, 2), (1, 2, 0, 2), (1, 2, 1, 2)]),
        ("abba", [(0, 2, 0, 2), (1, 2, 0, 2), (1, 2, 1, 2), (0, 2, 1, 2)]),
        ("abcc", [(0, 3, 0, 1), (1, 3, 0, 1), (2, 3, 0, 2), (2, 3, 1, 2)]),
    ],
)
def test_a_helper_reports_which_ranks_share_a_node(ranks: RankPool, hosts: str, expected: list[Any]) -> None:
    found = ranks.run(4, report_topology, hosts)
    assert found == [(rank, 4, *where) for rank, where in enumerate(expected)]


def make_overlap(comm: Communicator, kind: str) -> Any:
    helper = ad.CommOverlapHelper(comm)
    shape = (ROWS, max(WIDTH, HIDDEN))
    if kind in ("ring", "capped ring"):
        max_ctas = 4 if kind == "capped ring" else None
        return ad.CommOverlapP2P(helper, shape, torch.float64, aggregate=comm.size > 2, num_comm_ctas=max_ctas)
    by_copies = {"copy_engines": kind == "copy engines", "deterministic": kind in ("exchange", "copy engines")}
    return ad.CommOverlap(helper, shape, torch.float64, num_splits=3, **by_copies)


class Calls(Observer):
    """Count collectives, and list those with a buffer outside the given memory.

    For those NCCL cannot use symmetric kernels or copy engines."""

    def __init__(self, memory: Iterable[Tensor]) -> None:
        self._storages = {buffer.untyped_storage().data_ptr() for buffer in memory}
        self.all = 0
        self.outside: list[str] = []

    def ran(self, lane: Lane, name: str, reads: Any, writes: Any, begin: Any, end: Any) -> None:
        if name in COLLECTIVES:
            self.all += 1
            if any(t.untyped_storage().data_ptr() not in self._storages for t in (*reads, *writes)):
                self.outside.append(name)


def check_layers(comm: Communicator, kind: str) -> str:
    """Run both layers of an MLP with one overlap object, for two steps in the same buffers."""
    torch.manual_seed(2)
    up, down = torch.nn.Linear(WIDTH, HIDDEN).double(), torch.nn.Linear(HIDDEN, WIDTH).double()
    overlap = make_overlap(comm, kind)
    options = {"sequence_parallel": True, "dtype": torch.float64, "overlap": overlap}
    column = ad.ColumnParallelLinear(WIDTH, HIDDEN, comm, **options)
    row = ad.RowParallelLinear(HIDDEN, WIDTH, comm, **options)
    column.load_full(up.weight, up.bias)
    row.load_full(down.weight, down.bias)
    before, calls = overlap.nbytes, Calls(overlap.buffers._buffers.values())
    for seed in range(2):
        torch.manual_seed(seed)
        x, g = torch.randn(2, ROWS, WIDTH, dtype=torch.float64)
        full_x, own_x = x.clone().requires_grad_(), x.chunk(comm.size)[comm.rank].clone().requires_grad_()
        layers: tuple[Any, ...] = (up, down, column, row)
        for layer in layers:
            layer.zero_grad()
        down(up(full_x).relu()).backward(g)
        with observing(calls):
            y = row(column(own_x).relu())
            y.backward(g.chunk(comm.size)[comm.rank])
        pairs = [
            (own_x.grad, full_x.grad.chunk(comm.size)[comm.rank]),  # type: ignore[union-attr]
            (column.weight.grad, up.weight.grad.chunk(comm.size)[comm.rank]),  # type: ignore[union-attr]
            (column.bias.grad, up.bias.grad.chunk(comm.size)[comm.rank]),  # type: ignore[union-attr]
            (row.weight.grad, down.weight.grad.chunk(comm.size, 1)[comm.rank]),  # type: ignore[union-attr]
            (row.bias.grad, down.bias.grad),
            (y, down(up(x).relu()).chunk(comm.size)[comm.rank]),
        ]
        for found, expected in pairs:
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    assert overlap.nbytes == before
    assert kind == "ring" or (calls.all > 8 and not calls.outside), calls.outside
    memory: str = overlap.memory
    overlap.close()
    overlap.close()
    return memory


@pytest.mark.parametrize(("n", "kind"), [(2, "slices"), (3, "ring"), (4, "exchange"), (2, "copy engines")])
def test_layers_with_an_overlap_object_equal_the_unsharded_ones(ranks: RankPool, n: int, kind: str) -> None:
    assert ranks.run(n, check_layers, kind) == ["window"] * n


def check_cta_limits(comm: Communicator, end: str) -> None:
    """Work on a child communicator, which the test can destroy or abort."""
    parent = comm.split(0, comm.rank)
    assert parent is not None
    config = OverlapConfig("ring", num_comm_ctas=4, dgrad=OverlapConfig("ring", num_comm_ctas=2))
    options: Any = {"sequence_parallel": True, "overlap": config}
    layers = [ad.RowParallelLinear(WIDTH * comm.size, WIDTH, parent, **options) for _ in range(2)]
    children = parent._dependents
    caps = [child.config.max_ctas for child in children if child.config]
    assert caps == [4, 2]  # created once, with the first layer
    for layer in layers:
        layer(torch.ones(comm.size, WIDTH)).sum().backward()
    with make_overlap(parent, "capped ring") as overlap:  # its windows belong to the child communicator
        assert overlap.buffers.carrier is children[0]
        overlap.matmul_reduce_scatter(torch.ones(ROWS, WIDTH).double(), torch.ones(HIDDEN, WIDTH).double())
    assert parent._dependents == children
    getattr(parent, end)()
    assert not any(child.alive for child in children)
    comm.barrier()


@pytest.mark.parametrize("end", ["destroy", "abort"])
def test_communicators_with_a_cta_limit_are_created_with_a_layer_and_end_with_their_parent(
    ranks: RankPool, end: str
) -> None:
    ranks.run(2, check_cta_limits, end)


def check_bad_arguments(comm: Communicator) -> None:
    helper = ad.CommOverlapHelper(comm)
    wrong: list[tuple[Any, type[Exception], str]] = [
        (lambda: ad.CommOverlapHelper(3), TypeError, "comm is 3, expected a pynccl.Communicator"),
        (lambda: ad.CommOverlap(comm, (8, 8)), TypeError, r"expected a CommOverlapHelper\(comm\)"),  # type: ignore[arg-type]
        (lambda: ad.CommOverlap(helper, (8,)), ValueError, "tensor_shape is .*expected"),
        (lambda: ad.CommOverlap(helper, (7, 8)), ValueError, "a number of rows divisible by 2 ranks"),
        (lambda: ad.CommOverlap(helper, (8, 8), torch.int32), TypeError, "dtype is torch.int32, expected"),
        (
            lambda: ad.CommOverlap(helper, (8, 8), num_splits=0),
            ValueError,
            "CommOverlap: num_splits is 0, expected an integer",
        ),
        (lambda: ad.CommOverlapP2P(helper, (8, 8), aggregate=1), TypeError, "aggregate is 1, expected True or"),  # type: ignore[arg-type]
    ]
    for call, kind, text in wrong:
        with pytest.raises(kind, match=text):
            call()
    with ad.CommOverlap(helper, (8, 8)) as overlap:
        with pytest.raises(ValueError, match="collective is 'gather', expected"):
            overlap.bulk("gather", torch.ones(2), torch.ones(2)).__enter__()
        with pytest.raises(ValueError, match=r"CommOverlap: its buffer 'gathered' has \d+ bytes, but \(.*\) of torch"):
            overlap.all_gather_matmul(torch.ones(8, 160), torch.ones(4, 160))
        assert overlap.all_gather_matmul(torch.ones(4, 8), torch.ones(4, 8)).tolist() == [[8.0] * 4] * 8  # still usable
        gathered = torch.empty(4)
        with overlap.bulk("all_gather", torch.full((2,), comm.rank + 1.0), gathered) as arriving:
            y = torch.ones(3, 3, requires_grad=True).sum()  # gradients are recorded as usual
        assert arriving is gathered and y.requires_grad and gathered.tolist() == [1.0, 1.0, 2.0, 2.0]
    with pytest.raises(ValueError, match=r"do not use it after close\(\)"):
        overlap.all_gather_matmul(torch.ones(4, 8), torch.ones(4, 8))


def test_bad_arguments_raise_and_the_overlap_object_stays_usable(ranks: RankPool) -> None:
    ranks.run(2, check_bad_arguments)
