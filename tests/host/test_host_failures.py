"""Host library errors when calls disagree, a rank leaves, or a rank never joins: every rank names the culprit."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import pytest
import torch
from host_calls import CallFailed, Ranks, address, call, check_fails, get_int, in_threads, last_error, row
from torch import Tensor

from pynccl.bindings.abi import DataType, RedOp, Result
from pynccl.host.watchdog import Activity, disagreement

pytestmark = pytest.mark.usefixtures("transport")
INT32, FLOAT32, SUM = DataType.INT32, DataType.FLOAT32, RedOp.SUM
Call = tuple[Any, ...]


def arguments_of(rank: int, comm: int, name: str, *values: int) -> Call:
    """Return a call's name and arguments. Its buffer is ZEROS, which lives as long as this module."""
    if name == "ncclCommSplit":
        return name, comm, 0, 0, ctypes.byref(ctypes.c_void_p()), None
    if name == "ncclAllReduce":
        return name, address(ZEROS), address(ZEROS), values[0], FLOAT32, values[1], comm, None
    return name, address(ZEROS), values[0], FLOAT32, 1 - rank, comm, None


ZEROS = torch.zeros(600_000)
REDUCE, SPLIT, SEND, RECV = ("ncclAllReduce", 4, SUM), ("ncclCommSplit",), ("ncclSend", 4), ("ncclRecv", 4)
DISAGREE = [
    (("ncclAllReduce", 16, SUM), ("ncclAllReduce", 64, SUM)),
    (("ncclAllReduce", 100_000, SUM), ("ncclAllReduce", 200_000, SUM)),
    (REDUCE, ("ncclAllReduce", 4, RedOp.MAX)),
    (REDUCE, SEND),
    (RECV, REDUCE),
    (SPLIT, SEND),
    (RECV, SPLIT),
]


@pytest.mark.parametrize("calls", DISAGREE)
def test_mismatched_calls_are_named(pair: Ranks, calls: tuple[Call, Call]) -> None:
    def body(rank: int, comm: int) -> str:
        text = "the ranks disagree"
        check_fails(Result.INVALID_USAGE, text, *arguments_of(rank, comm, *calls[rank]))
        return last_error(comm)

    for text in pair.run(body):
        for rank, (name, *arguments) in enumerate(calls):
            count = f"count={arguments[0]}" if arguments else ""
            assert f"rank {rank} calls {name}({count}" in text


@pytest.mark.parametrize("exchanges", [0, 1])
def test_calls_agree_while_a_message_is_on_its_way(exchanges: int) -> None:
    """Rank 0 has done its part of an exchange and waits in the next call; rank 1 still waits for a lost packet."""
    ahead, behind = Activity(2), Activity(2)
    ahead.begin(lambda: "exchange")
    for _ in range(exchanges):
        ahead.begin_message(True, 1)
        ahead.begin_message(False, 1)
    behind.begin(lambda: "exchange")
    behind.begin_message(True, 0)
    behind.begin_message(False, 0)
    ahead.begin(lambda: "all_reduce")
    ahead.begin_collective()
    found = disagreement(1, behind, 0, ahead.status([1], 1)), disagreement(0, ahead, 1, behind.status([0], 0))
    assert [one is None for one in found] == [exchanges == 1] * 2


@pytest.mark.parametrize(("sent", "expected"), [(4, 8), (8, 4), (500_000, 4), (4, 500_000)])
def test_both_ranks_name_a_message_size_mismatch(pair: Ranks, sent: int, expected: int) -> None:
    def body(rank: int, comm: int) -> None:
        text = f"rank 0 sends {4 * sent} bytes to rank 1, which expects {4 * expected}"
        wrong = arguments_of(rank, comm, *(("ncclSend", sent), ("ncclRecv", expected))[rank])
        check_fails(Result.INVALID_USAGE, text, *wrong)

    pair.run(body)


@pytest.mark.parametrize(
    ("leave", "why"),
    [("ncclCommAbort", "it aborted"), ("ncclCommDestroy", "it has destroyed the communicator")],
)
def test_the_error_says_how_a_rank_left(pair: Ranks, leave: str, why: str) -> None:
    call(leave, pair.comms[1])
    check_fails(Result.REMOTE_ERROR, f"lost rank 1: {why}", *arguments_of(0, pair.comms[0], *REDUCE))


def test_abort_wakes_a_blocked_operation(pair: Ranks) -> None:
    entered = threading.Event()
    receives = arguments_of(0, pair.comms[0], *RECV)

    def blocked() -> str:
        entered.set()
        with pytest.raises(CallFailed) as raised:
            call(*receives)
        return raised.value.text

    def aborting() -> None:
        assert entered.wait(60)
        call("ncclCommAbort", pair.comms[0])

    assert "aborted" in in_threads(2, lambda rank: (blocked, aborting)[rank]())[0]
    # The peer sees the failure and stays failed.
    check_fails(Result.REMOTE_ERROR, "lost rank 0", *arguments_of(1, pair.comms[1], *RECV))
    assert get_int("ncclCommGetAsyncError", pair.comms[1]) == Result.REMOTE_ERROR
    with pytest.raises(CallFailed, match="already failed"):
        call(*arguments_of(1, pair.comms[1], *SEND))
    assert "ncclRecv(count=4, datatype=float32, peer=0) on rank 1 of 2" in last_error(pair.comms[1])


def test_an_operation_without_peers_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYNCCL_HOST_TIMEOUT", "0.3")
    ranks = Ranks(2)
    text = r"ncclAllReduce\(count=4.*PYNCCL_HOST_TIMEOUT is 0.3 s"
    check_fails(Result.REMOTE_ERROR, text, *arguments_of(0, ranks.comms[0], *REDUCE))
    for comm in ranks.comms:
        call("ncclCommAbort", comm)


def test_destroying_early_loses_no_data() -> None:
    """Rank 0 destroys as soon as its sends complete, before rank 1 has read them all."""
    for _ in range(20):
        ranks = Ranks(2)
        received = [torch.zeros(5000, dtype=torch.int32) for _ in range(3)]

        def body(rank: int, comm: int, received: list[Tensor] = received) -> None:
            for tensor in received:
                data = row(7, 5000) if rank == 0 else tensor
                call("ncclBcast", address(data), 5000, INT32, 0, comm, None)
            call("ncclCommDestroy", comm)

        ranks.run(body)
        assert all(tensor.equal(row(7, 5000)) for tensor in received)
