"""Every collective of torch.distributed over "pynccl": beside what each rank computes alone from all ranks' inputs, and
beside gloo where that is right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from process_groups import group_over
from ranks import Place, RankPool, each_size

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int8, torch.uint8, torch.int32, torch.int64)
REDUCED = (*FLOATS, *INTEGERS, torch.bool)
MOVED = (*REDUCED, torch.int16, torch.complex64)
SHAPES = ((3, 2), (), (0,), (257,))


def given(rank: int, shape: Sequence[int], dtype: torch.dtype, many: int = 1) -> torch.Tensor:
    """What a rank brings: exact in every type, also as sums and products of four of them."""
    made = torch.Generator().manual_seed(7 * rank + 1)
    drawn = torch.randint(0, 3, (many, *shape), generator=made).to(dtype)
    return drawn if many > 1 else drawn[0]


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


# Each returns what this rank has then, and what it should have.

Pairs = list[tuple[torch.Tensor, torch.Tensor]]


def reductions(r: int, n: int, shape: Sequence[int], dtype: torch.dtype, asynchronous: bool) -> Pairs:
    pairs: Pairs = []
    everyone = [given(q, shape, dtype, n) for q in range(n)]
    for op in operators(dtype):
        code, total = getattr(dist.ReduceOp, op), reduced(everyone, op)
        whole = everyone[r].clone()
        done(dist.all_reduce(whole, code, async_op=asynchronous))
        root = everyone[r].clone()
        done(dist.reduce(root, n - 1, code, async_op=asynchronous))
        part = torch.empty(shape, dtype=dtype)
        done(dist.reduce_scatter(part, list(everyone[r].unbind(0)), code, async_op=asynchronous))
        single = torch.empty(shape, dtype=dtype)
        flat = everyone[r].reshape(-1) if not shape else everyone[r].reshape(n * shape[0], *shape[1:])
        done(dist.reduce_scatter_tensor(single, flat, code, async_op=asynchronous))
        pairs += [(whole, total), (part, total[r]), (single, total[r])]
        pairs += [(root, total)] if r == n - 1 else []
    return pairs


def movements(r: int, n: int, shape: Sequence[int], dtype: torch.dtype, asynchronous: bool) -> Pairs:
    everyone = [given(q, shape, dtype, n) for q in range(n)]  # everyone[q][p]: of rank q, for rank p
    own = [one.clone() for one in everyone[r]]
    sent = everyone[1 % n][0].clone() if r == 1 % n else torch.zeros(shape, dtype=dtype)
    done(dist.broadcast(sent, 1 % n, async_op=asynchronous))
    parts = [torch.empty(shape, dtype=dtype) for _ in range(n)]
    done(dist.all_gather(parts, own[0], async_op=asynchronous))
    joined = torch.empty(n, *shape, dtype=dtype)
    done(dist.all_gather_into_tensor(joined, own[0][None], async_op=asynchronous))
    swapped = [torch.empty(shape, dtype=dtype) for _ in range(n)]
    done(dist.all_to_all(swapped, own, async_op=asynchronous))
    single = torch.empty(n, *shape, dtype=dtype)
    done(dist.all_to_all_single(single, everyone[r], async_op=asynchronous))
    gathered = [torch.empty(shape, dtype=dtype) for _ in range(n)] if r == 0 else None
    done(dist.gather(own[0], gathered, 0, async_op=asynchronous))
    scattered = torch.empty(shape, dtype=dtype)
    done(dist.scatter(scattered, own if r == n - 1 else None, n - 1, async_op=asynchronous))
    firsts = [one[0] for one in everyone]
    pairs = [(sent, everyone[1 % n][0]), (joined, torch.stack(firsts)), (scattered, everyone[n - 1][r])]
    pairs += zip(parts, firsts, strict=True)
    pairs += zip(swapped, [one[r] for one in everyone], strict=True)
    pairs += [(single, torch.stack([one[r] for one in everyone]))]
    pairs += zip(gathered or [], firsts, strict=False)
    return pairs


def done(work: Any) -> None:
    if work is not None:
        work.wait()
        assert work.get_future().wait() is not None


def all_of_them(place: Place, path: str) -> None:
    with group_over("pynccl", place, path):
        for make, dtypes in ((reductions, REDUCED), (movements, MOVED)):
            for dtype in dtypes:
                for shape in SHAPES:
                    for asynchronous in (False, True):
                        for number, pair in enumerate(make(place.rank, place.size, shape, dtype, asynchronous)):
                            equal(*pair, (make.__name__, dtype, shape, asynchronous, number))


@each_size
def test_all_collectives_of_all_data_types(processes: RankPool, n: int, tmp_path: Path) -> None:
    processes.run(n, all_of_them, str(tmp_path / "store"))


def uneven(place: Place, path: str) -> None:
    r, n = place.rank, place.size
    with group_over("pynccl", place, path):
        counts = [2 * q for q in range(n)]  # of rank q; rank 0 has nothing
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


def test_sizes_that_differ_from_rank_to_rank(processes: RankPool, tmp_path: Path) -> None:
    processes.run(3, uneven, str(tmp_path / "store"))


def strided(place: Place, path: str) -> None:
    """Buffers with any strides hold what contiguous ones would, and nothing beside them is written."""
    r, n = place.rank, place.size
    with group_over("pynccl", place, path):
        for asynchronous in (False, True):
            base = torch.zeros(4, 6)
            x = base[:, ::2].t() if r else base[:, ::2].t().contiguous()  # not the same strides on all ranks
            x.copy_(torch.arange(12.0).view(3, 4) + r)
            done(dist.all_reduce(x, async_op=asynchronous))
            equal(x, n * torch.arange(12.0).view(3, 4) + n * (n - 1) / 2, "all_reduce")
            assert not r or base[:, 1::2].count_nonzero() == 0
            wide = torch.zeros(2 * n, 4)
            done(dist.all_gather_into_tensor(wide[:, ::2], torch.full((2, 4), r + 1.0)[:, ::2], async_op=asynchronous))
            equal(wide[:, ::2], torch.arange(1.0, n + 1).repeat_interleave(2)[:, None].expand(-1, 2), "all_gather")
            assert wide[:, 1::2].count_nonzero() == 0
            outs = torch.zeros(2, n)
            done(dist.all_gather(list(outs.unbind(1)), torch.full((2,), float(r)), async_op=asynchronous))
            equal(outs, torch.arange(float(n)).expand(2, n), "all_gather of columns")
        leaf = torch.ones(2, requires_grad=True)
        twice = leaf * 2
        saved = twice.exp()
        dist.all_reduce(saved)  # as over gloo: behind autograd's back
        saved.sum().backward()
        leaf_too = torch.ones(2, requires_grad=True)
        dist.broadcast(leaf_too, 0)


def test_strides_views_and_tensors_of_a_graph(processes: RankPool, tmp_path: Path) -> None:
    processes.run(2, strided, str(tmp_path / "store"))


def coalesced(place: Place, path: str) -> None:
    r, n = place.rank, place.size
    with group_over("pynccl", place, path):
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

    with group_over("pynccl", place, path):
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


def test_sums_with_a_factor_and_of_complex_numbers(processes: RankPool, tmp_path: Path) -> None:
    processes.run(2, factors, str(tmp_path / "store"))


def refusals(place: Place, path: str) -> None:
    x, n = torch.ones(4), place.size
    sparse = (TypeError, NotImplementedError)  # torch 2.14 says it first
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
    with group_over("pynccl", place, path):
        for call, kind, text in wrong:
            with pytest.raises(kind, match=text):
                call()
            dist.barrier()  # nothing was launched: the group goes on


def test_what_cannot_be_done_is_refused_before_anything_is_launched(processes: RankPool, tmp_path: Path) -> None:
    processes.run(2, refusals, str(tmp_path / "store"))


def beside_gloo(place: Place, path: str) -> None:
    """Random numbers, whose sums are rounded: as near to those of gloo as one order of adding is to another."""
    with group_over("pynccl", place, path):
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
                assert all(torch.equal(y, one) for one in everywhere)  # the same on all ranks, to the bit


@each_size
def test_sums_are_those_of_gloo_and_the_same_on_all_ranks(processes: RankPool, n: int, tmp_path: Path) -> None:
    processes.run(n, beside_gloo, str(tmp_path / "store"))
