"""Shrink, grow, revoke and suspend on the host library, and several unique ids for one communicator."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from host_calls import CallFailed, Ranks, all_reduced, call, check_fails, get_int, in_threads, init_rank, unique_id
from ranks import HOST, Place, RankPool

import pynccl
from pynccl import host
from pynccl.bindings import abi
from pynccl.bindings.abi import DataType, RedOp, Result

pytestmark = pytest.mark.usefixtures("transport")
FLOAT32, SUM = DataType.FLOAT32, RedOp.SUM


def shrink(comm: int, excluded: list[int], flags: int = 0) -> int:
    out, ranks = ctypes.c_void_p(), (ctypes.c_int * len(excluded))(*excluded)
    call("ncclCommShrink", comm, ranks, len(excluded), ctypes.byref(out), None, flags)
    return out.value or 0


# Shrink


def test_shrink_makes_a_communicator_and_keeps_the_parent(trio: Ranks) -> None:
    """Without an abort, and with one while no operation is in progress. Each new communicator is independent."""
    made = [in_threads(2, lambda i: shrink(trio.comms[2 * i], [1], flags)) for flags in (0, 0, 1)]  # noqa: B023
    for comms in made:
        assert [get_int("ncclCommUserRank", comm) for comm in comms] == [0, 1]
        assert [get_int("ncclCommCount", comm) for comm in comms] == [2, 2]
        assert in_threads(2, lambda i: all_reduced(comms[i], i + 1.0)) == [3.0, 3.0]  # noqa: B023
    assert trio.run(lambda rank, comm: all_reduced(comm, 1.0)) == [3.0] * 3
    for comm in (comm for comms in made for comm in comms):
        call("ncclCommDestroy", comm)


@pytest.fixture(scope="module")
def processes(transport: str) -> Iterator[RankPool]:
    pool = RankPool({**HOST, "PYNCCL_HOST_TRANSPORT": transport}, communicators=False)
    yield pool
    pool.close()


def lose_rank(place: Place, identity: bytes, dead: int) -> tuple[str, float]:
    comm = init_rank(place.size, abi.UniqueId.from_buffer_copy(identity), place.rank)
    all_reduced(comm, 1.0)
    if place.rank == dead:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(CallFailed) as lost:
        all_reduced(comm, 1.0)
    small = shrink(comm, [dead], 1)
    result = all_reduced(small, 1.0)
    call("ncclCommDestroy", small)
    call("ncclCommAbort", comm)
    return lost.value.code.name, result


def test_survivors_of_a_killed_rank_continue_after_shrink(processes: RankPool) -> None:
    """This process created the unique id and stays alive."""
    outcomes = processes.outcomes(3, lose_rank, bytes(unique_id()), 1)
    assert [outcome.value for outcome in outcomes] == [("REMOTE_ERROR", 2.0), None, ("REMOTE_ERROR", 2.0)]
    assert "died: SIGKILL" in outcomes[1].report


# Grow


def test_grow_adds_ranks() -> None:
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


def test_wrong_arguments_raise(trio: Ranks) -> None:
    out, ids, comm = ctypes.byref(ctypes.c_void_p()), (abi.UniqueId * 4)(), trio.comms[0]
    rows: list[tuple[str, tuple[Any, ...], str]] = [
        ("ncclCommInitRankScalable", (out, 3, 0, 0, ids, None), "0 ids at an address; expected 1 to 3"),
        ("ncclCommInitRankScalable", (out, 3, 0, 4, ids, None), "4 ids at an address; expected 1 to 3"),
        ("ncclCommGrow", (comm, 3, None, -1, out, None), "expected more than the 3 existing ranks"),
        ("ncclCommGrow", (comm, 4, None, 0, out, None), "and rank -1"),
        ("ncclCommGrow", (None, 4, None, 3, out, None), "unique id is NULL on a new rank"),
        ("ncclCommRevoke", (comm, 2), "revokeFlags is 0x2"),
        ("ncclCommSuspend", (comm, 0), "expected"),
        ("ncclCommMemStats", (comm, 4, ctypes.byref(ctypes.c_uint64())), "expected"),
    ]
    for excluded, text in (([], r"\[\]"), ([3], "0 to 2"), ([1, 1], "different"), ([0], "itself")):
        array = (ctypes.c_int * len(excluded))(*excluded)
        rows.append(("ncclCommShrink", (comm, array, len(excluded), out, None, 0), text))
    for name, arguments, text in rows:
        check_fails(Result.INVALID_USAGE if text == "itself" else Result.INVALID_ARGUMENT, text, name, *arguments)


# Revoke and suspend


def test_a_revoked_communicator_can_only_shrink_or_be_destroyed(trio: Ranks) -> None:
    data, stream = torch.zeros(3), host.HostStream()
    call("ncclRecv", data.data_ptr(), 3, FLOAT32, 1, trio.comms[0], stream.handle)  # never sent
    for comm in trio.comms:
        call("ncclCommRevoke", comm, 0)
    with pytest.raises(pynccl.NcclInvalidUsage, match="revoked"):
        stream.synchronize()
    arguments = (data.data_ptr(), data.data_ptr(), 3, FLOAT32, SUM, trio.comms[1], None)
    check_fails(Result.INVALID_USAGE, "revoked", "ncclAllReduce", *arguments)
    made = in_threads(2, lambda rank: shrink(trio.comms[rank], [2]))
    assert in_threads(2, lambda i: all_reduced(made[i], 2.0)) == [4.0, 4.0]
    for comm in made + trio.comms:
        call("ncclCommDestroy", comm)


def test_suspend_releases_memory() -> None:
    comms = pynccl.Communicator.init_all(2)

    def step(rank: int) -> float:
        return float(comms[rank].all_reduce(torch.ones(100_000))[0])

    assert in_threads(2, step) == [2.0, 2.0]
    before = comms[0].mem_stats()
    kept = before["persist"]
    assert before["suspended"] == 0 and kept > 4096 and before["total"] == before["suspend"] + kept
    for comm in comms:
        comm.suspend()
    assert comms[0].mem_stats() == {"suspend": 0, "suspended": 1, "persist": kept, "total": kept}
    with pytest.raises(pynccl.NcclInvalidUsage, match="suspended; call ncclCommResume first"):
        comms[0].all_reduce(torch.ones(2))
    for comm in comms:
        comm.resume()
    assert in_threads(2, step) == [2.0, 2.0]
    for comm in comms:
        comm.destroy()
