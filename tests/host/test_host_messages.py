"""Messages through shared memory: every size and order, without memory for large ones, and how they end."""

from __future__ import annotations

import ctypes
import random
import threading
import time
from typing import Any

import pytest
import torch
from host_calls import TRANSPORT, CallFailed, Ranks, call, child_over, in_threads, kill_later, shared_of
from ranks import HOST, RankPool
from torch import Tensor

import pynccl
from pynccl import Communicator
from pynccl.bindings.abi import DataType, Result
from pynccl.host import segment
from pynccl.host.comm import find

INLINE = segment.MESSAGE_BYTES - 128  # what fits behind a header
SIZES = (0, 1, 5, INLINE - 1, INLINE, INLINE + 1, 20_000, segment.MESSAGE_BYTES + INLINE, 700_001, 2_500_000)


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


def many_groups(comm: Communicator, mode: str, turns: int, seed: int) -> None:
    child = child_over(comm, mode)
    assert (shared_of(child) is not None) == (mode == "shm")
    stream = pynccl.create_stream()
    for turn in range(turns):
        one_group(child, turn, seed, stream if turn % 3 == 0 else None)
        if turn % 4 == 0:
            total = child.all_reduce(torch.full((100,), turn))
            assert total.equal(torch.full((100,), turn * child.size))
    child.destroy()


@pytest.mark.parametrize("n", [2, 3, 4])
def test_every_size_in_every_order(ranks: RankPool, n: int) -> None:
    ranks.run(n, many_groups, "shm", 40, n)
    ranks.run(n, many_groups, "sockets", 8, n)


def test_by_threads_of_one_process() -> None:
    made = Communicator.init_all(3)

    def talk(rank: int) -> None:
        for turn in range(25):
            one_group(made[rank], turn, 9)

    in_threads(3, talk)
    pynccl.abort(made)


def test_the_number_of_slots_wraps() -> None:
    made = Communicator.init_all(2)
    start = 2**32 - 3
    for comm in made:
        shared = shared_of(comm)
        assert shared is not None
        for channel in (*shared._outgoing.values(), *shared._incoming.values()):
            channel._ring._mine[0] = channel._ring._count = start

    def talk(rank: int) -> None:
        for turn in range(12):
            one_group(made[rank], turn, 11)

    in_threads(2, talk)
    for comm in made:
        shared = shared_of(comm)
        assert shared is not None and shared._outgoing[1 - comm.rank]._ring._count < 2**31
    pynccl.abort(made)


# How they end


def messages_until_one_dies(comm: Communicator, victim: int, after: float, nbytes: int) -> tuple[str, float]:
    """(error, when) of a rank while another one is killed in a ring of messages."""
    died = kill_later(comm, victim, after)
    data, out = payload("ring", nbytes), torch.zeros(nbytes, dtype=torch.uint8)
    with pytest.raises(pynccl.NcclRemoteError) as lost:
        while True:
            with pynccl.group():
                comm.send(data, (comm.rank + 1) % comm.size)
                comm.recv(out, (comm.rank - 1) % comm.size)
            assert out.equal(data)
    took = time.monotonic() - died[0] if died[0] else 0.0
    comm.abort()
    return str(lost.value), took


@pytest.mark.parametrize("mode", ["shm", "sockets"])
def test_kill_9_in_the_middle_of_messages(mode: str) -> None:
    pool = RankPool({**HOST, TRANSPORT: mode})
    pick = random.Random(mode)
    for nbytes in (3, 50_000, 900_000, 6_000_000):
        n = pick.choice((2, 3, 4))
        victim = pick.randrange(n)
        outcomes = pool.outcomes(n, messages_until_one_dies, victim, pick.uniform(0.02, 0.2), nbytes)
        assert "died: SIGKILL" in outcomes.pop(victim).report
        for outcome in outcomes:
            assert not outcome.report
            text, seconds = outcome.value
            assert f"lost rank {victim}: its process has ended" in text and seconds < 2.0
    pool.close()


@pytest.mark.parametrize(("sent", "expected"), [(4, 8), (8, 4), (2_000_000, 4), (4, 2_000_000)])
def test_other_sizes_are_named_by_both(pair: Ranks, sent: int, expected: int) -> None:
    def body(rank: int, comm: int) -> tuple[Result, str]:
        data = torch.zeros(2_000_000, dtype=torch.uint8)
        name, count = (("ncclSend", sent), ("ncclRecv", expected))[rank]
        with pytest.raises(CallFailed) as refused:
            call(name, data.data_ptr(), count, DataType.UINT8, 1 - rank, comm, None)
        return refused.value.code, refused.value.text

    for code, text in pair.run(body):
        assert code == Result.INVALID_USAGE
        assert f"rank 0 sends {sent} bytes to rank 1, which expects {expected} (message 1 between them)" in text


@pytest.mark.parametrize("message", ["ncclSend", "ncclRecv"])
@pytest.mark.parametrize("first", [0, 1])
def test_a_split_beside_a_message_is_named(pair: Ranks, message: str, first: int) -> None:
    """A rank makes a communicator, which ranks agree on over sockets; another one waits in memory for a message."""

    def body(rank: int, comm: int) -> str:
        data = torch.zeros(4)
        with pytest.raises(CallFailed) as refused:
            if rank == first:
                call("ncclCommSplit", comm, 0, 0, ctypes.byref(ctypes.c_void_p()), None)
            else:
                call(message, data.data_ptr(), 4, DataType.FLOAT32, 1 - rank, comm, None)
        return str(refused.value)

    for text in pair.run(body):
        assert "the calls of the ranks disagree" in text
        assert f"rank {first} calls ncclCommSplit" in text and f"rank {1 - first} calls {message}" in text


def test_a_rank_that_goes_on_while_another_looks_is_not_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 waits in a collective and looks up what rank 1 does, which at that moment joins it and sends a message."""
    made = Communicator.init_all(2)
    transport = find(made[0].handle).transport
    looked, arrived = threading.Event(), threading.Event()
    hear = transport.hear

    def slow_hear() -> None:
        looked.set()
        assert arrived.wait(10)
        deadline = time.monotonic() + 10
        while transport._connections[1].status is None and time.monotonic() < deadline:
            hear()

    monkeypatch.setattr(transport, "hear", slow_hear)

    def body(rank: int) -> float:
        x, y = torch.full((3,), rank + 1.0), torch.zeros(3)
        if rank == 1:
            assert looked.wait(10)
            arrived.set()
        made[rank].all_reduce(x, x)
        if rank == 1:
            made[1].send(x, 0)
        else:
            made[0].recv(y, 1)
        return float(x[0])

    assert in_threads(2, body) == [3.0, 3.0]
    pynccl.abort(made)
