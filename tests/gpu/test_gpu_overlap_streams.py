"""Overlapped matmuls on CUDA streams: the caller's streams, memory that is reused, CUDA graphs, and the timeline."""

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
    inputs,
    needs_peers,
    part,
    parts,
    reference,
    some_pairs,
    to,
    trample,
    untouched,
)
from torch import Tensor

from pynccl import Communicator
from pynccl.comm.observers import observing
from pynccl_autograd import OverlapConfig
from pynccl_autograd.overlap.lanes import seconds_between

WAYS = {
    "slices": OverlapConfig("slices", chunks=3),
    "two compute streams": OverlapConfig("slices", chunks=4, compute_streams=2),
    "ring": OverlapConfig("ring"),
    "exchange": OverlapConfig("exchange", chunks=3, compute_streams=2),
    "gathered twice": OverlapConfig("bulk", save_gathered=False),
}
REPLAYS = 3


@pytest.mark.parametrize(("name", "way"), some_pairs(WAYS))
def test_the_caller_may_have_a_stream_of_his_own(comm: Communicator, name: str, way: str) -> None:
    """Whose work is late: who does not wait for it reads zeros."""
    case, whole = CASES[name], inputs(comm, seed=11)
    own, expected = to(parts(case, whole, comm), torch.float32), parts(case, reference(whole), comm)
    late = type(own)(*(torch.zeros_like(t) for t in own))
    forward_and_backward(case, own, comm, WAYS[way])  # memory is there
    torch.cuda.synchronize()
    with torch.cuda.stream(stream := torch.cuda.Stream()):
        torch.cuda._sleep(BUSY_CYCLES)
        for into, t in zip(late, own, strict=True):
            into.copy_(t)
        found = forward_and_backward(case, late, comm, WAYS[way])
    stream.synchronize()
    assert_same(found, expected, way)


@pytest.mark.parametrize(("name", "way"), some_pairs(WAYS))
def test_what_was_dropped_is_not_used_anew_too_early(comm: Communicator, name: str, way: str) -> None:
    needs_peers(comm)
    case, whole = CASES[name], inputs(comm, seed=30)
    expected, kept = parts(case, reference(whole), comm), list[Tensor]()
    for _ in range(2):
        own = to(parts(case, whole, comm), torch.float32)
        x, w, bias = (t.requires_grad_() for t in own[:3])
        delay(comm)
        y = case.function(x, w, comm, bias, overlap=WAYS[way])
        kept += trample(comm)
        delay(comm)
        grads = torch.autograd.grad(y, (x, w, bias), own.y)
        found = type(own)(*grads, y.detach())
        del own, x, w, bias, y, grads
        kept += trample(comm)
        assert_same(found, expected, way)
    assert untouched(kept)


@pytest.mark.parametrize(("name", "way"), some_pairs(WAYS))
def test_a_captured_pass_repeats_itself_on_new_inputs(comm: Communicator, name: str, way: str) -> None:
    """In torch's default mode too, in which no thread of the process may ask CUDA anything that a capture forbids."""
    case, mode = CASES[name], "global" if way == "two compute streams" else "thread_local"
    own = to(parts(case, inputs(comm, seed=50), comm), torch.float32)

    def step() -> Sequence[Tensor]:
        return forward_and_backward(case, own, comm, WAYS[way])

    with captured(step, mode) as (graph, results):
        for i in range(REPLAYS):
            whole = inputs(comm, seed=50 + i)
            for t, new in zip(own, parts(case, whole, comm), strict=True):
                t.copy_(new)
            graph.replay()
            assert_same(type(own)(*results), parts(case, reference(whole), comm), (way, i))


@pytest.fixture
def timeline() -> Iterator[Timeline]:
    with observing(observer := Timeline()):
        yield observer


@pytest.mark.parametrize("name", ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"])
def test_communication_runs_while_matmuls_do(comm: Communicator, timeline: Timeline, name: str) -> None:
    needs_peers(comm)
    case, width = CASES[name], 4096
    x = torch.randn(8192, 1, width, device=comm.device, dtype=torch.bfloat16)
    w = torch.randn(width, width, device=comm.device, dtype=torch.bfloat16)
    x, w = part(x, case.x_dim, comm), part(w, case.w_dim, comm)
    for _ in range(2):  # the first connects and allocates
        timeline.spans.clear()
        torch.cuda._sleep(BUSY_CYCLES)  # all is issued when the first of it begins
        with torch.no_grad():
            case.function(x, w, comm, overlap=OverlapConfig("slices", chunks=4))
        torch.cuda.synchronize()
    collectives, matmuls = timeline.on("comm"), timeline.on("main", "second")
    assert len(collectives) == 4 and len(matmuls) >= 4
    assert all(seconds_between(span.begin, span.end) >= 0 for span in timeline.spans)
    assert seconds_between(collectives[0].begin, matmuls[-1].end) > 0
    assert seconds_between(matmuls[0].begin, collectives[-1].end) > 0
