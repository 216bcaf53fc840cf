"""Collectives with a count per rank match a single-process reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from libraries import Stub
from ranks import RankPool, each_size
from reference import DTYPES, OPS, expect, inputs, reduced

from pynccl import Communicator

COUNTS = ([5, 0, 17, 2], [0, 1, 0, 0], [0, 0, 0, 0], [3000, 1, 0, 70000])  # the first n counts of each are used


def check_all_to_all_v(comm: Communicator) -> None:
    """Check counts that differ by pair of ranks, some of them 0."""
    n, rank = comm.size, comm.rank
    counts = [[(i + 2 * j) % (n + 1) * 3 for j in range(n)] for i in range(n)]
    column = [row[rank] for row in counts]
    for dtype in ("float32", "int64", "bfloat16", "float8_e4m3"):
        xs = [inputs(DTYPES[dtype], "sum", sum(row), 1, seed=i)[0] for i, row in enumerate(counts)]
        wanted = torch.cat([x.split(row)[rank] for x, row in zip(xs, counts, strict=True)])
        recv = torch.zeros_like(wanted)
        assert comm.all_to_all_v(xs[rank], recv, send_counts=counts[rank], recv_counts=column) is recv
        expect(recv, wanted, f"all_to_all_v of {dtype}")
        allocated = comm.all_to_all_v(xs[rank], send_counts=counts[rank], recv_counts=column)
        expect(allocated, wanted, f"all_to_all_v of {dtype}, allocated")


def check_gather_and_reduce_scatter(comm: Communicator, counts: list[int], dtype: str) -> None:
    n, rank = comm.size, comm.rank
    parts = [inputs(DTYPES[dtype], "sum", count, 1, seed=i)[0] for i, count in enumerate(counts)]
    expect(comm.all_gather_v(parts[rank], counts=counts), torch.cat(parts), f"all_gather_v of {counts}")
    for op in OPS:
        full = inputs(DTYPES[dtype], op, sum(counts), n, seed=9)
        wanted = reduced(full, op).split(counts)[rank]
        recv = torch.zeros_like(wanted)
        assert comm.reduce_scatter_v(full[rank], recv, op, counts=counts) is recv
        expect(recv, wanted, f"reduce_scatter_v {op} of {counts}")


def check_gather_and_scatter(comm: Communicator, counts: list[int], dtype: str) -> None:
    rank = comm.rank
    parts = [inputs(DTYPES[dtype], "sum", count, 1, seed=i)[0] for i, count in enumerate(counts)]
    full, like, what = torch.cat(parts), torch.empty(0, dtype=DTYPES[dtype]), f"of {counts}"
    for root in (0, comm.size - 1):
        received = torch.zeros_like(parts[rank])
        assert comm.scatter_v(full if rank == root else None, received, root, counts=counts) is received
        expect(received, parts[rank], f"scatter_v {what}")
        allocated = comm.scatter_v(full if rank == root else like, root=root, counts=counts)
        expect(allocated, parts[rank], f"scatter_v {what}, allocated")
        recv = torch.zeros_like(full) if rank == root else None
        assert comm.gather_v(parts[rank], recv, root, counts=counts) is recv
        gathered = comm.gather_v(parts[rank], root=root, counts=counts)
        for result in (recv, gathered) if rank == root else ():
            expect(result, full, f"gather_v {what}")
        assert rank == root or gathered is None


def check_all(comm: Communicator) -> None:
    check_all_to_all_v(comm)
    for counts, dtype in zip(COUNTS, ("int32", "float16", "int8", "float32"), strict=True):
        check_gather_and_reduce_scatter(comm, counts[: comm.size], dtype)
        check_gather_and_scatter(comm, counts[: comm.size], dtype)


@each_size
def test_v_collectives_match_single_process(ranks: RankPool, n: int) -> None:
    ranks.run(n, check_all)


def test_v_offsets_above_31_bits() -> None:
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


ONE, F4, OVER = torch.zeros(1), "float32", "send and recv overlap"
# Operation, buffers, options, error message, on rank 1 of 2
BAD: list[tuple[str, tuple[Any, ...], dict[str, Any], str]] = [
    ("all_gather_v", (ONE,), {"counts": [1]}, "counts is [1], expected 1 count per rank (2 in all), got 1"),
    ("all_gather_v", (ONE,), {"counts": [-1, 2]}, "counts is [-1, 2], expected 1 count per rank"),
    (
        "all_to_all_v",
        (ONE,),
        {"send_counts": [1, 0], "recv_counts": [0, -2]},
        "recv_counts is [0, -2], expected 1",
    ),
    ("scatter_v", (ONE,), {"root": 1, "counts": [1, 1]}, "send has 1 elements, expected 2 by the counts"),
    ("gather_v", (ONE, torch.zeros(5)), {"root": 1, "counts": [2, 1]}, "recv has 5 elements, expected 3"),
    ("all_gather_v", ((64, 1, F4), (52, 4, F4)), {"counts": [3, 1], "stream": 0}, f"{OVER}, -12 bytes apart; pass s"),
    ("scatter_v", (None,), {"counts": [1, 1]}, "rank 1 passed no recv and no send to allocate it from"),
]


@pytest.mark.parametrize(("operation", "args", "options", "message"), BAD)
def test_invalid_counts_and_buffers_raise_before_launch(
    operation: str, args: tuple[Any, ...], options: dict[str, Any], message: str
) -> None:
    stub = Stub()
    comm = stub.comm(nranks=2, rank=1, cpu=True)
    with pytest.raises((ValueError, TypeError)) as caught:
        getattr(comm, operation)(*args, **options)
    assert str(caught.value).startswith(f"{operation}: {message}")
    assert stub.names() == []
    comm.barrier()  # no group was left open
    assert stub.names() == ["ncclAllReduce"]
