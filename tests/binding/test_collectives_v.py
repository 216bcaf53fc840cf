"""Collectives with a number of elements per rank, against what one process computes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from libraries import Stub
from ranks import HOST, RankPool, each_size
from reference import DTYPES, OPS, expect, inputs, reduced

import pynccl
from pynccl import Communicator


def sent(n: int) -> list[list[int]]:
    """counts[i][j]: how many elements rank i gives rank j; some none, and nobody is owed the same as another."""
    return [[(i + 2 * j) % (n + 1) * 3 for j in range(n)] for i in range(n)]


def wanted_of_all_to_all(given: list[torch.Tensor], counts: list[list[int]], rank: int) -> torch.Tensor:
    return torch.cat([x.split(row)[rank] for x, row in zip(given, counts, strict=True)])


def all_to_all(comm: Communicator, dtype: str) -> None:
    n, rank = comm.size, comm.rank
    counts = sent(n)
    assert any(0 in row for row in counts)
    column = [row[rank] for row in counts]
    given = [inputs(DTYPES[dtype], "sum", sum(row), 1, seed=i)[0] for i, row in enumerate(counts)]
    wanted = wanted_of_all_to_all(given, counts, rank)
    recv = torch.zeros_like(wanted)
    assert comm.all_to_all_v(given[rank], recv, send_counts=counts[rank], recv_counts=column) is recv
    expect(recv, wanted, "all_to_all_v")
    made = comm.all_to_all_v(given[rank], send_counts=counts[rank], recv_counts=column)
    expect(made, wanted, "all_to_all_v, allocated")


@each_size
@pytest.mark.parametrize("dtype", ["float32", "int64", "bfloat16", "float8_e4m3"])
def test_all_to_all_moves_what_each_pair_agreed_on(ranks: RankPool, n: int, dtype: str) -> None:
    assert ranks.run(n, all_to_all, dtype) == [None] * n


def gather_and_scatter(comm: Communicator, counts: list[int], dtype: str) -> None:
    n, rank = comm.size, comm.rank
    given = [inputs(DTYPES[dtype], "sum", count, 1, seed=i)[0] for i, count in enumerate(counts)]
    expect(comm.all_gather_v(given[rank], counts=counts), torch.cat(given), "all_gather_v")
    for op in OPS:
        full = inputs(DTYPES[dtype], op, sum(counts), n, seed=9)
        wanted = reduced(full, op).split(counts)[rank]
        recv = torch.zeros_like(wanted)
        assert comm.reduce_scatter_v(full[rank], recv, op, counts=counts) is recv
        expect(recv, wanted, f"reduce_scatter_v {op}")


@each_size
@pytest.mark.parametrize("dtype", ["float32", "int32", "float16"])
@pytest.mark.parametrize("counts", [[5, 0, 17, 2], [0, 1, 0, 0], [4, 4, 4, 4], [3000, 1, 0, 70000]], ids=str)
def test_gather_and_reduce_scatter_with_a_count_per_rank(
    ranks: RankPool, n: int, counts: list[int], dtype: str
) -> None:
    assert ranks.run(n, gather_and_scatter, counts[:n], dtype) == [None] * n


def rooted(comm: Communicator, counts: list[int], dtype: str) -> None:
    n, rank = comm.size, comm.rank
    parts = [inputs(DTYPES[dtype], "sum", count, 1, seed=i)[0] for i, count in enumerate(counts)]
    whole, like = torch.cat(parts), torch.empty(0, dtype=DTYPES[dtype])
    for root in (0, n - 1):
        own = torch.zeros_like(parts[rank])
        assert comm.scatter_v(whole if rank == root else None, own, root, counts=counts) is own
        expect(own, parts[rank], "scatter_v")
        expect(comm.scatter_v(whole if rank == root else like, root=root, counts=counts), parts[rank], "allocated")
        recv = torch.zeros_like(whole) if rank == root else None
        assert comm.gather_v(parts[rank], recv, root, counts=counts) is recv
        made = comm.gather_v(parts[rank], root=root, counts=counts)
        for result in (recv, made) if rank == root else ():
            assert result is not None
            expect(result, whole, "gather_v")
        assert rank == root or made is None
    again = comm.plan.gather_v(parts[rank], torch.zeros_like(whole) if rank == 0 else None, counts=counts)
    back = comm.plan.scatter_v(again.recv, torch.zeros_like(parts[rank]), counts=counts)
    for _ in range(2):
        again()
        back()
        expect(back.recv, parts[rank], "gathered and scattered by plans")


@each_size
@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("counts", [[5, 0, 17, 2], [0, 1, 0, 0], [0, 0, 0, 0], [4, 4, 4, 4]], ids=str)
def test_scatter_and_gather_with_a_count_per_rank(ranks: RankPool, n: int, counts: list[int], dtype: str) -> None:
    assert ranks.run(n, rooted, counts[:n], dtype) == [None] * n


def rooted_in_a_group(comm: Communicator) -> None:
    n, rank = comm.size, comm.rank
    counts = list(range(n))
    parts = [torch.full((count,), float(i)) for i, count in enumerate(counts)]
    stream = pynccl.create_stream()
    with pynccl.group():
        gathered = comm.gather_v(parts[rank], root=n - 1, counts=counts, stream=stream)
        scattered = comm.scatter_v(torch.cat(parts), root=0, counts=np.array(counts), stream=stream)
    stream.synchronize()
    expect(scattered, parts[rank], "scatter_v")
    if rank == n - 1:
        expect(gathered, torch.cat(parts), "gather_v")


@each_size
def test_scatter_and_gather_share_a_group_on_a_stream(ranks: RankPool, n: int) -> None:
    assert ranks.run(n, rooted_in_a_group) == [None] * n


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


def nothing_at_all(comm: Communicator) -> list[tuple[int, ...]]:
    none, zeros = torch.empty(0), [0] * comm.size
    results = [
        comm.all_to_all_v(none, send_counts=zeros, recv_counts=zeros),
        comm.all_gather_v(none, counts=zeros),
        comm.reduce_scatter_v(none, counts=zeros),
    ]
    return [tuple(result.shape) for result in results]


def test_all_counts_may_be_zero(ranks: RankPool) -> None:
    assert ranks.run(2, nothing_at_all) == [[(0,)] * 3] * 2


def on_a_stream(comm: Communicator) -> list[float]:
    counts = list(range(1, comm.size + 1))
    stream = pynccl.create_stream()
    x = torch.zeros(counts[comm.rank])
    total = torch.full((1,), float(comm.rank + 1))
    comm.broadcast(total, x[:1], root=0, stream=stream)  # before the gather, by the order of the stream
    gathered = comm.all_gather_v(x, counts=counts, stream=stream)
    stream.synchronize()
    return gathered.tolist()


@each_size
def test_they_keep_the_order_of_their_stream(ranks: RankPool, n: int) -> None:
    starts = [sum(range(1, rank + 1)) for rank in range(n)]
    wanted = [1.0 if i in starts else 0.0 for i in range(sum(range(1, n + 1)))]
    assert ranks.run(n, on_a_stream) == [wanted] * n


def in_a_group(comm: Communicator) -> None:
    n, rank = comm.size, comm.rank
    counts = list(range(n))
    given = [torch.full((count,), float(i)) for i, count in enumerate(counts)]
    x = torch.ones(2)
    with pynccl.group():
        gathered = comm.all_gather_v(given[rank], counts=counts)
        comm.all_reduce(x, x)
        back = comm.reduce_scatter_v(torch.ones(sum(counts)), counts=counts)
    expect(gathered, torch.cat(given), "all_gather_v")
    expect(x, torch.full((2,), float(n)), "all_reduce")
    expect(back, torch.full((rank,), float(n)), "reduce_scatter_v")


@each_size
def test_they_share_a_group_with_others(ranks: RankPool, n: int) -> None:
    assert ranks.run(n, in_a_group) == [None] * n


def arrays(comm: Communicator) -> list[Any]:
    counts = [2, 1, 3][: comm.size]
    result = comm.all_gather_v(np.full(counts[comm.rank], comm.rank, dtype=np.int32), counts=counts)
    assert isinstance(result, np.ndarray) and result.dtype == np.int32
    return result.tolist()


def test_the_result_is_of_the_kind_of_send(ranks: RankPool) -> None:
    assert ranks.run(3, arrays) == [[0, 0, 1, 2, 2, 2]] * 3


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


ONE = torch.zeros(1)
BAD: dict[str, tuple[str, tuple[Any, ...], dict[str, Any], str]] = {
    "too few counts": (
        "all_gather_v",
        (ONE,),
        {"counts": [1]},
        r"counts is \[1\], expected 2 numbers of elements >= 0",
    ),
    "too many counts": ("reduce_scatter_v", (ONE,), {"counts": [1, 1, 1]}, r"counts is \[1, 1, 1\], expected 2"),
    "negative": ("all_gather_v", (ONE,), {"counts": [-1, 2]}, r"counts is \[-1, 2\], expected 2 numbers"),
    "not whole": ("all_gather_v", (ONE,), {"counts": [1.0, 1]}, r"counts is \[1\.0, 1\], expected 2 numbers"),
    "send_counts": (
        "all_to_all_v",
        (ONE,),
        {"send_counts": [1], "recv_counts": [0, 0]},
        r"send_counts is \[1\], expected 2",
    ),
    "recv_counts": (
        "all_to_all_v",
        (ONE,),
        {"send_counts": [1, 0], "recv_counts": [0, -2]},
        r"recv_counts is \[0, -2\], expected 2",
    ),
    "true": ("all_gather_v", (ONE,), {"counts": [True, 1]}, r"counts is \[True, 1\], expected 2 numbers"),
    "more than memory": ("gather_v", (ONE,), {"counts": [1 << 61, 1]}, r"counts is \[2305.*, 1\], expected 2 numbers"),
    "scatter root": ("scatter_v", (ONE,), {"root": 2, "counts": [1, 1]}, r"root is 2, expected a rank in 0\.\.1"),
    "gather root": ("gather_v", (ONE,), {"root": True, "counts": [1, 1]}, r"root is True, expected a rank in 0\.\.1"),
    "scatter of another sum": (
        "scatter_v",
        (ONE,),
        {"root": 1, "counts": [1, 1]},
        "send has 1 elements, the counts say 2",
    ),
    "scatter into another size": (
        "scatter_v",
        (None, ONE),
        {"counts": [1, 2]},
        "recv has 1 elements, the counts say 2",
    ),
    "gather of another size": ("gather_v", (ONE,), {"counts": [1, 2]}, "send has 1 elements, the counts say 2"),
    "gather into another size": (
        "gather_v",
        (ONE, torch.zeros(5)),
        {"root": 1, "counts": [2, 1]},
        "recv has 5 elements, expected 3",
    ),
    "send of another size": ("all_gather_v", (ONE,), {"counts": [1, 2]}, "send has 1 elements, the counts say 2"),
    "send of another sum": (
        "all_to_all_v",
        (ONE,),
        {"send_counts": [1, 1], "recv_counts": [0, 0]},
        "send has 1 elements, the counts say 2",
    ),
    "recv of another size": (
        "all_gather_v",
        (ONE, torch.zeros(7)),
        {"counts": [3, 1]},
        "recv has 7 elements, expected 4",
    ),
    "recv of another type": (
        "reduce_scatter_v",
        (torch.zeros(4), torch.zeros(1, dtype=torch.int32)),
        {"counts": [3, 1]},
        "send is FLOAT32, recv is INT32; they must be equal",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_counts_and_buffers_are_refused_before_anything_is_launched(case: str) -> None:
    operation, args, options, message = BAD[case]
    stub = Stub()
    comm = stub.comm(nranks=2, rank=1, cpu=True)
    with pytest.raises(ValueError, match=f"^{operation}: {message}"):
        getattr(comm, operation)(*args, **options)
    assert stub.names() == []
    comm.barrier()  # no group was left open
    assert stub.names() == ["ncclAllReduce"]


def test_an_unknown_operator_launches_nothing() -> None:
    stub = Stub()
    with pytest.raises(ValueError, match="unknown operator 'mean'"):
        stub.comm(nranks=2, rank=1, cpu=True).reduce_scatter_v(torch.zeros(4), op="mean", counts=[3, 1])
    assert stub.names() == []


def test_overlapping_buffers_are_refused() -> None:
    stub = Stub()
    comm = stub.comm(nranks=2, rank=1)
    with pytest.raises(ValueError, match=r"all_gather_v: send and recv overlap, -12 bytes apart; pass separate"):
        comm.all_gather_v((4096 + 12, 1, "float32"), (4096, 4, "float32"), counts=[3, 1], stream=0)
    with pytest.raises(ValueError, match="all_to_all_v: send and recv overlap, 0 bytes apart"):
        comm.all_to_all_v((4096, 4, "float32"), (4096, 2, "float32"), send_counts=[3, 1], recv_counts=[1, 1], stream=0)
    assert stub.names() == []
    comm.all_gather_v((4096 + 16, 1, "float32"), (4096, 4, "float32"), counts=[3, 1], stream=0)  # touch, not overlap
    comm.all_gather_v((4096, 0, "float32"), (4096, 4, "float32"), counts=[4, 0], stream=0)  # nothing to overlap
    assert stub.names().count("ncclBroadcast") == 4


def test_scatter_without_buffers_says_which_it_needs() -> None:
    stub = Stub()
    comm = stub.comm(nranks=2, rank=1, cpu=True)
    with pytest.raises(TypeError, match=r"scatter_v: rank 1 passed no recv and no send like which to allocate it"):
        comm.scatter_v(None, counts=[1, 1])
    with pytest.raises(TypeError, match=r"scatter_v: rank 1 passed no send; pass send="):
        comm.scatter_v(None, ONE, root=1, counts=[1, 1])
    assert stub.names() == []


def test_a_raw_pointer_needs_recv() -> None:
    stub = Stub()
    with pytest.raises(TypeError, match="cannot allocate the result like a tuple: pass recv="):
        stub.comm(nranks=2, rank=1).all_gather_v((4096, 1, "float32"), counts=[3, 1], stream=0)
