"""However the ranks meet, and whatever fails or is silent: the deadline holds, Ctrl-C is heard, the others hear why."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from gate import Gate
from meetings import AT_ONCE, End, end_of, free_port, interrupted, set_environment
from ranks import Place, RankPool

import pynccl
from pynccl import Communicator
from pynccl.bootstrap import from_process_group

TIMEOUT = 1.0
PROCESSES = 8
LATE = "NcclTimeout"

# What one process waits for, at a path of its own


def comes(host: str, port: int, timeout: float = TIMEOUT, agent: str = "False") -> End:
    """Rank 1 of 2, to a launch whose store is not there."""
    set_environment(1, 2, port, MASTER_ADDR=host, TORCHELASTIC_USE_AGENT_STORE=agent)
    return end_of(lambda: pynccl.init(timeout=timeout))


def comes_to_a_listener(words: bytes, **options: Any) -> End:
    """Who listens says this to all who come, and nothing more."""
    clients = []

    def speak() -> None:
        with contextlib.suppress(OSError):
            while True:
                clients.append(listener.accept()[0])
                clients[-1].sendall(words)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=speak, daemon=True).start()
        return comes("127.0.0.1", listener.getsockname()[1], **options)


def comes_to_a_store(ended_by: Callable[..., End] = end_of) -> End:
    """Which falls silent after some bytes."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    gate = Gate(server.port, 150)
    store = dist.TCPStore("127.0.0.1", gate.port, is_master=False, timeout=timedelta(seconds=30))
    end = ended_by(lambda: pynccl.from_store(store, 0, 2, timeout=TIMEOUT if ended_by is end_of else 60))
    assert gate.was_shut.is_set()
    return end


@contextlib.contextmanager
def locked(path: str) -> Iterator[None]:
    with open(path, "a") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        yield


def finds_a_locked_file(path: str, ended_by: Callable[..., End] = end_of) -> End:
    with locked(path):
        return ended_by(lambda: pynccl.from_file(path, 0, 2, timeout=TIMEOUT if ended_by is end_of else 60))


def finds_a_file_left_over(path: str) -> End:
    first = end_of(lambda: pynccl.from_file(path, 0, 2, timeout=0.2))
    assert first.message.splitlines()[0] == "rank 0 of 2 waited 0.2 s: ranks [1] never came"
    return end_of(lambda: pynccl.from_file(path, 0, 2))


def nobody_comes(path: str) -> End:
    set_environment(1, 2, free_port())
    return interrupted(pynccl.init)


SILENT = "something listens there, but does not answer as a store"
# How the call ends, and parts of what it says, {} being the file's path. What has a timeout of 60 ends at once.
WAITS: dict[str, tuple[Callable[[str], End], str, tuple[str, ...]]] = {
    "no name": (
        lambda path: comes("no-such-host.invalid", 1),
        LATE,
        ("rank 1 reached no store at no-such-host.invalid:1 within 1 s", "'no-such-host.invalid' does not resolve: "),
    ),
    "nobody": (
        lambda path: comes("127.0.0.1", free_port()),
        LATE,
        ("within 1 s: has rank 0 started there? (Connection refused)",),
    ),
    "silent": (
        lambda path: comes_to_a_listener(b"", agent="True"),
        LATE,
        ("has torchrun's agent started there?", SILENT),
    ),
    "ssh": (
        lambda path: comes_to_a_listener(b"SSH-2.0-OpenSSH_9.9\r\n", timeout=60),
        "NcclSystemError",
        ("is no torch.distributed store, so the ranks", "127.0.0.1:"),
    ),
    "silent store": (
        lambda path: comes_to_a_store(),
        LATE,
        ("rank 0 of 2 waited 1 s: the store at which the ranks meet does not answer",),
    ),
    "locked file": (finds_a_locked_file, LATE, ("the lock of {}, where the ranks meet, was not free within 1 s",)),
    "file left over": (
        finds_a_file_left_over,
        "NcclInvalidUsage",
        ("two processes say that they are rank 0: process ", "or {} is left over from an earlier run: remove it"),
    ),
    "id": (
        lambda path: end_of(lambda: Communicator.init(3, pynccl.get_unique_id(), 1, timeout=TIMEOUT)),
        LATE,
        ("ncclCommInitRank(rank=1, nranks=3) did not return within 1 s (timeout=1)", "[0, 2]", "were all ranks start"),
    ),
    "ctrl-c, port": (nobody_comes, "KeyboardInterrupt", ()),
    "ctrl-c, lock": (lambda path: finds_a_locked_file(path, interrupted), "KeyboardInterrupt", ()),
    "ctrl-c, silent store": (lambda path: comes_to_a_store(interrupted), "KeyboardInterrupt", ()),
}


