"""The order of overlapped layers, proven from what they issue: nothing meets in memory, and every wait is needed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from deferred import deferred_lanes
from ranks import RankPool, each_size
from schedule import Log, Schedule, access, races, redundant_waits
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


@each_size
@pytest.mark.parametrize("name", CASES)
def test_nothing_meets_in_memory_and_each_wait_is_needed(ranks: RankPool, n: int, name: str) -> None:
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
    "reduce-scatter by slices on two streams, all-gather at once": (
        "matmul_reduce_scatter",
        replace(TWO_SLICES, compute_streams=2, dgrad=OverlapConfig("bulk")),
        [
            "linear_rows on main, comm waits main, reduce_scatter on comm, "
            "second waits main, linear_rows on second, comm waits second, reduce_scatter on comm, main waits comm",
            "comm waits main, all_gather on comm, linear_rows on main, outer_rows on main, sum_rows on main, "
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


@pytest.mark.parametrize("case", ORDERS)
def test_the_order_is_that_of_the_recipe(ranks: RankPool, case: str) -> None:
    name, way, expected = ORDERS[case]
    assert ranks.run(2, lines, name, Variant(way)) == [expected] * 2


def proofs_of_wrong_passes(comm: Communicator) -> dict[str, list[str]]:
    """What the proof says of passes in which something is wrong, each on lanes of its own."""
    x, y, whole = torch.zeros(4, 2), torch.zeros(4, 2), torch.zeros(8, 2)
    kept: list[Tensor] = []

    def copy(source: Tensor, *, out: Tensor) -> None:
        out.copy_(source)

    def unannounced(lanes: Lanes) -> None:
        lanes.collective("all_gather", x, whole)

    def strided(lanes: Lanes) -> None:  # as the lanes have begun, the copy is not waited for
        lanes.comm.wait(lanes.begun)
        kept.append(torch.zeros(2, 4).t().contiguous())
        lanes.collective("all_gather", kept[0], whole)

    def let_go(lanes: Lanes) -> None:
        lanes.comm.wait(lanes.begun)
        lanes.observed(lanes.comm, "copy", (x,), torch.empty(4, 2), lambda: None)

    def overtaken(lanes: Lanes) -> None:
        lanes.comm.wait(lanes.begun)
        lanes.comm.run(copy, x[::2], out=y[::2])
        lanes.main.run(copy, x[:1], out=y[2:3])

    def beside(lanes: Lanes) -> None:
        lanes.comm.wait(lanes.begun)
        lanes.comm.run(copy, x[::2], out=y[::2])
        lanes.main.run(copy, x[1::2], out=y[1::2])

    found = {}
    for work in (unannounced, strided, let_go, overtaken, beside):
        with deferred_lanes(), Schedule() as schedule, Lanes(comm) as lanes:
            work(lanes)
        found[work.__name__] = races(schedule.logs[0])
    return found


def test_the_proof_finds_what_is_wrong(ranks: RankPool) -> None:
    """And nothing where two lanes write to the rows of one tensor in turn."""
    for found in ranks.run(2, proofs_of_wrong_passes):
        unordered = "of the same memory, and no wait puts them in order"
        assert found["unannounced"] == [
            f"what came before on main writes all memory, all_gather on comm writes float32[8, 2] {unordered}"
        ]
        assert found["strided"] == [
            f"clone on main writes float32[4, 2], all_gather on comm reads float32[4, 2] {unordered}"
        ]
        assert found["let_go"] == ["float32[4, 2] was let go while copy on comm could still be at work on it"]
        assert found["overtaken"] == [
            f"copy on comm writes float32[2, 2], copy on main writes float32[1, 2] {unordered}"
        ]
        assert found["beside"] == []


def by_brute_force(t: Tensor) -> set[int]:
    """The bytes of a tensor, element by element."""
    numbers = torch.arange(t.untyped_storage().nbytes() // t.element_size())
    elements = numbers.as_strided(t.shape, t.stride(), t.storage_offset()).flatten().tolist()
    return {at * t.element_size() + byte for at in elements for byte in range(t.element_size())}


def test_the_bytes_of_a_view_are_exact() -> None:
    base = torch.zeros(6, 5, 4)
    views = [
        base, base[1:3], base[:, 1:3], base[..., 2], base[::2], base[1::2, ::3, 1:], base.mT,
        base.permute(2, 0, 1)[1:, ::2], base[0, 0, :1].expand(3, 4), base.as_strided((4, 3), (2, 1), 7), base[3:3],
        base[2].to(torch.bfloat16), base.view(torch.int16)[1, :, 3:5], base[5, 4, 3],
    ]  # fmt: skip
    for view in views:
        assert {at for first, last in access(view).spans for at in range(first, last)} == by_brute_force(view)
    for one in views:
        for other in views:
            shared = one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
            assert access(one).meets(access(other)) == (shared and bool(by_brute_force(one) & by_brute_force(other)))


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
