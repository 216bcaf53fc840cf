"""Shared memory between ranks: same bits as over sockets, who may have it, what is left of it, and how waits end."""

from __future__ import annotations

import hashlib
import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from host_calls import TRANSPORT, CallFailed, Ranks, call, child_over, in_threads, kill_later, shared_of
from ranks import HOST, RankPool
from torch import Tensor

import pynccl
from pynccl import Communicator
from pynccl.bindings.abi import DataType, RedOp, Result
from pynccl.host import comm as comms
from pynccl.host.failure import HostFailure

ROOT = Path(__file__).parents[2]
TYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8)
OPS = ("sum", "max", "avg")
COUNTS = (1, 37, 4099, 20_011, 700_003)  # one step; pieces in small and in large slots


def values(dtype: torch.dtype, count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(count, generator=generator).to(dtype)
    return torch.randint(0, 100, (count,), generator=generator).to(dtype)


def all_kinds(comm: Communicator, dtype: torch.dtype, count: int, op: str, root: int, seed: int) -> dict[str, Tensor]:
    """What each collective gives to this rank."""
    n, mine = comm.size, values(dtype, count, seed + comm.rank)
    wide = values(dtype, count * n, seed + 100 + comm.rank)
    on_root = comm.rank == root
    found = {
        "all_reduce": comm.all_reduce(mine, op=op),
        "in place": comm.all_reduce(kept := mine.clone(), kept, op=op),
        "reduce_scatter": comm.reduce_scatter(wide, op=op),
        "all_gather": comm.all_gather(mine),
        "broadcast": comm.broadcast(mine.clone(), mine.clone(), root=root),
        "all_to_all": comm.all_to_all(wide, torch.empty_like(wide)),
    }
    reduced: Any = comm.reduce(mine, torch.zeros_like(mine), op=op, root=root)
    gathered: Any = comm.gather(mine, torch.zeros_like(wide), root=root)
    found["scatter"] = comm.scatter(wide, torch.zeros_like(mine), root=root)
    return {**found, "reduce": reduced, "gather": gathered} if on_root else found


def digest(data: Tensor) -> str:
    return hashlib.sha256(data.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def compare_transports(comm: Communicator) -> list[str]:
    """The bits of everything, from both transports; those of operations whose result all ranks have."""
    over = {mode: child_over(comm, mode) for mode in ("shm", "gloo")}
    assert shared_of(over["shm"]) is not None and shared_of(over["gloo"]) is None
    equal = []
    for at, (count, dtype) in enumerate((count, dtype) for count in COUNTS for dtype in TYPES):
        for op in OPS if count < 5000 else OPS[:1]:
            both = [all_kinds(child, dtype, count, op, at % comm.size, 7 * at) for child in over.values()]
            for kind in both[0]:
                assert digest(both[0][kind]) == digest(both[1][kind]), f"{kind} {dtype} {count} {op}"
            equal += [digest(both[0][kind]) for kind in ("all_reduce", "in place", "all_gather")]
    for child in over.values():
        child.destroy()
    return equal


@pytest.mark.parametrize("n", [2, 3, 4])
def test_the_same_bits_over_both_transports_and_on_all_ranks(ranks: RankPool, n: int) -> None:
    first, *others = ranks.run(n, compare_transports)
    assert all(other == first for other in others)


ALL_TYPES = (*TYPES, torch.float64, torch.float16, torch.float8_e4m3fn, torch.int8, torch.uint32)


def compare_large_reductions(comm: Communicator, op: str) -> None:
    """Reductions of more than a slot, of every type, beside those over sockets."""
    over = {mode: child_over(comm, mode) for mode in ("shm", "gloo")}
    for at, dtype in enumerate(ALL_TYPES):
        for count in (40_001, 300_007):
            mine, wide = (values(dtype, n, at + comm.rank) for n in (count, count * comm.size))
            found = []
            for child in over.values():
                copy, whole = mine.clone(), wide.clone()
                rows = whole.view(comm.size, count)
                child.reduce_scatter(whole, rows[comm.rank], op=op)
                results = [
                    child.all_reduce(mine, op=op),
                    child.all_reduce(copy, copy, op=op),
                    child.reduce_scatter(wide, op=op),
                    rows[comm.rank],
                ]
                found.append([digest(result) for result in results])
            assert found[0] == found[1], f"{dtype} {count}"
    for child in over.values():
        child.destroy()


@pytest.mark.parametrize("op", ["sum", "prod", "max", "min", "avg"])
def test_large_reductions_give_the_same_bits(ranks: RankPool, op: str) -> None:
    ranks.run(3, compare_large_reductions, op)
    if op == "avg":
        ranks.run(4, compare_large_reductions, op)


# Many small ones


def one_of(comm: Communicator, turn: int, seed: int, stream: Any) -> Callable[[], None]:
    """Issue some collective; returns what checks its result, which is known from the seeds of all ranks."""
    pick = random.Random(f"{seed} {turn}")  # the same on all ranks
    count = pick.choice((1, 3, 64, 1000, 5000, pick.randrange(1, 70_000)))
    n, me, root = comm.size, comm.rank, pick.randrange(comm.size)
    rows = [torch.arange(count * n, dtype=torch.int64) * (rank + 1) + turn for rank in range(n)]
    wide, mine = rows[me].clone(), rows[me][:count].clone()
    kind = pick.randrange(8)
    out = torch.full((count * n if kind in (2, 3, 5) else count,), -1)
    blocks = [row[me * count : (me + 1) * count] for row in rows]
    expected: Tensor | None
    if kind == 0:
        comm.all_reduce(mine, out, stream=stream)
        expected = sum(row[:count] for row in rows)  # type: ignore[assignment]
    elif kind == 1:
        comm.reduce_scatter(wide, out, stream=stream)
        expected = sum(blocks)  # type: ignore[assignment]
    elif kind == 2:
        comm.all_gather(mine, out, stream=stream)
        expected = torch.cat([row[:count] for row in rows])
    elif kind == 3:
        comm.all_to_all(wide, out, stream=stream)
        expected = torch.cat(blocks)
    elif kind == 4:
        comm.broadcast(mine, out, root=root, stream=stream)
        expected = rows[root][:count]
    elif kind == 5:
        comm.gather(mine, out, root=root, stream=stream)
        expected = torch.cat([row[:count] for row in rows]) if me == root else None
    elif kind == 6:
        comm.scatter(wide, out, root=root, stream=stream)
        expected = rows[root][me * count : (me + 1) * count]
    else:
        comm.reduce(mine, out, root=root, stream=stream)
        expected = sum(row[:count] for row in rows) if me == root else None  # type: ignore[assignment]

    def check() -> None:
        assert expected is None or out.equal(expected), f"turn {turn}: kind {kind}, count {count}, root {root}"

    return check


def stress(comm: Communicator, turns: int, seed: int) -> None:
    """One by one, in groups, on streams, with messages between."""
    streams = [pynccl.create_stream(), pynccl.create_stream()]
    checks: list[Callable[[], None]] = []
    for turn in range(turns):
        how = random.Random(f"how {seed} {turn}").randrange(4)
        if how == 0:
            with pynccl.group():
                checks += [one_of(comm, 1000 * turn + i, seed, None) for i in range(3)]
        elif how == 1:
            checks.append(one_of(comm, turn, seed, streams[turn % 2]))
        else:
            checks.append(one_of(comm, turn, seed, None))
        if how == 3:
            out = torch.zeros(3)
            with pynccl.group():
                comm.send(torch.full((3,), float(comm.rank)), (comm.rank + 1) % comm.size)
                comm.recv(out, (comm.rank - 1) % comm.size)
            assert out.tolist() == [float((comm.rank - 1) % comm.size)] * 3
    for stream in streams:
        stream.synchronize()
    for check in checks:
        check()


def stress_over(comm: Communicator, mode: str, turns: int, seed: int) -> None:
    child = child_over(comm, mode)
    stress(child, turns, seed)
    child.destroy()


@pytest.mark.parametrize("n", [2, 3, 4])
def test_many_in_random_order(ranks: RankPool, n: int) -> None:
    ranks.run(n, stress_over, "shm", 250, n)
    ranks.run(n, stress_over, "sockets", 60, n)


def test_many_in_random_order_by_threads_of_one_process() -> None:
    made = Communicator.init_all(3)
    assert all(shared_of(comm) is not None for comm in made)
    in_threads(3, lambda rank: stress(made[rank], 120, 5))
    pynccl.abort(made)


def test_the_number_of_steps_wraps() -> None:
    made = Communicator.init_all(2)
    for comm in made:
        shared = shared_of(comm)
        assert shared is not None
        shared._step = 2**32 - 5
        for posted in shared._posted:
            posted[0] = 2**32 - 5
    in_threads(2, lambda rank: stress(made[rank], 30, 6))
    for comm in made:
        shared = shared_of(comm)
        assert shared is not None and shared._step < 2**31
    pynccl.abort(made)


# How waits end


def calls_until_one_dies(comm: Communicator, victim: int, after: float, seed: int) -> tuple[str, float]:
    """(error, when) of a rank while another one is killed somewhere in the middle."""
    died = kill_later(comm, victim, after)
    with pytest.raises(pynccl.NcclRemoteError) as lost:
        for turn in range(10**6):
            one_of(comm, turn, seed, None)
    took = time.monotonic() - died[0] if died[0] else 0.0
    comm.abort()
    return str(lost.value), took


def in_shared_memory() -> list[str]:
    """Without the semaphores of multiprocessing, which come and go with every program of the machine."""
    return sorted(name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-"))


@pytest.mark.parametrize("mode", ["shm", "sockets"])
def test_kill_9_at_random_points(mode: str) -> None:
    pool = RankPool({**HOST, TRANSPORT: mode})
    pick = random.Random(mode)
    before = in_shared_memory()
    for attempt in range(6):
        n = pick.choice((2, 3, 4))
        victim = pick.randrange(n)
        outcomes = pool.outcomes(n, calls_until_one_dies, victim, pick.uniform(0.02, 0.2), attempt)
        assert "died: SIGKILL" in outcomes.pop(victim).report
        for outcome in outcomes:
            assert not outcome.report
            text, seconds = outcome.value
            assert f"lost rank {victim}: its process has ended" in text and seconds < 2.0
    pool.close()
    assert in_shared_memory() == before


@pytest.mark.parametrize("message", ["ncclSend", "ncclRecv"])
@pytest.mark.parametrize("first", [0, 1])
def test_a_collective_beside_a_message_is_named(pair: Ranks, message: str, first: int) -> None:
    def body(rank: int, comm: int) -> Result:
        data = torch.zeros(4)
        with pytest.raises(CallFailed) as refused:
            if rank == first:
                call("ncclAllReduce", data.data_ptr(), data.data_ptr(), 4, DataType.FLOAT32, RedOp.SUM, comm, None)
            else:
                call(message, data.data_ptr(), 4, DataType.FLOAT32, 1 - rank, comm, None)
        assert "the calls of the ranks disagree" in refused.value.text
        assert f"rank {first} calls ncclAllReduce" in refused.value.text
        assert f"rank {1 - first} calls {message}" in refused.value.text
        return refused.value.code

    assert pair.run(body) == [Result.INVALID_USAGE] * 2


def test_broadcasts_of_two_roots_are_named_by_the_next_call(pair: Ranks) -> None:
    def body(rank: int, comm: int) -> str:
        data = torch.zeros(4)
        call("ncclBroadcast", data.data_ptr(), data.data_ptr(), 4, DataType.FLOAT32, rank, comm, None)
        with pytest.raises(CallFailed) as refused:
            call("ncclAllReduce", data.data_ptr(), data.data_ptr(), 4, DataType.FLOAT32, RedOp.SUM, comm, None)
        return refused.value.text

    for text in pair.run(body):
        assert "root=0), rank 1 calls ncclBroadcast" in text and "root=1)" in text


def test_an_abort_wakes_a_rank_that_sleeps(pair: Ranks) -> None:
    data, entered = torch.zeros(4), threading.Event()

    def blocked() -> str:
        entered.set()
        with pytest.raises(CallFailed) as refused:
            call("ncclAllReduce", data.data_ptr(), data.data_ptr(), 4, DataType.FLOAT32, RedOp.SUM, pair.comms[0], None)
        return refused.value.text

    def aborting() -> str:
        assert entered.wait(10)
        time.sleep(0.05)
        comms.find(pair.comms[0]).fail(HostFailure(Result.INVALID_USAGE, "aborted by the test"))
        return ""

    assert "aborted by the test" in in_threads(2, lambda rank: (blocked, aborting)[rank]())[0]
