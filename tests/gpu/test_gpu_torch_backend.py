"""init_process_group("pynccl") on GPUs: values, stream order, buffer lifetimes, DDP, messages."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gpu.launches import process_group

import pynccl.torch_backend
from pynccl import Communicator
from pynccl.interop import events

LARGE = 1 << 22  # elements: kernels take longer than a launch


@pytest.fixture(scope="module")
def device(comm: Communicator, tmp_path_factory: pytest.TempPathFactory) -> Iterator[torch.device]:
    """Initialize the default process group of all ranks, and return the GPU of this rank."""
    with process_group("pynccl", tmp_path_factory.mktemp("store")):
        yield torch.device(comm.device)


def value(rank: int) -> float:
    return rank + 1.0


def total(n: int) -> float:
    return n * (n + 1) / 2


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool], ids=str)
def test_collectives(comm: Communicator, device: torch.device, dtype: torch.dtype, asynchronous: bool) -> None:
    r, n = comm.rank, comm.size
    x = torch.full((5,), value(r), device=device).to(dtype)
    inputs = [torch.full((5,), value(q), device=device).to(dtype) for q in range(n)]

    def done(work: Any) -> None:
        if work is not None:
            work.wait()

    y = x.clone()
    done(dist.all_reduce(y, async_op=asynchronous))
    assert torch.equal(y, torch.full_like(x, total(n)) if dtype != torch.bool else torch.ones_like(x))
    gathered = [torch.empty_like(x) for _ in range(n)]
    done(dist.all_gather(gathered, x, async_op=asynchronous))
    assert all(torch.equal(*pair) for pair in zip(gathered, inputs, strict=True))
    stacked = torch.empty(n, 5, device=device).to(dtype)
    done(dist.all_gather_into_tensor(stacked, x[None], async_op=asynchronous))
    assert torch.equal(stacked, torch.stack(inputs))
    z = x.clone() if r == n - 1 else torch.zeros_like(x)
    done(dist.broadcast(z, n - 1, async_op=asynchronous))
    assert torch.equal(z, inputs[-1])
    swapped = torch.empty_like(stacked)
    done(dist.all_to_all_single(swapped, x.expand(n, 5).contiguous(), async_op=asynchronous))
    assert torch.equal(swapped, torch.stack(inputs))
    columns = torch.zeros(5, 2, device=device).to(dtype)
    columns[:, 0] = x
    done(dist.all_reduce(columns[:, 0], async_op=asynchronous))
    assert torch.equal(columns[:, 0], y) and not columns[:, 1].any()


def test_wait_orders_the_current_stream_and_does_not_block(comm: Communicator, device: torch.device) -> None:
    x = torch.full((LARGE,), value(comm.rank), device=device)
    for _ in range(20):
        y = x * 1  # computed on the current stream, after the queued work
        work = dist.all_reduce(y, async_op=True)
        z = x * 2  # runs concurrently
        assert work is not None
        work.wait()
        y += 1
        assert torch.equal(y, torch.full_like(y, total(comm.size) + 1)) and z[0] == 2 * value(comm.rank)
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    future = work.get_future()
    doubled = future.then(lambda done: done.value()[0] * 2).wait()
    assert torch.equal(doubled, torch.full_like(x, 2 * total(comm.size)))


def test_buffers_may_be_dropped_before_the_call_has_run(comm: Communicator, device: torch.device) -> None:
    kept = []
    for _ in range(10):
        x = torch.full((LARGE,), value(comm.rank), device=device)
        work = dist.all_reduce(x, async_op=True)
        kept.append((work, x[:1]))
        del x
        torch.full((LARGE,), -1.0, device=device)  # would reuse its memory
    for work, first in kept:
        assert work is not None
        work.wait()
        assert first.item() == total(comm.size)


def allreduce(x: torch.Tensor) -> Any:
    """Take the maximum over the ranks. The Work itself: from torch 2.14 on, dist.all_reduce returns its C++ half."""
    return dist.group.WORLD._get_backend(x.device).allreduce([x], dist.ReduceOp.MAX)


def test_an_old_works_answer_is_not_changed_by_later_calls(comm: Communicator, device: torch.device) -> None:
    x = torch.ones(LARGE, device=device)
    first = allreduce(x)
    first.wait()
    torch.cuda.synchronize(device)
    event = first.event.handle
    for _ in range(3):
        works = [allreduce(x) for _ in range(8)]
        assert all(work.event.handle != event for work in works)
        assert first.event.handle == event and first.event.query()  # while the later calls may still run
        for work in works:
            work.wait()
    works.clear()
    del work
    again = [allreduce(x) for _ in range(3)]
    assert len(events._pools[device.index]) > 4  # the later calls took what the earlier ones gave back
    for work in again:
        work.wait()


def test_calls_in_a_captured_graph(comm: Communicator, device: torch.device) -> None:
    x, strided = torch.ones(4, device=device), torch.ones(4, 2, device=device)
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for y in (x, strided[:, 0]):
            allreduce(y).wait()
    torch.cuda.synchronize(device)
    graph, captured = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph, stream=stream):
        x.mul_(2)
        for _ in range(12):  # more than the lane keeps before it asks what has run
            work = allreduce(x)
            captured.append(work.event.handle)
            work.wait()
        work = allreduce(strided[:, 0])
        captured.append(work.event.handle)
        work.wait()
    del work
    assert len(set(captured)) > 1 and not set(captured) & {event.value for event in events._pools[device.index]}
    works = [allreduce(x) for _ in range(20)]
    for work in works:
        work.wait()
    for _ in range(3):
        graph.replay()
    assert x.tolist() == [8.0] * 4 and strided[:, 1].tolist() == [1.0] * 4
    graph.reset()


def test_buffers_live_until_wait_or_until_the_call_has_run(comm: Communicator, device: torch.device) -> None:
    def issue() -> tuple[Any, weakref.ref[Any]]:
        work = allreduce(torch.full((LARGE, 2), value(comm.rank), device=device)[:, 0])
        buffer = work._kept[0][0].keywords["send"]  # a copy, since the tensor is not contiguous
        return work, weakref.ref(buffer)

    torch.cuda._sleep(1 << 28)  # nothing that follows has run for a while
    waited, at_wait = issue()
    dropped, after = issue()
    del dropped
    gc.collect()
    assert at_wait() is not None and after() is not None
    waited.wait()
    del waited
    assert at_wait() is None and after() is not None
    torch.cuda.synchronize(device)
    x = torch.ones(1, 2, device=device)
    for _ in range(200):
        allreduce(x).wait()
    assert after() is None


def test_futures_are_in_the_order_of_the_calls(comm: Communicator, device: torch.device) -> None:
    x = torch.full((LARGE,), value(comm.rank), device=device)
    current = torch.cuda.current_stream(device)
    torch.cuda._sleep(1 << 26)
    futures = [dist.all_reduce(x, op=op, async_op=True).get_future() for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX)]
    assert torch.cuda.current_stream(device) == current
    halves = [future.then(lambda done: done.value()[0] / 2) for future in futures]
    assert torch.equal(halves[1].wait(), torch.full_like(x, total(comm.size) / 2))
    assert torch.equal(futures[0].wait()[0], torch.full_like(x, total(comm.size)))


def test_messages_around_a_ring_both_ways(comm: Communicator, device: torch.device) -> None:
    r, n = comm.rank, comm.size
    if n == 1:
        pytest.skip("needs 2 ranks")
    x, left, right = torch.full((LARGE,), value(r), device=device), *torch.empty(2, LARGE, device=device)
    works = [dist.isend(x, (r + 1) % n), dist.isend(x, (r - 1) % n)]
    works += [dist.irecv(left, (r - 1) % n), dist.irecv(right, (r + 1) % n)]
    for work in works:
        assert work is not None
        work.wait()
    assert left[0] == value((r - 1) % n) and right[-1] == value((r + 1) % n)
    operations = [dist.P2POp(dist.isend, x, (r + 1) % n), dist.P2POp(dist.irecv, left, (r - 1) % n)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert left[-1] == value((r - 1) % n)


def test_ddp_averages_gradients_and_the_groups_communicator_is_reused(comm: Communicator, device: torch.device) -> None:
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8)).to(device)
    inputs = [torch.randn(16, 64, device=device) for _ in range(comm.size)]
    for x in inputs:
        (plain(x).square().mean() / comm.size).backward()
    expected = [p.grad.clone() for p in plain.parameters() if p.grad is not None]
    plain.zero_grad()
    model = torch.nn.parallel.DistributedDataParallel(plain, bucket_cap_mb=0.02)
    model(inputs[comm.rank]).square().mean().backward()
    for p, reference in zip(plain.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, reference, rtol=1e-4, atol=1e-6)
    own = pynccl.Communicator.from_process_group()
    assert own is pynccl.Communicator.from_process_group() and own.device == str(device)


def test_cpu_and_gpu_tensors_in_one_group(comm: Communicator, device: torch.device) -> None:
    x, y = torch.ones(3), torch.ones(3, device=device)
    dist.all_reduce(x)
    dist.all_reduce(y)
    dist.barrier()
    assert x.tolist() == y.tolist() == [comm.size] * 3
    objects: list[Any] = [None] * comm.size
    dist.all_gather_object(objects, comm.rank)
    assert objects == list(range(comm.size))
