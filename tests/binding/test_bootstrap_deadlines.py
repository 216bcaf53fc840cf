"""However the ranks meet, and whatever is silent: the deadline holds, Ctrl-C is heard, the process can end."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from gate import Gate
from meetings import AT_ONCE, End, end_of, free_port, interrupted, set_environment, total
from ranks import Place, RankPool
from torch.distributed.distributed_c10d import _set_pg_timeout

import pynccl
from pynccl.bindings.workers import Clock
from pynccl.bootstrap import from_process_group
from pynccl.bootstrap.rendezvous import Rendezvous

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT = 1.0
LATEST = TIMEOUT + 1.0


@pytest.fixture(scope="module")
def bare() -> Iterator[RankPool]:
    """Processes that have not met."""
    pool = RankPool(communicators=False)
    yield pool
    pool.close()


@pytest.fixture
def silent() -> Iterator[int]:
    """A port where connections are accepted, by the kernel, and nobody ever answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@pytest.fixture
def server() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


# Deadlines


def comes_to_a_silent_port(place: Place, port: int, agent: str) -> End:
    set_environment(1, 2, port, TORCHELASTIC_USE_AGENT_STORE=agent)
    return end_of(lambda: pynccl.init(timeout=TIMEOUT))


@pytest.mark.parametrize(("agent", "server"), [("True", "torchrun's agent"), ("False", "rank 0")])
def test_a_listener_that_never_answers_is_given_up(bare: RankPool, silent: int, agent: str, server: str) -> None:
    [end] = bare.run(1, comes_to_a_silent_port, silent, agent)
    assert end.error == "NcclTimeout"
    assert f"rank 1 reached no store at 127.0.0.1:{silent} within 1 s: has {server} started there?" in end.message
    assert "something listens there, but does not answer as a store" in end.message
    assert end.seconds < LATEST


def comes_to_a_store(place: Place, port: int, own_timeout: float, name: str = "") -> End:
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=30))
    store.set_timeout(timedelta(seconds=own_timeout))
    return end_of(lambda: pynccl.from_store(dist.PrefixStore(name, store), 0, 2, timeout=TIMEOUT))


def test_a_store_that_falls_silent_anywhere_in_the_meeting_is_given_up(bare: RankPool, server: Any) -> None:
    for bytes_passed in (50, 150, 450):
        gate = Gate(server.port, bytes_passed)
        [end] = bare.run(1, comes_to_a_store, gate.port, 300.0, str(bytes_passed))
        gate.close()
        assert gate.was_shut.is_set()
        assert end.error == "NcclTimeout"
        assert "rank 0 of 2 waited 1 s: the store at which the ranks meet does not answer" in end.message
        assert end.seconds < LATEST


@pytest.mark.parametrize("own_timeout", [0.01, 300.0])
def test_the_timeout_of_the_store_itself_does_not_matter(bare: RankPool, server: Any, own_timeout: float) -> None:
    [end] = bare.run(1, comes_to_a_store, server.port, own_timeout)
    assert (end.error, end.message.splitlines()[0]) == (
        "NcclTimeout",
        "rank 0 of 2 waited 1 s: ranks [1] never came",
    )
    assert TIMEOUT <= end.seconds < LATEST


def has_a_peer_that_never_calls(place: Place, path: str, own_timeout: float) -> End:
    store = dist.FileStore(path, 2)
    dist.init_process_group("gloo", store=store, rank=place.rank, world_size=2, timeout=timedelta(seconds=60))
    _set_pg_timeout(timedelta(seconds=own_timeout))  # not for its start, which takes its time on a busy machine
    if place.rank == 0:
        end = end_of(lambda: from_process_group(timeout=TIMEOUT))
        store.set("done", "")
        return end
    store.wait(["done"], timedelta(seconds=30))
    return End("", "", 0.0)


@pytest.mark.parametrize("own_timeout", [1800.0, 0.5])
def test_a_process_group_with_a_late_rank_is_given_up(tmp_path: Path, own_timeout: float) -> None:
    pool = RankPool(communicators=False)  # its ranks are left with a group that does not answer
    end, _ = pool.run(2, has_a_peer_that_never_calls, str(tmp_path / "group"), own_timeout)
    pool.close()
    assert end.error == "NcclTimeout"
    assert "rank 0 of 2 waited 1 s: ranks [1] never came" in end.message
    assert end.seconds < LATEST


# A file


def test_a_file_with_something_else_in_it_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "notes").write_bytes(b"this is no meeting" * 100)
    end = end_of(lambda: pynccl.from_file(str(tmp_path / "notes"), 0, 2))
    assert end.error == "NcclInvalidUsage"
    assert f"{tmp_path}/notes is no meeting of ranks: pass the path of a file that does not exist yet" in end.message
    assert end.seconds < AT_ONCE


def test_a_path_where_no_file_can_be_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, said in {
        tmp_path / "none" / "meeting": "No such file or directory",
        tmp_path: "Is a directory",
        Path("/proc/meeting"): "No such file or directory",
        tmp_path / "pipe": "is no meeting of ranks: pass the path of a file that does not exist yet",
    }.items():
        end = end_of(lambda path=path: pynccl.from_file(str(path), 0, 2))
        assert end.error in ("NcclSystemError", "NcclInvalidUsage")
        assert str(path) in end.message and said in end.message
        assert end.seconds < AT_ONCE


