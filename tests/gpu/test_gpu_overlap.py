"""Overlapped matmuls on a GPU equal torch's unsharded layer, for each pattern and schedule, forward and backward."""

from __future__ import annotations

import zlib
from typing import Any

import pytest
import torch
from gpu.overlapped import (
    BATCH,
    CASES,
    HIDDEN,
    SEQUENCE,
    WIDTH,
    assert_same,
    forward_and_backward,
    inputs,
    needs_peers,
    reference,
    shards_of,
    to,
)

import pynccl_autograd as ad
from pynccl import Communicator
from pynccl_autograd import OverlapConfig
from pynccl_autograd.overlap import lanes
from pynccl_autograd.overlap.buffers import Buffers
from pynccl_autograd.overlap.tune import EVERY, STARTS
from pynccl_autograd.state import state_of

CONFIGS = (
    OverlapConfig("slices", chunks=1),
    OverlapConfig("slices", chunks=3),
    OverlapConfig("slices", chunks=4),
    OverlapConfig("slices", chunks=4, save_gathered=False),
    OverlapConfig("slices", chunks=4, compute_streams=2),
    OverlapConfig("ring"),
    OverlapConfig("ring", aggregate=True),
    OverlapConfig("ring", compute_streams=2, save_gathered=False),
    OverlapConfig("exchange", chunks=1),
    OverlapConfig("exchange", chunks=4),
    OverlapConfig("exchange", chunks=3, compute_streams=2),
    OverlapConfig("bulk"),
    OverlapConfig("bulk", save_gathered=False),
    OverlapConfig("slices", chunks=3, dgrad=OverlapConfig("ring")),
    OverlapConfig("slices", chunks=3, dgrad=OverlapConfig("off")),
)
SOME = (CONFIGS[1], CONFIGS[5], CONFIGS[10], CONFIGS[11])


def configs_for(comm: Communicator) -> tuple[OverlapConfig, ...]:
    """Return all configs; only some with more than two ranks, which share a GPU and take long."""
    return CONFIGS if comm.size <= 2 else SOME


@pytest.mark.parametrize(
    ("dtype", "reduce_dtype"),
    [(torch.float64, None), (torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, torch.float32)],
    ids=["float64", "float32", "bfloat16", "bfloat16 in float32"],
)
@pytest.mark.parametrize("name", CASES)
def test_exact_sums_are_bitwise_equal_in_every_schedule(
    comm: Communicator, name: str, dtype: torch.dtype, reduce_dtype: torch.dtype | None
) -> None:
    case, full = CASES[name], inputs(comm, seed=1)
    shards, expected = to(shards_of(case, full, comm), dtype), shards_of(case, reference(full), comm)
    for config in configs_for(comm):
        found = forward_and_backward(case, shards, comm, config, reduce_dtype=reduce_dtype)
        assert {got.dtype for got in found} == {dtype}
        assert_same(found, expected, config)


