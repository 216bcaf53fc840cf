"""Ranks find each other by environment, store, file or process group; what contradicts itself or fails is named."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from meetings import AT_ONCE, end_of, free_port, set_environment, total
from ranks import TORCHRUN, Place, RankPool

import pynccl
from pynccl import Communicator
from pynccl.bindings.workers import Clock
from pynccl.bootstrap import from_process_group
from pynccl.bootstrap.stores import _file_store

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def bare() -> Iterator[RankPool]:
    """Processes that have not met."""
    pool = RankPool(communicators=False)
    yield pool
    pool.close()


# The environment

GOOD = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
RANKS = "expected integers with 0 <= RANK < WORLD_SIZE. torchrun sets both:\n  torchrun --standalone"
PORT = "expected a number in 1..65535, of a port that is free on rank 0's machine"
WRONG: list[tuple[dict[str, str | None], str]] = [
    (dict.fromkeys(GOOD), "RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT not set: this process was not started by"),
    ({"WORLD_SIZE": None}, "WORLD_SIZE not set: this process was not started by torchrun. Start it with\n  torchrun"),
    ({"WORLD_SIZE": None}, "--standalone --nproc-per-node=2 train.py\nor pass rank, size and id yourself to Communi"),
    ({"WORLD_SIZE": None}, "as in a notebook, there is\n  comms = pynccl.init_all()"),
    ({"RANK": "2"}, f"RANK='2', WORLD_SIZE='2': {RANKS}"),
    ({"RANK": "-1"}, f"RANK='-1', WORLD_SIZE='2': {RANKS}"),
    ({"WORLD_SIZE": "0"}, f"RANK='0', WORLD_SIZE='0': {RANKS}"),
    ({"RANK": "one"}, f"RANK='one', WORLD_SIZE='2': {RANKS}"),
    ({"WORLD_SIZE": ""}, f"RANK='0', WORLD_SIZE='': {RANKS}"),
    ({"MASTER_ADDR": ""}, "MASTER_ADDR='': expected the name or address of rank 0's machine, the same on all ranks"),
    ({"MASTER_PORT": "http"}, f"MASTER_PORT='http': {PORT}"),
    ({"MASTER_PORT": "0"}, f"MASTER_PORT='0': {PORT}"),
    ({"MASTER_PORT": "65536"}, f"MASTER_PORT='65536': {PORT}"),
    ({"LOCAL_RANK": "first"}, "LOCAL_RANK='first': expected this rank's number on its machine, 0 or more"),
]


@pytest.mark.parametrize(("changes", "said"), WRONG)
def test_variables_that_cannot_be_right_are_quoted_with_what_was_expected(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, str | None], said: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["-c"])
    for name, value in {**GOOD, **changes}.items():
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    with pytest.raises(pynccl.NcclInvalidUsage) as caught:
        pynccl.init()
    assert said in str(caught.value)


def by_hand(place: Place, port: int) -> list[float]:
    set_environment(place.rank, place.size, port)
    comm = pynccl.init(timeout=50)
    assert (comm.rank, comm.size, comm.timeout) == (place.rank, place.size, 50)
    return [total(comm), total(Communicator.from_env())]


@pytest.mark.parametrize("n", [1, 3])
def test_variables_set_by_hand_suffice(bare: RankPool, n: int) -> None:
    assert bare.run(n, by_hand, free_port()) == [[n * (n + 1) / 2] * 2] * n


SCRIPT = """
import os, pynccl, torch
comm = pynccl.init()
x = torch.full((3,), float(comm.rank + 1))
comm.all_reduce(x, x)
again = pynccl.Communicator.from_env()
assert again.all_gather(torch.tensor([again.rank])).tolist() == list(range(again.size))
with open(f"{os.environ['REPORT']}/{comm.rank}", "w") as report:
    report.write(f"{comm!r} {x.tolist()}")
