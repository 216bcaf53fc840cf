"""Shared memory between ranks: collectives and messages of every size in every order, as over sockets."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from host_calls import CallFailed, Ranks, call, child_over, in_threads, shared_of
from ranks import RankPool, each_size
from torch import Tensor

import pynccl
from pynccl import Communicator
from pynccl.bindings.abi import DataType, RedOp
from pynccl.host import segment
from pynccl.host.comm import find

INLINE = segment.MESSAGE_BYTES - 128  # what fits behind a header
SIZES = (0, 1, 5, INLINE - 1, INLINE, INLINE + 1, 20_000, segment.MESSAGE_BYTES + INLINE, 700_001, 2_500_000)

# Collectives


def one_of(comm: Communicator, turn: int, seed: int, stream: Any) -> Callable[[], None]:
    """Issue some collective; returns what checks its result, which is known from the seeds of all ranks."""
    pick = random.Random(f"{seed} {turn}")  # the same on all ranks
    count = pick.choice((1, 3, 64, 1000, 5000, pick.randrange(1, 70_000))) if turn % 40 else 150_000
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


# Messages


def payload(seed: str, nbytes: int) -> Tensor:
    generator = torch.Generator().manual_seed(random.Random(seed).getrandbits(60))
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


def one_group(comm: Communicator, turn: int, seed: int, stream: Any = None) -> None:
    """Some messages, several of one pair of ranks among them, and some to oneself; each rank checks what it got."""
    pick = random.Random(f"{seed} {turn}")  # the same on all ranks
    messages = []
    for number in range(pick.randrange(1, 12)):
        nbytes = pick.choice(SIZES) if pick.random() < 0.7 else pick.randrange(1, 100_000)
        messages.append((pick.randrange(comm.size), pick.randrange(comm.size), nbytes, number))
    got = []
    with pynccl.group():
        for source, target, nbytes, number in messages:
            if comm.rank not in (source, target):
                continue
            data = payload(f"{seed} {turn} {number}", nbytes)
            if comm.rank == source:
                comm.send(data, target, stream=stream)
            if comm.rank == target:
                out = torch.zeros(nbytes, dtype=torch.uint8)
                comm.recv(out, source, stream=stream)
                got.append((out, data, (source, target, nbytes, number)))
    if stream is not None:
        stream.synchronize()
    for out, data, what in got:
        assert out.equal(data), f"turn {turn}: {what}"


# Both in random order


def stress(comm: Communicator, turns: int, seed: int) -> None:
    """One by one, in groups, on streams, with messages between."""
    streams = [pynccl.create_stream(), pynccl.create_stream()]
    checks: list[Callable[[], None]] = []
    for turn in range(turns):
        how = random.Random(f"how {seed} {turn}").randrange(5)
        if how == 0:
            with pynccl.group():
                checks += [one_of(comm, 1000 * turn + i, seed, None) for i in range(3)]
        elif how == 1:
            checks.append(one_of(comm, turn, seed, streams[turn % 2]))
        elif how == 2:
            one_group(comm, turn, seed, streams[0] if turn % 3 == 0 else None)
        else:
            checks.append(one_of(comm, turn, seed, None))
    for stream in streams:
        stream.synchronize()
    for check in checks:
        check()


def stress_over(comm: Communicator, mode: str, turns: int, seed: int) -> None:
    child = child_over(comm, mode)
    assert (shared_of(child) is not None) == (mode == "shm")
    stress(child, turns, seed)
    child.destroy()


@each_size
def test_many_in_random_order(ranks: RankPool, n: int) -> None:
    """Seeded by the number of ranks."""
    ranks.run(n, stress_over, "shm", 90, n)
    ranks.run(n, stress_over, "sockets", 25, n)


def test_by_threads_of_one_process_while_all_numbers_wrap() -> None:
    """Of steps and of slots, which count to 2**32."""
    made = Communicator.init_all(3)
    for comm in made:
        shared = shared_of(comm)
        assert shared is not None
        shared._step = 2**32 - 5
        for posted in shared._posted:
            posted[0] = 2**32 - 5
        for channel in (*shared._outgoing.values(), *shared._incoming.values()):
            channel._ring._mine[0] = channel._ring._count = 2**32 - 3
    in_threads(3, lambda rank: stress(made[rank], 60, 5))
    for comm in made:
        shared = shared_of(comm)
        assert shared is not None and shared._step < 2**31
        assert all(channel._ring._count < 2**31 for channel in shared._outgoing.values())
    pynccl.abort(made)


# Who disagrees, and who does not


def test_broadcasts_of_two_roots_are_named_by_the_next_call(pair: Ranks) -> None:
    def body(rank: int, comm: int) -> str:
        data = torch.zeros(4)
        call("ncclBroadcast", data.data_ptr(), data.data_ptr(), 4, DataType.FLOAT32, rank, comm, None)
        with pytest.raises(CallFailed) as refused:
            call("ncclAllReduce", data.data_ptr(), data.data_ptr(), 4, DataType.FLOAT32, RedOp.SUM, comm, None)
        return refused.value.text

    for text in pair.run(body):
        assert "root=0), rank 1 calls ncclBroadcast" in text and "root=1)" in text


def test_a_rank_that_goes_on_while_another_looks_is_not_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 waits in a collective and looks up what rank 1 does, which at that moment joins it and sends a message."""
    made = Communicator.init_all(2)
    transport = find(made[0].handle).transport
    looked, arrived = threading.Event(), threading.Event()
    hear = transport.hear

    def slow_hear() -> None:
        looked.set()
        assert arrived.wait(60)
        deadline = time.monotonic() + 10
        while transport._connections[1].status is None and time.monotonic() < deadline:
            hear()

    monkeypatch.setattr(transport, "hear", slow_hear)

    def body(rank: int) -> float:
        x, y = torch.full((3,), rank + 1.0), torch.zeros(3)
        if rank == 1:
            assert looked.wait(60)
            arrived.set()
        made[rank].all_reduce(x, x)
        if rank == 1:
            made[1].send(x, 0)
        else:
            made[0].recv(y, 1)
        return float(x[0])

    assert in_threads(2, body) == [3.0, 3.0]
    pynccl.abort(made)
