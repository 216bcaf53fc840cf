"""The host library's C functions: init, copies, groups, wrong arguments."""

from __future__ import annotations

import ctypes

import pytest
import torch
from host_calls import CallFailed, Ranks, address, call, in_threads, init_all, init_rank, number, row, split, unique_id

from pynccl import host
from pynccl.bindings import abi
from pynccl.bindings.abi import DataType, RedOp, Result

pytestmark = pytest.mark.usefixtures("transport")
INT32, FLOAT32, SUM = DataType.INT32, DataType.FLOAT32, RedOp.SUM


# Library


def test_version_and_unknown_functions() -> None:
    version = ctypes.c_int()
    call("ncclGetVersion", ctypes.byref(version))
    assert abi.version_tuple(version.value) == host.VERSION
    assert host.function("ncclNoSuchThing") is None
    assert host.function("ncclGetVersion") is host.function("ncclGetVersion")


def test_error_strings() -> None:
    text = host.function("ncclGetErrorString")
    assert text(Result.SUCCESS) == b"no error"
    assert b"remote process exited" in text(Result.REMOTE_ERROR)
    assert text(99) == b"unknown result code"


# Init


def test_ranks_find_each_other_by_unique_id() -> None:
    identity = unique_id()
    comms = in_threads(3, lambda rank: init_rank(3, identity, rank))
    assert [number("ncclCommUserRank", comm) for comm in comms] == [0, 1, 2]
    assert [number("ncclCommCount", comm) for comm in comms] == [3, 3, 3]
    assert [number("ncclCommCuDevice", comm) for comm in comms] == [0, 0, 0]
    for comm in comms:
        call("ncclCommDestroy", comm)


def test_several_ranks_of_one_thread_in_a_group() -> None:
    identity, handles = unique_id(), [ctypes.c_void_p() for _ in range(3)]
    call("ncclGroupStart")
    for rank, handle in enumerate(handles):
        call("ncclCommInitRank", ctypes.byref(handle), 3, identity, rank)
    call("ncclGroupEnd")
    data = [row(rank, 5) for rank in range(3)]
    call("ncclGroupStart")
    for handle, tensor in zip(handles, data, strict=True):
        call("ncclAllReduce", address(tensor), address(tensor), 5, INT32, SUM, handle, None)
    call("ncclGroupEnd")
    assert all(tensor.equal(row(0, 5) * 3 + 3000) for tensor in data)
    for handle in handles:
        call("ncclCommDestroy", handle)


def test_init_all_numbers_devices() -> None:
    out = (ctypes.c_void_p * 2)()
    call("ncclCommInitAll", out, 2, (ctypes.c_int * 2)(5, 3))
    assert [number("ncclCommCuDevice", comm) for comm in out if comm] == [5, 3]
    for comm in out:
        call("ncclCommDestroy", comm)
    with pytest.raises(CallFailed, match="different devices"):
        call("ncclCommInitAll", out, 2, (ctypes.c_int * 2)(1, 1))


def test_one_rank_needs_no_network() -> None:
    comm = init_rank(1, unique_id(), 0)
    data, out = row(0, 4), torch.zeros(4, dtype=torch.int32)
    call("ncclAllReduce", address(data), address(out), 4, INT32, RedOp.AVG, comm, None)
    assert out.equal(data)
    call("ncclCommDestroy", comm)


@pytest.mark.parametrize(
    ("claims", "text"),
    [([(2, 0), (2, 0)], "claim to be rank 0 of 2"), ([(2, 0), (3, 1)], "there are [23] ranks, another rank says [23]")],
    ids=["same rank", "different sizes"],
)
def test_ranks_that_contradict_each_other(claims: list[tuple[int, int]], text: str) -> None:
    identity = unique_id()

    def body(index: int) -> Result:
        with pytest.raises(CallFailed, match=text) as refused:
            init_rank(claims[index][0], identity, claims[index][1])
        return refused.value.code

    assert in_threads(2, body) == [Result.INVALID_USAGE] * 2


def test_a_rank_that_never_comes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYNCCL_HOST_INIT_TIMEOUT", "0.3")
    with pytest.raises(CallFailed, match=r"rank 1 of 4 still waits for ranks \[0, 2, 3\] after 0.3 s"):
        init_rank(4, unique_id(), 1)


