"""simulate() asks NCCL for an estimate, launches nothing, and leaves the communicators as they were.

The stub does as NCCL does: it runs the calls of a single rank at once and has no estimate for them, nor for sends and
receives alone; and it spoils the communicators of a simulation, on which the next collective fails.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from libraries import Stub
from ranks import RankPool

import pynccl
from pynccl import CommConfig, Communicator
from pynccl.bindings import abi

X, Y = (1 << 20, 12, "float32"), (1 << 30, 12, "float32")
MADE = ["ncclGroupStart", "config", "ncclCommSplit", "ncclGroupEnd"]
THROWN_AWAY = ["ncclCommGetAsyncError", "ncclCommFinalize", "ncclCommDestroy"]


@pytest.fixture
def stub() -> Stub:
    made = Stub()
    made.split_whole()
    return made


def asked(*calls: str) -> list[str]:
    """What a simulation of these calls is in C."""
    return [*MADE, "ncclGroupStart", *calls, "ncclGroupSimulateEnd", *THROWN_AWAY]


def test_the_estimate_is_there_after_the_block(stub: Stub) -> None:
    comm = stub.comm(cpu=True)
    with pynccl.simulate() as estimate:
        assert comm.all_reduce(X, Y, stream=0) is Y
        comm.send(X, 2, stream=0)
        assert stub.names() == []
        assert estimate.estimated_time == 0.0
    assert estimate.estimated_time == 12.5
    assert stub.names() == asked("ncclAllReduce", "ncclSend")


def test_nccl_is_asked_on_a_communicator_of_the_same_ranks_that_is_thrown_away(stub: Stub) -> None:
    comm = stub.comm(cpu=True)
    comm._config = CommConfig(max_ctas=4)
    for _ in range(2):
        stub.clear()
        with pynccl.simulate():
            comm.all_reduce(X, Y, op="max", stream=0)
        config, split, call = (stub.calls()[i] for i in (1, 2, 5))
        struct = abi.Config.from_buffer_copy(bytes.fromhex(config.hex))
        assert (struct.maxCTAs, struct.blocking) == (4, 1)
        assert split.args == {"color": 0, "key": 1}
        assert call.args == {
            "send": X[0], "recv": Y[0], "count": 12, "dtype": 7, "op": 2, "comm": 1, "stream": 0
        }  # fmt: skip
    stub.clear()
    comm.all_reduce(X, Y, stream=0)
    with pynccl.group():
        comm.send(X, 0, stream=0)
    assert stub.names() == ["ncclAllReduce", "ncclGroupStart", "ncclSend", "ncclGroupEnd"]  # as if nothing had been


def test_a_single_rank_takes_no_time_and_nothing_is_called(stub: Stub) -> None:
    alone, comm = stub.comm(nranks=1, rank=0, cpu=True), stub.comm(cpu=True)
    with pynccl.simulate() as estimate:
        alone.all_reduce(X, Y, stream=0)
    assert (stub.names(), estimate.estimated_time) == ([], 0.0)
    with pynccl.simulate() as estimate:
        alone.all_reduce(X, Y, stream=0)
        comm.all_gather(X, (1 << 30, 48, "float32"), stream=0)
    assert (stub.names(), estimate.estimated_time) == (asked("ncclAllGather"), 12.5)


def test_there_is_no_estimate_for_sends_and_receives_alone(stub: Stub) -> None:
    comm = stub.comm(cpu=True)
    with pynccl.simulate() as estimate:
        comm.send(X, 2, stream=0)
    assert math.isnan(estimate.estimated_time)
    assert stub.names() == asked("ncclSend")


def test_several_communicators_are_split_as_one_group(stub: Stub) -> None:
    """They may be ranks of one process, none of which could be made without the others."""
    comms = [stub.comm(rank=rank, cpu=True) for rank in (0, 1)]
    with pynccl.simulate() as estimate:
        for comm in comms:
            comm.broadcast(X, Y, stream=0)
    made = ["ncclGroupStart", *["config", "ncclCommSplit"] * 2, "ncclGroupEnd"]
    simulated = ["ncclGroupStart", "ncclBroadcast", "ncclBroadcast", "ncclGroupSimulateEnd"]
    assert stub.names() == [*made, *simulated, *THROWN_AWAY * 2]
    assert [call.args["comm"] for call in stub.calls() if call.name == "ncclBroadcast"] == [0, 1]
    assert estimate.estimated_time == 12.5


@pytest.mark.parametrize("how", ["config", "child", "environment", "over the config"])
def test_a_nonblocking_communicator_is_refused(stub: Stub, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """NCCL would launch the calls."""
    library, config = stub.cpu_library, CommConfig(blocking=how == "over the config")
    if "config" in how or how == "child":
        comm = Communicator.init(4, bytes(128), 1, config=config, library=library)
        own = comm.split(0) if how == "child" else comm
        assert own is not None
    else:
        own = stub.comm(cpu=True)
    if how in ("environment", "over the config"):
        monkeypatch.setenv("NCCL_COMM_BLOCKING", "0")
    stub.clear()
    with pytest.raises(pynccl.NcclInvalidUsage, match="is nonblocking, and NCCL would launch the calls; use a"):
        simulate(own)
    assert stub.names() == []


def simulate(comm: Communicator) -> None:
    with pynccl.simulate():
        comm.all_reduce(X, Y, stream=0)


def test_the_environment_can_make_a_communicator_blocking(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    comm = Communicator.init(4, bytes(128), 1, config=CommConfig(blocking=False), library=stub.cpu_library)
    monkeypatch.setenv("NCCL_COMM_BLOCKING", "1")
    stub.clear()
    simulate(comm)
    assert stub.names() == asked("ncclAllReduce")


def test_a_communicator_that_turns_out_to_be_nonblocking_is_waited_for(stub: Stub) -> None:
    """One that was made elsewhere, whose config is not known: its child is blocking, once it is there."""
    comm = stub.comm(cpu=True)
    stub.progress("ncclCommSplit", polls=3)
    simulate(comm)
    polls = ["ncclCommGetAsyncError"] * 3
    simulated = ["ncclGroupStart", "ncclAllReduce", "ncclGroupSimulateEnd"]
    assert stub.names() == [*MADE, *polls, *simulated, *THROWN_AWAY]
    stub.progress("ncclCommSplit", polls=2, final=6)
    with pytest.raises(pynccl.NcclRemoteError, match=r"^ncclCommSplit of 1 communicators failed"):
        simulate(comm)


def test_what_a_child_could_spoil_or_nccl_cannot_estimate_is_refused(
    stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    sharing = Communicator.init(4, bytes(128), 1, config=CommConfig(split_share=True), library=stub.cpu_library)
    stub.clear()
    with pytest.raises(pynccl.NcclInvalidUsage, match="shares its resources with its children"):
        simulate(sharing)
    comm = stub.comm(cpu=True)
    with pytest.raises(pynccl.NcclInvalidUsage, match="simulate: signal is one-sided"), pynccl.simulate():
        comm.signal(0, stream=0)
    monkeypatch.setattr("pynccl.comm.consistency.refuse_capture", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):  # in a capture
        simulate(comm)
    comm.abort()
    stub.clear()
    with pytest.raises(pynccl.NcclInvalidUsage, match="was aborted"):
        simulate(comm)
    assert stub.names() == []


def test_an_operator_is_made_again_for_the_simulation(stub: Stub) -> None:
    comm = stub.comm(cpu=True)
    op = comm.pre_mul_sum(2.5, "float32")
    stub.clear()
    with pynccl.simulate():
        comm.reduce(X, Y, root=3, op=op, stream=0)
    simulated = ["ncclGroupStart", "ncclReduce", "ncclGroupSimulateEnd"]
    assert stub.names() == [
        *MADE, "ncclRedOpCreatePreMulSum", *simulated, "ncclRedOpDestroy", *THROWN_AWAY
    ]  # fmt: skip
    created, reduced = (stub.calls()[i].args for i in (4, 6))
    assert created["dtype"] == 7
    assert (reduced["op"], reduced["root"]) == (1007, 3)
    assert op.code == 1007  # still there
    op.destroy()


@pytest.mark.parametrize(("version", "stamp"), [((2, 22, 3), 22203), ((2, 32, 3), 23203), ((2, 40, 1), 23203)])
def test_the_struct_is_stamped_for_the_library(version: tuple[int, int, int], stamp: int) -> None:
    stub = Stub(version)
    stub.split_whole()
    simulate(stub.comm(cpu=True))
    (end,) = (call for call in stub.calls() if call.name == "ncclGroupSimulateEnd")
    assert end.args == {"size": 24, "version": stamp, "magic": 0x74685283}


def test_it_asks_for_nothing_if_nothing_was_called() -> None:
    stub = Stub()
    with pynccl.simulate() as estimate:
        pass
    assert (stub.names(), estimate.estimated_time) == ([], 0.0)


@pytest.mark.parametrize("nranks", [1, 4])
def test_an_old_library_says_so_and_no_group_is_left_open(nranks: int) -> None:
    stub = Stub((2, 21, 5))
    comm = stub.comm(nranks, rank=0)
    with pytest.raises(pynccl.NcclVersionError, match=r"ncclGroupSimulateEnd needs NCCL >= 2\.22"), pynccl.simulate():
        comm.all_reduce(X, Y, stream=0)
    assert stub.names() == []
    comm.all_reduce(X, Y, stream=0)
    assert stub.names() == ["ncclAllReduce"]


def test_a_call_that_fails_ends_the_simulation(stub: Stub) -> None:
    comm = stub.comm(cpu=True)
    stub.fail("ncclAllReduce", 5)
    with pytest.raises(pynccl.NcclInvalidUsage, match=r"^all_reduce\(count=12"), pynccl.simulate():
        comm.all_reduce(X, Y, stream=0)
    simulated = ["ncclGroupStart", "ncclAllReduce", "ncclGroupSimulateEnd"]
    assert stub.names() == [*MADE, *simulated, "ncclCommAbort"]
    assert comm.alive


def test_a_split_that_fails_is_the_error_and_leaves_no_group(stub: Stub) -> None:
    comm = stub.comm(cpu=True)
    stub.fail("ncclCommSplit", 5)
    with pytest.raises(pynccl.NcclInvalidUsage, match=r"^ncclCommSplit of 1 communicators failed"):
        simulate(comm)
    assert stub.names() == [*MADE, "ncclCommAbort"]
    stub.clear()
    stub.fail("ncclCommSplit", 0)
    stub.linger("ncclCommSplit", 0.3)
    comm.timeout = 0.05
    with pytest.raises(pynccl.NcclTimeout, match="ncclCommSplit of 1 communicators did not return"):
        simulate(comm)
    assert comm.alive


def test_an_exception_in_the_block_simulates_nothing() -> None:
    stub = Stub()
    comm = stub.comm(cpu=True)
    with pytest.raises(ZeroDivisionError), pynccl.simulate():
        comm.all_reduce(torch.zeros(4))
        _ = 1 // 0
    assert stub.names() == []


def test_a_simulation_inside_a_group_is_its_own(stub: Stub) -> None:
    comm = stub.comm(cpu=True)
    with pynccl.group():
        comm.send(X, 0, stream=0)
        with pynccl.simulate() as estimate:
            comm.plan.all_reduce(X, Y, stream=0)()
        assert stub.names() == asked("ncclAllReduce")
        assert estimate.estimated_time == 12.5
        stub.clear()
    assert [call.args.get("peer") for call in stub.calls()] == [None, 0, None]


# On the host library, whose ranks really have to come together


def simulated(comm: Communicator) -> list[Any]:
    x = torch.full((4,), float(comm.rank))
    with pynccl.simulate() as estimate, comm.pre_mul_sum(2.0, "float32") as op:
        comm.all_reduce(x, x, op=op)
    found = [estimate.estimated_time, x.tolist()]
    return [*found, comm.all_reduce(x).tolist()]


def test_nothing_is_launched_and_the_communicator_goes_on(ranks: RankPool) -> None:
    assert ranks.run(2, simulated) == [[0.0, [float(rank)] * 4, [1.0] * 4] for rank in range(2)]


def disagreeing(comm: Communicator, call: Callable[[Communicator, torch.Tensor], Any]) -> str:
    os.environ["PYNCCL_CHECK"] = "1"
    own = comm.split(0)
    assert own is not None
    x = torch.ones(4)
    with own, pytest.raises(pynccl.NcclInvalidUsage) as caught:
        if own.rank == 0:
            with pynccl.simulate():
                own.all_reduce(x)
        else:
            call(own, x)
    return str(caught.value)


def another_simulation(comm: Communicator, x: torch.Tensor) -> None:
    with pynccl.simulate():
        comm.broadcast(x)


def launched(comm: Communicator, x: torch.Tensor) -> None:
    comm.all_reduce(x)


@pytest.mark.parametrize(
    ("call", "theirs"),
    [(another_simulation, "simulate(broadcast(count=4, FLOAT32, root=0))"), (launched, "all_reduce(count=4, ")],
)
def test_ranks_that_do_not_simulate_the_same_are_told(
    ranks: RankPool, call: Callable[[Communicator, torch.Tensor], Any], theirs: str
) -> None:
    for message in ranks.run(2, disagreeing, call):
        assert "rank 0: simulate(all_reduce(count=4, FLOAT32, SUM)) at " in message
        assert f"rank 1: {theirs}" in message
