"""Every collective of torch.distributed with "pynccl", compared with a reference that each rank computes from all
ranks' inputs, and with gloo where gloo is correct."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from process_groups import numbers, process_group
from ranks import Place, RankPool, each_size

from pynccl.torch_backend import c10d

SECONDS = 30.0
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int8, torch.uint8, torch.int32, torch.int64)
REDUCED = (*FLOATS, *INTEGERS, torch.bool)
MOVED = (*REDUCED, torch.int16, torch.complex64)
SHAPES = ((3, 2), (), (0,), (257,))


def input_of(rank: int, shape: Sequence[int], dtype: torch.dtype, count: int = 1) -> torch.Tensor:
    """Return the input of a rank. Sums and products of four inputs are exact in every dtype."""
    made = torch.Generator().manual_seed(7 * rank + 1)
    drawn = torch.randint(0, 3, (count, *shape), generator=made).to(dtype)
    return drawn if count > 1 else drawn[0]


def reduced(parts: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    stacked = torch.stack(list(parts))
    if stacked.dtype == torch.bool:
        return stacked.any(0) if op in ("SUM", "MAX") else stacked.all(0)
    wide = stacked.to(torch.complex128 if stacked.is_complex() else torch.float64)
    found = {
        "SUM": lambda: wide.sum(0),
        "AVG": lambda: wide.mean(0),
        "PRODUCT": lambda: wide.prod(0),
        "MIN": lambda: wide.amin(0),
        "MAX": lambda: wide.amax(0),
    }[op]()
    return found.to(stacked.dtype)


def equal(found: torch.Tensor, expected: torch.Tensor, what: object) -> None:
    assert found.dtype == expected.dtype and torch.equal(found, expected), (what, found, expected)


def operators(dtype: torch.dtype) -> tuple[str, ...]:
    return ("SUM", "PRODUCT", "MIN", "MAX", *(("AVG",) if dtype.is_floating_point else ()))


# Each returns pairs (result of this rank, expected result).

Pairs = list[tuple[torch.Tensor, torch.Tensor]]


def reductions(r: int, n: int, shape: Sequence[int], dtype: torch.dtype, asynchronous: bool) -> Pairs:
    pairs: Pairs = []
    all_inputs = [input_of(q, shape, dtype, n) for q in range(n)]
    for op in operators(dtype):
        code, total = getattr(dist.ReduceOp, op), reduced(all_inputs, op)
        result = all_inputs[r].clone()
        wait_for(dist.all_reduce(result, code, async_op=asynchronous))
        root = all_inputs[r].clone()
        wait_for(dist.reduce(root, n - 1, code, async_op=asynchronous))
        part = torch.empty(shape, dtype=dtype)
        wait_for(dist.reduce_scatter(part, list(all_inputs[r].unbind(0)), code, async_op=asynchronous))
        single = torch.empty(shape, dtype=dtype)
        flat = all_inputs[r].reshape(-1) if not shape else all_inputs[r].reshape(n * shape[0], *shape[1:])
        wait_for(dist.reduce_scatter_tensor(single, flat, code, async_op=asynchronous))
        pairs += [(result, total), (part, total[r]), (single, total[r])]
        pairs += [(root, total)] if r == n - 1 else []
    return pairs


def copies(r: int, n: int, shape: Sequence[int], dtype: torch.dtype, asynchronous: bool) -> Pairs:
    all_inputs = [input_of(q, shape, dtype, n) for q in range(n)]  # all_inputs[q][p]: from rank q for rank p
    inputs = [tensor.clone() for tensor in all_inputs[r]]
    sent = all_inputs[1 % n][0].clone() if r == 1 % n else torch.zeros(shape, dtype=dtype)
    wait_for(dist.broadcast(sent, 1 % n, async_op=asynchronous))
    parts = [torch.empty(shape, dtype=dtype) for _ in range(n)]
    wait_for(dist.all_gather(parts, inputs[0], async_op=asynchronous))
    joined = torch.empty(n, *shape, dtype=dtype)
    wait_for(dist.all_gather_into_tensor(joined, inputs[0][None], async_op=asynchronous))
    swapped = [torch.empty(shape, dtype=dtype) for _ in range(n)]
    wait_for(dist.all_to_all(swapped, inputs, async_op=asynchronous))
    single = torch.empty(n, *shape, dtype=dtype)
    wait_for(dist.all_to_all_single(single, all_inputs[r], async_op=asynchronous))
    gathered = [torch.empty(shape, dtype=dtype) for _ in range(n)] if r == 0 else None
    wait_for(dist.gather(inputs[0], gathered, 0, async_op=asynchronous))
    scattered = torch.empty(shape, dtype=dtype)
    wait_for(dist.scatter(scattered, inputs if r == n - 1 else None, n - 1, async_op=asynchronous))
    firsts = [tensor[0] for tensor in all_inputs]
    pairs = [(sent, all_inputs[1 % n][0]), (joined, torch.stack(firsts)), (scattered, all_inputs[n - 1][r])]
    pairs += zip(parts, firsts, strict=True)
    pairs += zip(swapped, [tensor[r] for tensor in all_inputs], strict=True)
    pairs += [(single, torch.stack([tensor[r] for tensor in all_inputs]))]
    pairs += zip(gathered or [], firsts, strict=False)
    return pairs


def wait_for(work: Any) -> None:
    if work is not None:
        work.wait()
        assert work.get_future().wait() is not None


def check_all(place: Place, path: str) -> None:
    with process_group("pynccl", place, path):
        for make, dtypes in ((reductions, REDUCED), (copies, MOVED)):
            for dtype in dtypes:
                for shape in SHAPES:
                    for asynchronous in (False, True):
                        for number, pair in enumerate(make(place.rank, place.size, shape, dtype, asynchronous)):
                            equal(*pair, (make.__name__, dtype, shape, asynchronous, number))


@each_size
def test_all_collectives_with_all_dtypes(processes: RankPool, n: int, tmp_path: Path) -> None:
    processes.run(n, check_all, str(tmp_path / "store"))


def uneven(place: Place, path: str) -> None:
    r, n = place.rank, place.size
    with process_group("pynccl", place, path):
        counts = [2 * q for q in range(n)]  # counts[q] for rank q; rank 0 has none
        parts = [torch.empty(count, 3) for count in counts]
        dist.all_gather(parts, torch.full((counts[r], 3), float(r)))
        assert [part.tolist() for part in parts] == [[[float(q)] * 3] * counts[q] for q in range(n)]
        part = torch.empty(counts[r])
        dist.reduce_scatter(part, [torch.full((count,), r + 1.0) for count in counts])
        assert part.tolist() == [n * (n + 1) / 2] * counts[r]
        for dtype in (torch.float32, torch.bool, torch.complex64):
            sent = torch.full((sum(counts), 2), r % 2, dtype=dtype)
            received = torch.empty(n * counts[r], 2, dtype=dtype)
            dist.all_to_all_single(received, sent, [counts[r]] * n, counts)
            expected = torch.tensor([q % 2 for q in range(n)], dtype=dtype).repeat_interleave(counts[r])
            equal(received, expected[:, None].expand(-1, 2), dtype)
        outputs = [torch.empty(counts[r]) for _ in range(n)]
        dist.all_to_all(outputs, [torch.full((count,), float(r)) for count in counts])
        assert [out.tolist() for out in outputs] == [[float(q)] * counts[r] for q in range(n)]


def test_uneven_sizes(processes: RankPool, tmp_path: Path) -> None:
    processes.run(3, uneven, str(tmp_path / "store"))


def large_lists(place: Place, path: str) -> None:
    """Lists of large tensors, which are passed on one by one, with the values that the ranks made."""
    r, n = place.rank, place.size
    with process_group("pynccl", place, path):
        for dtype in (torch.float32, torch.int16):
            for step in (1, 2):

                def made(seed: int, dtype: torch.dtype = dtype, step: int = step) -> torch.Tensor:
                    return numbers(seed, (1 << 18) * step, dtype=dtype)[::step]

                for root in range(n):
                    outs = [made(40) for _ in range(n)]
                    wait_for(dist.all_gather(outs, made(r), async_op=bool(root)))
                    assert all(torch.equal(out, made(q)) for q, out in enumerate(outs))
                    outs = [made(40) for _ in range(n)]
                    wait_for(dist.gather(made(r + 1), outs if r == root else None, root, async_op=bool(root)))
                    assert all(torch.equal(out, made(q + 1 if r == root else 40)) for q, out in enumerate(outs))
                    x = made(40)
                    blocks = [made(50 + 10 * root + q) for q in range(n)] if r == root else None
                    wait_for(dist.scatter(x, blocks, root, async_op=bool(root)))
                    assert torch.equal(x, made(50 + 10 * root + r))
                if dtype == torch.float32:
                    for asynchronous in (False, True):
                        x = made(40)
                        wait_for(dist.reduce_scatter(x, [made(10 * r + q) for q in range(n)], async_op=asynchronous))
                        assert torch.equal(x, sum(made(10 * q + r) for q in range(n)))


def test_lists_of_large_tensors(processes: RankPool, tmp_path: Path) -> None:
    processes.run(3, large_lists, str(tmp_path / "store"))


def strided(place: Place, path: str) -> None:
    """Check that strided buffers get the same values as contiguous ones and that no memory between them is written."""
    r, n = place.rank, place.size
    with process_group("pynccl", place, path):
        for asynchronous in (False, True):
            base = torch.zeros(4, 6)
            x = base[:, ::2].t() if r else base[:, ::2].t().contiguous()  # strides differ by rank
            x.copy_(torch.arange(12.0).view(3, 4) + r)
            wait_for(dist.all_reduce(x, async_op=asynchronous))
            equal(x, n * torch.arange(12.0).view(3, 4) + n * (n - 1) / 2, "all_reduce")
            assert not r or base[:, 1::2].count_nonzero() == 0
            wide = torch.zeros(2 * n, 4)
            wait_for(
                dist.all_gather_into_tensor(wide[:, ::2], torch.full((2, 4), r + 1.0)[:, ::2], async_op=asynchronous)
            )
            equal(wide[:, ::2], torch.arange(1.0, n + 1).repeat_interleave(2)[:, None].expand(-1, 2), "all_gather")
            assert wide[:, 1::2].count_nonzero() == 0
            outs = torch.zeros(2, n)
            wait_for(dist.all_gather(list(outs.unbind(1)), torch.full((2,), float(r)), async_op=asynchronous))
            equal(outs, torch.arange(float(n)).expand(2, n), "all_gather of columns")
        leaf = torch.ones(2, requires_grad=True)
        twice = leaf * 2
        saved = twice.exp()
        dist.all_reduce(saved)  # as with gloo, without autograd
        saved.sum().backward()
        leaf_too = torch.ones(2, requires_grad=True)
        dist.broadcast(leaf_too, 0)


def test_strided_tensors_and_autograd_tensors(processes: RankPool, tmp_path: Path) -> None:
    processes.run(2, strided, str(tmp_path / "store"))


def coalesced(place: Place, path: str) -> None:
    r, n = place.rank, place.size
    with process_group("pynccl", place, path):
        xs = [torch.full((k,), float(r)) for k in (1, 2, 3)]
        with dist._coalescing_manager():
            for x in xs:
                dist.all_reduce(x)
        assert [x.tolist() for x in xs] == [[n * (n - 1) / 2] * k for k in (1, 2, 3)]
        outs = [torch.empty(n * k) for k in (1, 2)]
        with dist._coalescing_manager(async_ops=True) as manager:
            for k, out in zip((1, 2), outs, strict=True):
                dist.all_gather_into_tensor(out, torch.full((k,), float(r)))
        manager.wait()
        assert [out.tolist() for out in outs] == [[float(q) for q in range(n) for _ in range(k)] for k in (1, 2)]
        parts = [torch.empty(k) for k in (1, 2)]
        with dist._coalescing_manager():
            for k, part in zip((1, 2), parts, strict=True):
                dist.reduce_scatter_tensor(part, torch.ones(n * k))
        assert [part.tolist() for part in parts] == [[n], [n, n]]
        objects: list[Any] = [None] * n
        dist.all_gather_object(objects, {"rank": r})
        assert objects == [{"rank": q} for q in range(n)]
        listed = ["a", r] if r == 0 else [None, None]
        dist.broadcast_object_list(listed)
        assert listed == ["a", 0]
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, [f"to {q}" for q in range(n)] if r == 0 else None)
        assert mine == [f"to {r}"]


def test_coalesced_calls_and_objects(processes: RankPool, tmp_path: Path) -> None:
    processes.run(3, coalesced, str(tmp_path / "store"))


def factors(place: Place, path: str) -> None:
    from torch._C._distributed_c10d import _make_nccl_premul_sum as premul_sum

    with process_group("pynccl", place, path):
        for factor in (0.5, torch.tensor([0.25])):
            for dtype in (torch.float64, torch.bfloat16):
                x = torch.full((3,), 4.0 + 4 * place.rank, dtype=dtype)
                dist.all_reduce(x, premul_sum(factor))
                equal(x, torch.full((3,), 12 * float(factor), dtype=dtype), (factor, dtype))
                part = torch.empty(1, dtype=dtype)
                dist.reduce_scatter_tensor(part, torch.full((2,), 8.0, dtype=dtype), premul_sum(factor))
                equal(part, torch.full((1,), 16 * float(factor), dtype=dtype), (factor, dtype))
        z = torch.tensor([1 + 2j, place.rank + 0j])
        dist.all_reduce(z)
        assert z.tolist() == [2 + 4j, 1 + 0j]


def test_premul_sum_and_complex_sum(processes: RankPool, tmp_path: Path) -> None:
    processes.run(2, factors, str(tmp_path / "store"))


def unsupported_calls(place: Place, path: str) -> None:
    x, n = torch.ones(4), place.size
    sparse = (TypeError, NotImplementedError)  # torch 2.14 checks this itself
    wrong: list[tuple[Callable[[], object], type[Exception] | tuple[type[Exception], ...], str]] = [
        (lambda: dist.all_reduce(torch.ones(2, dtype=torch.int32), dist.ReduceOp.BXOR), ValueError, "BXOR.*all_gather"),
        (lambda: dist.all_reduce(torch.ones(2) > 0, dist.ReduceOp.AVG), ValueError, "AVG of a torch.bool.*SUM"),
        (lambda: dist.all_reduce(torch.ones(2, dtype=torch.int16)), TypeError, "int16.*convert it to int32"),
        (lambda: dist.all_reduce(torch.ones(2, dtype=torch.complex64), dist.ReduceOp.MAX), ValueError, "MAX"),
        (lambda: dist.all_gather_into_tensor(torch.empty(n * 3), x), ValueError, "recv has .* expected"),
        (lambda: dist.all_gather([torch.empty(4)] * (n + 1), x), ValueError, "expected one for each of"),
        (lambda: dist.all_to_all_single(torch.empty(4), x, [1, 1], [2, 2]), ValueError, "output split sizes.*sum 4"),
        (lambda: dist.all_to_all_single(torch.empty(3), torch.ones(3)), ValueError, "not divisible by 2 ranks"),
        (lambda: dist.broadcast(torch.ones(2).to_sparse(), 0), sparse, "(?i)sparse"),
        (lambda: dist.recv(torch.empty(2)), NotImplementedError, "src="),
    ]
    with process_group("pynccl", place, path):
        for call, kind, text in wrong:
            with pytest.raises(kind, match=text):
                call()
            dist.barrier()  # nothing was launched: the group stays usable


def test_unsupported_calls_raise_before_launch(processes: RankPool, tmp_path: Path) -> None:
    processes.run(2, unsupported_calls, str(tmp_path / "store"))


def compare_with_gloo(place: Place, path: str) -> None:
    """Check that sums of random numbers match gloo's up to the effect of another order of addition."""
    with process_group("pynccl", place, path):
        gloo = dist.new_group(backend="gloo")
        rng = torch.Generator().manual_seed(place.rank)
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            for size in (1, 1000, 70_000):
                x = torch.randn(size, generator=rng).to(dtype)
                y, z = x.clone(), x.clone()
                dist.all_reduce(y)
                dist.all_reduce(z, group=gloo)
                torch.testing.assert_close(y, z, rtol=0, atol=8 * place.size * torch.finfo(dtype).eps)
                everywhere = [torch.empty_like(y) for _ in range(place.size)]
                dist.all_gather(everywhere, y, group=gloo)
                assert all(torch.equal(y, tensor) for tensor in everywhere)  # bitwise equal on all ranks


