"""The order of overlapped layers: what is issued, with every wait and no other; the same bits from lanes that run late,
each in its own time, and NaN where a buffer is used too early or too late."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from deferred import deferred_lanes, poisoned_workspaces
from ranks import RankPool
from test_overlap import CASES, part
from torch import Tensor

import pynccl_autograd as ad
from pynccl import Communicator
from pynccl.comm.observers import Observer, observing
from pynccl_autograd import OverlapConfig
from pynccl_autograd.overlap.lanes import Lane, Lanes, Point

ROWS, WIDTH = 12, 12  # divisible by 2, 3 and 4
ON_ONE = (
    OverlapConfig("slices", chunks=1),
    OverlapConfig("slices", chunks=3),
    OverlapConfig("slices", chunks=100),
    OverlapConfig("ring"),
    OverlapConfig("ring", aggregate=True),
    OverlapConfig("exchange", chunks=1),
    OverlapConfig("exchange", chunks=5),
    OverlapConfig("bulk"),
)
ON_TWO = tuple(replace(way, compute_streams=2) for way in ON_ONE)
GATHERED_TWICE = tuple(OverlapConfig(method, save_gathered=False) for method in ("slices", "ring"))
MORE: dict[str, dict[str, Any]] = {
    "all_gather_matmul": {"return_gathered": True},
    "matmul_all_reduce": {"hand_off": True},
    "matmul_reduce_scatter": {"reduce_dtype": torch.float32},
    "copy_matmul": {"reduce_dtype": torch.float32},
}


def tensors(name: str, comm: Communicator, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """x, w and bias of this rank; x is a matrix."""
    case, generator = CASES[name], torch.Generator().manual_seed(7)
    x, w, bias = (torch.randn(*shape, generator=generator) for shape in ((ROWS, WIDTH), (WIDTH, WIDTH), (WIDTH,)))
    x_dim = None if case.x_dim is None else min(case.x_dim, 1)
    own = [part(x, x_dim, comm), part(w, case.w_dim, comm), part(bias, case.bias_dim, comm)]
    return [t.to(dtype).clone().requires_grad_() for t in own]


def results(name: str, way: OverlapConfig, comm: Communicator, **more: Any) -> list[Tensor]:
    """Outputs and gradients."""
    leaves = tensors(name, comm, torch.bfloat16 if "reduce_dtype" in more else torch.float32)
    y = CASES[name].function(*leaves[:2], comm, leaves[2], overlap=way, **more)
    outputs = [part * 1 for part in y] if isinstance(y, (tuple, ad.overlap.Slices)) else [y]
    there = [out.detach().clone() for out in outputs]  # at once: what comes too late is not there
    loss = sum((out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum() for out in outputs)
    loss.backward()  # type: ignore[union-attr]
    return there + [leaf.grad.clone() for leaf in leaves if leaf.grad is not None]


def same_bits(found: list[Tensor], expected: list[Tensor]) -> bool:
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


def those_that_differ(comm: Communicator, name: str) -> list[str]:
    differ = []
    for way in (*ON_ONE, *ON_TWO, *GATHERED_TWICE):
        for more in ({}, MORE[name]):
            expected = results(name, way, comm, **more)
            for seed, most in ((0, 0.0), (comm.rank, 0.0005)):  # seconds: some times what a piece takes
                with poisoned_workspaces(), deferred_lanes(seed, most):
                    if not same_bits(results(name, way, comm, **more), expected):
                        differ.append(f"{way}, {more}, up to {most} s late")
    return differ


@pytest.mark.parametrize(("name", "n"), list(zip(CASES, (2, 3, 2, 3), strict=True)))
def test_lanes_that_run_late_give_the_same_bits(ranks: RankPool, name: str, n: int) -> None:
    assert ranks.run(n, those_that_differ, name) == [[]] * n


class Order(Observer):
    """What overlapped layers issue, pass by pass: "comm waits main", "all_gather on comm", ..."""

    def __init__(self) -> None:
        self.passes: list[list[str]] = [[]]

    def ran(self, lane: Lane, name: str, reads: Any, writes: Any, begin: Any, end: Any) -> None:
        self.passes[-1].append(f"{name} on {lane.name}")

    def waited(self, lane: Lane, point: Point) -> None:
        self.passes[-1].append(f"{lane.name} waits {point.lane.name}")

    def closed(self, lanes: Lanes) -> None:
        self.passes.append([])

    def lines(self) -> list[str]:
        return [", ".join(one) for one in self.passes if one]


TWO_SLICES = OverlapConfig("slices", chunks=2)
# The passes of a pattern, on two ranks with a bias: what is issued, in this order.
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


def orders(comm: Communicator) -> dict[str, list[str]]:
    found = {}
    for case, (name, way, _) in ORDERS.items():
        order = Order()
        x, w, bias = tensors(name, comm)
        with deferred_lanes(), observing(order):
            CASES[name].function(x, w, comm, bias, overlap=way).sum().backward()
        found[case] = order.lines()
    return found


def test_the_order_is_that_of_the_recipe(ranks: RankPool) -> None:
    assert ranks.run(2, orders) == [{case: expected for case, (*_, expected) in ORDERS.items()}] * 2


def waits_of_a_lane_that_knows(comm: Communicator) -> list[str]:
    """One wait for a point that lies before one that was waited for, also through another lane; one for itself."""
    order = Order()
    with deferred_lanes(), observing(order), Lanes(comm, compute_streams=2) as lanes:
        main, second = lanes.compute(), lanes.compute()
        lanes.comm.wait(lanes.begun)
        early, late = lanes.comm.record(), lanes.comm.record()
        main.wait(late)
        main.wait(early)
        second.wait(main.record())
        second.wait(late)
        main.wait(main.record())
        lanes.comm.wait(main.record())  # of what the caller does himself, nothing is counted: each point is a new one
    return order.passes[0]


def test_what_was_waited_for_is_not_waited_for_again(ranks: RankPool) -> None:
    expected = ["second waits main", "comm waits main", "main waits comm", "second waits main", "comm waits main"]
    expected += ["main waits second"]  # at the end: a lane that has only waited belongs to a captured graph, too
    assert ranks.run(2, waits_of_a_lane_that_knows) == [expected] * 2
