"""Parameters, the modeled link, simulated groups and per-call configurations of the host library."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from host_calls import Ranks, call, check_fails, split

import pynccl
from pynccl import host
from pynccl.bindings import abi
from pynccl.bindings.abi import CollConfig, DataType, RedOp, Result
from pynccl.host import link
from pynccl.host.failure import HostFailure

FLOAT32, SUM = DataType.FLOAT32, RedOp.SUM
INVALID = Result.INVALID_ARGUMENT


# Parameters


def test_params_are_the_values_in_effect(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PYNCCL_HOST_TIMEOUT", "12.5")
    monkeypatch.setenv("PYNCCL_HOST_LINK", "latency=5us")
    from_environment = {"PYNCCL_HOST_TIMEOUT": "12.5", "PYNCCL_HOST_LINK": "latency=5us"}
    expected = {**from_environment, "PYNCCL_HOST_INIT_TIMEOUT": "600", "PYNCCL_HOST_VERSION": "2.32.3"}
    assert pynccl.params().items() >= expected.items()
    with pytest.raises(pynccl.NcclInvalidArgument, match="key is 'NCCL_BUFFSIZE'; expected one of PYNCCL_HOST_TIMEOUT"):
        pynccl.param("NCCL_BUFFSIZE")
    handle, out = ctypes.c_void_p(), ctypes.c_int8()
    call("ncclParamBind", ctypes.byref(handle), b"PYNCCL_HOST_TIMEOUT")
    for text in ("12.5", "128"):
        monkeypatch.setenv("PYNCCL_HOST_TIMEOUT", text)
        message = "expected an integer from .* to 127, or use ncclParamGetStr"
        check_fails(INVALID, message, "ncclParamGetI8", handle, ctypes.byref(out))
    monkeypatch.setenv("PYNCCL_HOST_TIMEOUT", "100")
    call("ncclParamGetI8", handle, ctypes.byref(out))
    assert out.value == 100
    monkeypatch.setenv("PYNCCL_HOST_TIMEOUT", "-1")
    host.function("ncclParamDumpAll")()
    printed = dict(line.split("=", 1) for line in capsys.readouterr().out.splitlines())
    assert printed["PYNCCL_HOST_VERSION"] == "2.32.3"
    assert "expected a positive number of seconds" in printed["PYNCCL_HOST_TIMEOUT"]


# The modeled link and simulated groups

BAD_LINKS = [
    "fast",
    "latency=50",
    "latency=50us/s",
    "bandwidth=0GB/s",
    "bandwidth=1GiB/s",
    "speed=1GB/s",
    "latency=",
]


def test_link_units_and_invalid_links() -> None:
    for text, latency, bandwidth in (
        ("latency=50us,bandwidth=1GB/s", 50e-6, 1e9),
        ("bandwidth=2.5MB/s, latency=3ms", 3e-3, 2.5e6),
        ("latency=100ns,bandwidth=10kb", 100e-9, 1e4),
        ("latency=1s,bandwidth=7B/s", 1.0, 7.0),
    ):
        read = link.parse(text)
        assert (read.latency, 1 / read.seconds_per_byte) == pytest.approx((latency, bandwidth)), text
    assert link.parse("") is None
    for text in BAD_LINKS:
        with pytest.raises(HostFailure, match="latency=50us,bandwidth=1GB/s") as raised:
            link.parse(text)
        assert repr(text) in raised.value.text


def test_operations_take_the_time_of_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three ranks with 10 ms per step and 100 ms per MB. A communicator and its split share one link."""
    monkeypatch.setenv("PYNCCL_HOST_LINK", "latency=10ms,bandwidth=10MB/s")
    ranks = Ranks(3)
    children = ranks.run(lambda rank, comm: split(comm, 0, rank))
    rows = torch.zeros(3, 60_000)  # of 240 kB

    def timed(rank: int, comm: int) -> float:
        start, data = time.perf_counter(), rows[rank].data_ptr()
        call("ncclGroupStart")
        call("ncclAllReduce", data, data, 60_000, FLOAT32, SUM, comm, None)
        call("ncclBroadcast", data, data, 60_000, FLOAT32, 0, children[rank], None)
        call("ncclGroupEnd")
        return time.perf_counter() - start

    assert min(ranks.run(timed)) >= 4 * 0.010 + 4 / 3 * 0.024 + 2 * 0.010 + 0.024
    ranks.run(lambda rank, comm: call("ncclCommDestroy", children[rank]))
    ranks.destroy()