@each_size
def test_sums_match_gloo_and_are_bitwise_equal_on_all_ranks(processes: RankPool, n: int, tmp_path: Path) -> None:
    processes.run(n, compare_with_gloo, str(tmp_path / "store"))


def waits(place: Place, path: str) -> None:
    """Each way to wait for asynchronous calls, in every order, and from a thread that did not make them."""

    def sum_of(x: torch.Tensor, depth: int) -> Any:
        """Return a future of the sum over the ranks, `depth` more times, each from a callback of the one before."""
        future = dist.all_reduce(x, async_op=True).get_future()
        return future.then(lambda done: sum_of(x, depth - 1).wait() if depth else done.value()[0].clone())

    def waiting(work: Any, way: int) -> None:
        if way == 0:
            work.wait()
        elif way == 1:
            work.get_future().wait()
        elif way == 2:
            thread = threading.Thread(target=work.wait)
            thread.start()
            thread.join()
        elif way == 3:
            while not work.is_completed() and not work.get_future().done():
                time.sleep(1e-4)

    with process_group("pynccl", place, path):
        for depth in (0, 1, 5):
            dist.all_reduce(torch.ones(1), async_op=True).wait()
            assert sum_of(torch.ones(3), depth).wait().tolist() == 3 * [float(place.size ** (depth + 1))]
        draw = random.Random(place.rank)  # the ranks wait in other ways
        for _ in range(100):
            parts = [torch.full((1 if i % 2 else 70_000,), float(place.rank + i)) for i in range(5)]
            works: list[Any] = [dist.all_reduce(part, async_op=True) for part in parts]
            for at in draw.sample(range(5), 5):
                waiting(works[at], draw.randrange(5))
            works[-1].wait()
            for i, part in enumerate(parts):
                assert part.eq(sum(rank + i for rank in range(place.size))).all(), i