"""


def test_torchrun_starts_a_job(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "REPORT": str(tmp_path), "PYNCCL_LIBRARY": "host"}
    command = [sys.executable, *TORCHRUN, "--nproc-per-node=2", str(tmp_path / "job.py")]
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert (tmp_path / str(rank)).read_text() == f"<pynccl.Communicator rank {rank} of 2 on cpu> [3.0, 3.0, 3.0]"


# Where the store listens


def answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=2).close()
    except OSError:
        return False
    return True


def serves(place: Place, host: str, port: int) -> tuple[list[str], list[float]]:
    """(where somebody listens, sums that two communicators and a process group at this address come to)."""
    set_environment(place.rank, place.size, port, MASTER_ADDR=host)
    sums = [total(pynccl.init(timeout=50))]
    listening = [one for one in ("127.0.0.1", "127.0.0.2", "::1") if answers(one, port)] if place.rank == 0 else []
    dist.init_process_group("gloo")  # finds its own store at the same port
    x = torch.ones(1)
    dist.all_reduce(x)
    dist.destroy_process_group()
    return listening, [*sums, x.item(), total(pynccl.init(timeout=50))]


@pytest.mark.parametrize(
    ("host", "expected"), [("localhost", ["127.0.0.1"]), ("127.0.0.2", ["127.0.0.2"]), ("::1", ["::1"])]
)
def test_a_job_on_one_machine_listens_on_the_loopback_alone(bare: RankPool, host: str, expected: list[str]) -> None:
    if ":" in host and not os.path.exists("/proc/net/if_inet6"):
        pytest.skip("no IPv6")
    (listening, first), (_, second) = bare.run(2, serves, host, free_port())
    assert listening == expected
    assert first == second == [3.0, 2.0, 3.0]


def shares(place: Place, port: int) -> list[float]:
    """The same with the process group first, whose store is used, and outlived."""
    set_environment(place.rank, place.size, port)
    dist.init_process_group("gloo")
    sums = [total(pynccl.init(timeout=50))]
    dist.barrier()
    dist.destroy_process_group()
    return [*sums, total(pynccl.init(timeout=50))]


def test_the_store_of_a_process_group_is_shared_and_kept(bare: RankPool) -> None:
    assert bare.run(2, shares, free_port()) == [[3.0, 3.0]] * 2


@pytest.mark.parametrize("listening", [True, False])
def test_a_port_in_use_is_named_by_rank_0(monkeypatch: pytest.MonkeyPatch, listening: bool) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        if listening:
            other.listen()
        port = other.getsockname()[1]
        for name, value in {**GOOD, "MASTER_PORT": str(port)}.items():
            monkeypatch.setenv(name, value)
        end = end_of(pynccl.init)
    assert end.error == "NcclSystemError"
    assert f"rank 0 could not serve the ranks' store at 127.0.0.1:{port} (Address already in use)" in end.message
    assert f"or another program, may have the port (ss -ltnp 'sport = :{port}' names it)" in end.message
    assert "or set another MASTER_PORT, or MASTER_ADDR, on all ranks" in end.message


# Other ways to meet


def by_file_store_and_group(place: Place, path: str) -> list[float]:
    store = dist.FileStore(f"{path}.store", place.size)
    results = [
        total(pynccl.from_file(f"{path}.file", place.rank, place.size, timeout=50)),
        total(Communicator.from_file(f"{path}.file", place.rank, place.size, timeout=None)),  # removed, so it is free
        total(Communicator.from_store(dist.PrefixStore("a", store), place.rank, place.size, timeout=50)),
    ]
    dist.init_process_group("gloo", store=dist.PrefixStore("b", store), rank=place.rank, world_size=place.size)
    results.append(total(Communicator.from_process_group()))
    last_two = dist.new_group([place.size - 2, place.size - 1])
    if place.rank >= place.size - 2:
        results.append(total(from_process_group(last_two)))
    mesh = dist.init_device_mesh("cpu", (place.size,))
    results.append(total(from_process_group(mesh)))
    dist.destroy_process_group()
    return results


def test_ranks_meet_in_a_file_at_a_store_and_in_a_process_group(bare: RankPool, tmp_path: Path) -> None:
    found = bare.run(3, by_file_store_and_group, str(tmp_path / "meeting"))
    assert found == [[6.0] * 5, [6.0, 6.0, 6.0, 6.0, 3.0, 6.0], [6.0, 6.0, 6.0, 6.0, 3.0, 6.0]]
    assert [path.name for path in tmp_path.iterdir()] == ["meeting.store"]


def test_the_file_of_a_meeting_which_holds_the_id_is_its_users_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        _file_store(str(tmp_path / "meeting"), Clock(50)).set("id", b"the secret of the ranks")
    finally:
        os.umask(before)
    assert (tmp_path / "meeting").stat().st_mode & 0o777 == 0o600


def test_a_path_where_no_meeting_can_be_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "notes").write_bytes(b"this is no meeting" * 100)
    os.mkfifo(tmp_path / "pipe")
    no_meeting = "is no meeting of ranks: pass the path of a file that does not exist yet"
    for path, error, said in (
        (tmp_path / "notes", "NcclInvalidUsage", no_meeting),
        (tmp_path / "pipe", "NcclInvalidUsage", no_meeting),
        (tmp_path / "none" / "meeting", "NcclSystemError", "No such file or directory"),
        (tmp_path, "NcclSystemError", "Is a directory"),
        (Path("/proc/meeting"), "NcclSystemError", "No such file or directory"),
    ):
        end = end_of(lambda path=path: pynccl.from_file(str(path), 0, 2))
        assert end.error == error and str(path) in end.message and said in end.message, path
        assert end.seconds < AT_ONCE


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), "60"])
def test_a_timeout_that_is_none_is_refused(timeout: object) -> None:
    with pytest.raises(ValueError, match=r"timeout is .*, expected a number of seconds > 0"):
        pynccl.from_file("/nowhere", 0, 1, timeout=timeout)