def waits(place: Place, folder: str) -> dict[str, End]:
    """How one in PROCESSES of them ends."""
    return {name: WAITS[name][0](f"{folder}/{name}") for name in list(WAITS)[place.rank :: place.size]}


def test_every_wait_ends_by_its_deadline_or_by_ctrl_c_and_says_what_it_was_for(tmp_path: Path) -> None:
    pool = RankPool(communicators=False)  # some are left with a store that does not answer
    ends = {name: end for some in pool.run(PROCESSES, waits, str(tmp_path)) for name, end in some.items()}
    pool.close()
    for name, (_, error, says) in WAITS.items():
        end = ends[name]
        assert end.error == error, (name, end)
        for part in says:
            assert part.format(tmp_path / name) in end.message, (name, end)
        assert "Exception raised from" not in end.message  # torch's trace
        assert end.seconds > TIMEOUT - 0.1 or error != LATE, (name, end)
        assert end.seconds < AT_ONCE, (name, end)


# Ranks that cannot go on, contradict each other or never come


def cannot_start(place: Place, port: int, broken: int, path: str) -> End:
    """By a process group if there is a path for its store."""
    set_environment(place.rank, place.size, port)
    if path:
        dist.init_process_group("gloo", store=dist.FileStore(path, place.size), rank=place.rank, world_size=place.size)
    if place.rank == broken:
        os.environ["PYNCCL_LIBRARY"] = "/nowhere/libnccl.so.2"
    end = end_of(from_process_group if path else pynccl.init)
    if path:
        dist.destroy_process_group()
    return end


@pytest.mark.parametrize(("broken", "by_group"), [(0, False), (2, False), (0, True)])
def test_a_rank_that_cannot_start_tells_the_others(bare: RankPool, tmp_path: Path, broken: int, by_group: bool) -> None:
    path = str(tmp_path / "group") if by_group else ""
    for rank, end in enumerate(bare.run(3, cannot_start, free_port(), broken, path)):
        assert end.error == ("NcclLibraryNotFound" if rank == broken else "NcclRemoteError")
        assert "PYNCCL_LIBRARY=/nowhere/libnccl.so.2: " in end.message
        assert rank == broken or f"rank {broken} could not start: NcclLibraryNotFound: " in end.message
        assert end.seconds < AT_ONCE


def claims(place: Place, port: int, said: list[tuple[int, int]]) -> End:
    set_environment(*said[place.rank], port)
    return end_of(pynccl.init)


def test_ranks_that_contradict_each_other_all_hear_of_it(bare: RankPool) -> None:
    for said, word in (
        ([(0, 2), (1, 3)], ") says 3: WORLD_SIZE, or nranks, has to be the same on"),
        ([(0, 3), (1, 3), (1, 3)], "two processes say that they are rank 1: process "),
    ):
        for end in bare.run(len(said), claims, free_port(), said):
            assert end.error == "NcclInvalidUsage" and word in end.message
            assert end.seconds < AT_ONCE


def outlives_rank_0(place: Place, port: int) -> End:
    set_environment(place.rank, 3, port)
    if place.rank == 0:
        end_of(lambda: pynccl.init(timeout=1))
        os._exit(0)
    return end_of(pynccl.init)


def test_the_end_of_the_process_that_serves_the_store_is_noticed(bare: RankPool) -> None:
    first, second = bare.outcomes(2, outlives_rank_0, free_port())
    assert "died: exit code 0" in first.report
    assert second.value.error == "NcclRemoteError" and second.value.seconds < AT_ONCE
    assert "rank 1 of 3 lost the store at which the ranks meet" in second.value.message
    assert "rank 0, or torchrun's agent) has ended; look for its first error" in second.value.message
