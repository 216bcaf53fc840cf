"""What one-sided operations hand to the library, and what they refuse."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from libraries import Stub

import pynccl
from pynccl import Communicator, Window

X = (1 << 20, 12, "float32")


def window_of(comm: Communicator, stub: Stub, nbytes: int = 4096) -> Window:
    window = comm.window((1 << 30, nbytes, "uint8"))
    stub.clear()
    return window


def test_put_signal_says_what_goes_where() -> None:
    stub = Stub()
    comm = stub.comm()
    window = window_of(comm, stub)
    comm.put_signal(X, 3, window, 128, signal=5, context=2, stream=9)
    (call,) = stub.calls()
    assert call.name == "ncclPutSignal"
    assert call.args == {
        "buffer": 1 << 20,
        "count": 12,
        "dtype": 7,
        "peer": 3,
        "window": 0x6000,
        "offset": 128,
        "signal": 5,
        "context": 2,
        "flags": 0,
        "comm": 1,
        "stream": 9,
    }
    stub.clear()
    comm.put_signal(X, 3, window, 4096 - 48, stream=0)  # up to the last byte
    assert stub.calls()[0].args["offset"] == 4048


@pytest.mark.parametrize("offset", [-4, 4096 - 47, 4096])
def test_a_put_stays_in_its_window(offset: int) -> None:
    stub = Stub()
    comm = stub.comm()
    window = window_of(comm, stub)
    with pytest.raises(ValueError, match=f"put_signal: 48 bytes at offset {offset} do not fit into the window of 4096"):
        comm.put_signal(X, 3, window, offset, stream=0)
    assert stub.names() == []


def test_a_closed_window_is_refused() -> None:
    stub = Stub()
    comm = stub.comm()
    window = window_of(comm, stub)
    window.close()
    stub.clear()
    with pytest.raises(ValueError, match="this window of 4096 bytes was closed"):
        comm.put_signal(X, 3, window, stream=0)
    assert stub.names() == []


def test_a_signal_is_one_call() -> None:
    stub = Stub()
    stub.comm().signal(2, signal=1, context=3, stream=7)
    (call,) = stub.calls()
    assert (call.name, call.args) == (
        "ncclSignal",
        {"peer": 2, "signal": 1, "context": 3, "flags": 0, "comm": 1, "stream": 7},
    )


def test_waiting_for_several_peers_is_one_call_with_a_row_for_each() -> None:
    stub = Stub()
    comm = stub.comm()
    comm.wait_signal({3: 2, 0: 1}, signal=4, context=1, stream=7)
    first, second, call = stub.calls()
    assert first.args == {"count": 2, "peer": 3, "signal": 4, "context": 1}
    assert second.args == {"count": 1, "peer": 0, "signal": 4, "context": 1}
    assert (call.name, call.args) == ("ncclWaitSignal", {"rows": 2, "comm": 1, "stream": 7})
    stub.clear()
    comm.wait_signal(2, stream=0)
    assert stub.calls()[0].args == {"count": 1, "peer": 2, "signal": 0, "context": 0}


def test_bad_peers_and_counts_are_refused() -> None:
    stub = Stub()
    comm = stub.comm()
    window = window_of(comm, stub)
    with pytest.raises(ValueError, match=r"put_signal: peer is 4, expected a rank in 0\.\.3"):
        comm.put_signal(X, 4, window, stream=0)
    with pytest.raises(ValueError, match=r"signal: peer is -1, expected a rank in 0\.\.3"):
        comm.signal(-1, stream=0)
    with pytest.raises(ValueError, match=r"wait_signal: peer is 9, expected a rank in 0\.\.3"):
        comm.wait_signal({0: 1, 9: 1}, stream=0)
    with pytest.raises(ValueError, match="wait_signal: 0 signals of rank 2, expected 1 or more"):
        comm.wait_signal({2: 0}, stream=0)
    with pytest.raises(ValueError, match="wait_signal: counts is empty, expected"):
        comm.wait_signal({}, stream=0)
    with pytest.raises(TypeError, match="is no stream"):
        comm.signal(0, stream=None)
    assert stub.names() == []


def test_they_can_be_grouped_and_planned() -> None:
    stub = Stub()
    comm = stub.comm()
    window = window_of(comm, stub)
    with pynccl.group():
        comm.put_signal(X, 0, window, stream=0)
        comm.wait_signal({0: 1}, stream=0)
    names = ["ncclPutSignal", "row", "ncclWaitSignal"]
    assert stub.names() == ["ncclGroupStart", *names, "ncclGroupEnd"]
    plans = [comm.plan.put_signal(X, 0, window, 64, stream=0), comm.plan.wait_signal({0: 2, 2: 1}, stream=0)]
    gc.collect()
    stub.clear()
    for plan in plans:
        plan()
    assert stub.names() == ["ncclPutSignal", "row", "row", "ncclWaitSignal"]
    assert [call.args["count"] for call in stub.calls() if call.name == "row"] == [2, 1]
    stub.clear()
    comm.plan.group(plans)()
    assert stub.names() == ["ncclGroupStart", "ncclPutSignal", "row", "row", "ncclWaitSignal", "ncclGroupEnd"]


def test_the_buffer_and_the_window_live_until_the_launch() -> None:
    stub = Stub()
    comm = stub.comm(cpu=True)
    with pynccl.group():
        x = torch.zeros(4)
        window = comm.window(torch.zeros(64))
        alive = [weakref.ref(x), weakref.ref(window)]
        comm.put_signal(x, 0, window)
        del x, window
        gc.collect()
        assert all(ref() is not None for ref in alive)
    gc.collect()
    assert all(ref() is None for ref in alive)


def test_a_failure_names_the_call() -> None:
    stub = Stub()
    comm = stub.comm()
    window = window_of(comm, stub)
    stub.fail("ncclPutSignal", 5)
    with pytest.raises(pynccl.NcclInvalidUsage, match=r"^put_signal\(count=12, FLOAT32, peer=3\) failed"):
        comm.put_signal(X, 3, window, stream=0)
    stub.fail("ncclSignal", 5)
    with pytest.raises(pynccl.NcclInvalidUsage, match=r"^signal\(peer=2, signal=1, context=0\) failed"):
        comm.signal(2, signal=1, stream=0)
    stub.fail("ncclWaitSignal", 5)
    with pytest.raises(pynccl.NcclInvalidUsage, match=r"^wait_signal\(2 of rank 3, 1 of rank 0\) failed"):
        comm.wait_signal({3: 2, 0: 1}, stream=0)


def test_an_ended_communicator_and_an_old_library_refuse() -> None:
    stub = Stub()
    comm = stub.comm()
    comm.destroy()
    for use in (lambda: comm.signal(0, stream=0), lambda: comm.wait_signal(0, stream=0)):
        with pytest.raises(pynccl.NcclInvalidUsage, match="was destroyed"):
            use()
    old = Stub((2, 28, 9)).comm()
    with pytest.raises(pynccl.NcclVersionError, match=r"ncclSignal needs NCCL >= 2\.29; loaded 2\.28\.9 from /"):
        old.signal(0, stream=0)
    with pytest.raises(pynccl.NcclVersionError, match=r"ncclWaitSignal needs NCCL >= 2\.29"):
        old.wait_signal(0, stream=0)
