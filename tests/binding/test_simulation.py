"""simulate() gets an estimate from NCCL, launches nothing, and leaves the communicators unchanged.

Like NCCL, the stub runs calls of a single rank at once and has no estimate for them or for sends and receives alone. A
simulation leaves its communicators unusable: the next collective on them fails.
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
SPLIT = ["ncclGroupStart", "config", "ncclCommSplit", "ncclGroupEnd"]
DESTROYED = ["ncclCommGetAsyncError", "ncclCommFinalize", "ncclCommDestroy"]


@pytest.fixture
def stub() -> Stub:
    made = Stub()
    made.split_with_all_ranks()
    return made


def simulation_calls(*calls: str) -> list[str]:
    """Return the C calls of a simulation of these calls."""
    return [*SPLIT, "ncclGroupStart", *calls, "ncclGroupSimulateEnd", *DESTROYED]


def simulate(comm: Communicator) -> float:
    with pynccl.simulate() as estimate:
        comm.all_reduce(X, Y, stream=0)
    return estimate.estimated_time


def test_simulate_returns_estimate(stub: Stub) -> None:
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
    assert stub.names() == simulation_calls("ncclAllReduce", "ncclSend")
    with pynccl.simulate() as estimate:
        comm.send(X, 2, stream=0)  # NCCL has no estimate for a send alone
    assert math.isnan(estimate.estimated_time)


def test_simulate_uses_temporary_communicator(stub: Stub) -> None:
    comm = stub.comm(cpu=True)
    comm._config = CommConfig(max_ctas=4)
    with comm.pre_mul_sum(2.5, "float32") as op:
        stub.clear()
        with pynccl.simulate():
            comm.reduce(X, Y, op=op, root=1, stream=0)
        check_simulate = ["ncclGroupStart", "ncclReduce", "ncclGroupSimulateEnd", "ncclRedOpDestroy"]
        assert stub.names() == [*SPLIT, "ncclRedOpCreatePreMulSum", *check_simulate, *DESTROYED]
        config, split, call, end = (stub.calls()[i] for i in (1, 2, 6, 7))
    struct = abi.Config.from_buffer_copy(bytes.fromhex(config.hex))
    assert (struct.maxCTAs, struct.blocking) == (4, 1)
    assert split.args == {"color": 0, "key": 1}
    what = {"send": X[0], "recv": Y[0], "count": 12, "dtype": 7, "op": 1007, "root": 1}
    assert call.args == {**what, "comm": 1, "stream": 0}
    assert end.args == {"size": 24, "version": 23203, "magic": 0x74685283}
    stub.clear()
    comm.all_reduce(X, Y, stream=0)
    assert stub.names() == ["ncclAllReduce"]  # unaffected by the simulation


def test_simulate_errors(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
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
    monkeypatch.setattr("pynccl.comm.consistency.check_not_capturing", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):  # in a capture
        simulate(comm)
    assert stub.names() == []
    old = Stub((2, 21, 5))
    with pytest.raises(pynccl.NcclVersionError, match=r"ncclGroupSimulateEnd needs NCCL >= 2\.22"):
        simulate(old.comm())
    assert old.names() == []


def check_simulate(comm: Communicator) -> str:
    """Simulate on the host library, where the ranks really communicate; return the error of mismatched simulations."""
    x = torch.full((4,), float(comm.rank))
    with pynccl.simulate():
        comm.all_reduce(x, x)
    assert (x.tolist(), comm.all_reduce(x).tolist()) == ([float(comm.rank)] * 4, [1.0] * 4)
    os.environ["PYNCCL_CHECK"] = "1"
    child = comm.split(0)
    assert child is not None
    with child, pytest.raises(pynccl.NcclInvalidUsage) as caught, pynccl.simulate():
        child.broadcast(x) if child.rank else child.all_reduce(x)
    return str(caught.value)


def test_simulate_launches_nothing_and_detects_mismatch(ranks: RankPool) -> None:
    for message in ranks.run(2, check_simulate):
        assert "rank 0: simulate(all_reduce(count=4, FLOAT32, SUM)) at " in message
        assert "rank 1: simulate(broadcast(count=4, FLOAT32, root=0)) at " in message
