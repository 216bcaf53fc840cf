"""init_process_group("pynccl") again: after destroy_process_group, after a failure, after a restart by torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import HOST, TORCHRUN, Place, RankPool
from rendezvous_servers import free_port

from pynccl import NcclTimeout

ROOT = Path(__file__).resolve().parents[2]
SLOW = pytest.mark.slow


def use_group(place: Place, method: str, seconds: float = 20) -> list[float]:
    """Make groups, use and destroy them; return sums and a message."""
    import pynccl.torch_backend  # noqa: F401

    limit = timedelta(seconds=seconds)
    dist.init_process_group("pynccl", method, rank=place.rank, world_size=place.size, timeout=limit)
    one, last = torch.ones(1), place.size - 1
    dist.all_reduce(one)
    found = [one.item()]
    pair = dist.new_group([0, last])
    if place.rank in (0, last):
        dist.all_reduce(one, group=pair)
        found.append(one.item())
    message = torch.full((1,), -1.0)
    sent = dist.isend(torch.full((1,), float(place.rank)), (place.rank + 1) % place.size)
    dist.irecv(message, (place.rank - 1) % place.size).wait()
    sent.wait()
    dist.destroy_process_group()
    return [*found, message.item()]


def use_groups(place: Place, method: str, times: int) -> list[list[float]]:
    return [use_group(place, method) for _ in range(times)]


def results(size: int) -> list[list[float]]:
    sums = [[size, 2 * size], *[[size]] * (size - 2), [size, 2 * size]]
    return [[*map(float, sums[rank]), float((rank - 1) % size)] for rank in range(size)]


@pytest.mark.parametrize(("size", "kind"), [(2, "tcp"), pytest.param(3, "tcp", marks=SLOW), (2, "file")])
def test_groups_are_made_and_destroyed_20_times(processes: RankPool, tmp_path: Path, size: int, kind: str) -> None:
    method = f"tcp://127.0.0.1:{free_port()}" if kind == "tcp" else f"file://{tmp_path}/store"
    found = processes.run(size, use_groups, method, 20)
    assert found == [[of_rank] * 20 for of_rank in results(size)]


RESTARTED = """
import os, sys, torch, torch.distributed as dist, pynccl.torch_backend

run, rank, place, broken = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), os.environ["RANK"], sys.argv[1], sys.argv[2]

def fail(here):
    if run < 2 and here == place and rank == broken:
        raise RuntimeError("on purpose")

for number in range(3):
    if number == 1:
        fail("before")
    dist.init_process_group("pynccl")
    x = torch.ones(1)
    dist.all_reduce(x)
    if number == 1:
        fail("after")
    dist.destroy_process_group()
with open(f"{os.environ['REPORT']}/{rank}", "w") as report:
    report.write(f"{run} {x.item()}")
"""


@pytest.mark.parametrize(
    ("where", "broken"), [("before", 1), pytest.param("before", 0, marks=SLOW), pytest.param("after", 0, marks=SLOW)]
)
def test_group_after_restart_by_torchrun(tmp_path: Path, where: str, broken: int) -> None:
    (tmp_path / "job.py").write_text(RESTARTED)
    job = [str(tmp_path / "job.py"), where, str(broken)]
    command = [sys.executable, *TORCHRUN, "--nproc-per-node=2", "--max-restarts=2", "--monitor-interval=0.1", *job]
    environment = {**os.environ, **HOST, "PYTHONPATH": str(ROOT), "REPORT": str(tmp_path)}
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["2 2.0"] * 2


def fail_once(place: Place, method: str, failed: str) -> tuple[str, list[float]]:
    """Rank 1 fails before its init, and catches it when rank 0 has stopped waiting."""
    error = ""
    try:
        if place.rank == 1:
            while not os.path.exists(failed):
                time.sleep(0.01)
            raise ValueError("on purpose")
        use_group(place, method, seconds=1)
    except (ValueError, NcclTimeout) as caught:
        error = str(caught).partition("\n")[0]
        Path(failed).touch()
    return error, use_group(place, method)


def test_group_after_one_rank_failed(processes: RankPool, tmp_path: Path) -> None:
    found = processes.run(2, fail_once, f"file://{tmp_path}/store", f"{tmp_path}/failed")
    assert [error for error, _ in found] == ["rank 0 of 2 waited 1 s: ranks [1] never joined", "on purpose"]
    assert [again for _, again in found] == results(2)
