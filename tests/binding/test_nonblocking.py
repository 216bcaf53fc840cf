"""Nonblocking communicators: a call that is in progress is waited for, until a deadline.

On the stub, which is in progress for as many polls as a test says, and like NCCL has no child to show before that.
"""

from __future__ import annotations

import pytest
from libraries import Stub

import pynccl
from pynccl import CommConfig, Communicator
from pynccl.bindings import abi

X, Y = (1 << 20, 12, "float32"), (1 << 30, 12, "float32")
POLL = "ncclCommGetAsyncError"
FOR_EVER = 1 << 30


def init(stub: Stub, **options: object) -> Communicator:
    config = CommConfig(blocking=False)
    return Communicator.init(4, bytes(128), 1, config=config, library=stub.cpu_library, **options)


def test_an_init_is_polled_until_it_is_done() -> None:
    stub = Stub()
    stub.progress("ncclCommInitRankConfig", polls=5)
    comm = init(stub)
    assert stub.names() == ["config", "ncclCommInitRankConfig", *[POLL] * 5]
    assert abi.Config.from_buffer_copy(bytes.fromhex(stub.calls()[0].hex)).blocking == 0
    assert (comm.rank, comm.size) == (1, 4)


def test_an_init_has_a_deadline_after_which_it_is_aborted() -> None:
    stub = Stub()
    stub.progress("ncclCommInitRankConfig", polls=FOR_EVER)
    with pytest.raises(
        pynccl.NcclTimeout, match=r"ncclCommInitRank\(rank=1, nranks=4\) is still in progress after 0.05"
    ):
        init(stub, timeout=0.05)
    assert stub.names()[-1] == "ncclCommAbort"
    assert stub.names().count("ncclCommAbort") == 1


def test_an_init_that_fails_on_the_way_is_aborted_and_raised() -> None:
    stub = Stub()
    stub.progress("ncclCommInitRankConfig", polls=3, final=6)
    with pytest.raises(pynccl.NcclRemoteError, match=r"^ncclCommInitRank\(rank=1, nranks=4\) failed"):
        init(stub)
    assert stub.names()[-1] == "ncclCommAbort"  # as NCCL asks: nothing else frees it


def test_a_launch_in_progress_is_waited_for() -> None:
    stub = Stub()
    comm = stub.comm()
    stub.progress("ncclBroadcast", polls=3)
    comm.broadcast(X, Y, stream=0)
    assert stub.names() == ["ncclBroadcast", *[POLL] * 3]
    plan = comm.plan.broadcast(X, Y, stream=0)
    stub.clear()
    plan()
    assert stub.names() == ["ncclBroadcast", *[POLL] * 3]


def test_an_error_after_the_progress_is_raised_with_the_call() -> None:
    stub = Stub()
    comm = stub.comm()
    stub.progress("ncclBroadcast", polls=2, final=5)
    with pytest.raises(pynccl.NcclInvalidUsage, match=r"^broadcast\(count=12, FLOAT32, root=3\) failed: invalid usage"):
        comm.broadcast(X, Y, root=3, stream=0)


def test_a_launch_that_stays_in_progress_is_a_timeout() -> None:
    stub = Stub()
    comm = stub.comm()
    comm.timeout = 0.05
    stub.progress("ncclBroadcast", polls=FOR_EVER)
    with pytest.raises(pynccl.NcclTimeout) as caught:
        comm.broadcast(X, Y, stream=0)
    assert "broadcast(count=12, FLOAT32, root=0) is still in progress after 0.05 s" in str(caught.value)
    assert "what the stub has to say\n  abort() it" in str(caught.value)
    comm.abort()


def test_what_is_done_in_the_end_is_no_timeout() -> None:
    stub = Stub()
    comm = stub.comm()
    comm.timeout = 0.0
    stub.progress("ncclBroadcast", polls=1)  # done at the first look, however late that is
    comm.broadcast(X, Y, stream=0)
    assert stub.names() == ["ncclBroadcast", POLL]


def test_calls_in_progress_inside_a_group_do_not_end_it() -> None:
    stub = Stub()
    comm = stub.comm()
    step = comm.plan.group([comm.plan.send(X, 0, stream=0), comm.plan.recv(Y, 0, stream=0)])
    stub.progress("ncclSend", polls=0)
    stub.fail("ncclSend", 7)
    with pynccl.group():
        comm.send(X, 0, stream=0)
        comm.recv(Y, 0, stream=0)
    step()
    assert stub.names() == ["ncclGroupStart", "ncclSend", "ncclRecv", "ncclGroupEnd"] * 2


