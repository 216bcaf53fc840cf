"""Groups are transactions: recorded, then launched between ncclGroupStart and ncclGroupEnd, or not at all."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
from libraries import Called, Stub
from ranks import RankPool, each_size
from reference import expect, inputs, reduced

import pynccl
from pynccl import Communicator, DataType

BIG = (1 << 31) + 5  # more elements than an int holds


def test_calls_are_replayed_in_order_between_start_and_end() -> None:
    stub = Stub()
    comm = stub.comm(cpu=True)
    x = torch.zeros(4)
    with pynccl.group():
        assert comm.all_reduce(x, x) is x
        comm.send(x, 2)
        comm.recv(torch.zeros(2), 3)
        comm.broadcast(x, x, root=1)
        assert stub.names() == []
    names = ["ncclGroupStart", "ncclAllReduce", "ncclSend", "ncclRecv", "ncclBroadcast", "ncclGroupEnd"]
    assert stub.names() == names
    assert [call.args["peer"] for call in stub.calls() if "peer" in call.args] == [2, 3]


def test_an_exception_in_the_block_launches_nothing_and_closes_the_group() -> None:
    stub = Stub()
    comm = stub.comm(cpu=True)
    with pytest.raises(ZeroDivisionError), pynccl.group():
        comm.all_reduce(torch.zeros(4))
        _ = 1 // 0
    assert stub.names() == []
    comm.all_reduce(torch.zeros(4))
    assert stub.names() == ["ncclAllReduce"]


def test_a_group_in_a_group_joins_the_outer_one() -> None:
    stub = Stub()
    comm = stub.comm(cpu=True)
    with pynccl.group():
        comm.send(torch.zeros(4), 0)
        with pynccl.group():
            comm.recv(torch.zeros(4), 0)
        assert stub.names() == []
        comm.send(torch.zeros(4), 2)
    assert stub.names() == ["ncclGroupStart", "ncclSend", "ncclRecv", "ncclSend", "ncclGroupEnd"]


def test_an_empty_group_calls_nothing() -> None:
    stub = Stub()
    with pynccl.group():
        pass
    assert stub.names() == []


def test_a_call_that_fails_closes_the_group_and_is_named() -> None:
    stub = Stub()
    comm = stub.comm(cpu=True)
    stub.fail("ncclReduce", 5)
    with pytest.raises(pynccl.NcclInvalidUsage) as caught, pynccl.group():
        comm.all_reduce(torch.zeros(4))
        comm.reduce(torch.zeros(3, dtype=torch.bfloat16), op="max", root=2)
        comm.broadcast(torch.zeros(4))
    assert stub.names() == ["ncclGroupStart", "ncclAllReduce", "ncclReduce", "ncclGroupEnd"]
    assert str(caught.value).startswith("reduce(count=3, BFLOAT16, MAX, root=2) failed: invalid usage")
    assert "what the stub has to say" in str(caught.value)


def test_a_group_that_fails_at_its_end_names_its_calls() -> None:
    stub = Stub()
    comm = stub.comm(cpu=True)
    stub.fail("ncclGroupEnd", 5)
    with pytest.raises(pynccl.NcclInvalidUsage) as caught, pynccl.group():
        comm.send(torch.zeros(4), 3)
        comm.all_gather(torch.zeros(2, dtype=torch.int64))
    assert "group of 2 calls: send(count=4, FLOAT32, peer=3), all_gather(count=2, INT64)" in str(caught.value)
    with pytest.raises(pynccl.NcclInvalidUsage, match=r"group of 9 calls: .*, \.\.\.") as caught, pynccl.group():
        for _ in range(9):
            comm.all_reduce(torch.zeros(4))
    assert str(caught.value).count("all_reduce(") == 4


def test_a_call_outside_a_group_names_itself_when_it_fails() -> None:
    stub = Stub()
    comm = stub.comm(cpu=True)
    stub.fail("ncclReduceScatter", 5)
    with pytest.raises(pynccl.NcclInvalidUsage, match=r"^reduce_scatter\(count=2, FLOAT32, AVG\) failed"):
        comm.reduce_scatter(torch.zeros(8), op="avg")
    with comm.pre_mul_sum(2.0, "float32") as op, pytest.raises(pynccl.NcclInvalidUsage, match="PRE_MUL_SUM"):
        comm.reduce_scatter(torch.zeros(8), op=op)


def test_threads_have_groups_of_their_own() -> None:
    stub = Stub()
    comm = stub.comm(cpu=True)
    with pynccl.group():
        comm.send(torch.zeros(4), 0)
        other = threading.Thread(target=comm.all_reduce, args=(torch.zeros(4),))
        other.start()
        other.join()
        assert stub.names() == ["ncclAllReduce"]
    assert stub.names() == ["ncclAllReduce", "ncclGroupStart", "ncclSend", "ncclGroupEnd"]


def test_buffers_live_until_the_launch() -> None:
    comm = Stub().comm(cpu=True)
    with pynccl.group():
        x = torch.zeros(4)
        alive = weakref.ref(x)
        comm.send(x, 0)
        del x
        gc.collect()
        assert alive() is not None
    gc.collect()
    assert alive() is None


# Libraries before 2.28 have no ncclAlltoAll, ncclGather, ncclScatter.


def sends_and_receives(calls: list[Called]) -> list[tuple[str, int, int, int]]:
    assert (calls[0].name, calls[-1].name) == ("ncclGroupStart", "ncclGroupEnd")
    return [(call.name[4:], call.args["buffer"], call.args["count"], call.args["peer"]) for call in calls[1:-1]]


def test_all_to_all_is_sends_and_receives_on_an_old_library() -> None:
    stub = Stub((2, 21, 5))
    comm = stub.comm(nranks=3, rank=1)
    comm.all_to_all((1 << 20, 12, "float64"), (1 << 30, 12, "float64"), stream=9)
    pairs = [(("Send", (1 << 20) + 32 * p, 4, p), ("Recv", (1 << 30) + 32 * p, 4, p)) for p in range(3)]
    assert sends_and_receives(stub.calls()) == [call for pair in pairs for call in pair]
    assert {call.args["stream"] for call in stub.calls()[1:-1]} == {9}
    assert {call.args["dtype"] for call in stub.calls()[1:-1]} == {int(DataType.FLOAT64)}


@pytest.mark.parametrize("rank", [0, 2])
def test_gather_is_sends_and_receives_on_an_old_library(rank: int) -> None:
    stub = Stub((2, 27, 7))
    recv = (1 << 30, 12, "float32") if rank == 2 else None
    stub.comm(nranks=3, rank=rank).gather((1 << 20, 4, "float32"), recv, root=2, stream=0)
    receives = [("Recv", (1 << 30) + 16 * peer, 4, peer) for peer in range(3)]
    assert sends_and_receives(stub.calls()) == [("Send", 1 << 20, 4, 2), *(receives if rank == 2 else [])]


@pytest.mark.parametrize("rank", [0, 2])
def test_scatter_is_sends_and_receives_on_an_old_library(rank: int) -> None:
    stub = Stub((2, 27, 7))
    send = (1 << 20, 12, "float32") if rank == 2 else None
    stub.comm(nranks=3, rank=rank).scatter(send, (1 << 30, 4, "float32"), root=2, stream=0)
    sends = [("Send", (1 << 20) + 16 * peer, 4, peer) for peer in range(3)]
    assert sends_and_receives(stub.calls()) == [*(sends if rank == 2 else []), ("Recv", 1 << 30, 4, 2)]


def test_a_new_library_carries_them_itself() -> None:
    stub = Stub((2, 28, 9))
    comm = stub.comm(nranks=3, rank=1)
    comm.all_to_all((1 << 20, 12, "float64"), (1 << 30, 12, "float64"), stream=0)
    comm.gather((1 << 20, 4, "int8"), root=2, stream=0)
    comm.scatter(None, (1 << 20, 4, "int8"), root=2, stream=0)
    assert [(c.name, c.args["count"]) for c in stub.calls()] == [
        ("ncclAlltoAll", 4),
        ("ncclGather", 4),
        ("ncclScatter", 4),
    ]


def test_a_config_cannot_travel_with_sends_and_receives() -> None:
    stub = Stub((2, 27, 7))
    with pytest.raises(ValueError, match=r"config= needs NCCL >= 2\.31"):
        stub.comm(nranks=2, rank=1).all_to_all(
            (64, 4, "int8"), (128, 4, "int8"), stream=0, config=pynccl.CollConfig(max_ctas=1)
        )
    assert stub.names() == []


@pytest.mark.parametrize("version", [(2, 21, 5), (2, 32, 3)])
def test_counts_beyond_31_bits_arrive_whole(version: tuple[int, int, int]) -> None:
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
    offsets = {call.args["buffer"] for call in moved if call.name == "ncclRecv"}
    assert version > (2, 28) or (1 << 45) + 2 * BIG in offsets  # block 1: bytes, not elements, and no wrap


# On ranks


def mixed_group(comm: Communicator) -> None:
    n, rank = comm.size, comm.rank
    given = [inputs(torch.float32, "sum", 6 * n, n, seed=seed) for seed in range(3)]
    exchanged = torch.zeros(5)
    with pynccl.group():
        total = comm.all_reduce(given[0][rank])
        copy = comm.broadcast(given[1][rank], root=n - 1)
        comm.send(torch.full((5,), float(rank)), (rank + 1) % n)
        scattered = comm.reduce_scatter(given[2][rank], op="max")
        comm.recv(exchanged, (rank - 1) % n)
        gathered = comm.all_gather(given[0][rank])
        transposed = comm.all_to_all(given[1][rank])
    block = slice(6 * rank, 6 * rank + 6)
    expect(total, reduced(given[0], "sum"), "all_reduce")
    expect(copy, given[1][n - 1], "broadcast")
    expect(scattered, reduced(given[2], "max")[block], "reduce_scatter")
    expect(exchanged, torch.full((5,), float((rank - 1) % n)), "recv")
    expect(gathered, torch.cat(given[0]), "all_gather")
    expect(transposed, torch.cat([x[block] for x in given[1]]), "all_to_all")


@each_size
def test_collectives_and_messages_share_a_group(ranks: RankPool, n: int) -> None:
    assert ranks.run(n, mixed_group) == [None] * n


def opposite_orders(comm: Communicator) -> list[float]:
    """Everyone receives before it sends: outside a group nobody would get anywhere."""
    received = [torch.zeros(200_000) for _ in range(comm.size)]
    mine = torch.full((200_000,), float(comm.rank))
    with pynccl.group():
        for peer in range(comm.size):
            comm.recv(received[peer], peer)
        for peer in reversed(range(comm.size)):
            comm.send(mine, peer)
    assert all(bool((x == x[0]).all()) for x in received)
    return [x[0].item() for x in received]


@each_size
def test_messages_of_a_group_progress_together(ranks: RankPool, n: int) -> None:
    assert ranks.run(n, opposite_orders) == [[float(rank) for rank in range(n)]] * n


def two_communicators(comm: Communicator) -> tuple[float, float]:
    other = comm.split(0, key=-comm.rank)
    assert other is not None
    x = torch.tensor(float(comm.rank))
    with other, pynccl.group():  # rank 0 and the others name them in different orders
        pair = [comm, other] if comm.rank else [other, comm]
        results = {one: one.broadcast(x, root=0) for one in pair}
    return results[comm].item(), results[other].item()


@each_size
def test_a_group_spans_communicators(ranks: RankPool, n: int) -> None:
    assert ranks.run(n, two_communicators) == [(0.0, n - 1.0)] * n
