"""Who may map a rank's memory, what happens where that cannot be had, and what is left of it at the end."""

from __future__ import annotations

import errno
import gc
import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from host_calls import TRANSPORT, child_over, shared_of
from ranks import RankPool

import pynccl
from pynccl import Communicator
from pynccl.host import segment, sharing

# Who may have it


def refuse(*_: object) -> None:
    raise OSError(errno.ENOENT, "No such file or directory", "/proc/1/fd/2")


def opens_nothing(parent: Communicator, mode: str) -> str:
    """Rank 1 cannot open what the others have."""
    opens = vars(sharing)["open_segment"]
    if parent.rank == 1:
        vars(sharing)["open_segment"] = refuse
    try:
        return made_or_refused(parent, mode)
    finally:
        vars(sharing)["open_segment"] = opens


def reserves_nothing(parent: Communicator, mode: str) -> str:
    """Rank 1 gets no memory."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if parent.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (segment.Layout(parent.size).total // 2, hard))
    try:
        return made_or_refused(parent, mode)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def wants_other(parent: Communicator, mode: str) -> str:
    mine, others = mode.split(" against ")
    return made_or_refused(parent, mine if parent.rank == 1 else others)


def made_or_refused(parent: Communicator, mode: str) -> str:
    try:
        child = child_over(parent, mode)
    except pynccl.NcclError as error:
        return str(error)
    x = child.all_reduce(torch.ones(5))
    return f"{'shm' if shared_of(child) else 'sockets'} {int(x[0])}"


CANNOT = "rank 1 cannot share memory: "
WAYS: list[tuple[Callable[..., str], str, str]] = [
    (opens_nothing, "auto", "sockets 3"),
    (opens_nothing, "shm", CANNOT + "that of rank 0 cannot be opened: No such file or directory"),
    (reserves_nothing, "auto", "sockets 3"),
    (reserves_nothing, "shm", CANNOT + f"{segment.Layout(3).total} bytes of shared memory cannot be"),
    (wants_other, "sockets against auto", "sockets 3"),
    (wants_other, "sockets against shm", CANNOT + "it has PYNCCL_HOST_TRANSPORT=sockets"),
    (wants_other, "fast against auto", "rank 1: PYNCCL_HOST_TRANSPORT='fast': expected auto, shm or sockets"),
]


def all_ways(comm: Communicator) -> None:
    for way, mode, says in WAYS:
        os.environ.pop(TRANSPORT, None)
        parent = comm.split(0, comm.rank)
        assert parent is not None
        assert says in way(parent, mode), (way, mode)
        parent.abort()
        comm.barrier()


def test_where_memory_cannot_be_shared(ranks: RankPool) -> None:
    ranks.run(3, all_ways)


def no_space(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_slots_that_cannot_be_had_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Communicator.init_all(2)
    x = torch.ones(1 << 20)
    slots = segment.SLOTS * segment.SLOT_BYTES
    monkeypatch.setattr(os, "posix_fallocate", no_space)
    with pytest.raises(pynccl.NcclError, match=f"{slots} bytes of shared memory cannot be had: No space left"):
        pair[0].all_reduce(x, x)
    pynccl.abort(pair)


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


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:pynccl")


def leaves_nothing(comm: Communicator) -> None:
    before = sorted(name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-"))

    def state() -> tuple[int, int]:
        gc.collect()
        return len(os.listdir("/proc/self/fd")), mappings()

    for end in ("destroy", "abort"):
        for _ in range(
            10
        ):  # what is made once and stays, and the records of communicators that have ended: the last eight
            child_over(comm, "shm").destroy()
        comm.barrier()
        first = state()
        for _ in range(3):
            child = child_over(comm, "shm")
            child.all_reduce(torch.ones(1 << 18))
            child.all_reduce(torch.ones(4))
            assert mappings() == first[1] + comm.size
            comm.barrier()
            getattr(child, end)()
        assert state() == first
        comm.barrier()
    assert sorted(name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-")) == before


def test_nothing_is_left_after_the_end(ranks: RankPool) -> None:
    ranks.run(3, leaves_nothing)