def simulated(calls: Callable[[], Any]) -> float:
    with pynccl.simulate() as estimate:
        calls()
    return estimate.estimated_time


def test_a_simulated_group_predicts_the_time_of_the_link_and_runs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYNCCL_HOST_LINK", "latency=1ms,bandwidth=1MB/s")
    comms = pynccl.Communicator.init_all(2)
    data = torch.ones(1000)
    # All ranks must simulate. Each device has its own link.
    single = simulated(lambda: [comm.all_reduce(data, torch.empty(1000)) for comm in comms])
    assert single == pytest.approx(2 * 1000 + 4000)  # microseconds: two steps and 2(p-1)/p of 4000 bytes
    double = simulated(lambda: [comm.all_reduce(data, torch.empty(1000)) for comm in comms for _ in range(2)])
    assert double == pytest.approx(2 * single)

    def swapping() -> None:
        for comm in comms:
            comm.send(data, 1 - comm.rank)
            comm.recv(torch.empty(1000), 1 - comm.rank)

    assert simulated(swapping) == pytest.approx(1000 + 4000)
    assert data.tolist() == [1.0] * 1000
    # A single rank may call the library directly: if it ran anything, the ranks would now be out of step.
    info = abi.SimInfo(ctypes.sizeof(abi.SimInfo), abi.SIM_INFO_MAGIC, 23203, -1.0)
    call("ncclGroupStart")
    call("ncclAllReduce", data.data_ptr(), data.data_ptr(), 1000, 7, SUM, comms[0].handle, None)
    call("ncclGroupSimulateEnd", ctypes.byref(info))
    assert info.estimatedTime == pytest.approx(single)
    with pynccl.group():
        results = [comm.all_reduce(data[:10]) for comm in comms]
    assert results[1].tolist() == [2.0] * 10
    for comm in comms:
        comm.destroy()


# Collectives with a configuration


def config(**fields: Any) -> CollConfig:
    return pynccl.CollConfig(**fields).to_struct(pynccl.load("host"))


CALLS: dict[str, tuple[int, tuple[int, ...], list[list[float]]]] = {
    # count; operator and root; the first elements of the two ranks' recv buffers
    "ncclAllReduceConfig": (4, (SUM,), [[1, 1], [1, 1]]),
    "ncclBroadcastConfig": (4, (1,), [[1, 1], [1, 1]]),
    "ncclReduceScatterConfig": (2, (SUM,), [[1, 1], [1, 1]]),
    "ncclAlltoAllConfig": (2, (), [[0, 0], [0, 0]]),
    "ncclGatherConfig": (2, (1,), [[-1, -1], [0, 0]]),
}
WRONG = [
    ({"minCTAs": 5, "maxCTAs": 4}, "minCTAs 5; expected at most maxCTAs, which is 4"),
    ({"cgaClusterSize": 9}, "cgaClusterSize 9; expected 0 to 8"),
    ({"maxCTAs": 0}, "maxCTAs 0; expected 1 to"),
    ({"forceAlgSelection": 2}, "forceAlgSelection 2; expected 0 to 1"),
    ({"magic": 1}, "collective config has magic 0x1"),
    ({"size": 200}, "size 200; NCCL 2.32.3 expects"),
    ({"version": 23300}, "version 23300; NCCL 2.32.3 expects 23203 or less"),
    ({"launchCompletionEvent": 77}, "event is 0x4d; expected the handle of a live HostEvent"),
]


def test_collectives_with_a_config(pair: Ranks) -> None:
    """Rank 0 passes a config and rank 1 passes NULL: the calls match."""

    def body(rank: int, comm: int) -> None:
        for name, (count, extra, expected) in CALLS.items():
            send, recv = torch.full((4,), float(rank)), torch.full((4,), -1.0)
            struct = config(min_ctas=1, max_ctas=4, alg_selection="ring", user_profiler_tag=5)
            pointer = ctypes.byref(struct) if rank == 0 else None
            call(name, send.data_ptr(), recv.data_ptr(), count, FLOAT32, *extra, comm, None, pointer)
            assert recv[:2].tolist() == expected[rank], name

    pair.run(body)
    data = torch.zeros(4)
    arguments = (data.data_ptr(), data.data_ptr(), 4, FLOAT32, SUM, pair.comms[0], None)
    for change, text in WRONG:
        struct = config()
        for name, value in change.items():
            setattr(struct, name, value)
        check_fails(INVALID, text, "ncclAllReduceConfig", *arguments, ctypes.byref(struct))