def test_config_is_checked() -> None:
    out, config = ctypes.c_void_p(), abi.Config()
    config.size, config.magic = ctypes.sizeof(abi.Config), abi.CONFIG_MAGIC
    call("ncclCommInitRankConfig", ctypes.byref(out), 1, unique_id(), 0, ctypes.byref(config))
    call("ncclCommDestroy", out)
    config.magic = 1
    with pytest.raises(CallFailed, match="magic 0x1"):
        call("ncclCommInitRankConfig", ctypes.byref(out), 1, unique_id(), 0, ctypes.byref(config))


def test_split_orders_by_key_then_rank(group: Ranks) -> None:
    def body(rank: int, comm: int) -> tuple[int, int, int]:
        child = split(comm, rank % 2, -rank if rank % 2 == 0 else 7)
        assert child
        place = number("ncclCommUserRank", child), number("ncclCommCount", child)
        data = torch.tensor([rank], dtype=torch.int32)
        call("ncclAllReduce", address(data), address(data), 1, INT32, SUM, child, None)
        call("ncclCommDestroy", child)
        return *place, int(data)

    evens, odds = [range(start, group.size, 2) for start in (0, 1)]
    for rank, (new_rank, size, total) in enumerate(group.run(body)):
        mine = list(odds) if rank % 2 else list(reversed(evens))
        assert (new_rank, size, total) == (mine.index(rank), len(mine), sum(mine))


def test_split_without_color_gives_null(group: Ranks) -> None:
    children = group.run(lambda rank, comm: split(comm, -1 if rank == 0 else 0, 0))
    assert children[0] is None
    assert number("ncclCommCount", children[1]) == group.size - 1
    for child in children[1:]:
        call("ncclCommDestroy", child)


# Copies


def test_copies_in_place(group: Ranks) -> None:
    count, size = 1003, group.size
    everything = torch.cat([row(rank, count) for rank in range(size)])

    def body(rank: int, comm: int) -> None:
        whole = torch.zeros_like(everything)
        own = whole.split(count)[rank]
        own.copy_(row(rank, count))
        call("ncclAllGather", address(own), address(whole), count, INT32, comm, None)
        assert whole.equal(everything)
        if rank != 0:
            whole.zero_()
            own.copy_(row(rank, count))
        call("ncclGather", address(own), address(whole), count, INT32, 0, comm, None)
        assert rank != 0 or whole.equal(everything)
        call("ncclScatter", address(whole), address(own), count, INT32, 0, comm, None)
        assert own.equal(row(rank, count))
        blocks = torch.cat([row(10 * rank + to, count) for to in range(size)])
        call("ncclAlltoAll", address(blocks), address(blocks), count, INT32, comm, None)
        assert blocks.equal(torch.cat([row(10 * source + rank, count) for source in range(size)]))

    group.run(body)


# Point to point and groups


def test_collectives_and_messages_in_one_nested_group(group: Ranks) -> None:
    def body(rank: int, comm: int) -> None:
        total, gathered = row(rank, 3), torch.zeros(3 * group.size, dtype=torch.int32)
        token = torch.tensor([rank], dtype=torch.int32)
        call("ncclGroupStart")
        call("ncclGroupStart")
        call("ncclAllReduce", address(total), address(total), 3, INT32, SUM, comm, None)
        call("ncclGroupEnd")
        assert total.equal(row(rank, 3))  # nothing runs before the outermost end
        if rank == 0:
            call("ncclSend", address(token), 1, INT32, 1, comm, None)
        if rank == 1:
            call("ncclRecv", address(token), 1, INT32, 0, comm, None)
        call("ncclAllGather", address(total), address(gathered), 3, INT32, comm, None)
        call("ncclGroupEnd")
        expected = row(0, 3) * group.size + 1000 * sum(range(group.size))
        assert gathered.equal(expected.repeat(group.size))  # the second one saw the result of the first
        assert int(token) == (0 if rank <= 1 else rank)

    group.run(body)


def test_communicators_of_one_thread_progress_together() -> None:
    """Two communicators per process in one group, while the other process' share runs in another order."""
    first, second = init_all(2), init_all(2)
    data = [[row(rank, 200_000) for rank in range(2)] for _ in range(2)]

    def body(rank: int) -> None:
        comms = [(first[rank], data[0][rank]), (second[rank], data[1][rank])]
        if rank == 0:
            call("ncclGroupStart")
        for comm, tensor in comms:
            call("ncclAllReduce", address(tensor), address(tensor), 200_000, INT32, SUM, comm, None)
        if rank == 0:
            call("ncclGroupEnd")

    in_threads(2, body)
    expected = 2 * row(0, 200_000) + 1000
    assert all(tensor.equal(expected) for tensors in data for tensor in tensors)
    for comm in first + second:
        call("ncclCommDestroy", comm)


