"""Ranks rendezvous by environment, store, file, process group or MPI; errors name contradictory settings."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from ranks import TORCHRUN, Place, RankPool
from rendezvous_servers import AT_ONCE, End, end_of, free_port, set_environment, total

import pynccl
from pynccl import Communicator
from pynccl.bindings.workers import Clock
from pynccl.bootstrap import env, from_process_group
from pynccl.bootstrap.stores import _file_store

ROOT = Path(__file__).resolve().parents[2]

# The environment

GOOD = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
RANKS = "expected integers with 0 <= RANK < WORLD_SIZE. torchrun sets both:\n  torchrun --standalone"
PORT = "expected a number in 1..65535: a free port on rank 0's node, the same on all ranks"
WRONG: list[tuple[dict[str, str | None], str]] = [
    (dict.fromkeys(GOOD), "RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT not set: this process was not started by"),
    ({"WORLD_SIZE": None}, "--standalone --nproc-per-node=2 train.py\nor call Communicator.init with nranks"),
    ({**dict.fromkeys(GOOD), "SLURM_PROCID": "1", "PMI_RANK": "1"}, "srun sets SLURM_PROCID instead. Start it with\n"),
    ({**dict.fromkeys(GOOD), "SLURM_PROCID": "1"}, "  scripts/examples/multi_node.sh srun train.py\nor call"),
    ({"RANK": None, "SLURM_PROCID": "0", "OMPI_COMM_WORLD_RANK": "1"}, "multi_node.sh mpirun HOST:RANKS,HOST:RANKS"),
    ({"RANK": None, "PMI_RANK": "1"}, "mpirun sets PMI_RANK instead"),
    ({"RANK": None, "PMI_RANK": "1"}, "train.py\nor call Communicator.from_mpi (mpi4py)."),
    ({"RANK": None, "PET_NODE_RANK": "1"}, "sets PET_NODE_RANK instead. Start it with\n  torchrun train.py\n"),
    ({"RANK": "2"}, f"RANK='2', WORLD_SIZE='2': {RANKS}"),
    ({"MASTER_ADDR": ""}, "MASTER_ADDR='': expected the name or address of rank 0's node, the same on all ranks"),
    ({"MASTER_PORT": "http"}, f"MASTER_PORT='http': {PORT}"),
    ({"LOCAL_RANK": "first"}, "LOCAL_RANK='first': expected this rank's index on its node, 0 or more"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG)
def test_invalid_environment_variables_are_quoted_in_error(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, str | None], message: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["-c"])
    launchers = dict.fromkeys((variable for variable, *_ in env._LAUNCHERS), None)  # the tests may run in a job
    for name, value in {**launchers, **GOOD, **changes}.items():
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    with pytest.raises(pynccl.NcclInvalidUsage) as caught:
        pynccl.init()
    assert message in str(caught.value)


SCRIPT = """
import os, pynccl, torch
comm = pynccl.init()
x = torch.full((3,), float(comm.rank + 1))
comm.all_reduce(x, x)
with open(f"{os.environ['REPORT']}/{comm.rank}", "w") as report:
    report.write(f"{comm!r} {x.tolist()}")
