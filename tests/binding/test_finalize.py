"""finalize, destroy and abort: deadlines, failures, several threads, and the memory that NCCL may use."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any

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
    stub.linger("ncclCommInitRank", 2.0)
    with pytest.raises(pynccl.NcclTimeout) as caught:
        Communicator.init(4, bytes(128), 1, library=stub.cpu_library, timeout=0.05)
    assert "ncclCommInitRank(rank=1, nranks=4) did not return within 0 s (timeout=0.05)" in str(caught.value)
    assert "a rank is missing or unreachable: were all ranks started" in str(caught.value)
    comes_back("ncclCommInitRank")


def test_a_finalize_that_hangs_or_fails_is_an_error_and_an_abort() -> None:
    stub = Stub()
    (comm,), order = watched(stub)
    comm.timeout = 0.05
    stub.linger("ncclCommFinalize", 2.0)
    with pytest.raises(pynccl.NcclTimeout, match="the communicator was aborted instead"):
        comm.destroy()
    assert stub.names() == ["ncclCommGetAsyncError", "ncclCommFinalize", "ncclCommAbort"]
    assert order == ["ncclCommAbort", "freed"]
    assert not comm.alive
    comes_back("ncclCommFinalize")
    assert stub.names()[-1] == "ncclCommAbort"  # what is left behind keeps its hands off the freed handle
    comm.destroy()

    stub = Stub()
    comm = stub.comm()
    stub.fail("ncclCommFinalize", 6)
    with pytest.raises(pynccl.NcclRemoteError, match="ncclCommFinalize on rank 1 of 4 failed"):
        comm.destroy()
    assert stub.names()[-2:] == ["ncclCommFinalize", "ncclCommAbort"]


def test_several_are_aborted_as_one_group() -> None:
    stub = Stub()
    comms = [stub.comm(rank=rank) for rank in range(3)]
    comms[1].abort()
    stub.clear()
    pynccl.abort(comms)
    group = ["ncclGroupStart", "ncclCommAbort", "ncclCommAbort", "ncclGroupEnd"]
    assert stub.names() == group
    assert sorted(call.args["rank"] for call in stub.calls()[1:-1]) == [0, 2]
    assert not any(comm.alive for comm in comms)
    stub.clear()
    pynccl.abort(comms)
    pynccl.abort([])
    assert stub.names() == []
    comms = [stub.comm(rank=rank) for rank in range(2)]
    stub.fail("ncclCommAbort", 5)
    with pytest.raises(pynccl.NcclInvalidUsage, match="ncclCommAbort failed"):
        pynccl.abort(comms)
    assert stub.names() == group  # none is left open


def test_an_abort_that_a_live_graph_holds_up_goes_on_in_the_background() -> None:
    stub = Stub()
    comms = [stub.comm(rank=rank) for rank in range(2)]
    stub.linger("ncclCommAbort", 0.5)
    with pytest.warns(RuntimeWarning, match=r"the abort of 2 communicators has not returned after 0\.05 s and goes on"):
        pynccl.abort(comms, timeout=0.05)
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
    # a launch holds neither another communicator up nor the GIL: it may have to wait for one of another thread
    launch, grouped = other.plan.all_reduce(x, x), other.plan.group([other.plan.all_reduce(x, x)])
    for way in (lambda: other.all_reduce(x, x), lambda: other.all_reduce(x), launch, grouped):
        assert overlapping(stub, [lambda: one.all_reduce(x, x), way]) > 0


def test_destroy_waits_for_the_call_of_another_thread() -> None:
    stub = Stub()
    comm = stub.comm()
    stub.linger("ncclBroadcast", 2.0)
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


# The memory of barrier(), which must outlive what NCCL may be doing with it

END = ("ncclCommAbort", "ncclCommDestroy", "ncclGroupEnd")


class Watched:
    """Stands for a communicator's scratch: says when it is freed, for which it may wait."""

    nbytes = 1 << 20

    def __init__(self, order: list[str]) -> None:
        self.order = order
        self.may_go = threading.Event()
        self.may_go.set()

    def __del__(self) -> None:
        self.may_go.wait(HANGS)
        self.order.append("freed")


