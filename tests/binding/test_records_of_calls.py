"""What the flight recorder says of calls that end in unusual ways, or are made from unusual places."""

from __future__ import annotations

import _thread
import os
import threading
from typing import Any

import pytest
import torch
from libraries import Stub
from processes import wait_for

import pynccl
from pynccl import Communicator
from pynccl.watch import recorder
from pynccl.watch.reader import read_file
from pynccl.watch.records import COMPLETED, FAILED, CallRecord, CommRecord


def record_of(comm: Any) -> CommRecord:
    own = recorder.started()
    assert own is not None
    return next(one for one in read_file(own.path).comms if (one.uid, one.rank) == (comm._track.uid, comm.rank))


def last(comm: Any) -> CallRecord:
    return record_of(comm).calls[-1]


def test_a_call_without_a_line_of_the_user_is_made_all_the_same() -> None:
    (comm,) = Communicator.init_all(1, library=pynccl.load("host"))
    x, entered = torch.ones(3), comm._track.head
    _thread.start_new_thread(comm.all_reduce, (x, x))  # below which there is no frame
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
