"""simulate() asks NCCL for an estimate, launches nothing, and leaves the communicators as they were.

The stub does as NCCL does: it runs the calls of a single rank at once and has no estimate for them, nor for sends and
receives alone; and it spoils the communicators of a simulation, on which the next collective fails.
"""

from __future__ import annotations

import math
import os

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


def simulate(comm: Communicator) -> float:
    with pynccl.simulate() as estimate:
        comm.all_reduce(X, Y, stream=0)
    return estimate.estimated_time


def test_the_estimate_is_there_after_the_block(stub: Stub) -> None:
    comm, alone = stub.comm(cpu=True), stub.comm(nranks=1, rank=0, cpu=True)
    with pynccl.simulate() as nothing:
        pass
    assert (stub.names(), nothing.estimated_time, simulate(alone)) == ([], 0.0, 0.0)
    with pynccl.simulate() as estimate:
        assert comm.all_reduce(X, Y, stream=0) is Y
        alone.all_reduce(X, Y, stream=0)
        comm.send(X, 2, stream=0)
        assert stub.names() == [] and estimate.estimated_time == 0.0
    assert estimate.estimated_time == 12.5
    assert stub.names() == asked("ncclAllReduce", "ncclSend")
    with pynccl.simulate() as estimate:
        comm.send(X, 2, stream=0)  # alone, of which NCCL has none
    assert math.isnan(estimate.estimated_time)


def test_nccl_is_asked_on_a_communicator_of_the_same_ranks_that_is_thrown_away(stub: Stub) -> None:
    comm = stub.comm(cpu=True)
    comm._config = CommConfig(max_ctas=4)
    with comm.pre_mul_sum(2.5, "float32") as op:
        stub.clear()
        with pynccl.simulate():
            comm.reduce(X, Y, op=op, root=1, stream=0)
        simulated = ["ncclGroupStart", "ncclReduce", "ncclGroupSimulateEnd", "ncclRedOpDestroy"]
        assert stub.names() == [*MADE, "ncclRedOpCreatePreMulSum", *simulated, *THROWN_AWAY]
        config, split, call, end = (stub.calls()[i] for i in (1, 2, 6, 7))
    struct = abi.Config.from_buffer_copy(bytes.fromhex(config.hex))
    assert (struct.maxCTAs, struct.blocking) == (4, 1)
    assert split.args == {"color": 0, "key": 1}
    what = {"send": X[0], "recv": Y[0], "count": 12, "dtype": 7, "op": 1007, "root": 1}
    assert call.args == {**what, "comm": 1, "stream": 0}
    assert end.args == {"size": 24, "version": 23203, "magic": 0x74685283}
    stub.clear()
    comm.all_reduce(X, Y, stream=0)
    assert stub.names() == ["ncclAllReduce"]  # as if nothing had been


def test_what_a_child_could_spoil_or_nccl_cannot_estimate_is_refused(
    stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    sharing = Communicator.init(4, bytes(128), 1, config=CommConfig(split_share=True), library=stub.cpu_library)
    comm, ended = stub.comm(cpu=True), stub.comm(cpu=True)
    ended.abort()
    stub.clear()
    with pytest.raises(pynccl.NcclInvalidUsage, match="shares its resources with its children"):
        simulate(sharing)
    with pytest.raises(pynccl.NcclInvalidUsage, match="simulate: signal is one-sided"), pynccl.simulate():
        comm.signal(0, stream=0)
    with pytest.raises(KeyError), pynccl.simulate():
        comm.all_reduce(X, Y, stream=0)
        raise KeyError
    with pytest.raises(pynccl.NcclInvalidUsage, match="was aborted"):
        simulate(ended)
    monkeypatch.setattr("pynccl.comm.consistency.refuse_capture", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):  # in a capture
        simulate(comm)
    assert stub.names() == []
    old = Stub((2, 21, 5))
    with pytest.raises(pynccl.NcclVersionError, match=r"ncclGroupSimulateEnd needs NCCL >= 2\.22"):
        simulate(old.comm())
    assert old.names() == []


def simulated(comm: Communicator) -> str:
    """On the host library, whose ranks really have to come together; what is said where they simulate other calls."""
    x = torch.full((4,), float(comm.rank))
    with pynccl.simulate():
        comm.all_reduce(x, x)
    assert (x.tolist(), comm.all_reduce(x).tolist()) == ([float(comm.rank)] * 4, [1.0] * 4)
    os.environ["PYNCCL_CHECK"] = "1"
    own = comm.split(0)
    assert own is not None
    with own, pytest.raises(pynccl.NcclInvalidUsage) as caught, pynccl.simulate():
        own.broadcast(x) if own.rank else own.all_reduce(x)
    return str(caught.value)


def test_nothing_is_launched_and_ranks_that_do_not_simulate_the_same_are_told(ranks: RankPool) -> None:
    for message in ranks.run(2, simulated):
        assert "rank 0: simulate(all_reduce(count=4, FLOAT32, SUM)) at " in message
        assert "rank 1: simulate(broadcast(count=4, FLOAT32, root=0)) at " in message
