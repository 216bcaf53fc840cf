"""A rank that is killed inside a collective is an error on all the others, soon; nothing hangs."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from ranks import RankPool

import pynccl
from pynccl import Communicator

ROOT = Path(__file__).resolve().parents[2]
WITHIN = 10.0  # seconds from the kill to the last exit

JOB = """
import os, pynccl, torch
comm = pynccl.init(timeout=60)
x = torch.ones(1 << 18)
for turn in range(1_000_000):
    try:
        comm.all_reduce(x, x, op="max")
    except pynccl.NcclRemoteError:
        comm.abort()
        raise
    if turn == 5:
        print("ready", flush=True)
"""


def start(folder: Path, n: int) -> list[subprocess.Popen[str]]:
    """The ranks as processes of their own, without an agent that would end them all."""
    (folder / "job.py").write_text(JOB)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    common = {"PYTHONPATH": ROOT, "PYNCCL_LIBRARY": "host", "OMP_NUM_THREADS": 1, "WORLD_SIZE": n}
    ranks = []
    for rank in range(n):
        own = {**common, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": rank}
        environment = {**os.environ, **{name: str(value) for name, value in own.items()}}
        with (folder / f"{rank}.log").open("w") as log:
            command = [sys.executable, "job.py"]
            ranks.append(
                subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=log, text=True)
            )
    return ranks


def test_kill_9_of_one_rank_ends_the_other_three(tmp_path: Path) -> None:
    victim = 0  # the one that serves the stores
    ranks = start(tmp_path, 4)
    try:
        for rank, process in enumerate(ranks):
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n", (tmp_path / f"{rank}.log").read_text()
        ranks[victim].send_signal(signal.SIGKILL)
        killed = time.monotonic()
        codes = [process.wait(3 * WITHIN) for process in ranks]
        seconds = time.monotonic() - killed
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
    assert codes.pop(victim) == -signal.SIGKILL
    assert codes == [1, 1, 1]
    assert seconds < WITHIN
    for rank in (1, 2, 3):
        said = (tmp_path / f"{rank}.log").read_text()
        assert "pynccl.NcclRemoteError: all_reduce(count=262144, FLOAT32, MAX) failed" in said
        assert "a peer died or became unreachable: look for the first error in the other ranks' logs" in said


@pytest.fixture
def doomed() -> Iterator[RankPool]:
    """Ranks that this test may kill."""
    pool = RankPool()
    yield pool
    pool.close()


def killed_on_a_stream(comm: Communicator, victim: int) -> tuple[str, str, float]:
    """(error of the collective, error of the next one, seconds from the last success to the first error)."""
    stream = pynccl.create_stream()
    x = torch.ones(1000)
    if comm.rank == victim:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
    last = time.monotonic()
    with pytest.raises(pynccl.NcclRemoteError) as first:
        while True:
            comm.all_reduce(x, x, op="max", stream=stream)
            stream.synchronize()
            last = time.monotonic()
    seconds = time.monotonic() - last
    with pytest.raises(pynccl.NcclRemoteError) as second:
        comm.all_reduce(torch.ones(1))
    comm.abort()
    return str(first.value), str(second.value), seconds


def test_a_dead_rank_is_an_error_of_the_stream_and_of_every_later_call(doomed: RankPool) -> None:
    outcomes = doomed.outcomes(4, killed_on_a_stream, 2)
    assert "died: SIGKILL" in outcomes.pop(2).report
    for outcome in outcomes:
        assert not outcome.report
        first, second, seconds = outcome.value
        assert "REMOTE_ERROR" in first and "REMOTE_ERROR" in second
        assert second.startswith("all_reduce(count=1, FLOAT32, SUM) failed")
        assert seconds < WITHIN
