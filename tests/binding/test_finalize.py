"""finalize, destroy and abort: their deadlines, what fails in them, several communicators, several threads."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from libraries import Stub
from processes import HANGS, comes_back, overlapping, wait_for
from ranks import RankPool

import pynccl
from pynccl import Communicator

pytestmark = pytest.mark.usefixtures("unwatched")

X, Y = (1 << 20, 12, "float32"), (1 << 30, 12, "float32")

# Deadlines


def test_an_init_that_no_other_rank_joins_is_a_timeout() -> None:
    stub = Stub()
    stub.linger("ncclCommInitRank", 1.0)
    with pytest.raises(pynccl.NcclTimeout) as caught:
        Communicator.init(4, bytes(128), 1, library=stub.cpu_library, timeout=0.1)
    assert "ncclCommInitRank(rank=1, nranks=4) did not return within 0 s (timeout=0.1)" in str(caught.value)
    assert "a rank is missing or unreachable: were all ranks started" in str(caught.value)
    comes_back("ncclCommInitRank")


def test_a_peer_that_does_not_come_along_makes_destroy_a_timeout_and_an_abort() -> None:
    stub = Stub()
    comm = stub.comm()
    comm.timeout = 0.1
    stub.linger("ncclCommFinalize", 1.0)
    started = time.monotonic()
    with pytest.raises(pynccl.NcclTimeout, match="the communicator was aborted instead"):
        comm.destroy()
    assert time.monotonic() - started < 1.0
    assert stub.names() == ["ncclCommGetAsyncError", "ncclCommFinalize", "ncclCommAbort"]
    assert not comm.alive
    comes_back("ncclCommFinalize")
    assert stub.names()[-1] == "ncclCommAbort"  # what is left behind keeps its hands off the freed handle
    comm.destroy()


def test_a_finalize_that_fails_is_raised_and_the_communicator_aborted() -> None:
    stub = Stub()
    comm = stub.comm()
    stub.fail("ncclCommFinalize", 6)
    with pytest.raises(pynccl.NcclRemoteError, match="ncclCommFinalize on rank 1 of 4 failed") as caught:
        comm.destroy()
    assert caught.value.code is pynccl.Result.REMOTE_ERROR
    assert stub.names()[-2:] == ["ncclCommFinalize", "ncclCommAbort"]


def test_several_are_aborted_as_one_group() -> None:
    stub = Stub()
    comms = [stub.comm(rank=rank) for rank in range(3)]
    comms[1].abort()
    stub.clear()
    pynccl.abort(comms)
    assert stub.names() == ["ncclGroupStart", "ncclCommAbort", "ncclCommAbort", "ncclGroupEnd"]
    assert sorted(call.args["rank"] for call in stub.calls()[1:-1]) == [0, 2]
    assert not any(comm.alive for comm in comms)
    stub.clear()
    pynccl.abort(comms)
    pynccl.abort([])
    assert stub.names() == []


def test_an_abort_that_fails_leaves_no_open_group() -> None:
    stub = Stub()
    comms = [stub.comm(rank=rank) for rank in range(2)]
    stub.fail("ncclCommAbort", 5)
    with pytest.raises(pynccl.NcclInvalidUsage, match="ncclCommAbort failed"):
        pynccl.abort(comms)
    assert stub.names() == ["ncclGroupStart", "ncclCommAbort", "ncclCommAbort", "ncclGroupEnd"]


def test_an_abort_that_a_live_graph_holds_up_goes_on_in_the_background() -> None:
    stub = Stub()
    comms = [stub.comm(rank=rank) for rank in range(2)]
    stub.linger("ncclCommAbort", 0.5)
    with pytest.warns(RuntimeWarning, match=r"the abort of 2 communicators has not returned after 0\.1 s and goes on"):
        pynccl.abort(comms, timeout=0.1)
    assert "ncclGroupEnd" not in stub.names()  # so the caller was not kept
    with pytest.raises(pynccl.NcclInvalidUsage, match="was aborted"):
        comms[0].broadcast(X, Y, stream=0)
    comes_back("ncclCommAbort")
    assert stub.names() == ["ncclGroupStart", "ncclCommAbort", "ncclCommAbort", "ncclGroupEnd"]


# Several threads


def test_threads_take_turns_on_a_communicator() -> None:
    stub = Stub()
    one, other = stub.comm(cpu=True), stub.comm(cpu=True)
    x = torch.zeros(4)
    stub.linger("ncclAllReduce", 0.001)

    def in_a_group() -> None:
        with pynccl.group():
            one.all_reduce(x, x)
            one.all_reduce(x)

    plan = one.plan.all_reduce(x, x)
    bodies = [lambda: one.all_reduce(x, x), lambda: one.all_reduce(x), plan, in_a_group, one.plan.group([plan, plan])]
    assert overlapping(stub, [*bodies, lambda: plan(7), one.barrier]) == 0
    assert overlapping(stub, [lambda: one.all_reduce(x, x), lambda: other.all_reduce(x, x)]) > 0  # they are free


def test_destroy_waits_for_the_call_of_another_thread() -> None:
    stub = Stub()
    comm = stub.comm()
    stub.linger("ncclBroadcast", 0.3)
    before = stub.cdll.stub_overlaps()
    thread = threading.Thread(target=lambda: comm.broadcast(X, Y, stream=0))
    thread.start()
    wait_for(lambda: "ncclBroadcast" in stub.names())
    comm.timeout = 0.05
    with pytest.raises(pynccl.NcclTimeout, match=r"a call of another thread has not returned for 0\.05 s; abort"):
        comm.destroy()
    assert comm.alive
    comm.timeout = HANGS
    comm.destroy()
    thread.join()
    assert stub.names()[-1] == "ncclCommDestroy"
    assert stub.cdll.stub_overlaps() - before == 2  # each time ncclCommGetAsyncError, which may be asked at any time


def in_a_call(comm: Communicator) -> bool:
    """Whether another thread is in a call on `comm`."""
    free = comm.lock.acquire(blocking=False)
    if free:
        comm.lock.release()
    return not free


def freed_by_abort(comm: Communicator) -> str:
    own = comm.split(0)
    assert own is not None
    if comm.rank == 1:
        comm.barrier()  # alive, so that nothing but the abort of rank 0 can free rank 0
        own.abort()
        return ""
    found: list[BaseException] = []

    def wait_for_ever() -> None:
        try:
            own.recv(torch.zeros(1 << 20), 1)  # which rank 1 never sends
        except pynccl.NcclError as error:
            found.append(error)

    thread = threading.Thread(target=wait_for_ever, daemon=True)
    thread.start()
    wait_for(lambda: in_a_call(own))
    own.abort()
    thread.join(20)
    assert not thread.is_alive()
    comm.barrier()
    return str(found[0])


def test_an_abort_frees_a_thread_that_is_blocked(ranks: RankPool) -> None:
    said, _ = ranks.run(2, freed_by_abort)
    assert "was aborted; make a new one" in said or "REMOTE_ERROR" in said
