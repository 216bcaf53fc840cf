"""Who may map a rank's memory, what happens where that cannot be had, and what is left of it at the end."""

from __future__ import annotations

import errno
import gc
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from host_calls import child_over, shared_of
from ranks import HOST, RankPool

import pynccl
from pynccl import Communicator
from pynccl.host import segment, sharing

ROOT = Path(__file__).parents[2]


# Who may have it


def refuse(*_: object) -> None:
    raise OSError(errno.ENOENT, "No such file or directory", "/proc/1/fd/2")


def cannot_open(comm: Communicator, mode: str) -> str:
    """One rank cannot open what the others have."""
    if comm.rank == 1:
        vars(sharing)["open_segment"] = refuse
    return made_or_refused(comm, mode)


def cannot_reserve(comm: Communicator, mode: str) -> str:
    """One rank gets no memory."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if comm.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (segment.Layout(comm.size).total // 2, hard))
    try:
        return made_or_refused(comm, mode)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def speaks_nonsense(comm: Communicator, mode: str) -> str:
    return made_or_refused(comm, mode if comm.rank == 1 else "auto")


def wants_sockets(comm: Communicator, mode: str) -> str:
    return made_or_refused(comm, "sockets" if comm.rank == 1 else mode)


def made_or_refused(comm: Communicator, mode: str) -> str:
    try:
        child = child_over(comm, mode)
    except pynccl.NcclError as error:
        return str(error)
    x = child.all_reduce(torch.ones(5))
    return f"{'shm' if shared_of(child) else 'sockets'} {int(x[0])}"


@pytest.fixture
def spoilt() -> Iterator[RankPool]:
    pool = RankPool(HOST)
    yield pool
    pool.close()


@pytest.mark.parametrize(
    ("way", "mode", "says"),
    [
        (cannot_open, "auto", "sockets 3"),
        (cannot_open, "shm", "rank 1 cannot share memory: that of rank 0 cannot be opened: No such file or directory"),
        (cannot_reserve, "auto", "sockets 3"),
        (
            cannot_reserve,
            "shm",
            f"rank 1 cannot share memory: {segment.Layout(3).total} bytes of shared memory cannot be",
        ),
        (wants_sockets, "auto", "sockets 3"),
        (wants_sockets, "shm", "rank 1 cannot share memory: it has PYNCCL_HOST_TRANSPORT=sockets"),
        (speaks_nonsense, "fast", "rank 1: PYNCCL_HOST_TRANSPORT='fast': expected auto, shm or sockets"),
    ],
)
def test_where_memory_cannot_be_shared(spoilt: RankPool, way: Callable[..., str], mode: str, says: str) -> None:
    for text in spoilt.run(3, way, mode):
        assert says in text


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


STRANGER = """
    import os, sys
    sys.path.insert(0, sys.argv[1])
    from pynccl.host.segment import OwnSegment, open_segment
    own = OwnSegment(2)
    assert open_segment(os.getpid(), own.fd, own.token, 2).token == own.token
    try:
        open_segment(os.getpid(), own.fd, bytes(16), 2)
    except OSError as error:
        print("token:", "another rank" in str(error), flush=True)
    try:
        open_segment(os.getpid(), os.open("/etc/passwd", os.O_RDONLY), own.token, 2)
    except OSError as error:
        print("file:", "another file" in str(error), flush=True)
    if (child := os.fork()) == 0:
        os.setgid(65534)
        os.setuid(65534)
        try:
            open_segment(os.getppid(), own.fd, own.token, 2)
        except PermissionError:
            os._exit(7)
        os._exit(0)
    print("user:", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
def test_only_the_same_user_and_only_the_right_memory_is_opened() -> None:
    code = "\n".join(line[4:] for line in STRANGER.splitlines())
    found = subprocess.run(
        [sys.executable, "-c", code, str(ROOT)], check=False, capture_output=True, text=True, timeout=60
    )
    assert (found.stdout, found.returncode) == ("token: True\nfile: True\nuser: 7\n", 0), found.stderr


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