def watched(stub: Stub, count: int = 1) -> tuple[list[Communicator], list[str]]:
    """Communicators with such memory, and the order of what has returned and what was freed."""
    order: list[str] = []

    def telling(name: str) -> Callable[..., int]:
        function = getattr(stub.library, name)

        def call(*args: Any) -> int:
            code = int(function(*args))
            order.append(name)
            return code

        return call

    for name in END:
        setattr(stub.library, name, telling(name))
    comms = [stub.comm(rank=rank) for rank in range(count)]
    for comm in comms:
        comm._scratch = Watched(order)  # type: ignore[assignment]
    return comms, order


ENDS: dict[str, tuple[Callable[[list[Communicator]], None], list[str]]] = {
    "abort": (lambda comms: comms[0].abort(), ["ncclCommAbort", "freed"]),
    "destroy": (lambda comms: comms[0].destroy(), ["ncclCommDestroy", "freed"]),
    "several": (pynccl.abort, ["ncclCommAbort", "ncclCommAbort", "ncclGroupEnd", "freed", "freed"]),
}


@pytest.mark.parametrize("end", ENDS)
def test_memory_is_freed_when_the_end_has_returned(end: str) -> None:
    run, expected = ENDS[end]
    comms, order = watched(Stub(), 2 if end == "several" else 1)
    run(comms)
    assert order == expected


def test_memory_outlives_an_end_that_goes_on_in_the_background() -> None:
    stub = Stub()
    (comm,), order = watched(stub)
    comm.timeout = 0.05
    stub.linger("ncclCommDestroy", 2.0)
    with pytest.raises(pynccl.NcclTimeout):
        comm.destroy()
    assert order == []
    comes_back("ncclCommDestroy")
    assert order == ["ncclCommDestroy", "freed"]


def test_memory_that_is_slow_to_free_does_not_hold_up_an_abort() -> None:
    """As where freeing waits for a GPU that a collective of another communicator keeps busy."""
    (comm,), order = watched(Stub())
    scratch: Any = comm._scratch
    may_go = scratch.may_go
    del scratch
    may_go.clear()
    try:
        with pytest.warns(RuntimeWarning, match="goes on in the background"):
            pynccl.abort([comm], timeout=0.1)
        assert order == ["ncclCommAbort"]
    finally:
        may_go.set()
    wait_for(lambda: order == ["ncclCommAbort", "freed"])


# CUDA graphs, for which NCCL waits


class Graph:
    """Stands for torch.cuda.CUDAGraph."""


def test_an_end_that_does_not_come_names_the_graphs_that_are_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    stub = Stub()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    said = r"torch.cuda.CUDAGraph objects alive: 2.*reduce-overhead.*until torch._dynamo.reset()"

    def failing(slow: str) -> str:
        comm = stub.comm()
        comm.timeout = 0.05
        stub.linger(slow, 2.0)
        with pytest.raises(pynccl.NcclTimeout) as caught:
            comm.destroy()
        comes_back(slow)
        return str(caught.value)

    assert "CUDAGraph" not in failing("ncclCommDestroy")
    graphs = [Graph(), Graph()]
    assert all(re.search(said, failing(slow)) for slow in ("ncclCommFinalize", "ncclCommDestroy"))
    comm = stub.comm()
    comm.timeout = 0.05
    stub.progress("ncclCommFinalize", polls=1 << 30)
    with pytest.raises(pynccl.NcclTimeout, match=said):
        comm.finalize()
    stub.linger("ncclCommAbort", 2.0)
    with pytest.warns(RuntimeWarning, match=said):
        pynccl.abort([comm], timeout=0.05)
    comes_back("ncclCommAbort")
    assert len(graphs) == 2
