"""What the flight recorder says of calls that end in unusual ways, or are made from unusual places."""

from __future__ import annotations

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
from pynccl.watch.records import FAILED, CallRecord, CommRecord


def record_of(comm: Any) -> CommRecord:
    own = recorder.started()
    assert own is not None
    return next(one for one in read_file(own.path).comms if (one.uid, one.rank) == (comm._track.uid, comm.rank))


def last(comm: Any) -> CallRecord:
    return record_of(comm).calls[-1]


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
