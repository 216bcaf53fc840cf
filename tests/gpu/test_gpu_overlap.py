"""Overlapped matmuls on a GPU equal the unsharded layer of torch: every pattern and way, forwards and backwards."""

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
    parts,
    reference,
    to,
)

import pynccl_autograd as ad
from pynccl import Communicator
from pynccl_autograd import OverlapConfig
from pynccl_autograd.overlap.trials import MOST_CALLS

WAYS = (
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
SOME = (WAYS[1], WAYS[5], WAYS[10], WAYS[11])


def ways_of(comm: Communicator) -> tuple[OverlapConfig, ...]:
    """All; some with more than two ranks, which take turns on one GPU."""
    return WAYS if comm.size <= 2 else SOME


@pytest.mark.parametrize(
    ("dtype", "reduce_dtype"),
    [(torch.float64, None), (torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, torch.float32)],
    ids=["float64", "float32", "bfloat16", "bfloat16 in float32"],
)
@pytest.mark.parametrize("name", CASES)
def test_exact_sums_have_the_same_bits_in_every_way(
    comm: Communicator, name: str, dtype: torch.dtype, reduce_dtype: torch.dtype | None
) -> None:
    case, whole = CASES[name], inputs(comm, seed=1)
    own, expected = to(parts(case, whole, comm), dtype), parts(case, reference(whole), comm)
    for way in ways_of(comm):
        found = forward_and_backward(case, own, comm, way, reduce_dtype=reduce_dtype)
        assert {got.dtype for got in found} == {dtype}
        assert_same(found, expected, way)


@pytest.mark.parametrize("function", [ad.matmul_reduce_scatter, ad.matmul_all_reduce])
def test_an_exchange_sums_in_the_order_of_the_ranks(comm: Communicator, function: Any) -> None:
    """Each rank has one feature, so that a partial product is one rounding, whichever kernel makes it."""
    rows = 40 * comm.size
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(rows, comm.size, generator=generator)
    w = torch.randn(64, comm.size, generator=generator)
    expected = x[:, :1] * w[:, 0]
    for rank in range(1, comm.size):
        expected = expected + x[:, rank, None] * w[:, rank]
    if function is ad.matmul_reduce_scatter:
        expected = expected.chunk(comm.size)[comm.rank]
    own = [t[:, comm.rank, None].contiguous().to(comm.device) for t in (x, w)]
    for chunks in (1, 3, 5, 40):
        config = OverlapConfig("exchange", chunks=chunks, deterministic=True)
        assert torch.equal(function(*own, comm, overlap=config).cpu(), expected), chunks


@pytest.mark.parametrize("name", ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"])
@pytest.mark.parametrize("kind", ["slices", "exchange", "copy engines", "ring"])
def test_objects_with_buffers_of_their_own_keep_the_result(child: Communicator, kind: str, name: str) -> None:
    """In NCCL's memory, as windows where it can, over three steps; the copy engines' communicator is another one."""
    needs_peers(child)
    if kind == "copy engines" and child.library.version < (2, 28):
        pytest.skip("needs NCCL >= 2.28")
    helper, shape = ad.CommOverlapHelper(child), (SEQUENCE, BATCH, max(WIDTH, HIDDEN))
    made: ad.CommOverlap
    if kind == "ring":
        made = ad.CommOverlapP2P(helper, shape, torch.float32)
    else:
        options = {"deterministic": kind != "slices", "copy_engines": kind == "copy engines"}
        made = ad.CommOverlap(helper, shape, torch.float32, num_splits=3, **options)
    with made as overlap:
        assert overlap.memory in ("window", "registered")
        held = overlap.nbytes
        for seed in range(3 if child.size <= 2 else 1):
            case, whole = CASES[name], inputs(child, seed=seed)
            own, expected = to(parts(case, whole, child), torch.float32), parts(case, reference(whole), child)
            assert_same(forward_and_backward(case, own, child, overlap), expected, overlap)
        assert overlap.nbytes == held
        torch.cuda.synchronize()


@pytest.mark.parametrize("rows", [2048, 8192])
def test_a_trial_keeps_the_result_and_all_ranks_the_same_way(comm: Communicator, rows: int) -> None:
    needs_peers(comm)
    for name, case in CASES.items():
        whole, layer = inputs(comm, seed=10, sequence=rows // BATCH), torch.nn.Linear(WIDTH, HIDDEN)
        own, expected = to(parts(case, whole, comm), torch.float32), parts(case, reference(whole), comm)
        for _ in range(MOST_CALLS):
            assert_same(forward_and_backward(case, own, comm, "auto", owner=layer), expected, name)
        with ad.overlap.report() as report:
            assert_same(forward_and_backward(case, own, comm, "auto", owner=layer), expected, name)
        decided = ad.overlap.decisions(layer)
        assert decided and all(one.settled and len(one.tried) > 1 for one in decided)
        assert all(0 < seconds < 10 for one in decided for seconds in one.tried.values())
        assert {row.pattern: row.decision.way for row in report.rows()} == {one.pattern: one.way for one in decided}
        text = "; ".join(f"{one.pattern} {one.way} {one.tried}" for one in decided)
        told = torch.tensor([zlib.crc32(text.encode())], device=comm.device)
        assert len(comm.all_gather(told).unique()) == 1, text
