"""What the flight recorder says of calls that end in unusual ways, or are made from unusual places."""

from __future__ import annotations

import _thread
import ctypes
import os
import threading
from typing import Any

import pytest
import torch
from libraries import Stub
from processes import wait_for
from ranks import RankPool

import pynccl
from pynccl import Communicator
from pynccl.comm.call import issue
from pynccl.interop import streams
from pynccl.watch import recorder
from pynccl.watch.reader import read_file
from pynccl.watch.records import COMPLETED, FAILED, CallRecord, CommRecord


def record_of(comm: Any) -> CommRecord:
    own = recorder.started()
    assert own is not None
    return next(one for one in read_file(own.path).comms if (one.uid, one.rank) == (comm._track.uid, comm.rank))


def last(comm: Any) -> CallRecord:
    return record_of(comm).calls[-1]


@pytest.mark.parametrize("way", ["call", "plan"])
def test_a_call_without_a_line_of_the_user_is_made_all_the_same(way: str) -> None:
    (comm,) = Communicator.init_all(1, library=pynccl.load("host"))
    x, entered = torch.ones(3), comm._track.head
    run, args = (comm.all_reduce, (x, x)) if way == "call" else (comm.plan.all_reduce(x, x), ())
    _thread.start_new_thread(run, args)  # below which there is no frame
    wait_for(lambda: comm._track.head != entered)
    with comm.lock:
        assert (last(comm).operation, last(comm).site, last(comm).state) == ("all_reduce", "", COMPLETED)
    comm.destroy()


def test_a_call_that_an_abort_has_ended_is_no_completed_one() -> None:
    comms = Communicator.init_all(2, library=pynccl.load("host"))
    entered = comms[0]._track.head

    def end() -> None:
        wait_for(lambda: comms[0]._track.head != entered)
        comms[0].abort()

    other = threading.Thread(target=end)
    other.start()
    with pytest.raises(pynccl.NcclInvalidUsage, match="was aborted"):
        comms[0].all_reduce(torch.ones(3))
    other.join()
    assert last(comms[0]).state == FAILED
    comms[1].abort()


@pytest.mark.parametrize("way", ["call", "group"])
def test_an_interrupt_within_a_call_leaves_none_that_seems_to_be_under_way(way: str) -> None:
    comm = Stub().comm(2, 0, cpu=True)
    x, track = torch.ones(3), comm._track

    class Interrupts(dict[str, Any]):
        def of_detail(self, text: str) -> int:
            return 0

        def __missing__(self, text: str) -> int:
            raise KeyboardInterrupt

    track._strings, kept = Interrupts(), track._strings  # as a Ctrl-C between two lines of Track.enter
    try:
        with pytest.raises(KeyboardInterrupt):
            if way == "call":
                comm.all_reduce(x, x)
            else:
                with pynccl.group():
                    comm.all_reduce(x, x)
                    comm.broadcast(x, x)
    finally:
        track._strings = kept
    assert track.head and track.has_returned(track.head)


def test_the_error_of_a_call_is_its_own_and_not_that_of_a_newer_one() -> None:
    comm = Stub().comm(2, 0, cpu=True)
    x, track = torch.ones(3), comm._track
    comm.all_reduce(x, x)
    older = track.head
    comm.broadcast(x, x)
    with pytest.raises(pynccl.NcclInvalidUsage):
        comm._check_result(5, "all_reduce", older)
    assert [call.state == FAILED for call in record_of(comm).calls] == [True, False]


def test_a_group_plan_is_on_the_stream_of_each_of_its_communicators() -> None:
    a, b = (Stub().comm(2, 0, cpu=True) for _ in range(2))
    buffer = (4096, 4, "float32")
    plan = a.plan.group([a.plan.all_reduce(buffer, buffer, stream=16), b.plan.broadcast(buffer, buffer, stream=32)])
    plan()
    assert [(last(one).stream, last(one).detail.partition("(")[0]) for one in (a, b)] == [
        (16, "1 calls: all_reduce"),
        (32, "1 calls: broadcast"),
    ]


