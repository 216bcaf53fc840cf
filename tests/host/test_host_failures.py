"""The host library when something goes wrong: calls that disagree, aborts, dead peers, late ranks, early exits."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from host_calls import CallFailed, Ranks, address, call, in_threads, last_error, number, row, unique_id
from torch import Tensor

from pynccl import host
from pynccl.bindings.abi import DataType, RedOp, Result

pytestmark = pytest.mark.usefixtures("transport")
INT32, FLOAT32, SUM = DataType.INT32, DataType.FLOAT32, RedOp.SUM
ROOT = Path(__file__).parents[2]


@pytest.fixture
def pair() -> Iterator[Ranks]:
    """Two ranks that a test may break."""
    ranks = Ranks(2)
    yield ranks
    for comm in ranks.comms:
        host.function("ncclCommAbort")(comm)


@pytest.mark.parametrize(
    ("counts", "ops"), [((16, 64), (SUM, SUM)), ((200_000, 100_000), (SUM, SUM)), ((4, 4), (SUM, RedOp.MAX))]
)
def test_calls_that_disagree_are_named(pair: Ranks, counts: tuple[int, int], ops: tuple[RedOp, RedOp]) -> None:
    def body(rank: int, comm: int) -> Result:
        data, count = torch.zeros(counts[rank]), counts[rank]
        with pytest.raises(CallFailed) as refused:
            call("ncclAllReduce", address(data), address(data), count, FLOAT32, ops[rank], comm, None)
        for other in range(2):
            assert f"rank {other} calls ncclAllReduce(count={counts[other]}" in refused.value.text
        return refused.value.code

    assert pair.run(body) == [Result.INVALID_USAGE] * 2


@pytest.mark.parametrize(("sent", "expected"), [(4, 8), (8, 4), (2**20, 2**19)])
def test_a_message_of_another_size_is_named(pair: Ranks, sent: int, expected: int) -> None:
    def body(rank: int, comm: int) -> Result:
        data, count = torch.zeros(max(sent, expected)), (sent, expected)[rank]
        with pytest.raises(
            CallFailed, match=f"rank 0 sends {4 * sent} bytes to rank 1, which expects {4 * expected}"
        ) as e:
            call(("ncclSend", "ncclRecv")[rank], address(data), count, FLOAT32, 1 - rank, comm, None)
        return e.value.code

    assert pair.run(body) == [Result.INVALID_USAGE] * 2


def test_abort_wakes_a_blocked_operation(pair: Ranks) -> None:
    data, entered = torch.zeros(4), threading.Event()

    def blocked() -> CallFailed:
        entered.set()
        with pytest.raises(CallFailed) as refused:
            call("ncclRecv", address(data), 4, FLOAT32, 1, pair.comms[0], None)
        return refused.value

    def aborting() -> None:
        assert entered.wait(10)
        call("ncclCommAbort", pair.comms[0])

    start = time.monotonic()
    failure = in_threads(2, lambda rank: (blocked, aborting)[rank]())[0]
    assert "aborted" in failure.text
    assert time.monotonic() - start < 10
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


# Whole processes


def python(code: str, *arguments: str) -> subprocess.Popen[str]:
    environment = dict(
        os.environ, PYTHONPATH=os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")]), OMP_NUM_THREADS="1"
    )
    command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


KILLED = """
    import ctypes, os, sys, time
    import torch
    from host_calls import CallFailed, abi, call, init_rank
    rank, identity = int(sys.argv[1]), abi.UniqueId.from_buffer_copy(bytes.fromhex(sys.argv[2]))
    comm, data = init_rank(4, identity, rank), torch.ones(1_000_000)
    try:
        for step in range(10**6):
            if rank == 2 and step == 3:
                os.kill(os.getpid(), 9)
            call("ncclAllReduce", data.data_ptr(), data.data_ptr(), data.numel(), 7, 0, comm, None)
    except CallFailed as failure:
        print(failure)
        sys.exit(3)
"""


def test_a_killed_rank_is_a_remote_error_on_the_others() -> None:
    identity = unique_id()
    text = ctypes.string_at(ctypes.addressof(identity), 128).hex()
    ranks = [python(KILLED, str(rank), text) for rank in range(4)]
    outputs = [rank.communicate(timeout=60)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [3, 3, -9, 3], outputs
    for rank in (0, 1, 3):
        assert (
            f"REMOTE_ERROR: ncclAllReduce(count=1000000, datatype=float32, op=sum) on rank {rank} of 4" in outputs[rank]
        )


UNFINISHED = """
    import torch
    from host_calls import call, init_all
    from pynccl import host
    comms, data, streams = init_all(2), torch.zeros(4), [host.HostStream(), host.HostStream()]
    call("ncclRecv", data.data_ptr(), 4, 7, 1, comms[0], streams[0].handle)
    streams[1].wait(streams[0].record())
    for i in range(3):
        call("ncclAllReduce", data.data_ptr(), data.data_ptr(), 4, 7, 0, comms[0], streams[i % 2].handle)
    print("leaving")
"""


def test_a_process_with_queued_work_exits() -> None:
    process = python(UNFINISHED)
    output, _ = process.communicate(timeout=30)
    assert (process.returncode, output.strip()) == (0, "leaving")
