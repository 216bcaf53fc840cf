"""Groups are transactions: calls are recorded, then launched between ncclGroupStart and ncclGroupEnd or dropped."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from libraries import Stub
from ranks import RankPool
from reference import expect, inputs, reduced

import pynccl
from pynccl import Communicator

BIG = (1 << 31) + 5  # more elements than an int holds
X = torch.zeros(4)


def test_group_launches_calls_in_order_or_not_at_all() -> None:
    stub = Stub()
    comm = stub.comm(cpu=True)
    with pytest.raises(ZeroDivisionError), pynccl.group():
        comm.all_reduce(X)
        _ = 1 // 0
    with pynccl.group():
        pass
    assert stub.names() == []
    with pynccl.group():
        assert comm.all_reduce(X, X) is X
        comm.send(x := torch.zeros(4), 2)
        alive = weakref.ref(x)
        del x
        with pynccl.group():
            comm.recv(torch.zeros(2), 3)
        comm.broadcast(X, X, root=1)
        gc.collect()
        assert stub.names() == [] and alive() is not None  # buffers live until the launch
    names = ["ncclGroupStart", "ncclAllReduce", "ncclSend", "ncclRecv", "ncclBroadcast", "ncclGroupEnd"]
    assert stub.names() == names
    assert [call.args["peer"] for call in stub.calls() if "peer" in call.args] == [2, 3]


def group_of_three(comm: Communicator) -> None:
    with pynccl.group():
        comm.all_reduce(X)
        comm.reduce(torch.zeros(3, dtype=torch.bfloat16), op="max", root=2)
        comm.broadcast(X)


def scaled_reduce_scatter(comm: Communicator) -> None:
    with comm.pre_mul_sum(2.0, "float32") as op:
        comm.reduce_scatter(torch.zeros(8), op=op)


REDUCE = "reduce(count=3, BFLOAT16, MAX, root=2)"
# function that fails, calls, start of the error, C functions called
FAILURES: list[tuple[str, Callable[[Communicator], Any], str, list[str]]] = [
    ("ncclReduce", group_of_three, f"{REDUCE} failed: invalid usage", ["ncclAllReduce", "ncclReduce"]),
    (
        "ncclGroupEnd",
        group_of_three,
        f"group of 3 calls: all_reduce(count=4, FLOAT32, SUM), {REDUCE}, broadcast(",
        ["ncclAllReduce", "ncclReduce", "ncclBroadcast"],
    ),
    (
        "ncclReduceScatter",
        scaled_reduce_scatter,
        "reduce_scatter(count=2, FLOAT32, PRE_MUL_SUM",
        ["ncclRedOpCreatePreMulSum", "ncclReduceScatter", "ncclRedOpDestroy"],
    ),
]


@pytest.mark.parametrize(("function", "call", "message", "names"), FAILURES, ids=[row[0] for row in FAILURES])
def test_failed_group_names_call_and_is_closed(
    function: str, call: Callable[[Communicator], Any], message: str, names: list[str]
) -> None:
    stub = Stub()
    comm = stub.comm(cpu=True)
    stub.fail(function, 5)
    with pytest.raises(pynccl.NcclInvalidUsage) as caught:
        call(comm)
    assert str(caught.value).startswith(message)
    assert "what the stub has to say" in str(caught.value)
    assert stub.names() == (["ncclGroupStart", *names, "ncclGroupEnd"] if call is group_of_three else names)


@pytest.mark.parametrize("version", [(2, 21, 5), (2, 32, 3)])
def test_counts_above_31_bits(version: tuple[int, int, int]) -> None:
    stub = Stub(version)
    comm = stub.comm(nranks=2, rank=1)
    send, recv = (1 << 40, 2 * BIG, "bfloat16"), (1 << 45, 2 * BIG, "bfloat16")
    half_send, half_recv = (1 << 40, BIG, "bfloat16"), (1 << 45, BIG, "bfloat16")
    comm.all_reduce(send, recv, stream=0)
    comm.broadcast(send, recv, stream=0)
    comm.reduce(send, recv, root=1, stream=0)
    comm.send(send, 0, stream=0)
    comm.recv(recv, 0, stream=0)
    assert [call.args["count"] for call in stub.calls()] == [2 * BIG] * 5
    stub.clear()
    comm.all_gather(half_send, recv, stream=0)
    comm.reduce_scatter(send, half_recv, stream=0)
    comm.all_to_all(send, recv, stream=0)
    comm.gather(half_send, recv, root=1, stream=0)
    comm.scatter(send, half_recv, root=1, stream=0)
    moved = [call for call in stub.calls() if "count" in call.args]
    assert {call.args["count"] for call in moved} == {BIG}
    if version > (2, 28):
        wanted = ["ncclAllGather", "ncclReduceScatter", "ncclAlltoAll", "ncclGather", "ncclScatter"]
        assert [call.name for call in moved] == wanted
    else:  # offset of block 1: in bytes, without overflow
        assert (1 << 45) + 2 * BIG in {call.args["buffer"] for call in moved if call.name == "ncclRecv"}


def mixed_group(comm: Communicator) -> None:
    """Mix two communicators, in another order on rank 0, with sends and receives that need one group."""
    n, rank = comm.size, comm.rank
    xs = [inputs(torch.float32, "sum", 6 * n, n, seed=seed) for seed in range(3)]
    received = [torch.zeros(200_000) for _ in range(n)]
    other = comm.split(0, key=-rank)
    assert other is not None
    with other, pynccl.group():
        pair = [comm, other] if rank else [other, comm]
        copies = {c: c.broadcast(xs[1][rank], root=0) for c in pair}
        total = comm.all_reduce(xs[0][rank])
        for peer in range(n):  # before the sends: this would deadlock outside a group
            comm.recv(received[peer], peer)
        scattered = comm.reduce_scatter(xs[2][rank], op="max")
        for peer in reversed(range(n)):
            comm.send(torch.full((200_000,), float(rank)), peer)
        gathered = comm.all_gather(xs[0][rank])
        transposed = comm.all_to_all(xs[1][rank])
    block = slice(6 * rank, 6 * rank + 6)
    expect(copies[comm], xs[1][0], "broadcast")
    expect(copies[other], xs[1][n - 1], "broadcast of the other")
    expect(total, reduced(xs[0], "sum"), "all_reduce")
    expect(scattered, reduced(xs[2], "max")[block], "reduce_scatter")
    for peer in range(n):
        expect(received[peer], torch.full((200_000,), float(peer)), "recv")
    expect(gathered, torch.cat(xs[0]), "all_gather")
    expect(transposed, torch.cat([x[block] for x in xs[1]]), "all_to_all")


def test_group_mixes_two_communicators_and_point_to_point(ranks: RankPool) -> None:
    ranks.run(3, mixed_group)