@pytest.mark.parametrize("name", CASES)
def test_without_overlap_a_pass_makes_no_event_and_no_lanes(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    case, full = CASES[name], inputs(comm, seed=2)
    shards, expected = to(shards_of(case, full, comm), torch.float32), shards_of(case, reference(full), comm)

    def unexpected(*args: Any, **options: Any) -> None:
        raise AssertionError("a pass without overlap made an event or lanes")

    monkeypatch.setattr(torch.cuda, "Event", unexpected)
    monkeypatch.setattr(lanes, "make_lanes", unexpected)
    found = forward_and_backward(case, shards, comm, "off")
    monkeypatch.undo()
    assert_same(found, expected, "off")


@pytest.mark.parametrize("name", CASES)
def test_buffers_that_torch_fills_are_filled_before_they_are_used(comm: Communicator, name: str) -> None:
    """With deterministic algorithms torch fills new memory, on the caller's stream."""
    case, full = CASES[name], inputs(comm, seed=3)
    shards, expected = to(shards_of(case, full, comm), torch.float32), shards_of(case, reference(full), comm)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        for config in configs_for(comm):
            state_of(comm, Buffers).drop()
            assert_same(forward_and_backward(case, shards, comm, config), expected, config)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("function", [ad.matmul_reduce_scatter, ad.matmul_all_reduce])
def test_an_exchange_sums_in_rank_order(comm: Communicator, function: Any) -> None:
    """Each rank has one feature, so that a partial product has one rounding in any kernel."""
    rows = 40 * comm.size
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(rows, comm.size, generator=generator)
    w = torch.randn(64, comm.size, generator=generator)
    expected = x[:, :1] * w[:, 0]
    for rank in range(1, comm.size):
        expected = expected + x[:, rank, None] * w[:, rank]
    if function is ad.matmul_reduce_scatter:
        expected = expected.chunk(comm.size)[comm.rank]
    shards = [t[:, comm.rank, None].contiguous().to(comm.device) for t in (x, w)]
    for chunks in (1, 3, 5, 40):
        config = OverlapConfig("exchange", chunks=chunks, deterministic=True)
        assert torch.equal(function(*shards, comm, overlap=config).cpu(), expected), chunks


@pytest.mark.parametrize("name", ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"])
@pytest.mark.parametrize("kind", ["slices", "exchange", "copy engines", "ring"])
def test_comm_overlap_objects_give_the_same_result(child: Communicator, kind: str, name: str) -> None:
    """Three steps with buffers in NCCL's memory, as windows if possible. Copy engines use another communicator."""
    needs_peers(child)
    if kind == "copy engines" and child.library.version < (2, 28):
        pytest.skip("needs NCCL >= 2.28")
    helper, shape = ad.CommOverlapHelper(child), (SEQUENCE, BATCH, max(WIDTH, HIDDEN))
    overlap_object: ad.CommOverlap
    if kind == "ring":
        overlap_object = ad.CommOverlapP2P(helper, shape, torch.float32)
    else:
        options = {"deterministic": kind != "slices", "copy_engines": kind == "copy engines"}
        overlap_object = ad.CommOverlap(helper, shape, torch.float32, num_splits=3, **options)
    with overlap_object as overlap:
        assert overlap.memory in ("window", "registered")
        held = overlap.nbytes
        for seed in range(3 if child.size <= 2 else 1):
            case, full = CASES[name], inputs(child, seed=seed)
            shards, expected = to(shards_of(case, full, child), torch.float32), shards_of(case, reference(full), child)
            assert_same(forward_and_backward(case, shards, child, overlap), expected, overlap)
        assert overlap.nbytes == held
        torch.cuda.synchronize()


@pytest.mark.parametrize("rows", [2048, 8192])
def test_races_keep_the_result_and_all_ranks_choose_the_same_schedule(comm: Communicator, rows: int) -> None:
    needs_peers(comm)
    for name, case in CASES.items():
        full, layer = inputs(comm, seed=10, sequence=rows // BATCH), torch.nn.Linear(WIDTH, HIDDEN)
        shards, expected = to(shards_of(case, full, comm), torch.float32), shards_of(case, reference(full), comm)
        for _ in range(STARTS[-1] + 4 * EVERY):  # the last times are read two rounds later
            assert_same(forward_and_backward(case, shards, comm, "auto", owner=layer), expected, name)
        with ad.overlap.report() as report:
            assert_same(forward_and_backward(case, shards, comm, "auto", owner=layer), expected, name)
        decided = ad.overlap.decisions(layer)
        assert decided and all(decision.settled and len(decision.tried) > 1 for decision in decided)
        assert all(0 < seconds < 10 for decision in decided for seconds in decision.tried.values())
        reported = {row.pattern: row.decision.schedule for row in report.rows()}
        assert reported == {decision.pattern: decision.schedule for decision in decided}
        text = "; ".join(f"{decision.pattern} {decision.schedule} {decision.tried}" for decision in decided)
        checksum = torch.tensor([zlib.crc32(text.encode())], device=comm.device)
        assert len(comm.all_gather(checksum).unique()) == 1, text