def test_a_file_whose_lock_is_never_free_is_given_up(tmp_path: Path) -> None:
    with (tmp_path / "meeting").open("w") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        end = end_of(lambda: pynccl.from_file(str(tmp_path / "meeting"), 0, 2, timeout=0.5))
    assert end.error == "NcclTimeout"
    assert f"the lock of {tmp_path}/meeting, where the ranks meet, was not free within 0.5 s" in end.message
    assert end.seconds < 1.5


def test_a_file_left_over_from_an_earlier_run_is_named(tmp_path: Path) -> None:
    path = str(tmp_path / "meeting")
    assert end_of(lambda: pynccl.from_file(path, 0, 2, timeout=0.2)).error == "NcclTimeout"
    end = end_of(lambda: pynccl.from_file(path, 0, 2))
    assert end.error == "NcclInvalidUsage"
    assert "two processes say that they are rank 0: process " in end.message
    assert f"or {path} is left over from an earlier run: remove it" in end.message


def meets_twice(place: Place, path: str) -> list[float]:
    return [total(pynccl.from_file(path, place.rank, place.size, timeout=timeout)) for timeout in (20, None)]


def test_a_file_is_removed_when_all_have_met(bare: RankPool, tmp_path: Path) -> None:
    assert bare.run(2, meets_twice, str(tmp_path / "meeting")) == [[3.0, 3.0]] * 2
    assert not list(tmp_path.iterdir())


def test_a_file_store_of_torch_whose_lock_is_never_free_is_given_up(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 2)
    with (tmp_path / "store").open("a") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        end = end_of(lambda: pynccl.from_store(store, 0, 2, timeout=0.5))
    assert end.error == "NcclTimeout"
    assert "rank 0 of 2 waited 0.5 s: the store at which the ranks meet does not answer" in end.message
    assert end.seconds < 1.5


def test_threads_meet_at_a_hash_store() -> None:
    store, ends = dist.HashStore(), {}

    def comes(rank: int) -> None:
        ends[rank] = end_of(lambda: total(pynccl.from_store(store, rank, 2, timeout=20)))

    threads = [threading.Thread(target=comes, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [ends[rank].message for rank in range(2)] == ["", ""]


# Ctrl-C


def is_interrupted(place: Place, silent: int, store: int, path: str) -> list[float]:
    """Seconds that each way of meeting goes on after Ctrl-C."""
    set_environment(1, 2, silent)
    seconds = [interrupted(pynccl.init)]
    set_environment(1, 2, free_port())
    seconds.append(interrupted(pynccl.init))
    gate = Gate(store)
    client = dist.TCPStore("127.0.0.1", gate.port, is_master=False)
    seconds.append(interrupted(lambda: pynccl.from_store(dist.PrefixStore("a", client), 0, 2)))
    gate.shut()
    seconds.append(interrupted(lambda: pynccl.from_store(dist.PrefixStore("b", client), 0, 2)))
    gate.close()
    seconds.append(interrupted(lambda: pynccl.from_file(path, 0, 2)))
    with Path(path).open("a") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        seconds.append(interrupted(lambda: pynccl.from_file(path, 1, 2)))
    return seconds


def test_ctrl_c_ends_every_wait(bare: RankPool, silent: int, server: Any, tmp_path: Path) -> None:
    [seconds] = bare.run(1, is_interrupted, silent, server.port, str(tmp_path / "meeting"))
    assert len(seconds) == 6
    assert max(seconds) < 1, seconds


def one_is_interrupted(place: Place, port: int) -> Any:
    set_environment(place.rank, 3, port)
    return interrupted(pynccl.init, after=1.0) if place.rank == 1 else end_of(pynccl.init)


def test_the_others_hear_of_a_rank_that_was_interrupted(bare: RankPool) -> None:
    end, seconds = bare.run(2, one_is_interrupted, free_port())
    assert (end.error, end.message) == ("NcclRemoteError", "rank 1 was interrupted (Ctrl-C)")
    assert seconds < 1
    assert end.seconds < AT_ONCE


def interrupted_in_a_group(place: Place, path: str) -> float:
    store = dist.FileStore(path, 2)
    dist.init_process_group("gloo", store=store, rank=place.rank, world_size=2)
    if place.rank == 0:
        seconds = interrupted(from_process_group)
        store.set("done", "")
        return seconds
    store.wait(["done"], timedelta(seconds=30))
    return 0.0


def test_ctrl_c_is_heard_while_a_process_group_waits(tmp_path: Path) -> None:
    pool = RankPool(communicators=False)
    assert max(pool.run(2, interrupted_in_a_group, str(tmp_path / "group"))) < 1
    pool.close()


# The end of the process

ENDS = """
import os, sys, time
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
    assert "NcclTimeout: rank 0 of 2 waited " in done.stderr
    assert "the store at which the ranks meet does not answer" in done.stderr
    assert "terminate" not in done.stderr


class Slow(dict[str, str]):
    """A store that answers late, as one on another continent or on a busy machine."""

    def add(self, key: str, amount: int) -> int:
        time.sleep(0.4)
        self[key] = str(int(self.get(key, "0")) + amount)
        return int(self[key])

    def set(self, key: str, value: str) -> None:
        time.sleep(0.4)
        self[key] = value


def test_a_rank_that_cannot_start_tells_it_to_a_slow_store() -> None:
    store = Slow()
    Rendezvous(store, 1, 2, Clock(30), "a server", "come once").report(ValueError("no such device"))
    assert store["over"] == "remote\nrank 1 could not start: ValueError: no such device"
