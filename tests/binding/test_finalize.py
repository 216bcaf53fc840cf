"""finalize, destroy and abort: deadlines, failures, several threads, and the memory that NCCL may use."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from libraries import Stub
from processes import HANG_SECONDS, count_overlaps, wait_for, wait_for_return

import pynccl
from pynccl import Communicator

pytestmark = pytest.mark.usefixtures("unwatched")

X, Y = (1 << 20, 12, "float32"), (1 << 30, 12, "float32")
END = ("ncclCommFinalize", "ncclCommAbort", "ncclCommDestroy", "ncclGroupEnd")


class Scratch:
    """Replaces the memory of barrier(), which must live while NCCL may use it, and records when it is freed."""

    nbytes = 1 << 20

    def __init__(self, order: list[str], may_go: threading.Event) -> None:
        self.order, self.may_go = order, may_go

    def __del__(self) -> None:
        self.may_go.wait(HANG_SECONDS)
        self.order.append("freed")


class Ends:
    """Communicators on the stub, and the order in which ending calls returned and memory was freed."""

    def __init__(self, count: int = 1, holds: str = "") -> None:
        """holds: this call does not return (or "freed": memory is not freed) until `go` is set."""
        self.stub, self.order, self.go, self.holds = Stub(), list[str](), threading.Event(), holds
        for name in END:
            setattr(self.stub.library, name, self.recorded(name, name == holds))
        free = threading.Event()
        free.set()
        self.comms = [self.stub.comm(rank=rank) for rank in range(count)]
        for comm in self.comms:
            comm._scratch_memory = Scratch(self.order, self.go if holds == "freed" else free)  # type: ignore[assignment]

    def recorded(self, name: str, held: bool) -> Callable[..., int]:
        function = getattr(self.stub.library, name)

        def call(*args: Any) -> int:
            if held:
                self.go.wait(HANG_SECONDS)
            code = int(function(*args))
            self.order.append(name)
            return code

        return call

    def destroy_late(self) -> str:
        """Destroy the first communicator, which does not return in time, and return the message."""
        (comm, *_) = self.comms
        if self.holds == "ncclCommDestroy":
            comm.finalize()  # only the destroy is late
        comm.timeout = 0.05
        with pytest.raises(pynccl.NcclTimeout) as caught:
            comm.destroy()
        return str(caught.value)

    def release(self) -> None:
        """Let the abandoned call return."""
        self.go.set()
        wait_for_return(self.holds)


def test_init_without_other_ranks_times_out() -> None:
    stub = Stub()
    stub.linger("ncclCommInitRank", 2.0)
    message = (
        r"ncclCommInitRank\(rank=1, nranks=4\) did not return within 0\.05 s \(timeout=0\.05\)\n"
        "  a rank is missing or unreachable: were all ranks started"
    )
    with pytest.raises(pynccl.NcclTimeout, match=message):
        Communicator.init(4, bytes(128), 1, library=stub.cpu_library, timeout=0.05)
    wait_for_return("ncclCommInitRank")


def test_failed_finalize_raises_and_aborts() -> None:
    ends = Ends(holds="ncclCommFinalize")
    (comm,) = ends.comms
    assert "the communicator was aborted instead" in ends.destroy_late()
    assert ends.order == ["ncclCommAbort", "freed"] and not comm.alive
    ends.release()
    assert ends.order == ["ncclCommAbort", "freed", "ncclCommFinalize"]  # no destroy of the freed handle
    comm.destroy()
    stub = Stub()
    comm = stub.comm()
    stub.fail("ncclCommFinalize", 6)
    with pytest.raises(pynccl.NcclRemoteError, match="ncclCommFinalize on rank 1 of 4 failed"):
        comm.destroy()
    assert stub.names()[-2:] == ["ncclCommFinalize", "ncclCommAbort"]


def test_slow_abort_continues_in_background() -> None:
    ends = Ends(2, "ncclCommAbort")
    with pytest.warns(RuntimeWarning, match=r"the abort of 2 communicators has not returned after 0\.05 s and cont"):
        pynccl.abort(ends.comms, timeout=0.05)
    with pytest.raises(pynccl.NcclInvalidUsage, match="was aborted"):
        ends.comms[0].broadcast(X, Y, stream=0)
    assert ends.order == []
    ends.release()
    assert ends.order == ["ncclCommAbort", "ncclCommAbort", "ncclGroupEnd", "freed", "freed"]


def test_memory_is_freed_after_slow_destroy() -> None:
    ends = Ends(holds="ncclCommDestroy")
    ends.destroy_late()
    assert ends.order == ["ncclCommFinalize"]
    ends.release()
    assert ends.order == ["ncclCommFinalize", "ncclCommDestroy", "freed"]
    ends = Ends(holds="freed")  # as if freeing waited for a GPU that another communicator keeps busy
    with pytest.warns(RuntimeWarning, match="continues in the background"):
        pynccl.abort(ends.comms, timeout=0.05)
    assert ends.order == ["ncclCommAbort"] or ends.order == ["ncclCommAbort", "ncclGroupEnd"]
    ends.go.set()
    wait_for(lambda: ends.order[-1] == "freed")


def test_threads_are_serialized_per_communicator() -> None:
    stub = Stub()
    comm, other = stub.comm(cpu=True), stub.comm(cpu=True)
    x = torch.zeros(4)
    stub.linger("ncclAllReduce", 0.001)

    def in_a_group() -> None:
        with pynccl.group():
            comm.all_reduce(x, x)
            comm.all_reduce(x)

    plan = comm.plan.all_reduce(x, x)
    bodies = [
        lambda: comm.all_reduce(x, x),
        lambda: comm.all_reduce(x),
        plan,
        in_a_group,
        comm.plan.group([plan, plan]),
    ]
    assert count_overlaps(stub, [*bodies, lambda: plan(7), comm.barrier]) == 0
    # A launch blocks no other communicator and does not hold the GIL, since it may wait for a launch of another thread.
    launch, grouped = other.plan.all_reduce(x, x), other.plan.group([other.plan.all_reduce(x, x)])
    for launch_other in (lambda: other.all_reduce(x, x), lambda: other.all_reduce(x), launch, grouped):
        both = [lambda: comm.all_reduce(x, x), launch_other]
        wait_for(lambda both=both: count_overlaps(stub, both) > 0)  # type: ignore[misc]


def test_destroy_waits_for_call_in_another_thread() -> None:
    stub = Stub()
    comm = stub.comm()
    stub.linger("ncclBroadcast", 2.0)
    thread = threading.Thread(target=lambda: comm.broadcast(X, Y, stream=0))
    thread.start()
    wait_for(lambda: "ncclBroadcast" in stub.names())
    comm.timeout = HANG_SECONDS
    comm.destroy()
    thread.join()
    assert stub.names()[-1] == "ncclCommDestroy"
