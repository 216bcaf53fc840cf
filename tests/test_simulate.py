"""simulate() asks NCCL for an estimate and launches nothing."""

from __future__ import annotations

import pytest
import torch
from libraries import Stub

import pynccl

X, Y = (1 << 20, 12, "float32"), (1 << 30, 12, "float32")


def test_the_estimate_is_there_after_the_block() -> None:
    stub = Stub()
    comm = stub.comm()
    with pynccl.simulate() as estimate:
        assert comm.all_reduce(X, Y, stream=0) is Y
        comm.send(X, 2, stream=0)
        assert stub.names() == []
        assert estimate.estimated_time == 0.0
    assert estimate.estimated_time == 12.5
    assert stub.names() == ["ncclGroupStart", "ncclAllReduce", "ncclSend", "ncclGroupSimulateEnd"]


@pytest.mark.parametrize(("version", "stamp"), [((2, 22, 3), 22203), ((2, 32, 3), 23203), ((2, 40, 1), 23203)])
def test_the_struct_is_stamped_for_the_library(version: tuple[int, int, int], stamp: int) -> None:
    stub = Stub(version)
    with pynccl.simulate():
        stub.comm().all_reduce(X, Y, stream=0)
    assert stub.calls()[-1].args == {"size": 24, "version": stamp, "magic": 0x74685283}


def test_it_asks_for_nothing_if_nothing_was_called() -> None:
    stub = Stub()
    with pynccl.simulate() as estimate:
        pass
    assert (stub.names(), estimate.estimated_time) == ([], 0.0)


def test_an_old_library_says_so_and_no_group_is_left_open() -> None:
    stub = Stub((2, 21, 5))
    comm = stub.comm()
    with pytest.raises(pynccl.NcclVersionError, match=r"ncclGroupSimulateEnd needs NCCL >= 2\.22"), pynccl.simulate():
        comm.all_reduce(X, Y, stream=0)
    assert stub.names() == []
    comm.all_reduce(X, Y, stream=0)
    assert stub.names() == ["ncclAllReduce"]


def test_a_call_that_fails_ends_the_simulation() -> None:
    stub = Stub()
    comm = stub.comm()
    stub.fail("ncclAllReduce", 5)
    with pytest.raises(pynccl.NcclInvalidUsage, match=r"^all_reduce\(count=12"), pynccl.simulate():
        comm.all_reduce(X, Y, stream=0)
    assert stub.names() == ["ncclGroupStart", "ncclAllReduce", "ncclGroupSimulateEnd"]


def test_an_exception_in_the_block_simulates_nothing() -> None:
    stub = Stub()
    comm = stub.comm(cpu=True)
    with pytest.raises(ZeroDivisionError), pynccl.simulate():
        comm.all_reduce(torch.zeros(4))
        _ = 1 // 0
    assert stub.names() == []


def test_a_simulation_inside_a_group_is_its_own() -> None:
    stub = Stub()
    comm = stub.comm()
    with pynccl.group():
        comm.send(X, 0, stream=0)
        with pynccl.simulate() as estimate:
            comm.plan.send(X, 2, stream=0)()
        assert stub.names() == ["ncclGroupStart", "ncclSend", "ncclGroupSimulateEnd"]
        assert estimate.estimated_time == 12.5
        stub.clear()
    assert [call.args.get("peer") for call in stub.calls()] == [None, 0, None]
