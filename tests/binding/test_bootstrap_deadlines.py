"""However the ranks meet, and whatever is silent: the deadline holds, Ctrl-C is heard, the others hear why."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import sys
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

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT = 1.0
PROCESSES = 12


@pytest.fixture
def bare() -> Iterator[RankPool]:
    """Processes of their own for each test: some are left with a group that does not answer."""
    pool = RankPool(communicators=False)
    yield pool
    pool.close()


# What one process waits for, in a folder of its own


def comes(host: str, port: int, timeout: float | None = TIMEOUT, agent: str = "False") -> End:
    """Rank 1 of 2, to a launch whose store is not there."""
    set_environment(1, 2, port, MASTER_ADDR=host, TORCHELASTIC_USE_AGENT_STORE=agent)
    return end_of(lambda: pynccl.init(timeout=timeout) if timeout else pynccl.init())


def comes_to_a_listener(words: bytes | None, hears_first: bool = False, **options: Any) -> End:
    """Who listens says this, or goodbye; None: nothing ever."""
    clients = []

    def speak() -> None:
        with contextlib.suppress(OSError):
            while True:
                clients.append(listener.accept()[0])
                if hears_first:
                    clients[-1].recv(1)
                clients[-1].sendall(words or b"")
                if not words:
                    clients.pop().close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        if words is not None:
            threading.Thread(target=speak, daemon=True).start()
        return comes("127.0.0.1", listener.getsockname()[1], **options)


def comes_to_a_store(bytes_passed: int | None = None, own_timeout: float = 300.0) -> End:
    """Which falls silent after so many bytes, and has a timeout of its own."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    gate = Gate(server.port, bytes_passed)
    store = dist.TCPStore("127.0.0.1", gate.port, is_master=False, timeout=timedelta(seconds=30))
    store.set_timeout(timedelta(seconds=own_timeout))
    end = end_of(lambda: pynccl.from_store(store, 0, 2, timeout=TIMEOUT))
    assert gate.was_shut.is_set() == (bytes_passed is not None)
    return end


@contextlib.contextmanager
def locked(path: str) -> Iterator[None]:
    with open(path, "a") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        yield


def finds_a_locked_file(path: str) -> End:
    with locked(path):
        return end_of(lambda: pynccl.from_file(path, 0, 2, timeout=TIMEOUT))


def finds_a_locked_store(path: str) -> End:
    store = dist.FileStore(path, 2)
    with locked(path):
        return end_of(lambda: pynccl.from_store(store, 0, 2, timeout=TIMEOUT))


def finds_a_file_left_over(path: str) -> End:
    first = end_of(lambda: pynccl.from_file(path, 0, 2, timeout=0.2))
    assert (first.error, first.message.splitlines()[0]) == (
        "NcclTimeout",
        "rank 0 of 2 waited 0.2 s: ranks [1] never came",
    )
    return end_of(lambda: pynccl.from_file(path, 0, 2))


def ctrl_c(path: str, kind: str) -> End:
    set_environment(1, 2, free_port())
    if kind == "port":
        return interrupted(pynccl.init)
    if kind == "lock":
        with locked(path):
            return interrupted(lambda: pynccl.from_file(path, 1, 2))
    if kind == "file":
        return interrupted(lambda: pynccl.from_file(path, 0, 2))
    if kind == "listener":
        with socket.create_server(("127.0.0.1", 0)) as listener:
            set_environment(1, 2, listener.getsockname()[1])
            return interrupted(pynccl.init)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    gate = Gate(server.port)
    client = dist.TCPStore("127.0.0.1", gate.port, is_master=False)
    if kind == "silent store":
        gate.shut()
    return interrupted(lambda: pynccl.from_store(client, 0, 2))


