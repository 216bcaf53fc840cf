"""For every rendezvous method and failure: the deadline holds, Ctrl-C works, and all ranks report the reason."""

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
from ranks import Place, RankPool
from rendezvous_servers import AT_ONCE, End, end_of, free_port, interrupted, set_environment

import pynccl
from pynccl import Communicator
from pynccl.bootstrap import env, from_process_group

TIMEOUT = 1.0
PROCESSES = 8
LATE = "NcclTimeout"

# Waits of a single process, each with its own path


def join_absent_store(host: str, port: int, timeout: float = TIMEOUT, agent: str = "False") -> End:
    """Join as rank 1 of 2 a launch without a store."""
    set_environment(1, 2, port, MASTER_ADDR=host, TORCHELASTIC_USE_AGENT_STORE=agent)
    return end_of(lambda: pynccl.init(timeout=timeout))


def join_other_server(words: bytes, **options: Any) -> End:
    """Join at a port whose server sends `words` to every client and nothing else."""
    clients = []

    def speak() -> None:
        with contextlib.suppress(OSError):
            while True:
                clients.append(listener.accept()[0])
                clients[-1].sendall(words)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=speak, daemon=True).start()
        return join_absent_store("127.0.0.1", listener.getsockname()[1], **options)


def join_silent_store(ended_by: Callable[..., End] = end_of) -> End:
    """Join at a store that stops answering after 150 bytes."""
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


def join_locked_file(path: str, ended_by: Callable[..., End] = end_of) -> End:
    with locked(path):
        return ended_by(lambda: pynccl.from_file(path, 0, 2, timeout=TIMEOUT if ended_by is end_of else 60))


def join_stale_file(path: str) -> End:
    first = end_of(lambda: pynccl.from_file(path, 0, 2, timeout=0.2))
    assert first.message.splitlines()[0] == "rank 0 of 2 waited 0.2 s: ranks [1] never joined"
    return end_of(lambda: pynccl.from_file(path, 0, 2, timeout=TIMEOUT))


def join_alone(path: str) -> End:
    set_environment(1, 2, free_port())
    return interrupted(pynccl.init)


SILENT = "the port is open, but no store answers"
# Call, expected error, parts of its message ({} is the file's path). Calls with a timeout of 60 must end at once.
WAITS: dict[str, tuple[Callable[[str], End], str, tuple[str, ...]]] = {
    "no name": (
        lambda path: join_absent_store("no-such-host.invalid", 1),
        LATE,
        (
            "rank 1 could not connect to the store at no-such-host.invalid:1 within 1 s",
            "'no-such-host.invalid' does not resolve: ",
        ),
    ),
    "nobody": (
        lambda path: join_absent_store("127.0.0.1", free_port()),
        LATE,
        ("within 1 s: has rank 0 started there? (Connection refused)",),
    ),
    "silent": (
        lambda path: join_other_server(b"", agent="True"),
        LATE,
        ("has torchrun's agent started there?", SILENT),
    ),
    "ssh": (
        lambda path: join_other_server(b"SSH-2.0-OpenSSH_9.9\r\n", timeout=60),
        "NcclSystemError",
        ("is not a torch.distributed store: another program uses", "127.0.0.1:"),
    ),
    "silent store": (
        lambda path: join_silent_store(),
        LATE,
        ("rank 0 of 2 waited 1 s: the rendezvous store does not answer",),
    ),
    "locked file": (join_locked_file, LATE, ("the lock of the rendezvous file {} was not released within 1 s",)),
    "file left over": (
        join_stale_file,  # the file can be used again
        LATE,
        ("rank 0 of 2 waited 1 s: ranks [1] never joined",),
    ),
    "id": (
        lambda path: end_of(lambda: Communicator.init(3, pynccl.get_unique_id(), 1, timeout=TIMEOUT)),
        LATE,
        ("ncclCommInitRank(rank=1, nranks=3) did not return within 1 s (timeout=1)", "[0, 2]", "were all ranks start"),
    ),
    "ctrl-c, port": (join_alone, "KeyboardInterrupt", ()),
    "ctrl-c, lock": (lambda path: join_locked_file(path, interrupted), "KeyboardInterrupt", ()),
    "ctrl-c, silent store": (lambda path: join_silent_store(interrupted), "KeyboardInterrupt", ()),
}


