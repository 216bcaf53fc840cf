"""The host library when calls disagree, a rank leaves, or nobody comes: every rank is told who did what."""

from __future__ import annotations

import ctypes
import threading
import time
from typing import Any

import pytest
import torch
from host_calls import CallFailed, Ranks, address, call, in_threads, last_error, number, row
from torch import Tensor

from pynccl.bindings.abi import DataType, RedOp, Result

pytestmark = pytest.mark.usefixtures("transport")
INT32, FLOAT32, SUM = DataType.INT32, DataType.FLOAT32, RedOp.SUM
Call = tuple[Any, ...]


def make(rank: int, comm: int, name: str, *arguments: int) -> None:
    """One call, with a buffer of zeros."""
    data = torch.zeros(600_000)
    if name == "ncclCommSplit":
        call(name, comm, 0, 0, ctypes.byref(ctypes.c_void_p()), None)
    elif name == "ncclAllReduce":
        count, op = arguments
        call(name, address(data), address(data), count, FLOAT32, op, comm, None)
    else:
        call(name, address(data), arguments[0], FLOAT32, 1 - rank, comm, None)


REDUCE, SPLIT, SEND, RECV = ("ncclAllReduce", 4, SUM), ("ncclCommSplit",), ("ncclSend", 4), ("ncclRecv", 4)


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("ncclAllReduce", 16, SUM), ("ncclAllReduce", 64, SUM)),
        (("ncclAllReduce", 200_000, SUM), ("ncclAllReduce", 100_000, SUM)),
        (REDUCE, ("ncclAllReduce", 4, RedOp.MAX)),
        (REDUCE, SEND),
        (REDUCE, RECV),
        (SPLIT, SEND),
        (SPLIT, RECV),
    ],
)
def test_calls_that_disagree_are_named(pair: Ranks, one: Call, other: Call, swapped: bool) -> None:
    calls = (other, one) if swapped else (one, other)

    def body(rank: int, comm: int) -> tuple[Result, str]:
        with pytest.raises(CallFailed) as refused:
            make(rank, comm, *calls[rank])
        return refused.value.code, str(refused.value)

    for code, text in pair.run(body):
        assert code is Result.INVALID_USAGE
        assert "the calls of the ranks disagree" in text
        for rank, (name, *arguments) in enumerate(calls):
            count = f"count={arguments[0]}" if arguments else ""
            assert f"rank {rank} calls {name}({count}" in text


@pytest.mark.parametrize(("sent", "expected"), [(4, 8), (8, 4), (500_000, 4), (4, 500_000)])
def test_a_message_of_another_size_is_named_by_both(pair: Ranks, sent: int, expected: int) -> None:
    def body(rank: int, comm: int) -> tuple[Result, str]:
        with pytest.raises(CallFailed) as refused:
            make(rank, comm, *(("ncclSend", sent), ("ncclRecv", expected))[rank])
        return refused.value.code, refused.value.text

    for code, text in pair.run(body):
        assert code is Result.INVALID_USAGE
        assert f"rank 0 sends {4 * sent} bytes to rank 1, which expects {4 * expected}" in text


@pytest.mark.parametrize(
    ("leave", "why"),
    [("ncclCommAbort", "it aborted"), ("ncclCommDestroy", "it has destroyed the communicator")],
)
def test_how_a_rank_has_left_is_told(pair: Ranks, leave: str, why: str) -> None:
    call(leave, pair.comms[1])
    with pytest.raises(CallFailed, match=f"lost rank 1: {why}") as lost:
        make(0, pair.comms[0], *REDUCE)
    assert lost.value.code is Result.REMOTE_ERROR


def test_a_rank_that_has_destroyed_is_no_failure_for_the_others(trio: Ranks) -> None:
    call("ncclCommDestroy", trio.comms[2])

    def body(rank: int) -> None:
        sent, got = row(rank, 4), torch.zeros(4, dtype=torch.int32)
        for _ in range(12):
            call("ncclGroupStart")
            call("ncclSend", address(sent), 4, INT32, 1 - rank, trio.comms[rank], None)
            call("ncclRecv", address(got), 4, INT32, 1 - rank, trio.comms[rank], None)
            call("ncclGroupEnd")
            assert got.equal(row(1 - rank, 4))
            time.sleep(0.05)  # longer in all than the 0.4 s that a rank which vanished would be forgiven

    in_threads(2, body)


def test_abort_wakes_a_blocked_operation(pair: Ranks) -> None:
    data, entered = torch.zeros(4), threading.Event()

    def blocked() -> CallFailed:
        entered.set()
        with pytest.raises(CallFailed) as refused:
            call("ncclRecv", address(data), 4, FLOAT32, 1, pair.comms[0], None)
        return refused.value

    def aborting() -> None:
        assert entered.wait(60)
        call("ncclCommAbort", pair.comms[0])

    failure = in_threads(2, lambda rank: (blocked, aborting)[rank]())[0]
    assert "aborted" in failure.text
    with pytest.raises(CallFailed) as peer:  # the other end learns of it, and stays failed
        call("ncclRecv", address(data), 4, FLOAT32, 0, pair.comms[1], None)
    assert peer.value.code is Result.REMOTE_ERROR
    assert number("ncclCommGetAsyncError", pair.comms[1]) == Result.REMOTE_ERROR
    with pytest.raises(CallFailed, match="failed before"):
        call("ncclSend", address(data), 4, FLOAT32, 0, pair.comms[1], None)
    assert "ncclRecv(count=4, datatype=float32, peer=0) on rank 1 of 2" in last_error(pair.comms[1])


def test_an_operation_that_nobody_joins_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYNCCL_HOST_TIMEOUT", "0.3")
    ranks, data = Ranks(2), torch.zeros(4)
    with pytest.raises(CallFailed, match=r"ncclAllReduce\(count=4.*PYNCCL_HOST_TIMEOUT is 0.3 s") as refused:
        call("ncclAllReduce", address(data), address(data), 4, FLOAT32, SUM, ranks.comms[0], None)
    assert refused.value.code is Result.REMOTE_ERROR
    for comm in ranks.comms:
        call("ncclCommAbort", comm)


def test_destroying_early_loses_no_data() -> None:
    """Rank 0 destroys as soon as its sends are done, while rank 1 has not yet read them all."""
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
