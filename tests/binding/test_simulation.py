"""simulate() asks NCCL for an estimate, launches nothing, and leaves the communicators as they were.

The stub does as NCCL does: it runs the calls of a single rank at once and has no estimate for them, nor for sends and
receives alone; and it spoils the communicators of a simulation, on which the next collective fails.
"""

from __future__ import annotations

import math
import os
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


def simulate(comm: Communicator) -> None:
    with pynccl.simulate():
        comm.all_reduce(X, Y, stream=0)


def test_the_estimate_is_there_after_the_block(stub: Stub) -> None:
    comm = stub.comm(cpu=True)
    with pynccl.simulate() as estimate:
        pass
    assert (stub.names(), estimate.estimated_time) == ([], 0.0)
    with pynccl.simulate() as estimate:
        assert comm.all_reduce(X, Y, stream=0) is Y
        comm.send(X, 2, stream=0)
        assert stub.names() == []
        assert estimate.estimated_time == 0.0
    assert estimate.estimated_time == 12.5
    assert stub.names() == asked("ncclAllReduce", "ncclSend")
    stub.clear()
    with pynccl.simulate() as estimate:
        comm.send(X, 2, stream=0)  # alone, of which NCCL has none
    assert math.isnan(estimate.estimated_time)
    assert stub.names() == asked("ncclSend")


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
        what = {"send": X[0], "recv": Y[0], "count": 12, "dtype": 7, "op": 2}
        assert call.args == {**what, "comm": 1, "stream": 0}
        assert stub.calls()[6].args == {"size": 24, "version": 23203, "magic": 0x74685283}
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


# config of the communicator, whether it is split off, NCCL_COMM_BLOCKING, whether it is refused
NONBLOCKING = [(False, False, "", True), (False, True, "", True), (None, False, "0", True), (True, False, "0", True)]


@pytest.mark.parametrize(("blocking", "child", "environment", "refused"), [*NONBLOCKING, (False, False, "1", False)])
def test_a_nonblocking_communicator_is_refused(
    stub: Stub, monkeypatch: pytest.MonkeyPatch, blocking: bool | None, child: bool, environment: str, refused: bool
) -> None:
    """NCCL would launch the calls."""
    own: Communicator | None = stub.comm(cpu=True)
    if blocking is not None:
        config = CommConfig(blocking=blocking)
        own = Communicator.init(4, bytes(128), 1, config=config, library=stub.cpu_library)
    if child and own is not None:
        own = own.split(0)
    assert own is not None
    if environment:
        monkeypatch.setenv("NCCL_COMM_BLOCKING", environment)
    stub.clear()
    if refused:
        with pytest.raises(pynccl.NcclInvalidUsage, match="is nonblocking, and NCCL would launch the calls; use a"):
            simulate(own)
        assert stub.names() == []
    else:
        simulate(own)
        assert stub.names() == asked("ncclAllReduce")


def test_a_communicator_that_turns_out_to_be_nonblocking_is_waited_for(stub: Stub) -> None:
    """One that was made elsewhere, whose config is not known: its child is blocking, once it is there."""
    comm = stub.comm(cpu=True)
    stub.progress("ncclCommSplit", polls=3)
    simulate(comm)
    simulated = ["ncclGroupStart", "ncclAllReduce", "ncclGroupSimulateEnd"]
    assert stub.names() == [*MADE, *["ncclCommGetAsyncError"] * 3, *simulated, *THROWN_AWAY]
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
    with pytest.raises(KeyError), pynccl.simulate():
        comm.all_reduce(X, Y, stream=0)
        raise KeyError
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
    simulated = ["ncclGroupStart", "ncclReduce", "ncclGroupSimulateEnd", "ncclRedOpDestroy"]
    assert stub.names() == [*MADE, "ncclRedOpCreatePreMulSum", *simulated, *THROWN_AWAY]
    created, reduced = (stub.calls()[i].args for i in (4, 6))
    assert created["dtype"] == 7
    assert (reduced["op"], reduced["root"]) == (1007, 3)
    assert op.code == 1007  # still there
    op.destroy()


