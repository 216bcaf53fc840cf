"""Collectives with a number of elements per rank, against what one process computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from libraries import Stub
from ranks import HOST, RankPool, each_size
from reference import DTYPES, OPS, expect, inputs, reduced

import pynccl
from pynccl import Communicator

COUNTS = ([5, 0, 17, 2], [0, 1, 0, 0], [0, 0, 0, 0], [3000, 1, 0, 70000])  # of the first ranks of each


def all_to_all(comm: Communicator) -> None:
    """Some pairs exchange nothing, and nobody is owed the same as another."""
    n, rank = comm.size, comm.rank
    counts = [[(i + 2 * j) % (n + 1) * 3 for j in range(n)] for i in range(n)]
    column = [row[rank] for row in counts]
    for dtype in ("float32", "int64", "bfloat16", "float8_e4m3"):
        given = [inputs(DTYPES[dtype], "sum", sum(row), 1, seed=i)[0] for i, row in enumerate(counts)]
        wanted = torch.cat([x.split(row)[rank] for x, row in zip(given, counts, strict=True)])
        recv = torch.zeros_like(wanted)
        assert comm.all_to_all_v(given[rank], recv, send_counts=counts[rank], recv_counts=column) is recv
        expect(recv, wanted, f"all_to_all_v of {dtype}")
        made = comm.all_to_all_v(given[rank], send_counts=counts[rank], recv_counts=column)
        expect(made, wanted, f"all_to_all_v of {dtype}, allocated")


def parts_of(counts: list[int], dtype: str) -> list[torch.Tensor]:
    return [inputs(DTYPES[dtype], "sum", count, 1, seed=i)[0] for i, count in enumerate(counts)]


def gather_and_reduce_scatter(comm: Communicator) -> None:
    n, rank = comm.size, comm.rank
    for counts, dtype in zip([some[:n] for some in COUNTS], ("int32", "float16", "int32", "float32"), strict=True):
        given = parts_of(counts, dtype)
        expect(comm.all_gather_v(given[rank], counts=counts), torch.cat(given), f"all_gather_v of {counts}")
        for op in OPS:
            full = inputs(DTYPES[dtype], op, sum(counts), n, seed=9)
            wanted = reduced(full, op).split(counts)[rank]
            recv = torch.zeros_like(wanted)
            assert comm.reduce_scatter_v(full[rank], recv, op, counts=counts) is recv
            expect(recv, wanted, f"reduce_scatter_v {op} of {counts}")


def rooted(comm: Communicator) -> None:
    n, rank = comm.size, comm.rank
    for counts, dtype in zip([some[:n] for some in COUNTS], ("float32", "int8", "int8", "float32"), strict=True):
        parts, what = parts_of(counts, dtype), f"of {counts}"
        whole, like = torch.cat(parts), torch.empty(0, dtype=DTYPES[dtype])
        for root in (0, n - 1):
            own = torch.zeros_like(parts[rank])
            assert comm.scatter_v(whole if rank == root else None, own, root, counts=counts) is own
            expect(own, parts[rank], f"scatter_v {what}")
            made = comm.scatter_v(whole if rank == root else like, root=root, counts=counts)
            expect(made, parts[rank], f"scatter_v {what}, allocated")
            recv = torch.zeros_like(whole) if rank == root else None
            assert comm.gather_v(parts[rank], recv, root, counts=counts) is recv
            made = comm.gather_v(parts[rank], root=root, counts=counts)
            for result in (recv, made) if rank == root else ():
                expect(result, whole, f"gather_v {what}")
            assert rank == root or made is None
        again = comm.plan.gather_v(parts[rank], torch.zeros_like(whole) if rank == 0 else None, counts=counts)
        back = comm.plan.scatter_v(again.recv, torch.zeros_like(parts[rank]), counts=counts)
        for _ in range(2):
            again()
            back()
            expect(back.recv, parts[rank], "gathered and scattered by plans")


def in_a_group_on_a_stream(comm: Communicator) -> None:
    """In the order of the stream, together with other collectives; counts in an array."""
    n, rank = comm.size, comm.rank
    counts, stream = list(range(1, n + 1)), pynccl.create_stream()
    parts = [torch.full((count,), float(i)) for i, count in enumerate(counts)]
    x, firsts = torch.ones(2), torch.zeros(counts[rank])
    comm.broadcast(torch.full((1,), rank + 1.0), firsts[:1], root=0, stream=stream)  # before the gather that follows
    gathered_firsts = comm.all_gather_v(firsts, counts=counts, stream=stream)
    with pynccl.group():
        gathered = comm.all_gather_v(parts[rank], counts=counts, stream=stream)
        comm.all_reduce(x, x, stream=stream)
        back = comm.reduce_scatter_v(torch.ones(sum(counts)), counts=np.array(counts), stream=stream)
        at_root = comm.gather_v(parts[rank], root=n - 1, counts=counts, stream=stream)
        scattered = comm.scatter_v(torch.cat(parts), root=0, counts=np.array(counts), stream=stream)
    stream.synchronize()
    expect(gathered_firsts, torch.cat([torch.tensor([1.0] + [0.0] * i) for i in range(n)]), "by the stream's order")
    expect(gathered, torch.cat(parts), "all_gather_v")
    expect(x, torch.full((2,), float(n)), "all_reduce")
    expect(back, torch.full((counts[rank],), float(n)), "reduce_scatter_v")
    expect(scattered, parts[rank], "scatter_v")
    if rank == n - 1:
        expect(at_root, torch.cat(parts), "gather_v")
    array = comm.all_gather_v(np.full(counts[rank], rank, dtype=np.int32), counts=counts)
    assert isinstance(array, np.ndarray) and array.dtype == np.int32
    assert array.tolist() == [i for i, count in enumerate(counts) for _ in range(count)]


@each_size
@pytest.mark.parametrize("body", [all_to_all, gather_and_reduce_scatter, rooted, in_a_group_on_a_stream])
def test_a_count_per_rank(ranks: RankPool, n: int, body: Callable[[Communicator], None]) -> None:
    ranks.run(n, body)


def disagreeing_counts(comm: Communicator) -> list[str]:
    """Every rank checks; the last one has counts of its own, of the same sum."""
    good, own = [1] * comm.size, [1] * comm.size
    if comm.rank == comm.size - 1:
        own = [0, *([1] * (comm.size - 2)), 2]
    recv = torch.zeros(comm.size)
    comm.gather_v(torch.ones(1), recv if comm.rank == 0 else None, counts=good)
    comm.scatter_v(recv, torch.zeros(1), counts=good)
    found = []
    for call in (
        lambda: comm.gather_v(torch.ones(own[comm.rank]), recv if comm.rank == 0 else None, counts=own),
        lambda: comm.scatter_v(recv, torch.ones(own[comm.rank]), counts=own),
    ):
        with pytest.raises(pynccl.NcclInvalidUsage, match="the ranks of this communicator disagree") as caught:
            call()
        found.append(str(caught.value))
    return found


def test_counts_are_compared_across_ranks_when_asked_for() -> None:
    pool = RankPool({**HOST, "PYNCCL_CHECK": "1"})
    try:
        for gather, scatter in pool.run(2, disagreeing_counts):
            assert "gather_v(counts=[1, 1], FLOAT32, root=0)" in gather
            assert "scatter_v(counts=[0, 2], FLOAT32, root=0)" in scatter
    finally:
        pool.close()


def test_offsets_are_bytes_and_do_not_wrap() -> None:
    stub = Stub()
    comm = stub.comm(nranks=2, rank=1)
    big = (1 << 31) + 5
    send, recv = (1 << 40, big + 3, "bfloat16"), (1 << 45, big + 1, "bfloat16")
    comm.all_to_all_v(send, recv, send_counts=[big, 3], recv_counts=[1, big], stream=4)
    moves = [(c.name, c.args["buffer"], c.args["count"], c.args["peer"]) for c in stub.calls()[1:-1]]
    assert moves == [
        ("ncclSend", 1 << 40, big, 0),
        ("ncclRecv", 1 << 45, 1, 0),
        ("ncclSend", (1 << 40) + 2 * big, 3, 1),
        ("ncclRecv", (1 << 45) + 2, big, 1),
    ]
    stub.clear()
    comm.reduce_scatter_v((1 << 40, big + 3, "bfloat16"), (1 << 45, 3, "bfloat16"), counts=[big, 3], stream=4)
    assert [(c.args["send"], c.args["recv"], c.args["count"], c.args["root"]) for c in stub.calls()[1:-1]] == [
        (1 << 40, 0, big, 0),
        ((1 << 40) + 2 * big, 1 << 45, 3, 1),
    ]


ONE, F4, OVER = torch.zeros(1), "float32", "send and recv overlap"
# Operation, buffers, options, what is said, by rank 1 of 2
BAD: list[tuple[str, tuple[Any, ...], dict[str, Any], str]] = [
    ("all_gather_v", (ONE,), {"counts": [1]}, "counts is [1], expected 2 numbers of elements >= 0"),
    ("reduce_scatter_v", (ONE,), {"counts": [1, 1, 1]}, "counts is [1, 1, 1], expected 2"),
    ("all_gather_v", (ONE,), {"counts": [-1, 2]}, "counts is [-1, 2], expected 2 numbers"),
    ("all_gather_v", (ONE,), {"counts": [1.0, 1]}, "counts is [1.0, 1], expected 2 numbers"),
    ("all_gather_v", (ONE,), {"counts": [True, 1]}, "counts is [True, 1], expected 2 numbers"),
    ("gather_v", (ONE,), {"counts": [1 << 61, 1]}, "counts is [2305843009213693952, 1], expected 2 numbers"),
    ("all_to_all_v", (ONE,), {"send_counts": [1], "recv_counts": [0, 0]}, "send_counts is [1], expected 2"),
    ("all_to_all_v", (ONE,), {"send_counts": [1, 0], "recv_counts": [0, -2]}, "recv_counts is [0, -2], expected 2"),
    ("scatter_v", (ONE,), {"root": 2, "counts": [1, 1]}, "root is 2, expected a rank in 0..1"),
    ("gather_v", (ONE,), {"root": True, "counts": [1, 1]}, "root is True, expected a rank in 0..1"),
    ("scatter_v", (ONE,), {"root": 1, "counts": [1, 1]}, "send has 1 elements, the counts say 2"),
    ("scatter_v", (None, ONE), {"counts": [1, 2]}, "recv has 1 elements, the counts say 2"),
    ("gather_v", (ONE,), {"counts": [1, 2]}, "send has 1 elements, the counts say 2"),
    ("gather_v", (ONE, torch.zeros(5)), {"root": 1, "counts": [2, 1]}, "recv has 5 elements, expected 3"),
    ("all_gather_v", (ONE,), {"counts": [1, 2]}, "send has 1 elements, the counts say 2"),
    ("all_to_all_v", (ONE,), {"send_counts": [1, 1], "recv_counts": [0, 0]}, "send has 1 elements, the counts say 2"),
    ("all_gather_v", (ONE, torch.zeros(7)), {"counts": [3, 1]}, "recv has 7 elements, expected 4"),
    (
        "reduce_scatter_v",
        (torch.zeros(4), ONE.int()),
        {"counts": [3, 1]},
        "send is FLOAT32, recv is INT32; they must be equal",
    ),
    ("reduce_scatter_v", (torch.zeros(4),), {"op": "mean", "counts": [3, 1]}, "unknown operator 'mean'"),
    ("all_gather_v", ((64, 1, F4), (52, 4, F4)), {"counts": [3, 1], "stream": 0}, f"{OVER}, -12 bytes apart; pass s"),
    (
        "all_to_all_v",
        ((64, 4, F4), (64, 2, F4)),
        {"send_counts": [3, 1], "recv_counts": [1, 1], "stream": 0},
        f"{OVER}, 0 bytes apart",
    ),
    ("scatter_v", (None,), {"counts": [1, 1]}, "rank 1 passed no recv and no send like which to allocate it"),
    ("scatter_v", (None, ONE), {"root": 1, "counts": [1, 1]}, "rank 1 passed no send; pass send="),
    (
        "all_gather_v",
        ((4096, 1, F4),),
        {"counts": [3, 1], "stream": 0},
        "cannot allocate the result like a tuple: pass recv=",
    ),
]


@pytest.mark.parametrize(("operation", "args", "options", "message"), BAD)
def test_bad_counts_and_buffers_are_refused_before_anything_is_launched(
    operation: str, args: tuple[Any, ...], options: dict[str, Any], message: str
) -> None:
    stub = Stub()
    comm = stub.comm(nranks=2, rank=1, cpu=True)
    with pytest.raises((ValueError, TypeError)) as caught:
        getattr(comm, operation)(*args, **options)
    said = str(caught.value)
    assert said.startswith(f"{operation}: {message}") or (said.startswith("cannot allocate") and message in said)
    assert stub.names() == []
    comm.barrier()  # no group was left open
    assert stub.names() == ["ncclAllReduce"]


def test_buffers_may_touch_and_nothing_overlaps_nothing() -> None:
    stub = Stub()
    comm = stub.comm(nranks=2, rank=1)
    comm.all_gather_v((4096 + 16, 1, F4), (4096, 4, F4), counts=[3, 1], stream=0)
    comm.all_gather_v((4096, 0, F4), (4096, 4, F4), counts=[4, 0], stream=0)
    assert stub.names().count("ncclBroadcast") == 4
