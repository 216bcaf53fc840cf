"""Shared memory between ranks: operations in every order as over sockets, who may map it, and what is left of it."""

from __future__ import annotations

import errno
import gc
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from host_calls import TRANSPORT, child_over, shared_of
from ranks import RankPool, each_size
from torch import Tensor

import pynccl
from pynccl import Communicator
from pynccl.host import segment, sharing

INLINE = segment.MESSAGE_BYTES - 128  # what fits behind a header
SIZES = (0, 1, 5, INLINE - 1, INLINE, INLINE + 1, 20_000, segment.MESSAGE_BYTES + INLINE, 700_001, 2_500_000)


def one_of(comm: Communicator, turn: int, seed: int, stream: Any) -> Callable[[], None]:
    """Issue some collective; returns what checks its result, which is known from the seeds of all ranks."""
    pick = random.Random(f"{seed} {turn}")  # the same on all ranks
    count = pick.choice((1, 3, 64, 1000, 5000, pick.randrange(1, 70_000))) if turn % 40 else 150_000
    n, me, root = comm.size, comm.rank, pick.randrange(comm.size)
    rows = [torch.arange(count * n, dtype=torch.int64) * (rank + 1) + turn for rank in range(n)]
    heads = [row[:count] for row in rows]
    blocks = [row[me * count : (me + 1) * count] for row in rows]
    wide, mine, rooted, at_root = rows[me].clone(), heads[me].clone(), {"root": root}, me == root
    name, send, length, options, expected = pick.choice(
        (
            ("all_reduce", mine, count, {}, sum(heads)),
            ("reduce_scatter", wide, count, {}, sum(blocks)),
            ("all_gather", mine, count * n, {}, torch.cat(heads)),
            ("all_to_all", wide, count * n, {}, torch.cat(blocks)),
            ("broadcast", mine, count, rooted, heads[root]),
            ("gather", mine, count * n, rooted, torch.cat(heads) if at_root else None),
            ("scatter", wide, count, rooted, blocks[root]),
            ("reduce", mine, count, rooted, sum(heads) if at_root else None),
        )
    )
    out = torch.full((length,), -1)
    getattr(comm, name)(send, out, **options, stream=stream)

    def check() -> None:
        assert expected is None or out.equal(expected), f"seed {seed}, turn {turn}: {name}, count {count}, root {root}"

    return check


def payload(seed: str, nbytes: int) -> Tensor:
    generator = torch.Generator().manual_seed(random.Random(seed).getrandbits(60))
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


def some_messages(comm: Communicator, turn: int, seed: int, stream: Any = None) -> None:
    """In a group: several of one pair of ranks among them, and some to oneself; each rank checks what it got."""
    pick = random.Random(f"{seed} {turn}")  # the same on all ranks
    got = []
    with pynccl.group():
        for number in range(pick.randrange(1, 12)):
            nbytes = pick.choice(SIZES) if pick.random() < 0.7 else pick.randrange(1, 100_000)
            source, target = pick.randrange(comm.size), pick.randrange(comm.size)
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
        assert out.equal(data), f"seed {seed}, turn {turn}: {what}"


def stress(comm: Communicator, turns: int, seed: int) -> None:
    """Collectives one by one, in groups, and on streams, with messages between."""
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
            some_messages(comm, turn, seed, streams[0] if turn % 3 == 0 else None)
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


# Who may have it


def refuse(*_: object) -> None:
    raise OSError(errno.ENOENT, "No such file or directory", "/proc/1/fd/2")


CANNOT = "rank 1 cannot share memory: "
WAYS = [  # whether rank 1 can open what the others have; what it asks for, and what the others do
    (False, "auto", "auto", "sockets 3"),
    (False, "shm", "shm", CANNOT + "that of rank 0 cannot be opened: No such file or directory"),
    (True, "sockets", "auto", "sockets 3"),
    (True, "sockets", "shm", CANNOT + "it has PYNCCL_HOST_TRANSPORT=sockets"),
    (True, "fast", "auto", "rank 1: PYNCCL_HOST_TRANSPORT='fast': expected auto, shm or sockets"),
]


def all_ways(comm: Communicator) -> None:
    opens = vars(sharing)["open_segment"]
    for can_open, mine, others, says in WAYS:
        os.environ.pop(TRANSPORT, None)
        parent = comm.split(0, comm.rank)
        vars(sharing)["open_segment"] = opens if can_open or comm.rank != 1 else refuse
        try:
            child = child_over(parent, mine if comm.rank == 1 else others)
            x = child.all_reduce(torch.ones(5))
            found = f"{'shm' if shared_of(child) else 'sockets'} {int(x[0])}"
        except pynccl.NcclError as error:
            found = str(error)
        finally:
            vars(sharing)["open_segment"] = opens
        assert says in found, (mine, others)
        parent.abort()
        comm.barrier()


def test_where_memory_cannot_be_shared(ranks: RankPool) -> None:
    ranks.run(3, all_ways)


def opened_by_strangers(_: Communicator) -> int:
    """The exit code of another user who opens it."""
    own = segment.OwnSegment(2)
    assert segment.open_segment(os.getpid(), own.fd, own.token, 2).token == own.token
    with pytest.raises(OSError, match="another rank"):
        segment.open_segment(os.getpid(), own.fd, bytes(16), 2)
    with pytest.raises(OSError, match="another file"):
        segment.open_segment(os.getpid(), os.open("/etc/passwd", os.O_RDONLY), own.token, 2)
    if (child := os.fork()) == 0:
        os.setgid(65534)
        os.setuid(65534)
        try:
            segment.open_segment(os.getppid(), own.fd, own.token, 2)
        except PermissionError:
            os._exit(7)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
def test_only_the_same_user_and_only_the_right_memory_is_opened(doomed: RankPool) -> None:
    assert doomed.run(1, opened_by_strangers) == [7]


# What is left


def left() -> tuple[int, int]:
    gc.collect()
    return len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count("memfd:pynccl")


def leaves_nothing(comm: Communicator) -> None:
    for end in ("destroy", "abort"):
        for _ in range(10):  # what is made once and stays, and the records of the last eight communicators
            child_over(comm, "shm").destroy()
        comm.barrier()
        first = left()
        for _ in range(3):
            child = child_over(comm, "shm")
            child.all_reduce(torch.ones(1 << 18))
            child.all_reduce(torch.ones(4))
            assert left()[1] == first[1] + comm.size
            comm.barrier()
            getattr(child, end)()
        assert left() == first
        comm.barrier()


def test_nothing_is_left_after_the_end(ranks: RankPool) -> None:
    ranks.run(3, leaves_nothing)