"""


def test_init_under_torchrun(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "REPORT": str(tmp_path), "PYNCCL_LIBRARY": "host"}
    command = [sys.executable, *TORCHRUN, "--nproc-per-node=2", str(tmp_path / "job.py")]
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert (tmp_path / str(rank)).read_text() == f"<pynccl.Communicator rank {rank} of 2 on cpu> [3.0, 3.0, 3.0]"


def init_from_environment(place: Place, port: int, group_first: bool) -> list[float]:
    """Return sums over communicators created before, during and after a process group at this address."""
    set_environment(place.rank, place.size, port)
    sums = [] if group_first else [total(pynccl.init(timeout=50)), total(Communicator.from_env())]
    dist.init_process_group("gloo")  # finds its own store at the same port
    sums.append(total(pynccl.init(timeout=50)))
    dist.barrier()
    dist.destroy_process_group()
    return [*sums, total(pynccl.init(timeout=50))]


@pytest.mark.parametrize("group_first", [False, True])
def test_manual_environment_variables_work_alongside_process_group(processes: RankPool, group_first: bool) -> None:
    assert processes.run(3, init_from_environment, free_port(), group_first) == [[6.0] * (2 if group_first else 4)] * 3


def test_rank_0_error_names_port_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        for name, value in {**GOOD, "MASTER_PORT": str(port)}.items():
            monkeypatch.setenv(name, value)
        end = end_of(pynccl.init)
    assert end.error == "NcclSystemError"
    assert f"rank 0 could not serve the store at 127.0.0.1:{port} (Address already in use)" in end.message
    assert f"or another program may be using the port (ss -ltnp 'sport = :{port}' shows it)" in end.message


# Other rendezvous methods


def init_from_all(place: Place, path: str) -> list[float]:
    store = dist.FileStore(f"{path}.store", place.size)
    results = [
        total(pynccl.from_file(f"{path}.file", place.rank, place.size, timeout=50)),
        total(
            Communicator.from_file(f"{path}.file", place.rank, place.size, timeout=None)
        ),  # the file was removed, so its path can be reused
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


def test_init_from_file_store_and_process_group(processes: RankPool, tmp_path: Path) -> None:
    found = processes.run(3, init_from_all, str(tmp_path / "meeting"))
    assert found == [[6.0] * 5, [6.0, 6.0, 6.0, 6.0, 3.0, 6.0], [6.0, 6.0, 6.0, 6.0, 3.0, 6.0]]
    assert [path.name for path in tmp_path.iterdir()] == ["meeting.store"]


def test_rendezvous_file_is_private_and_must_be_new(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        _file_store(str(tmp_path / "meeting"), Clock(50)).set("id", b"the secret of the ranks")
    finally:
        os.umask(before)
    assert (tmp_path / "meeting").stat().st_mode & 0o777 == 0o600
    (tmp_path / "notes").write_bytes(b"this is no meeting" * 100)
    for path, error, message in (
        (tmp_path / "notes", "NcclInvalidUsage", "is not a rendezvous file: pass the path of a file that does not"),
        (tmp_path / "none" / "meeting", "NcclSystemError", "No such file or directory"),
    ):
        end = end_of(lambda path=path: pynccl.from_file(str(path), 0, 2))
        assert end.error == error and str(path) in end.message and message in end.message, path
        assert end.seconds < AT_ONCE


# MPI: a fake mpi4py module over a process group of torch


class Comm:
    """The part of mpi4py.MPI.Comm that from_mpi uses."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.threads: set[str] = set()
        self.Get_rank = lambda: place.rank
        self.Get_size = lambda: place.size
        self.Free = lambda: None

    def Split_type(self, kind: int) -> Comm:
        assert kind == 7
        dist.barrier()
        return self

    def allgather(self, sent: Any) -> list[Any]:
        self.threads.add(threading.current_thread().name)
        parts: list[Any] = [None] * self.place.size
        dist.all_gather_object(parts, sent)
        return parts


def init_from_mpi(place: Place, path: str) -> tuple[float, bool, End]:
    dist.init_process_group("gloo", store=dist.FileStore(path, place.size), rank=place.rank, world_size=place.size)
    comm = Comm(place)
    names = {"COMM_WORLD": comm, "COMM_TYPE_SHARED": 7, "THREAD_MULTIPLE": 3, "Query_thread": lambda: 1}
    sys.modules["mpi4py"] = types.ModuleType("mpi4py")
    sys.modules["mpi4py"].MPI = types.SimpleNamespace(**names)  # type: ignore[attr-defined]
    sum_of_ranks = total(Communicator.from_mpi(timeout=50))
    fails = end_of(lambda: Communicator.from_mpi(device="cuda" if place.rank else None))
    dist.destroy_process_group()
    return sum_of_ranks, comm.threads == {"MainThread"}, fails


def test_init_from_mpi_and_its_errors_on_all_ranks(processes: RankPool, tmp_path: Path) -> None:
    found = processes.run(2, init_from_mpi, str(tmp_path / "store"))
    assert [outcome[:2] for outcome in found] == [(3.0, True)] * 2  # MPI is called in the main thread alone
    remote_error, local_error = (fails for _, _, fails in found)
    assert local_error.error == "ValueError" and "the host library works on the CPU" in local_error.message
    assert remote_error.message == f"rank 1 could not start: ValueError: {local_error.message}"
