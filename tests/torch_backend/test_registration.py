"""Registration of the backend by import or entry point, the communicator of a group, and exit."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import torch
import torch.distributed as dist
from process_groups import process_group
from ranks import Place, RankPool

import pynccl
from pynccl.torch_backend import PyncclBackend
from pynccl.torch_backend.c10d import IS_BACKEND, backend_of


def test_installed_package_registers_backend_for_torch_2_14() -> None:
    """torch 2.14 loads the entry point of an unknown backend; importing the module registers it too."""
    (found,) = (entry for entry in entry_points(group="torch.distributed.backends") if entry.name == "pynccl")
    found.load()()
    assert "pynccl" in dist.Backend.backend_list
    code = "import torch.distributed as dist, pynccl.torch_backend; print(dist.Backend.backend_capability['pynccl'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "['cpu', 'cuda']\n"


def one_communicator(place: Place, path: str) -> None:
    """Calls of torch.distributed and of the communicator are ordered; passing options gives another communicator."""
    with process_group("pynccl", place, path):
        comm = pynccl.Communicator.from_process_group()
        assert comm is pynccl.Communicator.from_process_group() and (comm.rank, comm.size) == place
        x = torch.ones(3)
        dist.all_reduce(x)
        comm.all_reduce(x, x)
        work = dist.all_reduce(x, async_op=True)
        comm.all_reduce(x, x)  # runs after it
        assert work is not None
        work.wait()
        assert x.tolist() == [place.size**4] * 3
        with pynccl.Communicator.from_process_group(config=pynccl.CommConfig(comm_name="mine")) as other:
            assert other is not comm and other.name == "mine"
        half = dist.new_group([0])
        if place.rank == 0:
            assert pynccl.Communicator.from_process_group(half).size == 1
        gloo = dist.new_group(backend="gloo")
        with pynccl.Communicator.from_process_group(gloo) as made:
            assert made is not comm
    assert not comm.alive  # it ended with the group


def test_group_has_one_communicator(processes: RankPool, tmp_path: Path) -> None:
    processes.run(2, one_communicator, str(tmp_path / "store"))


def alongside_others(place: Place, path: str) -> None:
    with process_group("cpu:pynccl,cuda:gloo" if IS_BACKEND else "pynccl", place, path):
        assert isinstance(backend_of(dist.group.WORLD, "cpu"), PyncclBackend)
        x = torch.ones(2)
        dist.all_reduce(x)
        assert x.tolist() == [2, 2]
    with process_group("gloo", place, path + "gloo"):
        group = dist.new_group(backend="pynccl")
        assert dist.get_backend(group) in ("pynccl", "custom")
        dist.all_reduce(x, group=group)
        dist.all_reduce(x)
        assert x.tolist() == [8, 8]
        dist.destroy_process_group(group)


def test_backend_works_alongside_others(processes: RankPool, tmp_path: Path) -> None:
    processes.run(2, alongside_others, str(tmp_path / "store"))


LEAVES_ALL_OPEN = """
import sys, torch, torch.distributed as dist, pynccl.torch_backend
rank = int(sys.argv[1])
dist.init_process_group("pynccl", store=dist.FileStore(sys.argv[2], 2), rank=rank, world_size=2)
for group in (dist.group.WORLD, dist.new_group()):
    dist.all_reduce(torch.ones(1000), group=group, async_op=True)
dist.send(torch.ones(1), 1) if rank == 0 else dist.recv(torch.ones(1), 0)
"""


def test_exit_without_destroy_process_group(tmp_path: Path) -> None:
    """Like most programs, it does not call destroy_process_group, and some work is never waited for."""
    command = [sys.executable, "-c", LEAVES_ALL_OPEN]
    started = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store")], stderr=subprocess.PIPE, text=True)
        for rank in (0, 1)
    ]
    for process in started:
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0 and "pynccl" not in errors, errors
