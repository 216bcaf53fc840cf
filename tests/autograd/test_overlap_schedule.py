"""The order of overlapped layers, proven from what they issue: nothing meets in memory, and every wait is needed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from deferred import deferred_lanes
from ranks import RankPool
from schedule import Log, Schedule, races, redundant_waits
from test_overlap import CASES, part
from torch import Tensor

import pynccl_autograd as ad
from pynccl import Communicator
from pynccl_autograd import OverlapConfig
from pynccl_autograd.overlap.lanes import Lanes

ROWS, WIDTH = 12, 12  # divisible by 2, 3 and 4
ON_ONE = (
    OverlapConfig("slices", chunks=1),
    OverlapConfig("slices", chunks=3),
    OverlapConfig("slices", chunks=100),
    OverlapConfig("ring"),
    OverlapConfig("exchange", chunks=1),
    OverlapConfig("exchange", chunks=5),
    OverlapConfig("bulk"),
)
ON_TWO = tuple(replace(way, compute_streams=2) for way in ON_ONE if way.chunks != 100)
OTHERS = (
    OverlapConfig("ring", aggregate=True),
    OverlapConfig("slices", chunks=2, dgrad=OverlapConfig("off")),
    OverlapConfig("off", dgrad=OverlapConfig("slices", chunks=2)),
)
NOT_KEPT = tuple(replace(way, save_gathered=False) for way in (*ON_ONE, ON_TWO[1], *OTHERS) if way.chunks != 100)
SOME = (ON_ONE[1], ON_ONE[3], ON_ONE[5], ON_TWO[1], ON_TWO[4])


class Variant(NamedTuple):
    """A way to overlap, and what else is asked for.

    strided  x is no contiguous tensor"""

    way: OverlapConfig
    bias: bool = True
    dtype: torch.dtype = torch.float32
    strided: bool = False
    more: tuple[tuple[str, Any], ...] = ()

    def __repr__(self) -> str:
        way = ", ".join(f"{name}={value}" for name, value in vars(self.way).items() if value not in (None, False))
        return f"{way}; bias={self.bias}, strided={self.strided}, {dict(self.more)}"


WIDE = (("reduce_dtype", torch.float32),)
ALL = (
    *(Variant(way) for way in (*ON_ONE, *ON_TWO, *OTHERS)),
    *(Variant(way, bias=False) for way in SOME),
    *(Variant(way, dtype=torch.bfloat16, more=WIDE) for way in SOME),
    *(Variant(way, strided=True) for way in SOME[:2]),
)
SPECIAL = {
    "all_gather_matmul": (
        *(Variant(way) for way in NOT_KEPT),
        *(Variant(way, strided=True) for way in NOT_KEPT[1:4]),
        *(Variant(way, more=(("return_gathered", True),)) for way in (*SOME, NOT_KEPT[1])),
    ),
    "matmul_all_reduce": tuple(
        Variant(way, bias, torch.bfloat16 if wide else torch.float32, strided, (("hand_off", True), *wide))
        for way in (*ON_ONE, *ON_TWO)
        for bias, strided, wide in ((True, False, ()), (False, True, ()), (True, True, WIDE))
    ),
}


def tensors(name: str, variant: Variant, comm: Communicator) -> list[Tensor]:
    """x, w and bias of this rank; x is a matrix."""
    case = CASES[name]
    generator = torch.Generator().manual_seed(7)
    x, w, bias = (torch.randn(*shape, generator=generator) for shape in ((ROWS, WIDTH), (WIDTH, WIDTH), (WIDTH,)))
    x_dim = None if case.x_dim is None else min(case.x_dim, 1)
    own = [part(x, x_dim, comm), part(w, case.w_dim, comm), part(bias, case.bias_dim, comm)]
    return [t.to(variant.dtype).clone().requires_grad_() for t in own]


def step(name: str, variant: Variant, comm: Communicator) -> None:
    """Forward and backward pass. What the caller passes and does not keep himself is gone at once."""
    x, w, bias = tensors(name, variant, comm)
    y = CASES[name].function(
        x.t().contiguous().t() if variant.strided else x,
        w,
        comm,
        bias + 0 if variant.bias else None,
        overlap=variant.way,
        **dict(variant.more),
    )
    if isinstance(y, ad.overlap.Slices):
        y = torch.cat([part * 2 for part in y])  # each is used when it is there
    sum(part.sum() for part in y).backward() if isinstance(y, tuple) else y.sum().backward()


def recorded(name: str, variant: Variant, comm: Communicator) -> list[Log]:
    with deferred_lanes(), Schedule() as schedule:
        step(name, variant, comm)
    return schedule.logs


def prove(comm: Communicator, name: str) -> int:
    """Passes that were proven; each rank, whose blocks of rows lie elsewhere, proves some of them."""
    proven = 0
    for at, variant in enumerate((*ALL, *SPECIAL.get(name, ()))):
        logs = recorded(name, variant, comm)
        off = "off" in (variant.way.method, variant.way.backward.method)
        assert off or len(logs) == (1 if name in ("matmul_all_reduce", "copy_matmul") else 2)
        if at % comm.size == comm.rank:
            for log in logs:
                assert log.closed and (off or log.waits)
                assert not races(log), f"{name}, {variant}: {races(log)}\n{log.lines()}"
                assert not redundant_waits(log), f"{name}, {variant}: {redundant_waits(log)}\n{log.lines()}"
                proven += 1
    return proven


@pytest.mark.parametrize(("name", "n"), list(zip(CASES, (2, 3, 4, 3), strict=True)))
def test_nothing_meets_in_memory_and_each_wait_is_needed(ranks: RankPool, name: str, n: int) -> None:
    assert sum(ranks.run(n, prove, name)) > len(ALL) / 2


def lines(comm: Communicator, name: str, variant: Variant) -> list[str]:
    return [", ".join(log.lines()) for log in recorded(name, variant, comm)]


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
    return {case: lines(comm, name, Variant(way)) for case, (name, way, _) in ORDERS.items()}


def test_the_order_is_that_of_the_recipe(ranks: RankPool) -> None:
    assert ranks.run(2, orders) == [{case: expected for case, (*_, expected) in ORDERS.items()}] * 2


def waits_of_a_lane_that_knows(comm: Communicator) -> list[str]:
    """One wait for a point that lies before one that was waited for, also through another lane; one for itself."""
    with deferred_lanes(), Schedule() as schedule, Lanes(comm, compute_streams=2) as lanes:
        main, second = lanes.compute(), lanes.compute()
        lanes.comm.wait(lanes.begun)
        early, late = lanes.comm.record(), lanes.comm.record()
        main.wait(late)
        main.wait(early)
        second.wait(main.record())
        second.wait(late)
        main.wait(main.record())
        lanes.comm.wait(main.record())  # of what the caller does himself, nothing is counted: each point is a new one
    return schedule.logs[0].lines()


def test_what_was_waited_for_is_not_waited_for_again(ranks: RankPool) -> None:
    expected = ["second waits main", "comm waits main", "main waits comm", "second waits main", "comm waits main"]
    expected += ["main waits second"]  # at the end: a lane that has only waited belongs to a captured graph, too
    assert ranks.run(2, waits_of_a_lane_that_knows) == [expected] * 2
