"""Parameters, encryption, simulated groups and per-call configurations of the host library."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
from host_calls import Ranks, call, refuses

import pynccl
from pynccl import host
from pynccl.bindings import abi
from pynccl.bindings.abi import CollConfig, DataType, RedOp, Result

FLOAT32, SUM = DataType.FLOAT32, RedOp.SUM
INVALID = Result.INVALID_ARGUMENT


# Parameters


def test_parameters_say_what_is_in_force(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PYNCCL_HOST_TIMEOUT", "12.5")
    monkeypatch.setenv("PYNCCL_HOST_LINK", "latency=5us")
    given = {"PYNCCL_HOST_TIMEOUT": "12.5", "PYNCCL_HOST_LINK": "latency=5us"}
    expected = {**given, "PYNCCL_HOST_INIT_TIMEOUT": "600", "PYNCCL_HOST_VERSION": "2.32.3"}
    assert pynccl.params().items() >= expected.items()
    with pytest.raises(pynccl.NcclInvalidArgument, match="key is 'NCCL_BUFFSIZE'; expected one of PYNCCL_HOST_TIMEOUT"):
        pynccl.param("NCCL_BUFFSIZE")
    monkeypatch.setenv("PYNCCL_HOST_TIMEOUT", "-1")
    host.function("ncclParamDumpAll")()
    printed = dict(line.split("=", 1) for line in capsys.readouterr().out.splitlines())
    assert printed["PYNCCL_HOST_VERSION"] == "2.32.3"
    assert "expected a number of seconds above 0" in printed["PYNCCL_HOST_TIMEOUT"]


def bind(key: str) -> ctypes.c_void_p:
    out = ctypes.c_void_p()
    call("ncclParamBind", ctypes.byref(out), key.encode())
    return out


def test_typed_values(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = bind("PYNCCL_HOST_TIMEOUT")
    for sign, bits in (("I", 8), ("U", 8), ("I", 16), ("U", 32), ("I", 64), ("U", 64)):
        out = getattr(ctypes, f"c_{'u' if sign == 'U' else ''}int{bits}")()
        high = 2 ** (bits - (sign == "I")) - 1
        monkeypatch.setenv("PYNCCL_HOST_TIMEOUT", "100")
        call(f"ncclParamGet{sign}{bits}", handle, ctypes.byref(out))
        assert out.value == 100
        for text in ("0.5", "1e99" if bits == 64 else str(high + 1)):
            monkeypatch.setenv("PYNCCL_HOST_TIMEOUT", text)
            says = f"no integer of .* to {high}; use ncclParamGetStr"
            refuses(INVALID, says, f"ncclParamGet{sign}{bits}", handle, ctypes.byref(out))
    handle, text, length = bind("PYNCCL_HOST_VERSION"), ctypes.c_char_p(), ctypes.c_int()
    call("ncclParamGetStr", handle, ctypes.byref(text))
    assert text.value == b"2.32.3"
    room = ctypes.create_string_buffer(8)
    call("ncclParamGet", handle, room, 8, ctypes.byref(length))
    assert (room.raw[: length.value], length.value) == (b"2.32.3", 6)
    short = "room for 5 bytes at an address; the value has 6"
    refuses(INVALID, short, "ncclParamGet", handle, room, 5, ctypes.byref(length))
    unbound = "handle is 0x4d; expected one that ncclParamBind returned"
    refuses(INVALID, unbound, "ncclParamGetStr", 77, ctypes.byref(text))


# Simulated groups


def simulated(calls: Callable[[], Any]) -> float:
    with pynccl.simulate() as estimate:
        calls()
    return estimate.estimated_time


def test_a_simulated_group_takes_the_time_of_the_link_and_runs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYNCCL_HOST_LINK", "latency=1ms,bandwidth=1MB/s")
    comms = pynccl.Communicator.init_all(2)
    data = torch.ones(1000)
    # Every rank simulates, as all of them have to; each device has a link of its own.
    one = simulated(lambda: [comm.all_reduce(data, torch.empty(1000)) for comm in comms])
    assert one == pytest.approx(2 * 1000 + 4000)  # microseconds: two steps, and 2(p-1)/p of 4000 bytes
    both = simulated(lambda: [comm.all_reduce(data, torch.empty(1000)) for comm in comms for _ in range(2)])
    assert both == pytest.approx(2 * one)

    def swapping() -> None:
        for comm in comms:
            comm.send(data, 1 - comm.rank)
            comm.recv(torch.empty(1000), 1 - comm.rank)

    assert simulated(swapping) == pytest.approx(1000 + 4000)
    assert data.tolist() == [1.0] * 1000
    # One rank alone may ask the library itself: had it run anything, the ranks would now be out of step.
    info = abi.SimInfo(ctypes.sizeof(abi.SimInfo), abi.SIM_INFO_MAGIC, 23203, -1.0)
    call("ncclGroupStart")
    call("ncclAllReduce", data.data_ptr(), data.data_ptr(), 1000, 7, SUM, comms[0].handle, None)
    call("ncclGroupSimulateEnd", ctypes.byref(info))
    assert info.estimatedTime == pytest.approx(one)
    with pynccl.group():
        results = [comm.all_reduce(data[:10]) for comm in comms]
    assert results[1].tolist() == [2.0] * 10
    for comm in comms:
        comm.destroy()
    refuses(Result.INVALID_USAGE, "no group was started", "ncclGroupSimulateEnd", ctypes.byref(info))
    call("ncclGroupStart")
    info.magic = 3
    refuses(INVALID, "simInfo has magic 0x3", "ncclGroupSimulateEnd", ctypes.byref(info))
    refuses(INVALID, "nothing was launched; simInfo has magic", "ncclGroupEnd")


# Collectives with a configuration


def config(**fields: Any) -> CollConfig:
    return pynccl.CollConfig(**fields).to_struct(pynccl.load("host"))


CALLS: dict[str, tuple[int, tuple[int, ...], list[list[float]]]] = {
    # elements that each rank passes a count of; operator and root; what the two ranks' recv begin with
    "ncclAllReduceConfig": (4, (SUM,), [[1, 1], [1, 1]]),
    "ncclBroadcastConfig": (4, (1,), [[1, 1], [1, 1]]),
    "ncclReduceConfig": (4, (SUM, 0), [[1, 1], [-1, -1]]),
    "ncclAllGatherConfig": (2, (), [[0, 0], [0, 0]]),
    "ncclReduceScatterConfig": (2, (SUM,), [[1, 1], [1, 1]]),
    "ncclAlltoAllConfig": (2, (), [[0, 0], [0, 0]]),
    "ncclGatherConfig": (2, (1,), [[-1, -1], [0, 0]]),
    "ncclScatterConfig": (2, (1,), [[1, 1], [1, 1]]),
}
WRONG = [
    ({"minCTAs": 5, "maxCTAs": 4}, "minCTAs 5; expected at most maxCTAs, which is 4"),
    ({"cgaClusterSize": 9}, "cgaClusterSize 9; expected 0 to 8"),
    ({"maxCTAs": 0}, "maxCTAs 0; expected 1 to"),
    ({"forceAlgSelection": 2}, "forceAlgSelection 2; expected 0 to 1"),
    ({"magic": 1}, "collective config has magic 0x1"),
    ({"size": 200}, "size 200; NCCL 2.32.3 expects"),
    ({"version": 23300}, "version 23300; NCCL 2.32.3 expects 23203 or less"),
    ({"launchCompletionEvent": 77}, "event is 0x4d, which is the handle of no HostEvent"),
]


def test_collectives_with_a_config(pair: Ranks) -> None:
    """Rank 0 passes a config, rank 1 NULL: they fit together."""

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
        refuses(INVALID, text, "ncclAllReduceConfig", *arguments, ctypes.byref(struct))