@each_size
def test_every_way_to_wait(processes: RankPool, n: int, tmp_path: Path) -> None:
    processes.run(n, waits, str(tmp_path / "store"))


def dropped_in_a_group(place: Place, path: str) -> None:
    """The buffers of an asynchronous call are kept until it has run, also if pynccl.group() launches it."""
    import pynccl

    with process_group("pynccl", place, path):
        dist.barrier()
        for _ in range(5):
            x = torch.ones(1 << 16)
            with pynccl.group():
                work: Any = dist.all_reduce(x, async_op=True)
                time.sleep(0.02)
            del x, work
            if place.rank:
                time.sleep(0.1)
            others = [torch.zeros(1 << 16) for _ in range(4)]
            dist.barrier()
            assert not any(other.any() for other in others)


def test_an_asynchronous_call_in_a_group_keeps_its_buffers(processes: RankPool, tmp_path: Path) -> None:
    processes.run(2, dropped_in_a_group, str(tmp_path / "store"))


def into_inference_tensors(place: Place, path: str) -> None:
    """A copy into a strided tensor is made by any thread."""
    with process_group("pynccl", place, path):
        for waits_inside in (False, True):
            for _ in range(20):
                with torch.inference_mode():
                    x = torch.full((3, 4), float(place.rank)).t()
                    work: Any = dist.broadcast(x, 1, async_op=True)
                    if waits_inside:
                        work.wait()
                work.wait()
                assert x.eq(1).all()
        # What cannot be copied back is an error of its call alone, whoever makes it.
        same, other = torch.zeros(1).expand(4), torch.ones(4)
        works: Any = [dist.broadcast(x, 0, async_op=True) for x in (same, other)]
        works[1].wait()
        with pytest.raises(RuntimeError, match="more than one element"):
            works[0].wait()