@pytest.mark.parametrize("nranks", [1, 4])
def test_an_old_library_says_so_and_no_group_is_left_open(nranks: int) -> None:
    stub = Stub((2, 21, 5))
    comm = stub.comm(nranks, rank=0)
    with pytest.raises(pynccl.NcclVersionError, match=r"ncclGroupSimulateEnd needs NCCL >= 2\.22"):
        simulate(comm)
    assert stub.names() == []
    comm.all_reduce(X, Y, stream=0)
    assert stub.names() == ["ncclAllReduce"]


def test_a_call_or_split_that_fails_ends_the_simulation(stub: Stub) -> None:
    comm = stub.comm(cpu=True)
    stub.fail("ncclAllReduce", 5)
    with pytest.raises(pynccl.NcclInvalidUsage, match=r"^all_reduce\(count=12"):
        simulate(comm)
    simulated = ["ncclGroupStart", "ncclAllReduce", "ncclGroupSimulateEnd"]
    assert stub.names() == [*MADE, *simulated, "ncclCommAbort"]
    stub.clear()
    stub.fail("ncclCommSplit", 5)
    with pytest.raises(pynccl.NcclInvalidUsage, match=r"^ncclCommSplit of 1 communicators failed"):
        simulate(comm)
    assert stub.names() == [*MADE, "ncclCommAbort"]
    stub.fail("ncclCommSplit", 0)
    stub.linger("ncclCommSplit", 2.0)
    comm.timeout = 0.05
    with pytest.raises(pynccl.NcclTimeout, match="ncclCommSplit of 1 communicators did not return"):
        simulate(comm)
    assert comm.alive


@pytest.mark.parametrize("raises", [False, True])
def test_a_simulation_inside_a_group_is_its_own(stub: Stub, raises: bool) -> None:
    comm = stub.comm(cpu=True)
    with pynccl.group():
        comm.send(X, 0, stream=0)
        try:
            with pynccl.simulate() as estimate:
                comm.plan.all_reduce(X, Y, stream=0)()
                if raises:
                    raise KeyError
        except KeyError:
            pass
        assert stub.names() == ([] if raises else asked("ncclAllReduce"))
        assert estimate.estimated_time == (0.0 if raises else 12.5)
        stub.clear()
    assert [call.args.get("peer") for call in stub.calls()] == [None, 0, None]


# On the host library, whose ranks really have to come together


def simulated(comm: Communicator) -> tuple[list[Any], list[str]]:
    x = torch.full((4,), float(comm.rank))
    with pynccl.simulate() as estimate, comm.pre_mul_sum(2.0, "float32") as op:
        comm.all_reduce(x, x, op=op)
    found = [estimate.estimated_time, x.tolist(), comm.all_reduce(x).tolist()]
    os.environ["PYNCCL_CHECK"] = "1"
    own, messages = comm.split(0), []
    assert own is not None
    with own:
        for other_simulates in (True, False):
            with pytest.raises(pynccl.NcclInvalidUsage) as caught:
                if own.rank == 0:
                    with pynccl.simulate():
                        own.all_reduce(x)
                elif other_simulates:
                    with pynccl.simulate():
                        own.broadcast(x)
                else:
                    own.all_reduce(x)
            messages.append(str(caught.value))
    return found, messages


def test_nothing_is_launched_and_ranks_that_do_not_simulate_the_same_are_told(ranks: RankPool) -> None:
    for rank, (found, messages) in enumerate(ranks.run(2, simulated)):
        assert found == [0.0, [float(rank)] * 4, [1.0] * 4]
        for message, theirs in zip(
            messages, ("simulate(broadcast(count=4, FLOAT32, root=0))", "all_reduce("), strict=True
        ):
            assert "rank 0: simulate(all_reduce(count=4, FLOAT32, SUM)) at " in message
            assert f"rank 1: {theirs}" in message
