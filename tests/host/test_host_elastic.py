"""Communicators of the host library that shrink, grow, are revoked and rest; and several ids for one communicator."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from host_calls import CallFailed, Ranks, call, in_threads, init_rank, number, unique_id
from ranks import HOST, Place, RankPool

import pynccl
from pynccl import host
from pynccl.bindings import abi
from pynccl.bindings.abi import DataType, MemStat, RedOp, Result

pytestmark = pytest.mark.usefixtures("transport")
FLOAT32, SUM = DataType.FLOAT32, RedOp.SUM


def shrink(comm: int, excluded: list[int], flags: int = 0) -> int:
    out = ctypes.c_void_p()
    call(
        "ncclCommShrink", comm, (ctypes.c_int * len(excluded))(*excluded), len(excluded), ctypes.byref(out), None, flags
    )
    return out.value or 0


def total(comm: int, value: float) -> float:
    data = torch.full((3,), value)
    call("ncclAllReduce", data.data_ptr(), data.data_ptr(), 3, FLOAT32, SUM, comm, None)
    return float(data[0])


def stat(comm: int, which: MemStat) -> int:
    out = ctypes.c_uint64(12345)
    call("ncclCommMemStats", comm, which, ctypes.byref(out))
    return out.value


# Several ids


def test_several_ids_make_one_communicator() -> None:
    ids = (abi.UniqueId * 2)(unique_id(), unique_id())

    def body(rank: int) -> float:
        out = ctypes.c_void_p()
        call("ncclCommInitRankScalable", ctypes.byref(out), 3, rank, 2, ids, None)
        result = total(out.value or 0, rank + 1.0)
        call("ncclCommDestroy", out)
        return result

    assert in_threads(3, body) == [6.0] * 3


# Shrink


def test_survivors_form_a_communicator_and_the_parent_stays(trio: Ranks) -> None:
    made = in_threads(2, lambda i: shrink(trio.comms[2 * i], [1]))
    assert [number("ncclCommUserRank", comm) for comm in made] == [0, 1]
    assert [number("ncclCommCount", comm) for comm in made] == [2, 2]
    assert in_threads(2, lambda i: total(made[i], i + 1.0)) == [3.0, 3.0]
    again = in_threads(2, lambda i: shrink(trio.comms[2 * i], [1]))  # the same ranks once more: a place of its own
    assert in_threads(2, lambda i: total(again[i], i + 1.0)) == [3.0, 3.0]
    assert trio.run(lambda rank, comm: total(comm, 1.0)) == [3.0] * 3
    for comm in made + again:
        call("ncclCommDestroy", comm)


def test_a_shrink_with_abort_stops_what_waits_for_the_excluded(trio: Ranks) -> None:
    """Ranks 0 and 1 are in an all_reduce that rank 2 never joins."""
    streams, data = [host.HostStream() for _ in range(2)], torch.zeros(2, 3)
    for comm, stream, row in zip(trio.comms, streams, data, strict=False):
        call("ncclAllReduce", row.data_ptr(), row.data_ptr(), 3, FLOAT32, SUM, comm, stream.handle)
    made = in_threads(2, lambda rank: shrink(trio.comms[rank], [2], 1))
    for stream in streams:
        with pytest.raises(pynccl.NcclError):
            stream.synchronize()
    assert in_threads(2, lambda i: total(made[i], 2.0)) == [4.0, 4.0]
    for comm in made:
        call("ncclCommDestroy", comm)


def test_an_idle_parent_survives_a_shrink_with_abort(trio: Ranks) -> None:
    made = in_threads(2, lambda rank: shrink(trio.comms[rank], [2], 1))
    assert trio.run(lambda rank, comm: total(comm, 1.0)) == [3.0] * 3
    for comm in made:
        call("ncclCommDestroy", comm)


@pytest.fixture(scope="module")
def processes(transport: str) -> Iterator[RankPool]:
    pool = RankPool({**HOST, "PYNCCL_HOST_TRANSPORT": transport}, communicators=False)
    yield pool
    pool.close()


def lose_rank(place: Place, identity: bytes, dead: int) -> tuple[str, float]:
    comm = init_rank(place.size, abi.UniqueId.from_buffer_copy(identity), place.rank)
    total(comm, 1.0)
    if place.rank == dead:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(CallFailed) as lost:
        total(comm, 1.0)
    small = shrink(comm, [dead], 1)
    result = total(small, 1.0)
    call("ncclCommDestroy", small)
    call("ncclCommAbort", comm)
    return lost.value.code.name, result


def test_survivors_of_a_killed_rank_go_on(processes: RankPool) -> None:
    """The id was made by this process, which lives."""
    outcomes = processes.outcomes(3, lose_rank, bytes(unique_id()), 1)
    assert [outcome.value for outcome in outcomes] == [("REMOTE_ERROR", 2.0), None, ("REMOTE_ERROR", 2.0)]
    assert "died: SIGKILL" in outcomes[1].report


def lose_the_store(place: Place, path: str) -> str:
    if place.rank == 0:
        Path(path + ".new").write_bytes(bytes(unique_id()))
        os.rename(path + ".new", path)
    while not os.path.exists(path):
        time.sleep(0.01)
    comm = init_rank(place.size, abi.UniqueId.from_buffer_copy(Path(path).read_bytes()), place.rank)
    total(comm, 1.0)
    if place.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(CallFailed):
        total(comm, 1.0)
    with pytest.raises(CallFailed) as failure:
        shrink(comm, [0], 1)
    call("ncclCommAbort", comm)
    return str(failure.value)


def test_a_shrink_without_the_process_of_the_id_says_so(processes: RankPool, tmp_path: Path) -> None:
    outcomes = processes.outcomes(3, lose_the_store, str(tmp_path / "id"))
    for outcome in outcomes[1:]:
        assert "ncclCommShrink: REMOTE_ERROR" in outcome.value, outcome.report
        assert "the process that made the" in outcome.value


# Grow


def test_a_communicator_grows() -> None:
    comms = pynccl.Communicator.init_all(2)
    identity = comms[0].grow_id()

    def body(rank: int) -> Any:
        if rank < 2:
            grown = comms[rank].grow(4, identity if rank == 0 else None)
        else:
            grown = pynccl.Communicator.join_grown(4, bytes(identity), rank)
        result = grown.all_reduce(torch.full((2,), float(rank)))
        grown.destroy()
        return grown.rank, grown.size, result.tolist()

    assert in_threads(4, body) == [(rank, 4, [6.0, 6.0]) for rank in range(4)]
    assert in_threads(2, lambda rank: comms[rank].all_reduce(torch.ones(1)).item()) == [2.0, 2.0]
    for comm in comms:
        comm.destroy()


@pytest.mark.parametrize("given", [(), (0, 1)])
def test_members_have_to_pass_one_id(trio: Ranks, given: tuple[int, ...]) -> None:
    def body(rank: int, comm: int) -> Result:
        identity, out = abi.UniqueId(), ctypes.c_void_p()
        call("ncclCommGetUniqueId", comm, ctypes.byref(identity))
        pointer = ctypes.byref(identity) if rank in given else None
        with pytest.raises(CallFailed, match=f"the members pass {len(given)} ids; expected one") as refused:
            call("ncclCommGrow", comm, 4, pointer, -1, ctypes.byref(out), None)
        assert out.value is None
        return refused.value.code

    assert trio.run(body) == [Result.INVALID_USAGE] * 3


def test_wrong_arguments(trio: Ranks) -> None:
    out, ids, comm = ctypes.byref(ctypes.c_void_p()), (abi.UniqueId * 4)(), trio.comms[0]
    rows: list[tuple[str, tuple[Any, ...], str]] = [
        ("ncclCommInitRankScalable", (out, 3, 0, 0, ids, None), "0 ids at an address; expected 1 to 3"),
        ("ncclCommInitRankScalable", (out, 3, 0, 4, ids, None), "4 ids at an address; expected 1 to 3"),
        ("ncclCommGrow", (comm, 3, None, -1, out, None), "expected more than the 3 ranks"),
        ("ncclCommGrow", (comm, 4, None, 0, out, None), "and -1"),
        ("ncclCommGrow", (None, 4, None, 3, out, None), "has to pass the id"),
        ("ncclCommRevoke", (comm, 2), "revokeFlags is 0x2"),
        ("ncclCommSuspend", (comm, 0), "expected"),
        ("ncclCommMemStats", (comm, 4, ctypes.byref(ctypes.c_uint64())), "expected"),
    ]
    for excluded, text in (([], r"\[\]"), ([3], "0 to 2"), ([1, 1], "different"), ([0], "itself")):
        array = (ctypes.c_int * len(excluded))(*excluded)
        rows.append(("ncclCommShrink", (comm, array, len(excluded), out, None, 0), text))
    for name, arguments, text in rows:
        with pytest.raises(CallFailed, match=text) as refused:
            call(name, *arguments)
        expected = Result.INVALID_USAGE if text == "itself" else Result.INVALID_ARGUMENT
        assert refused.value.code is expected, (name, text)


# Revoke


def test_a_revoked_communicator_can_only_shrink_and_end(trio: Ranks) -> None:
    data, stream = torch.zeros(3), host.HostStream()
    call("ncclRecv", data.data_ptr(), 3, FLOAT32, 1, trio.comms[0], stream.handle)  # never sent
    for comm in trio.comms:
        call("ncclCommRevoke", comm, 0)
    with pytest.raises(pynccl.NcclInvalidUsage, match="revoked"):
        stream.synchronize()
    with pytest.raises(CallFailed, match="revoked") as refused:
        total(trio.comms[1], 1.0)
    assert refused.value.code is Result.INVALID_USAGE
    made = in_threads(2, lambda rank: shrink(trio.comms[rank], [2]))
    assert in_threads(2, lambda i: total(made[i], 2.0)) == [4.0, 4.0]
    for comm in made + trio.comms:
        call("ncclCommDestroy", comm)


# Rest


def test_a_rest() -> None:
    comms = pynccl.Communicator.init_all(2)
    buffers = [(torch.ones(500), torch.empty(500)) for _ in comms]

    def step(rank: int) -> float:
        comms[rank].all_reduce(*buffers[rank])
        return float(comms[rank].all_reduce(torch.ones(100_000))[0])

    assert in_threads(2, step) == [2.0, 2.0]
    before = comms[0].mem_stats()
    assert before["suspended"] == 0 and before["persist"] > 4096
    assert before["total"] == before["suspend"] + before["persist"]
    for comm in comms:
        comm.suspend()
    assert comms[0].mem_stats() == {
        "suspend": 0,
        "suspended": 1,
        "persist": before["persist"],
        "total": before["persist"],
    }
    with pytest.raises(pynccl.NcclInvalidUsage, match="suspended; call ncclCommResume first"):
        comms[0].all_reduce(torch.ones(2))
    with pytest.raises(pynccl.NcclInvalidUsage, match="suspended"):
        comms[0].suspend()
    for comm in comms:
        comm.resume()
    with pytest.raises(pynccl.NcclInvalidUsage, match="not suspended"):
        comms[0].resume()
    assert in_threads(2, step) == [2.0, 2.0]
    for comm in comms:
        comm.destroy()


def test_a_rest_waits_for_what_is_queued(trio: Ranks) -> None:
    stream, gate, data = host.HostStream(), threading.Event(), torch.ones(4)
    comm = shrink(trio.comms[0], [1, 2])
    stream.submit(gate.wait)
    call("ncclAllReduce", data.data_ptr(), data.data_ptr(), 4, FLOAT32, RedOp.AVG, comm, stream.handle)
    resting = threading.Thread(target=call, args=("ncclCommSuspend", comm, 1))
    resting.start()
    assert stat(comm, MemStat.GPU_MEM_SUSPENDED) == 0
    gate.set()
    resting.join(10)
    assert stat(comm, MemStat.GPU_MEM_SUSPENDED) == 1
    stream.synchronize()
    call("ncclCommDestroy", comm)


def test_a_group_that_launches_nothing_holds_up_nobody(trio: Ranks) -> None:
    """What it would have made takes no place in the order of the operations."""
    out, identity = ctypes.c_void_p(), abi.UniqueId()
    call("ncclGroupStart")
    call("ncclCommSplit", trio.comms[0], 0, 0, ctypes.byref(out), None)
    call("ncclCommGrow", trio.comms[0], 4, ctypes.byref(identity), -1, ctypes.byref(out), None)
    call("ncclCommWindowRegister", trio.comms[0], None, 0, ctypes.byref(out), 0)
    with pytest.raises(CallFailed):
        call("ncclBcast", None, 4, FLOAT32, 9, trio.comms[0], None)
    with pytest.raises(CallFailed, match="nothing was launched"):
        call("ncclGroupEnd")
    assert trio.run(lambda rank, comm: total(comm, 1.0)) == [3.0] * 3
