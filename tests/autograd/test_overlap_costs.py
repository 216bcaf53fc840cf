"""What a pass costs: no gradient that nobody needs, no objects in cycles, and without overlap no stream."""

from __future__ import annotations

import gc
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from ranks import RankPool
from test_overlap_schedule import CASES, ROWS, WIDTH, results, same_bits, tensors
from torch.utils.flop_counter import FlopCounterMode

import pynccl_autograd as ad
from pynccl import Communicator
from pynccl_autograd import OverlapConfig
from pynccl_autograd.overlap import lanes
from pynccl_autograd.overlap.buffers import Buffers
from pynccl_autograd.state import state_of

SCHEDULES: dict[str, Any] = {
    "off": "off",
    "auto": "auto",
    "slices": OverlapConfig("slices", chunks=2),
    "ring": OverlapConfig("ring"),
    "exchange": OverlapConfig("exchange", chunks=2),
    "bulk, gathered again": OverlapConfig("bulk", save_gathered=False),
}
LAYERS = ((True, True), (True, False), (False, True), (False, False))  # column, scattered


def new_layer(comm: Communicator, column: bool, scattered: bool, overlap: Any, **options: Any) -> Any:
    kind = ad.ColumnParallelLinear if column else ad.RowParallelLinear
    return kind(WIDTH, WIDTH, comm, sequence_parallel=scattered, overlap=overlap, **options)


def input_of(comm: Communicator, column: bool, scattered: bool) -> torch.Tensor:
    rows, width = ROWS // comm.size if column and scattered else ROWS, WIDTH if column else WIDTH // comm.size
    return torch.randn(rows, width)


def matmul_flops(layer: Any, x: torch.Tensor) -> int:
    """Return the FLOP of the matmuls of a forward and backward pass, by torch's formulas. Without dispatch modes, since
    layers do not overlap under one."""
    with torch.profiler.profile(with_flops=True, record_shapes=True) as profiler:
        layer(x).sum().backward()
    events = profiler.events() or ()
    return sum(event.flops or 0 for event in events if event.name in ("aten::mm", "aten::addmm", "aten::bmm"))


def wrong_flops(comm: Communicator) -> list[str]:
    """A layer of which x needs no gradient does two matmuls: forward, and for the gradient of the weight."""
    one = 2 * ROWS * WIDTH * WIDTH // comm.size
    wrong = []
    for name, overlap in SCHEDULES.items():
        for column, scattered in LAYERS:
            layer, x = new_layer(comm, column, scattered, overlap, bias=False), input_of(comm, column, scattered)
            matmul_flops(layer, x)
            for needed, matmuls in ((False, 2), (True, 3)):
                found = matmul_flops(layer, x.requires_grad_(needed))
                if found != matmuls * one:
                    wrong.append(f"{name}, column {column}, {scattered}, {needed}: {found}, expected {matmuls * one}")
    return wrong


def test_an_input_that_needs_no_gradient_costs_no_matmul(ranks: RankPool) -> None:
    assert ranks.run(2, wrong_flops) == [[]] * 2


def gradients(comm: Communicator, overlap: Any, scattered: bool, needs: Sequence[bool]) -> list[torch.Tensor | None]:
    """Return dx and dw of a column layer in successive steps. needs: whether x needs a gradient on this rank"""
    torch.manual_seed(3)
    layer = new_layer(comm, True, scattered, overlap)
    found: list[torch.Tensor | None] = []
    for need in needs:
        torch.manual_seed(comm.rank if scattered else 7)
        x = input_of(comm, True, scattered).requires_grad_(need)
        layer(x).square().sum().backward()
        found += [x.grad, layer.weight.grad.clone()]
        layer.weight.grad = None
    return found


def wrong_gradients(comm: Communicator) -> list[str]:
    """x needs a gradient on some ranks only, or begins to need one."""
    wrong = []
    mixed = [comm.rank == 0, comm.rank == comm.size - 1, False, True]
    for name, overlap in SCHEDULES.items():
        for scattered in (True, False):
            expected = gradients(comm, overlap, scattered, [True])
            for needs in (mixed, [False, True, False], [True, False]):
                found = gradients(comm, overlap, scattered, needs)
                for need, dx, dw in zip(needs, found[::2], found[1::2], strict=True):
                    if (dx is None) == need or (dx is not None and not torch.equal(dx, expected[0])):  # type: ignore[arg-type]
                        wrong.append(f"{name}, {scattered}, {needs}: dx is {dx}")
                    if dw is None or not torch.equal(dw, expected[1]):  # type: ignore[arg-type]
                        wrong.append(f"{name}, {scattered}, {needs}: dw is {dw}")
    return wrong


@pytest.mark.parametrize("n", [2, 3])
def test_ranks_may_differ_in_what_needs_a_gradient(ranks: RankPool, n: int) -> None:
    assert ranks.run(n, wrong_gradients) == [[]] * n


def objects_in_cycles(comm: Communicator) -> dict[str, int]:
    found = {}
    for name, overlap in SCHEDULES.items():
        layers = [new_layer(comm, column, scattered, overlap) for column, scattered in LAYERS]
        inputs = [input_of(comm, column, scattered).requires_grad_() for column, scattered in LAYERS]
        for step in range(4):
            if step == 1:
                gc.collect()
                gc.freeze()  # the objects of other tests need not be looked at again
                gc.disable()
            for layer, x in zip(layers, inputs, strict=True):
                layer(x).sum().backward()
        number = gc.collect()
        gc.enable()
        gc.unfreeze()
        if number:
            found[name] = number
    return found


def test_a_step_leaves_no_objects_in_cycles(ranks: RankPool) -> None:
    assert ranks.run(2, objects_in_cycles) == [{}] * 2


def run_without_overlap(comm: Communicator) -> list[str]:
    """Without overlap there are no lanes, hence no stream and no event, no thread and no kept buffer."""
    child = comm.split(0)
    assert child is not None
    with child, pytest.MonkeyPatch.context() as patch:
        patch.setattr(lanes, "make_lanes", None)  # raises if a pass makes lanes
        threads = threading.active_count()
        for name in CASES:
            leaves = tensors(name, child)
            expected = results(name, ad.OverlapConfig("off"), child)
            for overlap in ("off", "auto", OverlapConfig("off", dgrad=OverlapConfig("off", chunks=2))):
                y = CASES[name].function(*leaves[:2], child, leaves[2], overlap=overlap)
                y.sum().backward()
            assert same_bits(results(name, ad.OverlapConfig("off"), child), expected)
        assert threading.active_count() == threads and state_of(child, Buffers).nbytes == 0
    return list(map(str, CASES))


def test_without_overlap_a_pass_has_no_stream_thread_event_or_kept_buffer(ranks: RankPool) -> None:
    assert ranks.run(2, run_without_overlap) == [list(CASES)] * 2


def flops_of_both(comm: Communicator) -> list[int]:
    """Under a dispatch mode the same layer runs by the operations of unfused.py."""
    layer, x = new_layer(comm, True, True, "off", bias=False), input_of(comm, True, True)
    with FlopCounterMode(display=False) as counter:
        layer(x.requires_grad_()).sum().backward()
    return [counter.get_total_flops(), matmul_flops(layer, x)]


def test_dispatch_modes_count_the_matmuls_of_a_layer(ranks: RankPool) -> None:
    (counted, profiled), _ = ranks.run(2, flops_of_both)
    assert counted == profiled
