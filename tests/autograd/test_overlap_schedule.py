"""The schedules of overlapped layers: the exact order of operations and waits.

Lanes with random delays give the same bits; buffers are filled with NaN outside their lifetime."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from async_lanes import deferred_lanes, poisoned_buffers
from ranks import RankPool
from test_overlap import CASES, shard
from torch import Tensor

import pynccl_autograd as ad
from pynccl import Communicator
from pynccl_autograd import OverlapConfig
from pynccl_autograd.overlap.lanes import Lane, Lanes, Observer, Point, observing

ROWS, WIDTH = 12, 12  # divisible by 2, 3 and 4
ONE_STREAM = (
    OverlapConfig("slices", chunks=1),
    OverlapConfig("slices", chunks=3),
    OverlapConfig("slices", chunks=100),
    OverlapConfig("ring"),
    OverlapConfig("ring", aggregate=True),
    OverlapConfig("exchange", chunks=1),
    OverlapConfig("exchange", chunks=5),
    OverlapConfig("bulk"),
)
TWO_STREAMS = tuple(replace(config, compute_streams=2) for config in ONE_STREAM)
GATHERED_TWICE = tuple(OverlapConfig(method, save_gathered=False) for method in ("slices", "ring"))
MORE: dict[str, dict[str, Any]] = {
    "all_gather_matmul": {"return_gathered": True},
    "matmul_all_reduce": {"hand_off": True},
    "matmul_reduce_scatter": {"reduce_dtype": torch.float32},
    "copy_matmul": {"reduce_dtype": torch.float32},
}


def tensors(name: str, comm: Communicator, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return this rank's x (a matrix), w and bias."""
    case, generator = CASES[name], torch.Generator().manual_seed(7)
    x, w, bias = (torch.randn(*shape, generator=generator) for shape in ((ROWS, WIDTH), (WIDTH, WIDTH), (WIDTH,)))
    x_dim = None if case.x_dim is None else min(case.x_dim, 1)
    own = [shard(x, x_dim, comm), shard(w, case.w_dim, comm), shard(bias, case.bias_dim, comm)]
    return [t.to(dtype).clone().requires_grad_() for t in own]


