"""C functions of the host library: rendezvous, in-place copies, groups, and errors for wrong arguments."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from host_calls import Ranks, address, call, check_fails, get_int, in_threads, init_rank, row, split, unique_id

from pynccl.bindings import abi
from pynccl.bindings.abi import DataType, RedOp, Result

pytestmark = pytest.mark.usefixtures("transport")
INT32, FLOAT32, SUM = DataType.INT32, DataType.FLOAT32, RedOp.SUM


# Rendezvous


def test_ranks_find_each_other_by_unique_id() -> None:
    """Each rank in its own thread, or all ranks in one group of one thread."""
    identity = unique_id()
    comms = in_threads(3, lambda rank: init_rank(3, identity, rank))
    identity, handles = unique_id(), [ctypes.c_void_p() for _ in range(3)]
    call("ncclGroupStart")
    for rank, handle in enumerate(handles):
        call("ncclCommInitRank", ctypes.byref(handle), 3, identity, rank)
    call("ncclGroupEnd")
    for joined in (comms, [handle.value or 0 for handle in handles]):
        assert [get_int("ncclCommUserRank", comm) for comm in joined] == [0, 1, 2]
        assert [get_int("ncclCommCount", comm) for comm in joined] == [3, 3, 3]
        data = [row(rank, 5) for rank in range(3)]
        call("ncclGroupStart")
        for comm, tensor in zip(joined, data, strict=True):
            call("ncclAllReduce", address(tensor), address(tensor), 5, INT32, SUM, comm, None)
        call("ncclGroupEnd")
        assert all(tensor.equal(row(0, 5) * 3 + 3000) for tensor in data)
        for comm in joined:
            call("ncclCommDestroy", comm)


@pytest.mark.parametrize(
    ("claims", "text"),
    [([(2, 0), (2, 0)], "claim to be rank 0 of 2"), ([(2, 0), (3, 1)], "there are [23] ranks, another rank says [23]")],
    ids=["same rank", "different sizes"],
)
def test_contradictory_ranks_raise_an_error(claims: list[tuple[int, int]], text: str) -> None:
    identity, out = unique_id(), ctypes.byref(ctypes.c_void_p())

    def body(index: int) -> None:
        size, rank = claims[index]
        check_fails(Result.INVALID_USAGE, text, "ncclCommInitRank", out, size, identity, rank)

    in_threads(2, body)


def test_invalid_arguments_of_init_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYNCCL_HOST_INIT_TIMEOUT", "0.3")
    out, good, bad = ctypes.byref(ctypes.c_void_p()), abi.Config(), abi.Config()
    good.size = bad.size = ctypes.sizeof(abi.Config)
    good.magic, bad.magic = abi.CONFIG_MAGIC, 1
    call("ncclCommInitRankConfig", out, 1, unique_id(), 0, ctypes.byref(good))
    invalid, garbage = Result.INVALID_ARGUMENT, abi.UniqueId.from_buffer_copy(bytes(range(128)))
    check_fails(invalid, "magic 0x1", "ncclCommInitRankConfig", out, 1, unique_id(), 0, ctypes.byref(bad))
    for size, rank in ((2, 2), (2, -1), (0, 0), (-1, 0)):
        check_fails(invalid, "expected", "ncclCommInitRank", out, size, unique_id(), rank)
    check_fails(invalid, "not made by ncclGetUniqueId of the host library", "ncclCommInitRank", out, 2, garbage, 0)
    late = r"rank 1 of 4 still waits for ranks \[0, 2, 3\] after 0.3 s"
    check_fails(Result.SYSTEM_ERROR, late, "ncclCommInitRank", out, 4, unique_id(), 1)


def test_a_split_orders_by_key_then_rank(group: Ranks) -> None:
    def body(rank: int, comm: int) -> tuple[int, int, int]:
        child = split(comm, rank % 2, -rank if rank % 2 == 0 else 7)
        assert child
        place = get_int("ncclCommUserRank", child), get_int("ncclCommCount", child)
        data = torch.tensor([rank], dtype=torch.int32)
        call("ncclAllReduce", address(data), address(data), 1, INT32, SUM, child, None)
        call("ncclCommDestroy", child)
        assert (split(comm, -1 if rank == 0 else 0, 0) is None) == (rank == 0)  # without a color: NULL
        return *place, int(data)

    evens, odds = [range(start, group.size, 2) for start in (0, 1)]
    for rank, (new_rank, size, total) in enumerate(group.run(body)):
        members = list(odds) if rank % 2 else list(reversed(evens))
        assert (new_rank, size, total) == (members.index(rank), len(members), sum(members))


# Copies and groups


def test_collectives_and_messages_in_one_nested_group(group: Ranks) -> None:
    def body(rank: int, comm: int) -> None:
        total, gathered = row(rank, 3), torch.zeros(3 * group.size, dtype=torch.int32)
        token = torch.tensor([rank], dtype=torch.int32)
        call("ncclGroupStart")
        call("ncclGroupStart")
        call("ncclAllReduce", address(total), address(total), 3, INT32, SUM, comm, None)
        call("ncclGroupEnd")
        assert total.equal(row(rank, 3))  # nothing runs before the outermost ncclGroupEnd
        if rank == 0:
            call("ncclSend", address(token), 1, INT32, 1, comm, None)
        if rank == 1:
            call("ncclRecv", address(token), 1, INT32, 0, comm, None)
        call("ncclAllGather", address(total), address(gathered), 3, INT32, comm, None)
        call("ncclGroupEnd")
        expected = row(0, 3) * group.size + 1000 * sum(range(group.size))
        assert gathered.equal(expected.repeat(group.size))  # the second collective used the result of the first
        assert int(token) == (0 if rank <= 1 else rank)

    group.run(body)


# Wrong calls


WRONG: list[tuple[dict[int, Any], str]] = [
    ({3: 12}, "datatype is 12; expected 0 to 11"),
    ({4: 5}, "op is 5; expected 0 to 4"),
    ({4: -1}, "op is -1"),
    ({0: None}, "sendbuff is NULL; expected the address of 16 bytes"),
    ({1: None}, "recvbuff is NULL"),
    ({5: None}, "comm is NULL"),
    ({6: 12345}, "stream is 0x3039"),
    ({2: 2**62}, "are more than an address space holds"),
    ({0: None, 2: 2**32 + 1, 3: FLOAT32}, f"the address of {4 * (2**32 + 1)} bytes"),  # not truncated to 32 bits
]


def test_wrong_calls_raise_and_leave_the_communicator_usable(pair: Ranks) -> None:
    comm, data = pair.comms[0], row(0, 4)
    invalid, usage = Result.INVALID_ARGUMENT, Result.INVALID_USAGE
    for change, text in WRONG:
        alone = init_rank(1, unique_id(), 0)
        right = [address(data), address(data), 4, INT32, SUM, alone, None]
        check_fails(invalid, text, "ncclAllReduce", *(change.get(index, value) for index, value in enumerate(right)))
        call("ncclCommDestroy", alone)
    check_fails(usage, "no group was started", "ncclGroupEnd")
    check_fails(usage, "in one group", "ncclSend", address(data), 4, INT32, 0, comm, None)
    check_fails(invalid, "destroyed", "ncclCommDestroy", alone)
    check_fails(invalid, "destroyed", "ncclAllReduce", *right)
    call("ncclGroupStart")
    call("ncclAllReduce", *right[:5], comm, None)
    check_fails(invalid, "root is 9", "ncclBcast", address(data), 4, INT32, 9, comm, None)
    check_fails(invalid, r"nothing was launched.*root is 9", "ncclGroupEnd")
    both = [row(rank, 4) for rank in range(2)]  # the communicator still works
    pair.run(lambda rank, c: call("ncclAllReduce", address(both[rank]), address(both[rank]), 4, INT32, SUM, c, None))
    assert both[0].equal(2 * row(0, 4) + 1000)
    call("ncclCommFinalize", comm)
    check_fails(usage, "finalized", "ncclAllReduce", *right[:5], comm, None)