def test_the_end_of_a_group_is_waited_for_on_every_communicator() -> None:
    stub = Stub()
    comms = Communicator.init_all(2, library=stub.cpu_library)
    plans = [comm.plan.send(X, 1, stream=0) for comm in comms]
    step = comms[0].plan.group(plans)
    stub.progress("ncclGroupEnd", polls=3)
    for launch in (step, lambda: step(5)):
        stub.clear()
        launch()
        # three polls until the first is out of progress, one for the second, which is out of it by then
        assert stub.names() == ["ncclGroupStart", "ncclSend", "ncclSend", "ncclGroupEnd", *[POLL] * 4]


def test_a_group_that_fails_after_the_progress_names_its_calls() -> None:
    stub = Stub()
    comm = stub.comm()
    stub.progress("ncclGroupEnd", polls=2, final=6)
    with pytest.raises(pynccl.NcclRemoteError, match=r"^group of 1 calls: send\(count=12"), pynccl.group():
        comm.send(X, 0, stream=0)


def test_a_group_that_stays_in_progress_is_a_timeout() -> None:
    stub = Stub()
    comm = stub.comm()
    comm.timeout = 0.05
    stub.progress("ncclGroupEnd", polls=FOR_EVER)
    with pytest.raises(pynccl.NcclTimeout, match="group of 1 calls"), pynccl.group():
        comm.send(X, 0, stream=0)


def test_a_finalize_is_polled_and_destroy_does_not_repeat_it() -> None:
    stub = Stub()
    comm = stub.comm()
    stub.progress("ncclCommFinalize", polls=2)
    comm.finalize()
    assert stub.names() == ["ncclCommFinalize", POLL, POLL]
    stub.clear()
    comm.destroy()
    assert stub.names() == [POLL, "ncclCommDestroy"]


def test_destroy_waits_for_its_finalize() -> None:
    stub = Stub()
    comm = stub.comm()
    stub.progress("ncclCommFinalize", polls=2)
    comm.destroy()
    assert stub.names() == [POLL, "ncclCommFinalize", POLL, POLL, "ncclCommDestroy"]


def test_a_finalize_that_stays_in_progress_is_a_timeout_and_destroy_aborts() -> None:
    stub = Stub()
    comm = stub.comm()
    comm.timeout = 0.05
    stub.progress("ncclCommFinalize", polls=FOR_EVER)
    with pytest.raises(pynccl.NcclTimeout, match="ncclCommFinalize on rank 1 of 4 is still in progress"):
        comm.finalize()
    with pytest.raises(pynccl.NcclTimeout, match="the communicator was aborted instead"):
        comm.destroy()
    assert stub.names()[-1] == "ncclCommAbort"
    assert "ncclCommDestroy" not in stub.names()


@pytest.mark.parametrize("kind", ["split", "shrink", "grow"])
def test_a_child_is_there_when_its_parent_is_out_of_progress(kind: str) -> None:
    stub = Stub()
    comm = stub.comm(cpu=True)
    make = {"split": lambda: comm.split(0), "shrink": lambda: comm.shrink([0]), "grow": lambda: comm.grow(6)}[kind]
    stub.progress(f"ncclComm{kind.capitalize()}", polls=3)
    child = make()
    assert child is not None and child.handle != comm.handle
    assert child.size == {"split": 1, "shrink": 3, "grow": 6}[kind]
    assert stub.names().count(POLL) >= 3


def test_a_rank_without_a_color_waits_too_and_gets_none() -> None:
    stub = Stub()
    comm = stub.comm(cpu=True)
    stub.progress("ncclCommSplit", polls=3)
    assert comm.split(None) is None
    assert stub.names() == ["ncclCommSplit", *[POLL] * 3]


def test_a_split_that_does_not_come_about_leaves_its_parent() -> None:
    stub = Stub()
    comm = stub.comm(cpu=True)
    comm.timeout = 0.05
    stub.progress("ncclCommSplit", polls=FOR_EVER)
    with pytest.raises(
        pynccl.NcclTimeout, match=r"ncclCommSplit\(color=0, key=0\) on rank 1 of 4 is still in progress"
    ):
        comm.split(0)
    assert "ncclCommAbort" not in stub.names()
    assert comm.alive
    stub.progress("ncclCommSplit", polls=2, final=6)
    with pytest.raises(pynccl.NcclRemoteError, match="ncclCommSplit"):
        comm.split(0)
