"""Shared memory between ranks: the same results as over sockets, access by other processes, and cleanup."""

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

INLINE = segment.MESSAGE_BYTES - 128  # payload that fits after a header
SIZES = (0, 1, 5, INLINE - 1, INLINE, INLINE + 1, 20_000, segment.MESSAGE_BYTES + INLINE, 700_001, 2_500_000)


def issue_collective(comm: Communicator, turn: int, seed: int, stream: Any) -> Callable[[], None]:
    """Issue a random collective, and return a function that checks its result, which follows from the seed."""
    pick = random.Random(f"{seed} {turn}")  # the same on all ranks
    count = pick.choice((1, 3, 64, 1000, 5000, pick.randrange(1, 70_000))) if turn % 40 else 150_000
    n, me, root = comm.size, comm.rank, pick.randrange(comm.size)
    rows = [torch.arange(count * n, dtype=torch.int64) * (rank + 1) + turn for rank in range(n)]
    heads = [row[:count] for row in rows]
    blocks = [row[me * count : (me + 1) * count] for row in rows]
    full, shard, rooted, at_root = rows[me].clone(), heads[me].clone(), {"root": root}, me == root
    name, send, length, options, expected = pick.choice(
        (
            ("all_reduce", shard, count, {}, sum(heads)),
            ("reduce_scatter", full, count, {}, sum(blocks)),
            ("all_gather", shard, count * n, {}, torch.cat(heads)),
            ("all_to_all", full, count * n, {}, torch.cat(blocks)),
            ("broadcast", shard, count, rooted, heads[root]),
            ("gather", shard, count * n, rooted, torch.cat(heads) if at_root else None),
            ("scatter", full, count, rooted, blocks[root]),
            ("reduce", shard, count, rooted, sum(heads) if at_root else None),
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


def exchange_messages(comm: Communicator, turn: int, seed: int, stream: Any = None) -> None:
    """Exchange random messages in one group, some between the same ranks or from a rank to itself, and check them."""
    pick = random.Random(f"{seed} {turn}")  # the same on all ranks
    received = []
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
                received.append((out, data, (source, target, nbytes, number)))
    if stream is not None:
        stream.synchronize()
    for out, data, what in received:
        assert out.equal(data), f"seed {seed}, turn {turn}: {what}"


def stress(comm: Communicator, turns: int, seed: int) -> None:
    """Run collectives one by one, in groups and on streams, interleaved with messages."""
    streams = [pynccl.create_stream(), pynccl.create_stream()]
    checks: list[Callable[[], None]] = []
    for turn in range(turns):
        how = random.Random(f"how {seed} {turn}").randrange(5)
        if how == 0:
            with pynccl.group():
                checks += [issue_collective(comm, 1000 * turn + i, seed, None) for i in range(3)]
        elif how == 1:
            checks.append(issue_collective(comm, turn, seed, streams[turn % 2]))
        elif how == 2:
            exchange_messages(comm, turn, seed, streams[0] if turn % 3 == 0 else None)
        else:
            checks.append(issue_collective(comm, turn, seed, None))
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
def test_operations_in_random_order(ranks: RankPool, n: int) -> None:
    """The world size is the seed."""
    ranks.run(n, stress_over, "shm", 90, n)
    ranks.run(n, stress_over, "sockets", 25, n)


# Access


def raise_not_found(*_: object) -> None:
    raise OSError(errno.ENOENT, "No such file or directory", "/proc/1/fd/2")


CANNOT = "rank 1 cannot share memory: "
CASES = [  # whether rank 1 can open the others' memory; its transport; that of the others; result or error
    (False, "auto", "auto", "sockets 3"),
    (False, "shm", "shm", CANNOT + "cannot open the memory of rank 0: No such file or directory"),
    (True, "sockets", "auto", "sockets 3"),
    (True, "sockets", "shm", CANNOT + "it has PYNCCL_HOST_TRANSPORT=sockets"),
    (True, "fast", "auto", "rank 1: PYNCCL_HOST_TRANSPORT='fast': expected auto, shm or sockets"),
]


def try_all_cases(comm: Communicator) -> None:
    opens = vars(sharing)["open_segment"]
    for can_open, own, others, expected in CASES:
        os.environ.pop(TRANSPORT, None)
        parent = comm.split(0, comm.rank)
        vars(sharing)["open_segment"] = opens if can_open or comm.rank != 1 else raise_not_found
        try:
            child = child_over(parent, own if comm.rank == 1 else others)
            x = child.all_reduce(torch.ones(5))
            found = f"{'shm' if shared_of(child) else 'sockets'} {int(x[0])}"
        except pynccl.NcclError as error:
            found = str(error)
        finally:
            vars(sharing)["open_segment"] = opens
        assert expected in found, (own, others)
        parent.abort()
        comm.barrier()


def test_ranks_without_shared_memory_use_sockets_or_raise(ranks: RankPool) -> None:
    ranks.run(3, try_all_cases)


def open_as_another_user(_: Communicator) -> int:
    """Check the errors for wrong memory, and return the exit code of a process of another user that opens it."""
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
def test_only_the_same_user_can_open_a_segment(doomed: RankPool) -> None:
    assert doomed.run(1, open_as_another_user) == [7]


# Cleanup


def open_resources() -> tuple[int, int]:
    """Return the number of file descriptors and of mapped segments of this process."""
    gc.collect()
    return len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count("memfd:pynccl")


def check_cleanup(comm: Communicator) -> None:
    for end in ("destroy", "abort"):
        for _ in range(10):  # caches fill up, and records of the last eight communicators stay
            child_over(comm, "shm").destroy()
        comm.barrier()
        before = open_resources()
        for _ in range(3):
            child = child_over(comm, "shm")
            child.all_reduce(torch.ones(1 << 18))
            child.all_reduce(torch.ones(4))
            assert open_resources()[1] == before[1] + comm.size
            comm.barrier()
            getattr(child, end)()
        assert open_resources() == before
        comm.barrier()


def test_destroy_and_abort_release_memory_and_descriptors(ranks: RankPool) -> None:
    ranks.run(3, check_cleanup)