def test_a_plan_has_the_line_of_its_launch_by_every_way() -> None:
    comm = Stub().comm(2, 0, cpu=True)
    plan = comm.plan.all_reduce(torch.ones(3), torch.ones(3))
    plan()
    plan(0)
    with pynccl.group():
        plan()
        comm.broadcast(torch.ones(3), torch.ones(3))
    calls = record_of(comm).calls
    lines = [int(call.site.rpartition(":")[2]) for call in calls[:3]]
    assert lines == [lines[0], lines[0] + 1, lines[0] + 3]
    assert [call.plan for call in calls] == [True, True, True, False]


def test_a_plan_counts_the_version_of_a_subclass_too() -> None:
    class Own(torch.nn.Parameter):
        pass

    (comm,) = Communicator.init_all(1, library=pynccl.load("host"))
    x = Own(torch.ones(3), requires_grad=False)
    plan = comm.plan.all_reduce(x, x)
    before = x._version
    plan()
    assert x._version == before + 1
    comm.destroy()


def test_an_ended_communicator_writes_into_no_other_ones_record() -> None:
    library = pynccl.load("host")
    ended = [Communicator.init_all(1, library=library)[0] for _ in range(4)]
    for comm in ended:
        comm.destroy()
    new = [Communicator.init_all(1, library=library)[0] for _ in range(2)]  # in the regions of some of them
    for comm in ended:
        comm._track.leave(comm._track.enter("all_reduce", (0, 0, 4, 7, 0)))
        with pytest.raises(pynccl.NcclInvalidUsage):
            comm.finalize()
    assert [record_of(comm).calls for comm in new] == [[]] * 2
    for comm in new:
        comm.destroy()


def test_a_forked_child_writes_nothing_into_its_parents_record() -> None:
    (comm,) = Communicator.init_all(1, library=pynccl.load("host"))
    comm.all_reduce(torch.ones(3))
    before = record_of(comm)
    pid = os.fork()
    if not pid:
        comm._track.leave(comm._track.enter("a new text", (), site="child.py:1"))
        os._exit(0)
    os.waitpid(pid, 0)
    after = record_of(comm)
    assert (after.entered, after.calls) == (before.entered, before.calls)
    comm.destroy()


def many_details(_: Any) -> None:
    comm = Stub().comm(2, 0, cpu=True)
    for number in range(3000):
        comm._track.leave(comm._track.enter("gather_v", (), detail=f"gather_v(counts=[{number}])", site="train.py:1"))
    comm._track.leave(comm._track.enter("all_to_all_x", (), site="train.py:2"))
    calls = record_of(comm).calls
    assert (calls[-1].operation, calls[-1].site) == ("all_to_all_x", "train.py:2")
    assert calls[-2].detail == "(...)"


def test_many_details_leave_room_for_operations_and_lines(doomed: RankPool) -> None:
    doomed.run(1, many_details)  # in a process that has no other texts to record afterwards


def test_a_c_function_that_raises_leaves_its_call_failed_and_the_lock_free() -> None:
    comm = Stub().comm(2, 0, cpu=True)

    def broken(*args: Any) -> int:
        raise ctypes.ArgumentError("no")

    with pytest.raises(ctypes.ArgumentError):
        issue(comm, "all_reduce", broken, (), (0, 0, 4, 7, 0), 0)
    assert last(comm).state == FAILED and comm.lock.acquire(blocking=False)
    comm.lock.release()


def test_a_group_keeps_the_scalar_of_an_operator_until_its_stream_has_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    comm, kept = Stub().comm(2, 0, cpu=True), []
    monkeypatch.setattr("pynccl.comm.call.hold", lambda stream, library, keep: kept.append(keep))
    scalar = torch.ones(1)
    op = comm.pre_mul_sum(scalar)
    plan = comm.plan.all_reduce((4096, 4, "float32"), (4096, 4, "float32"), op, stream=16)
    plan()
    with pynccl.group():
        comm.all_reduce((4096, 4, "float32"), (4096, 4, "float32"), op, stream=16)
    assert [any(x is scalar for x in streams._tensors(keep)) for keep in kept] == [True, True]
    op.close()