def run_cases(place: Place, folder: str) -> dict[str, End]:
    """Run this rank's share of WAITS and return how each ended."""
    return {name: WAITS[name][0](f"{folder}/{name}") for name in list(WAITS)[place.rank :: place.size]}


def test_rendezvous_waits_end_at_deadline_or_ctrl_c(tmp_path: Path) -> None:
    pool = RankPool(communicators=False)  # a separate pool, since some ranks keep an unresponsive store
    ends = {name: end for some in pool.run(PROCESSES, run_cases, str(tmp_path)) for name, end in some.items()}
    pool.close()
    for name, (_, error, parts) in WAITS.items():
        end = ends[name]
        assert end.error == error, (name, end)
        for part in parts:
            assert part.format(tmp_path / name) in end.message, (name, end)
        assert "Exception raised from" not in end.message  # torch's C++ trace
        assert end.seconds > TIMEOUT - 0.1 or error != LATE, (name, end)
        assert end.seconds < AT_ONCE, (name, end)


# Ranks that cannot start, contradict each other or exit


def init_with_broken_rank(place: Place, port: int, broken: int, path: str) -> End:
    """Join, through a process group if there is a path for its store, while one rank has no library."""
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
def test_startup_failure_is_reported_on_all_ranks(
    processes: RankPool, tmp_path: Path, broken: int, by_group: bool
) -> None:
    path = str(tmp_path / "group") if by_group else ""
    for rank, end in enumerate(processes.run(3, init_with_broken_rank, free_port(), broken, path)):
        assert end.error == ("NcclLibraryNotFound" if rank == broken else "NcclRemoteError")
        assert "PYNCCL_LIBRARY=/nowhere/libnccl.so.2: " in end.message
        assert rank == broken or f"rank {broken} could not start: NcclLibraryNotFound: " in end.message
        assert rank == broken or end.frames <= 2  # the user reads the message, not how it came here
        assert end.seconds < AT_ONCE


def init_with_claims(place: Place, port: int, claims: list[tuple[int, int]]) -> End:
    set_environment(*claims[place.rank], port)
    return end_of(pynccl.init)


def test_contradicting_ranks_raise_on_all_ranks(processes: RankPool) -> None:
    for claims, word in (
        ([(0, 2), (1, 3)], ") has 3: WORLD_SIZE (or nranks) must be the same on"),
        ([(0, 3), (1, 3), (1, 3)], "two processes have rank 1: process "),
    ):
        for end in processes.run(len(claims), init_with_claims, free_port(), claims):
            assert end.error == "NcclInvalidUsage" and word in end.message
            assert end.seconds < AT_ONCE


def lose_rank_0(place: Place, port: int) -> End:
    set_environment(place.rank, 3, port)
    if place.rank == 0:
        serve = threading.Thread(target=lambda: pynccl.init(timeout=50), daemon=True)
        serve.start()
        while not (stores := [store for launch, store in env._stores.items() if str(port) in launch]):
            serve.join(0.01)
        while not stores[0].check(["1/rank/1/1"]):  # until rank 1 has joined; wait() would block the other thread
            serve.join(0.01)
        os._exit(0)
    return end_of(pynccl.init)


def test_exit_of_store_process_raises(processes: RankPool) -> None:
    first, second = processes.outcomes(2, lose_rank_0, free_port())
    assert "died: exit code 0" in first.report
    assert second.value.error == "NcclRemoteError" and second.value.seconds < AT_ONCE
    assert "rank 1 of 3 lost the rendezvous store" in second.value.message
    assert "rank 0, or torchrun's agent) has exited; look for its first error" in second.value.message
