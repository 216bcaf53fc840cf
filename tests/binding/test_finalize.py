"""finalize, destroy and abort: deadlines, failures, several threads, and the memory that NCCL may use."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from libraries import Stub
from processes import HANGS, comes_back, overlapping, wait_for

import pynccl
from pynccl import Communicator

pytestmark = pytest.mark.usefixtures("unwatched")

X, Y = (1 << 20, 12, "float32"), (1 << 30, 12, "float32")
END = ("ncclCommFinalize", "ncclCommAbort", "ncclCommDestroy", "ncclGroupEnd")


class Scratch:
    """Stands for the memory of barrier(), which must outlive what NCCL may be doing with it: says when it is freed."""

    nbytes = 1 << 20

    def __init__(self, order: list[str], may_go: threading.Event) -> None:
        self.order, self.may_go = order, may_go

    def __del__(self) -> None:
        self.may_go.wait(HANGS)
        self.order.append("freed")


class Ends:
    """Communicators on the stub; the order in which calls that end them returned and their memory was freed."""

    def __init__(self, count: int = 1, holds: str = "") -> None:
        """holds: such a call does not return, or with "freed" memory is not freed, before `go` is set."""
        self.stub, self.order, self.go, self.holds = Stub(), list[str](), threading.Event(), holds
        for name in END:
            setattr(self.stub.library, name, self.told(name, name == holds))
        free = threading.Event()
        free.set()
        self.comms = [self.stub.comm(rank=rank) for rank in range(count)]
        for comm in self.comms:
            comm._scratch = Scratch(self.order, self.go if holds == "freed" else free)  # type: ignore[assignment]

    def told(self, name: str, held: bool) -> Callable[..., int]:
        function = getattr(self.stub.library, name)

        def call(*args: Any) -> int:
            if held:
                self.go.wait(HANGS)
            code = int(function(*args))
            self.order.append(name)
            return code

        return call

    def destroy_late(self) -> str:
        """Destroy the first of them, which does not return; what is said."""
        (comm, *_) = self.comms
        if self.holds == "ncclCommDestroy":
            comm.finalize()  # which is not what is late
        comm.timeout = 0.05
        with pytest.raises(pynccl.NcclTimeout) as caught:
            comm.destroy()
        return str(caught.value)

    def go_on(self) -> None:
        """Let the call that was left behind come back."""
        self.go.set()
        comes_back(self.holds)


def test_an_init_that_no_other_rank_joins_is_a_timeout() -> None:
    stub = Stub()
    stub.linger("ncclCommInitRank", 2.0)
    said = (
        r"ncclCommInitRank\(rank=1, nranks=4\) did not return within \d+ s \(timeout=0\.05\)\n"
        "  a rank is missing or unreachable: were all ranks started"
    )
    with pytest.raises(pynccl.NcclTimeout, match=said):
        Communicator.init(4, bytes(128), 1, library=stub.cpu_library, timeout=0.05)
    comes_back("ncclCommInitRank")


def test_a_finalize_that_hangs_or_fails_is_an_error_and_an_abort() -> None:
    ends = Ends(holds="ncclCommFinalize")
    (comm,) = ends.comms
    assert "the communicator was aborted instead" in ends.destroy_late()
    assert ends.order == ["ncclCommAbort", "freed"] and not comm.alive
    ends.go_on()
    assert ends.order == ["ncclCommAbort", "freed", "ncclCommFinalize"]  # and no destroy of the freed handle
    comm.destroy()
    stub = Stub()
    comm = stub.comm()
    stub.fail("ncclCommFinalize", 6)
    with pytest.raises(pynccl.NcclRemoteError, match="ncclCommFinalize on rank 1 of 4 failed"):
        comm.destroy()
    assert stub.names()[-2:] == ["ncclCommFinalize", "ncclCommAbort"]


def test_an_abort_that_does_not_return_goes_on_in_the_background() -> None:
    ends = Ends(2, "ncclCommAbort")
    with pytest.warns(RuntimeWarning, match=r"the abort of 2 communicators has not returned after 0\.05 s and goes on"):
        pynccl.abort(ends.comms, timeout=0.05)
    with pytest.raises(pynccl.NcclInvalidUsage, match="was aborted"):
        ends.comms[0].broadcast(X, Y, stream=0)
    assert ends.order == []
    ends.go_on()
    assert ends.order == ["ncclCommAbort", "ncclCommAbort", "ncclGroupEnd", "freed", "freed"]


def test_memory_outlives_a_destroy_and_may_be_slow_to_free() -> None:
    ends = Ends(holds="ncclCommDestroy")
    ends.destroy_late()
    assert ends.order == ["ncclCommFinalize"]
    ends.go_on()
    assert ends.order == ["ncclCommFinalize", "ncclCommDestroy", "freed"]
    ends = Ends(holds="freed")  # as where freeing waits for a GPU that another communicator keeps busy
    with pytest.warns(RuntimeWarning, match="goes on in the background"):
        pynccl.abort(ends.comms, timeout=0.05)
    assert ends.order == ["ncclCommAbort"] or ends.order == ["ncclCommAbort", "ncclGroupEnd"]
    ends.go.set()
    wait_for(lambda: ends.order[-1] == "freed")


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
        both = [lambda: one.all_reduce(x, x), way]
        wait_for(lambda both=both: overlapping(stub, both) > 0)  # type: ignore[misc]


def test_destroy_waits_for_the_call_of_another_thread() -> None:
    stub = Stub()
    comm = stub.comm()
    stub.linger("ncclBroadcast", 2.0)
    thread = threading.Thread(target=lambda: comm.broadcast(X, Y, stream=0))
    thread.start()
    wait_for(lambda: "ncclBroadcast" in stub.names())
    comm.timeout = HANGS
    comm.destroy()
    thread.join()
    assert stub.names()[-1] == "ncclCommDestroy"