def test_a_wrong_call_keeps_its_group_from_launching(pair: Ranks) -> None:
    comm, data = pair.comms[0], row(0, 4)
    call("ncclGroupStart")
    call("ncclAllReduce", address(data), address(data), 4, INT32, SUM, comm, None)
    with pytest.raises(CallFailed, match="root is 9"):
        call("ncclBcast", address(data), 4, INT32, 9, comm, None)
    with pytest.raises(CallFailed, match=r"nothing was launched.*root is 9") as refused:
        call("ncclGroupEnd")
    assert refused.value.code is Result.INVALID_ARGUMENT
    both = [row(rank, 4) for rank in range(2)]  # the communicator is still good
    pair.run(lambda rank, c: call("ncclAllReduce", address(both[rank]), address(both[rank]), 4, INT32, SUM, c, None))
    assert both[0].equal(2 * row(0, 4) + 1000)


def test_a_rank_alone_sends_to_itself() -> None:
    alone, source, target = Ranks(1), row(7, 4), torch.zeros(4, dtype=torch.int32)
    call("ncclGroupStart")
    call("ncclSend", address(source), 4, INT32, 0, alone.comms[0], None)
    call("ncclRecv", address(target), 4, INT32, 0, alone.comms[0], None)
    call("ncclGroupEnd")
    assert target.equal(source)
    alone.destroy()


# Wrong arguments


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({3: 12}, "datatype is 12; expected 0 to 11"),
        ({4: 5}, "op is 5; expected 0 to 4"),
        ({4: -1}, "op is -1"),
        ({0: None}, "sendbuff is NULL; expected the address of 16 bytes"),
        ({1: None}, "recvbuff is NULL"),
        ({5: None}, "comm is NULL"),
        ({6: 12345}, "stream is 0x3039"),
        ({2: 2**62}, "are more than an address space holds"),
        ({0: None, 2: 2**32 + 1, 3: FLOAT32}, f"the address of {4 * (2**32 + 1)} bytes"),  # not cut to 32 bits
    ],
)
def test_wrong_arguments(change: dict[int, object], text: str) -> None:
    comm, data = init_rank(1, unique_id(), 0), row(0, 4)
    arguments: list[object] = [address(data), address(data), 4, INT32, SUM, comm, None]
    for index, value in change.items():
        arguments[index] = value
    with pytest.raises(CallFailed, match=text) as refused:
        call("ncclAllReduce", *arguments)
    assert refused.value.code is Result.INVALID_ARGUMENT
    call("ncclCommDestroy", comm)


def test_wrong_ways_to_join() -> None:
    for size, rank in ((2, 2), (2, -1), (0, 0), (-1, 0)):
        with pytest.raises(CallFailed, match="expected") as refused:
            init_rank(size, unique_id(), rank)
        assert refused.value.code is Result.INVALID_ARGUMENT
    garbage = abi.UniqueId.from_buffer_copy(bytes(range(128)))
    with pytest.raises(CallFailed, match="not made by ncclGetUniqueId of the host library") as refused:
        init_rank(2, garbage, 0)
    assert refused.value.code is Result.INVALID_ARGUMENT


def test_calls_out_of_place(pair: Ranks) -> None:
    """In an order in which they cannot be; none of them breaks the communicator."""
    comm, data, alone = pair.comms[0], row(0, 4), init_rank(1, unique_id(), 0)
    reduction = (address(data), address(data), 4, INT32, SUM)
    call("ncclCommDestroy", alone)
    rows: list[tuple[str, tuple[object, ...], Result, str]] = [
        ("ncclGroupEnd", (), Result.INVALID_USAGE, "no group was started"),
        ("ncclSend", (address(data), 4, INT32, 0, comm, None), Result.INVALID_USAGE, "in one group"),
        ("ncclCommDestroy", (alone,), Result.INVALID_ARGUMENT, "destroyed"),
        ("ncclCommCount", (alone, ctypes.byref(ctypes.c_int())), Result.INVALID_ARGUMENT, "destroyed"),
        ("ncclAllReduce", (*reduction, alone, None), Result.INVALID_ARGUMENT, "destroyed"),
    ]
    for name, arguments, code, text in rows:
        with pytest.raises(CallFailed, match=text) as refused:
            call(name, *arguments)
        assert refused.value.code is code, name
    assert number("ncclCommGetAsyncError", comm) == Result.SUCCESS
    call("ncclCommFinalize", comm)
    with pytest.raises(CallFailed, match="finalized"):
        call("ncclAllReduce", *reduction, comm, None)
    call("ncclCommDestroy", comm)
