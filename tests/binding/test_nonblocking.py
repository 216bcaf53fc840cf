"""Nonblocking communicators: calls in progress are polled until a deadline.

The stub is in progress for a number of polls that a test sets. Like NCCL, it returns child handles only after that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from libraries import Stub

import pynccl
from pynccl import CommConfig, Communicator
from pynccl.bindings import abi

X, Y = (1 << 20, 12, "float32"), (1 << 30, 12, "float32")
POLL = "ncclCommGetAsyncError"
FOR_EVER = 1 << 30


def init(stub: Stub, **options: Any) -> Communicator:
    config = CommConfig(blocking=False)
    return Communicator.init(4, bytes(128), 1, config=config, library=stub.cpu_library, **options)


def test_init_is_polled_until_done_or_aborted() -> None:
    stub = Stub()
    stub.progress("ncclCommInitRankConfig", polls=5)
    comm = init(stub)
    assert stub.names() == ["config", "ncclCommInitRankConfig", *[POLL] * 5]
    assert abi.Config.from_buffer_copy(bytes.fromhex(stub.calls()[0].hex)).blocking == 0
    assert (comm.rank, comm.size) == (1, 4)
    for polls, final, kind, message in (
        (FOR_EVER, 0, pynccl.NcclTimeout, r"ncclCommInitRank\(rank=1, nranks=4\) is still in progress after"),
        (3, 6, pynccl.NcclRemoteError, r"^ncclCommInitRank\(rank=1, nranks=4\) failed"),
    ):
        stub.clear()
        stub.progress("ncclCommInitRankConfig", polls, final)
        with pytest.raises(kind, match=message):
            init(stub, timeout=0.05 if polls == FOR_EVER else 60)
        assert stub.names()[-1] == "ncclCommAbort" and stub.names().count("ncclCommAbort") == 1


def group_of(comm: Communicator) -> None:
    with pynccl.group():
        comm.send(X, 0, stream=0)


# function in progress, a call, its C functions before the polls, start of its errors
CALLS: dict[str, tuple[str, Callable[[Communicator], Any], list[str], str]] = {
    "launch": (
        "ncclBroadcast",
        lambda comm: comm.broadcast(X, Y, root=3, stream=0),
        ["ncclBroadcast"],
        "broadcast(count=12, FLOAT32, root=3)",
    ),
    "plan": (
        "ncclBroadcast",
        lambda comm: comm.plan.broadcast(X, Y, stream=0)(),
        ["ncclBroadcast"],
        "broadcast(count=12, FLOAT32, root=0)",
    ),
    "group": (
        "ncclGroupEnd",
        group_of,
        ["ncclGroupStart", "ncclSend", "ncclGroupEnd"],
        "group of 1 calls: send(count=12, FLOAT32, peer=0)",
    ),
    "finalize": ("ncclCommFinalize", Communicator.finalize, ["ncclCommFinalize"], "ncclCommFinalize on rank 1 of 4"),
}


@pytest.mark.parametrize("kind", CALLS)
def test_call_in_progress_is_polled_until_deadline(kind: str) -> None:
    function, call, names, text = CALLS[kind]
    stub = Stub()
    comm = stub.comm(cpu=True)
    stub.progress(function, polls=3)
    call(comm)
    assert stub.names() == [*names, *[POLL] * 3]
    stub.progress(function, polls=2, final=5)
    with pytest.raises(pynccl.NcclInvalidUsage) as failed:
        call(stub.comm(cpu=True))
    assert str(failed.value).startswith(f"{text} failed: invalid usage")
    comm = stub.comm(cpu=True)
    comm.timeout = 0.05
    stub.progress(function, polls=FOR_EVER)
    with pytest.raises(pynccl.NcclTimeout) as late:
        call(comm)
    assert f"{text} is still in progress after 0.05 s" in str(late.value)
    assert comm.alive and "ncclCommAbort" not in stub.names()
    comm.abort()