def test_strided_inference_tensors(processes: RankPool, tmp_path: Path) -> None:
    processes.run(2, into_inference_tensors, str(tmp_path / "store"))


def waits_without_alarm(place: Place, path: str) -> None:
    """Whoever waits has the call made, whatever the stream's thread would do 2 ms later."""
    with process_group("pynccl", place, path), pytest.MonkeyPatch.context() as patch:
        patch.setattr("pynccl.host.alarm.Alarm.set", lambda self: None)
        x = torch.ones(1)

        def begin() -> Any:
            for _ in range(3):
                dist.all_reduce(x, async_op=True).wait()  # so that the thread is left alone
            time.sleep(0.01)
            return dist.all_reduce(x, async_op=True)

        begin().wait()
        assert begin().wait(timedelta(seconds=SECONDS))
        begin().get_future().wait()
        work = begin()
        end = time.monotonic() + SECONDS
        while not (c10d.IS_BACKEND or work.is_completed() or work._done.is_set()):  # else torch does not call it
            assert time.monotonic() < end
            time.sleep(1e-4)
        begin()
        dist.all_reduce(x)


def test_who_waits_does_not_wait_for_the_alarm(processes: RankPool, tmp_path: Path) -> None:
    processes.run(2, waits_without_alarm, str(tmp_path / "store"), timeout=3 * SECONDS)