def results(name: str, config: OverlapConfig, comm: Communicator, **more: Any) -> list[Tensor]:
    """Return outputs and gradients."""
    leaves = tensors(name, comm, torch.bfloat16 if "reduce_dtype" in more else torch.float32)
    y = CASES[name].function(*leaves[:2], comm, leaves[2], overlap=config, **more)
    outputs = [y_slice * 1 for y_slice in y] if isinstance(y, (tuple, ad.overlap.Slices)) else [y]
    outputs_now = [out.detach().clone() for out in outputs]  # copied at once: late results would be missing
    loss = sum((out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum() for out in outputs)
    loss.backward()  # type: ignore[union-attr]
    return outputs_now + [leaf.grad.clone() for leaf in leaves if leaf.grad is not None]


def same_bits(found: list[Tensor], expected: list[Tensor]) -> bool:
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


def differing_results(comm: Communicator, name: str) -> list[str]:
    differ = []
    for config in (*ONE_STREAM, *TWO_STREAMS, *GATHERED_TWICE):
        for more in ({}, MORE[name]):
            expected = results(name, config, comm, **more)
            for seed, max_delay in ((0, 0.0), (comm.rank, 0.0005)):  # in seconds, several operations long
                with poisoned_buffers(), deferred_lanes(seed, max_delay):
                    if not same_bits(results(name, config, comm, **more), expected):
                        differ.append(f"{config}, {more}, up to {max_delay} s late")
    return differ


@pytest.mark.parametrize(("name", "n"), list(zip(CASES, (2, 3, 2, 3), strict=True)))
def test_lanes_that_run_late_give_the_same_bits(ranks: RankPool, name: str, n: int) -> None:
    assert ranks.run(n, differing_results, name) == [[]] * n


class Order(Observer):
    """Record the operations and waits of each pass: "comm waits main", "all_gather on comm", ..."""

    def __init__(self) -> None:
        self.passes: list[list[str]] = [[]]

    def ran(self, lane: Lane, name: str, reads: Any, writes: Any, begin: Any, end: Any) -> None:
        self.passes[-1].append(f"{name} on {lane.name}")

    def waited(self, lane: Lane, point: Point) -> None:
        self.passes[-1].append(f"{lane.name} waits {point.lane}")

    def closed(self, lanes: Lanes) -> None:
        self.passes.append([])

    def lines(self) -> list[str]:
        return [", ".join(each) for each in self.passes if each]


TWO_SLICES = OverlapConfig("slices", chunks=2)
# The operations of each pass in order, on two ranks with a bias.
ORDERS: dict[str, tuple[str, OverlapConfig, list[str]]] = {
    "all-gather by slices": (
        "all_gather_matmul",
        replace(TWO_SLICES, save_gathered=False),
        [
            "comm waits main, all_gather on comm, all_gather on comm, linear_rows on main, "
            "main waits comm, linear_rows on main, main waits comm, linear_rows on main",
            "comm waits main, all_gather on comm, "
            "linear_rows on main, comm waits main, reduce_scatter on comm, "
            "linear_rows on main, comm waits main, reduce_scatter on comm, "
            "sum_rows on main, main waits comm, outer_rows on main, main waits comm",
        ],
    ),
    "all-gather around the ring": (
        "all_gather_matmul",
        OverlapConfig("ring"),
        [
            "comm waits main, copy on main, send_recv on comm, linear_rows on main, "
            "main waits comm, linear_rows on main",
            "linear_rows on main, comm waits main, send_recv on comm, "
            "linear_rows on main, sum_rows on main, outer_rows on main, main waits comm, add on main",
        ],
    ),
    "reduce-scatter by slices": (
        "matmul_reduce_scatter",
        TWO_SLICES,
        [
            "linear_rows on main, comm waits main, reduce_scatter on comm, "
            "linear_rows on main, comm waits main, reduce_scatter on comm, main waits comm",
            "comm waits main, all_gather on comm, all_gather on comm, "
            "linear_rows on main, outer_rows on main, sum_rows on main, "
            "main waits comm, linear_rows on main, add_outer_rows on main, add_sum_rows on main, "
            "main waits comm, linear_rows on main, add_outer_rows on main, add_sum_rows on main",
        ],
    ),
    "all-reduce by slices": (
        "matmul_all_reduce",
        TWO_SLICES,
        [
            "linear_rows on main, comm waits main, all_reduce on comm, add on comm, "
            "linear_rows on main, comm waits main, all_reduce on comm, add on comm, main waits comm"
        ],
    ),
    "copy by exchange": (
        "copy_matmul",
        OverlapConfig("exchange", chunks=1),
        [
            "linear_rows on main, comm waits main, all_to_all on comm, sum_in_order on comm, all_gather on comm, "
            "sum_rows on main, outer_rows on main, main waits comm"
        ],
    ),
}


def recorded_orders(comm: Communicator) -> dict[str, list[str]]:
    found = {}
    for case, (name, config, _) in ORDERS.items():
        order = Order()
        x, w, bias = tensors(name, comm)
        with deferred_lanes(), observing(order):
            CASES[name].function(x, w, comm, bias, overlap=config).sum().backward()
        found[case] = order.lines()
    return found


def test_operations_and_waits_are_issued_in_the_expected_order(ranks: RankPool) -> None:
    assert ranks.run(2, recorded_orders) == [{case: expected for case, (*_, expected) in ORDERS.items()}] * 2


def recorded_waits(comm: Communicator) -> list[str]:
    """Wait for points that earlier waits cover (directly and through another lane), and for the lane itself."""
    order = Order()
    with deferred_lanes(), observing(order), Lanes(comm, OverlapConfig(compute_streams=2)) as lanes:
        main, second = lanes.compute(), lanes.compute()
        lanes.comm.wait(lanes.start)
        early, late = lanes.comm.record(), lanes.comm.record()
        main.wait(late)
        main.wait(early)
        second.wait(main.record())
        second.wait(late)
        main.wait(main.record())
        lanes.comm.wait(main.record())  # the caller's own work is not tracked: each point is new
    return order.passes[0]


def test_redundant_waits_are_skipped(ranks: RankPool) -> None:
    expected = ["second waits main", "comm waits main", "main waits comm", "second waits main", "comm waits main"]
    expected += ["main waits second"]  # at the end: a lane that has only waited is also part of a captured graph
    assert ranks.run(2, recorded_waits) == [expected] * 2
