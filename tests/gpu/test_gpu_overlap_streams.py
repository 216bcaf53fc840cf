"""Overlapped matmuls on CUDA streams: the caller's streams, memory that is reused, CUDA graphs, and the timeline."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from gpu.graphs import captured
from gpu.overlapped import (
    BUSY_CYCLES,
    CASES,
    HIDDEN,
    SEQUENCE,
    WIDTH,
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

import pynccl
import pynccl_autograd as ad
from pynccl import Communicator
from pynccl.comm.observing import observing
from pynccl.interop.devices import core_device
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


@pytest.mark.parametrize("name", CASES)
def test_callers_on_two_streams_may_take_turns(comm: Communicator, name: str) -> None:
    """Each time with more rows, so that buffers are made anew while the other stream is at work."""
    case, made = CASES[name], []
    for i in range(6):
        whole = inputs(comm, seed=20 + i, sequence=SEQUENCE * (1 + i // 2))
        made.append((to(parts(case, whole, comm), torch.float32), parts(case, reference(whole), comm)))
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    found = []
    for i, (own, _) in enumerate(made):
        with torch.cuda.stream(streams[i % 2]):
            torch.cuda._sleep(BUSY_CYCLES // 4)
            found.append(forward_and_backward(case, own, comm, WAYS["two compute streams"]))
        with torch.cuda.stream(streams[(i + 1) % 2]):
            trample(comm)
    torch.cuda.synchronize()
    for got, (_, expected) in zip(found, made, strict=True):
        assert_same(got, expected, name)


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


def test_slices_under_way_keep_what_they_need(comm: Communicator) -> None:
    """The bias and the rows that autocast has converted are nobody else's."""
    needs_peers(comm)
    case, whole = CASES["matmul_all_reduce"], inputs(comm, seed=31)
    x, w, bias = (t.float() for t in parts(case, whole, comm)[:3])
    expected = reference(whole).y.flatten(0, 1)
    config = OverlapConfig("slices", chunks=4, compute_streams=2)
    for how in ("taken", "dropped"):
        delay(comm)
        with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
            slices = ad.matmul_all_reduce(x.flatten(0, 1), w, comm, bias, overlap=config, hand_off=True)
        kept = trample(comm)
        if how == "taken":
            assert torch.equal(slices.whole().double(), expected)
        else:
            with torch.cuda.stream(torch.cuda.Stream()):
                del slices
            kept += trample(comm)
        torch.cuda.synchronize()
        assert untouched(kept)


def test_many_steps_take_no_more_memory(comm: Communicator) -> None:
    config = OverlapConfig("slices", chunks=2, compute_streams=2, save_gathered=False)
    column = ad.ColumnParallelLinear(WIDTH, HIDDEN, comm, sequence_parallel=True, overlap=config)
    row = ad.RowParallelLinear(HIDDEN, WIDTH, comm, sequence_parallel=True, overlap=config)
    layers = torch.nn.Sequential(column, row).to(comm.device)
    x = torch.randn(SEQUENCE // comm.size, 2, WIDTH, device=comm.device)

    def allocated(steps: int) -> int:
        for _ in range(steps):
            layers(x).sum().backward()
            layers.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        gc.collect()
        return torch.cuda.memory_allocated()

    before = allocated(5)
    assert allocated(200 if comm.size == 1 else 40) <= before  # ranks on one GPU take turns, which takes long


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


def test_two_graphs_may_be_replayed_at_once(comm: Communicator) -> None:
    """Of few rows and many features, for which cuBLAS splits the sum and needs its workspace."""
    rows, width, config = 256, 16384, WAYS["two compute streams"]
    made = [torch.zeros(n, width // comm.size, device=comm.device) for n in (rows, 64, rows, 64)]

    def step(x: Tensor, w: Tensor) -> list[Tensor]:
        with torch.no_grad():
            return [ad.matmul_all_reduce(x, w, comm, overlap=config)]

    streams = torch.cuda.Stream(), torch.cuda.Stream()
    with captured(lambda: step(*made[:2])) as (first, (y,)), captured(lambda: step(*made[2:])) as (second, (z,)):
        for seed in range(REPLAYS):
            generator = torch.Generator().manual_seed(seed)
            whole = [torch.randint(-1, 2, (len(t), width), generator=generator).double() for t in made]
            for t, new in zip(made, whole, strict=True):
                t.copy_(new.chunk(comm.size, 1)[comm.rank])
            torch.cuda.synchronize()
            for stream, graph in zip(streams, (first, second), strict=True):
                with torch.cuda.stream(stream):
                    graph.replay()
            torch.cuda.synchronize()
            for found, (x, w) in zip((y, z), (whole[:2], whole[2:]), strict=True):
                assert torch.equal(found.cpu().double(), x @ w.t()), seed


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


@pytest.mark.parametrize("kind", ["torch", "cuda.core", "pynccl"])
def test_communication_runs_on_the_stream_that_was_set(child: Communicator, timeline: Timeline, kind: str) -> None:
    needs_peers(child)
    device = core_device(child.device)
    device.set_current()  # cuda.core wants to be told, whatever is current
    stream: Any = {
        "torch": lambda: torch.cuda.Stream(priority=-1),
        "cuda.core": device.create_stream,
        "pynccl": lambda: pynccl.create_stream(child.device, library=child.library),
    }[kind]()
    number = stream.cuda_stream if kind == "torch" else int(stream.handle)
    ad.set_side_stream(child, stream)
    case, whole = CASES["all_gather_matmul"], inputs(child, seed=70)
    own, expected = to(parts(case, whole, child), torch.float32), parts(case, reference(whole), child)
    for way in ("two compute streams", "exchange"):
        delay(child)
        assert_same(forward_and_backward(case, own, child, WAYS[way]), expected, way)
    used: set[int] = {span.lane.stream.cuda_stream for span in timeline.on("comm")}  # type: ignore[attr-defined]
    assert used == {number}
    with pytest.raises(RuntimeError, match="has used its own side stream"):
        ad.set_side_stream(child, stream)
    torch.cuda.synchronize()
