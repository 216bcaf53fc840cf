"""Overlapped matmuls on CUDA streams: caller's streams, reuse of memory, CUDA graphs, and the timeline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from gpu.graphs import captured
from gpu.overlapped import (
    BUSY_CYCLES,
    CASES,
    Timeline,
    assert_same,
    delay,
    forward_and_backward,
    half_of_pairs,
    inputs,
    needs_peers,
    overwrite_freed,
    reference,
    shard_of,
    shards_of,
    to,
    unchanged,
)
from torch import Tensor

from pynccl import Communicator
from pynccl_autograd import OverlapConfig
from pynccl_autograd.overlap.lanes import observing, seconds_between

SCHEDULES = {
    "slices": OverlapConfig("slices", chunks=3),
    "two compute streams": OverlapConfig("slices", chunks=4, compute_streams=2),
    "ring": OverlapConfig("ring"),
    "exchange": OverlapConfig("exchange", chunks=3, compute_streams=2),
    "gathered twice": OverlapConfig("bulk", save_gathered=False),
}
REPLAYS = 3


@pytest.mark.parametrize(("name", "schedule"), half_of_pairs(SCHEDULES))
def test_the_caller_may_use_another_stream(comm: Communicator, name: str, schedule: str) -> None:
    """The inputs are written late on the caller's stream: a kernel that does not wait reads zeros."""
    case, full = CASES[name], inputs(comm, seed=11)
    shards, expected = to(shards_of(case, full, comm), torch.float32), shards_of(case, reference(full), comm)
    late = type(shards)(*(torch.zeros_like(t) for t in shards))
    forward_and_backward(case, shards, comm, SCHEDULES[schedule])  # allocates memory
    torch.cuda.synchronize()
    with torch.cuda.stream(stream := torch.cuda.Stream()):
        torch.cuda._sleep(BUSY_CYCLES)
        for into, t in zip(late, shards, strict=True):
            into.copy_(t)
        found = forward_and_backward(case, late, comm, SCHEDULES[schedule])
    stream.synchronize()
    assert_same(found, expected, schedule)


@pytest.mark.parametrize(("name", "schedule"), half_of_pairs(SCHEDULES))
def test_dropped_tensors_are_not_reused_too_early(comm: Communicator, name: str, schedule: str) -> None:
    needs_peers(comm)
    case, full = CASES[name], inputs(comm, seed=30)
    expected, kept = shards_of(case, reference(full), comm), list[Tensor]()
    for _ in range(2):
        shards = to(shards_of(case, full, comm), torch.float32)
        x, w, bias = (t.requires_grad_() for t in shards[:3])
        delay(comm)
        y = case.function(x, w, comm, bias, overlap=SCHEDULES[schedule])
        kept += overwrite_freed(comm)
        delay(comm)
        grads = torch.autograd.grad(y, (x, w, bias), shards.y)
        found = type(shards)(*grads, y.detach())
        del shards, x, w, bias, y, grads
        kept += overwrite_freed(comm)
        assert_same(found, expected, schedule)
    assert unchanged(kept)


@pytest.mark.parametrize(("name", "schedule"), half_of_pairs(SCHEDULES))
def test_a_captured_pass_can_be_replayed_on_new_inputs(comm: Communicator, name: str, schedule: str) -> None:
    """Also in torch's default mode, in which no thread of the process may make a CUDA call that a capture forbids."""
    case, mode = CASES[name], "global" if schedule == "two compute streams" else "thread_local"
    shards = to(shards_of(case, inputs(comm, seed=50), comm), torch.float32)

    def step() -> Sequence[Tensor]:
        return forward_and_backward(case, shards, comm, SCHEDULES[schedule])

    with captured(step, mode) as (graph, results):
        for i in range(REPLAYS):
            full = inputs(comm, seed=50 + i)
            for t, new in zip(shards, shards_of(case, full, comm), strict=True):
                t.copy_(new)
            graph.replay()
            assert_same(type(shards)(*results), shards_of(case, reference(full), comm), (schedule, i))


@pytest.fixture
def timeline() -> Iterator[Timeline]:
    with observing(observer := Timeline()):
        yield observer


@pytest.mark.parametrize("name", ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"])
def test_communication_overlaps_matmuls(comm: Communicator, timeline: Timeline, name: str) -> None:
    needs_peers(comm)
    case, width = CASES[name], 4096
    x = torch.randn(8192, 1, width, device=comm.device, dtype=torch.bfloat16)
    w = torch.randn(width, width, device=comm.device, dtype=torch.bfloat16)
    x, w = shard_of(x, case.x_dim, comm), shard_of(w, case.w_dim, comm)
    for _ in range(2):  # the first pass connects and allocates
        timeline.spans.clear()
        torch.cuda._sleep(BUSY_CYCLES)  # all work is issued before the first kernel begins
        with torch.no_grad():
            case.function(x, w, comm, overlap=OverlapConfig("slices", chunks=4))
        torch.cuda.synchronize()
    collectives, matmuls = timeline.on("comm"), timeline.on("main", "second")
    assert len(collectives) == 4 and len(matmuls) >= 4
    assert all(seconds_between(span.begin, span.end) >= 0 for span in timeline.spans)
    assert seconds_between(collectives[0].begin, matmuls[-1].end) > 0
    assert seconds_between(matmuls[0].begin, collectives[-1].end) > 0
