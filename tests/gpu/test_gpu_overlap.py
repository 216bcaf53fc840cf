"""Overlapped matmuls on a GPU equal the unsharded layer of torch: every pattern and way, forwards and backwards."""

from __future__ import annotations

import zlib
from typing import Any

import pytest
import torch
from gpu.graphs import captured
from gpu.overlapped import (
    BATCH,
    BUSY_CYCLES,
    CASES,
    HIDDEN,
    SEQUENCE,
    WIDTH,
    Tensors,
    assert_same,
    delay,
    forward_and_backward,
    inputs,
    needs_peers,
    parts,
    reference,
    to,
)
from torch import Tensor

import pynccl
import pynccl_autograd as ad
from pynccl import Communicator
from pynccl.comm.observing import Observer, observing
from pynccl_autograd import OverlapConfig
from pynccl_autograd.overlap import limits, routes, trials
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


def test_handed_out_slices_make_the_whole(comm: Communicator) -> None:
    case, whole = CASES["matmul_all_reduce"], inputs(comm, seed=5)
    whole = whole._replace(x=whole.x.flatten(0, 1), y=whole.y.flatten(0, 1))
    expected = parts(case._replace(x_dim=1), reference(whole), comm)
    own = to(parts(case._replace(x_dim=1), whole, comm), torch.float32)
    for way in ways_of(comm):
        x, w, bias = (t.clone().requires_grad_() for t in own[:3])
        slices = ad.matmul_all_reduce(x, w, comm, bias, overlap=way, hand_off=True)
        rows: list[Tensor] = [y * 1 for y in slices]
        assert len(rows) == len(slices.rows)
        grads = torch.autograd.grad(torch.cat(rows), (x, w, bias), own.y)
        assert_same(type(own)(*grads, torch.cat(rows).detach()), expected, way)


@pytest.mark.parametrize("method", ["slices", "ring"])
def test_a_cap_of_ctas_keeps_the_result(child: Communicator, method: str) -> None:
    """Of the call's configuration, or before NCCL 2.31 and around the ring of a communicator that is split off."""
    needs_peers(child)
    case, whole = CASES["matmul_reduce_scatter"], inputs(child, seed=7)
    own, expected = to(parts(case, whole, child), torch.float32), parts(case, reference(whole), child)
    config = OverlapConfig(method, chunks=3, num_comm_ctas=4)
    for _ in range(2):
        assert_same(forward_and_backward(case, own, child, config), expected, config)
    capped = limits._capped.get(child, {})
    by_call = child.library.version >= limits.COLL_CONFIG_SINCE and method != "ring"
    assert len(capped) == (0 if by_call else 1)
    torch.cuda.synchronize()
    for communicator in capped.values():
        communicator.destroy()


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


def test_close_waits_for_what_is_under_way(child: Communicator) -> None:
    """Without a synchronize before it: the memory is NCCL's, and unmapping it does not always wait."""
    needs_peers(child)
    case, whole = CASES["matmul_reduce_scatter"], inputs(child, seed=9)
    own, expected = to(parts(case, whole, child), torch.float32), parts(case, reference(whole), child)
    for kind in ("slices", "ring"):
        helper, shape = ad.CommOverlapHelper(child), (SEQUENCE, BATCH, max(WIDTH, HIDDEN))
        options: dict[str, Any] = {} if kind == "ring" else {"num_splits": 3}
        overlap = (ad.CommOverlapP2P if kind == "ring" else ad.CommOverlap)(helper, shape, torch.float32, **options)
        for _ in range(2):  # the first connects
            delay(child)
            found = forward_and_backward(case, own, child, overlap)
        overlap.close()
        with pynccl.mem_alloc(1 << 20, "uint8", device=child.device_index, library=child.library) as memory:
            torch.from_dlpack(memory).fill_(255)  # what was unmapped may be this
            assert_same(found, expected, kind)


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


def test_a_trial_is_timed_by_events_for_which_nothing_waits_before_the_decision(comm: Communicator) -> None:
    needs_peers(comm)
    case, whole = CASES["all_gather_matmul"], inputs(comm, seed=11, sequence=8192 // BATCH)
    own, layer = to(parts(case, whole, comm), torch.float32), torch.nn.Linear(WIDTH, HIDDEN)
    forward_and_backward(case, own, comm, "auto", owner=layer)
    begun = [one for one in routes._passes[layer][comm].known.values() if isinstance(one, trials.Trial)]
    assert [one.asked.pattern for one in begun] == ["all_gather_matmul", "column_backward"]
    waited = []
    for _ in range(begun[0].last - 1):
        torch.cuda.synchronize()
        torch.cuda._sleep(BUSY_CYCLES)
        late = torch.cuda.Event()
        late.record()
        forward_and_backward(case, own, comm, "auto", owner=layer)
        waited.append(late.query())
    assert not any(waited[len(begun[0].ways) :])  # the first of each way makes memory and connections
    moments = [moment for one in begun for took in one.took if took is not None for moment in took]
    assert len(moments) == 2 * sum(one.last for one in begun) and {type(one) for one in moments} == {torch.cuda.Event}
    assert not any(one.settled for one in ad.overlap.decisions(layer))
    forward_and_backward(case, own, comm, "auto", owner=layer)
    assert all(one.settled for one in ad.overlap.decisions(layer))


class Decided(Observer):
    """Keeps what was decided."""

    def __init__(self) -> None:
        self.found: list[ad.overlap.Decision] = []

    def decided(self, owner: Any, decision: Any) -> None:
        self.found.append(decision)


def test_a_capture_before_the_trial_has_ended_is_off_and_one_after_it_goes_as_decided(comm: Communicator) -> None:
    needs_peers(comm)
    case, whole = CASES["all_gather_matmul"], inputs(comm, seed=12, sequence=2048 // BATCH)
    own, expected = to(parts(case, whole, comm), torch.float32), parts(case, reference(whole), comm)
    layer = torch.nn.Linear(WIDTH, HIDDEN)

    def step() -> Tensors:
        return forward_and_backward(case, own, comm, "auto", owner=layer)

    def captures() -> list[ad.overlap.Decision]:
        """What is decided in a capture, behind two steps before it."""
        seen = Decided()
        with observing(seen), captured(step) as (graph, results):
            graph.replay()
            assert_same(Tensors(*results), expected, "captured")
        return [one for one in seen.found[-2:] if not one.reason.startswith("on trial")]

    early = captures()
    assert [one.pattern for one in early] == ["all_gather_matmul", "column_backward"]
    assert all(one.method == "off" and "run 25 steps" in one.reason for one in early)
    assert all(one.reason.startswith("on trial, call 2 of") for one in ad.overlap.decisions(layer))
    for _ in range(MOST_CALLS):
        step()
    assert captures() == list(ad.overlap.decisions(layer))


def test_another_gpu_may_be_the_current_one(comm: Communicator) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    case, whole = CASES["all_gather_matmul"], inputs(comm, seed=8)
    own, expected = to(parts(case, whole, comm), torch.float32), parts(case, reference(whole), comm)
    other = (torch.cuda.current_device() + 1) % torch.cuda.device_count()
    with torch.cuda.device(other):
        assert_same(forward_and_backward(case, own, comm, WAYS[4]), expected, WAYS[4])
        assert torch.cuda.current_device() == other