LATE, NO_STORE = "NcclTimeout", "is no torch.distributed store, so the ranks"
SILENT = "something listens there, but does not answer as a store"
NO_ANSWER = "rank 0 of 2 waited 1 s: the store at which the ranks meet does not answer"
NEVER_CAME = "rank 0 of 2 waited 1 s: ranks [1] never came"
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
    "silent": (lambda path: comes_to_a_listener(None), LATE, ("has rank 0 started there?", SILENT)),
    "agent": (
        lambda path: comes_to_a_listener(None, agent="True"),
        LATE,
        ("has torchrun's agent started there?", SILENT),
    ),
    "closes": (lambda path: comes_to_a_listener(b""), LATE, (f"{SILENT}, or closes",)),
    "web server": (
        lambda path: comes_to_a_listener(b"HTTP/1.1 400 Bad Request\r\n\r\n", True, timeout=None),
        "NcclSystemError",
        (NO_STORE, "127.0.0.1:"),
    ),
    "ssh": (
        lambda path: comes_to_a_listener(b"SSH-2.0-OpenSSH_9.9\r\n", timeout=None),
        "NcclSystemError",
        (NO_STORE, "127.0.0.1:"),
    ),
    "silent at first": (lambda path: comes_to_a_store(50), LATE, (NO_ANSWER,)),
    "silent soon": (lambda path: comes_to_a_store(150), LATE, (NO_ANSWER,)),
    "silent at last": (lambda path: comes_to_a_store(450), LATE, (NO_ANSWER,)),
    "short timeout of its own": (lambda path: comes_to_a_store(None, 0.01), LATE, (NEVER_CAME,)),
    "long timeout of its own": (lambda path: comes_to_a_store(None), LATE, (NEVER_CAME,)),
    "locked file": (
        finds_a_locked_file,
        LATE,
        ("the lock of {}, where the ranks meet, was not free within 1 s",),
    ),
    "locked store": (finds_a_locked_store, LATE, (NO_ANSWER,)),
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
    **{
        f"ctrl-c, {kind}": (lambda path, kind=kind: ctrl_c(path, kind), "KeyboardInterrupt", ())  # type: ignore[misc]
        for kind in ("port", "lock", "file", "listener", "store", "silent store")
    },
}


def waits(place: Place, folder: str) -> dict[str, End]:
    """How one in PROCESSES of them ends."""
    return {name: WAITS[name][0](f"{folder}/{name}") for name in list(WAITS)[place.rank :: place.size]}


def test_every_wait_ends_by_its_deadline_or_by_ctrl_c_and_says_what_it_was_for(bare: RankPool, tmp_path: Path) -> None:
    ends = {name: end for some in bare.run(PROCESSES, waits, str(tmp_path)) for name, end in some.items()}
    for name, (_, error, says) in WAITS.items():
        end = ends[name]
        assert end.error == error, (name, end)
        for part in says:
            assert part.format(tmp_path / name) in end.message, (name, end)
        assert "Exception raised from" not in end.message  # torch's trace
        assert end.seconds > TIMEOUT - 0.1 or error != LATE, (name, end)
        assert end.seconds < AT_ONCE, (name, end)


# The end of the process

ENDS = """
import sys, time
import torch.distributed as dist
import pynccl
from gate import Gate

server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
gate = Gate(server.port)
store = dist.TCPStore("127.0.0.1", gate.port, is_master=False)
gate.shut()

class Last:  # goes when the interpreter is past all exit handlers, and wakes up who waits for the store
    def __init__(self, sockets, sleep=time.sleep):
        self.sockets, self.sleep = sockets, sleep

    def __del__(self):
        for one in self.sockets:
            one.shutdown(2)
        self.sleep(0.3)

sys.last = Last(gate._sockets)
pynccl.from_store(store, 0, 2, timeout=0.5)
"""


def test_a_call_that_was_left_behind_does_not_crash_the_end_of_the_process(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(ENDS)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'support'}"}
    command = [sys.executable, str(tmp_path / "job.py")]
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1, (done.returncode == -signal.SIGABRT, done.stderr)
    assert "the store at which the ranks meet does not answer" in done.stderr
    assert "terminate" not in done.stderr
