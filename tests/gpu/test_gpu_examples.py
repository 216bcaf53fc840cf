"""scripts/examples/ on a GPU: with the ranks of this launch; and as processes of their own that share it.

NCCL refuses two ranks on one GPU of one machine, so each of the latter has an NCCL_HOSTID of its own."""

from __future__ import annotations

import importlib
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import pynccl

FOLDER = Path(__file__).parents[2] / "scripts" / "examples"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))
sys.path.append(str(FOLDER))


@pytest.mark.parametrize("name", [name for name in NAMES if name != "dead_rank"])
def test_example_is_right_on_the_ranks_of_this_launch(comm: pynccl.Communicator, name: str) -> None:
    if name in ("checkpoint", "sequence_parallel_mlp") and comm.size > 8:
        pytest.skip(f"{name} is for up to 8 ranks; these are {comm.size}")
    try:
        line = importlib.import_module(name).main(comm)
    except pynccl.NcclVersionError as error:  # on all ranks alike
        pytest.skip(str(error))
    except ValueError as error:
        if "NCCL declined the buffer" not in str(error):
            raise
        pytest.skip(str(error))
    assert line.startswith(f"{name}: ")
    if name == "raw_pointers":
        assert "cuda.core is right" in line and "numpy skipped: the communicator is on cuda:" in line
    if name == "cuda_graph":
        assert "a captured graph was replayed" in line
    if name == "hello":
        assert f" on {comm.device} of " in line


def processes(name: str, n: int) -> list[subprocess.CompletedProcess[str]]:
    """The example on n ranks, all on one GPU, started without an agent that would end them all when one ends."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    started = []
    for rank in range(n):
        own = {"RANK": rank, "WORLD_SIZE": n, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        own |= {"PYNCCL_LIBRARY": "nccl", "NCCL_HOSTID": f"rank{rank}", "NCCL_SOCKET_IFNAME": "lo"}
        environment = {**os.environ, **{key: str(value) for key, value in own.items()}}
        command = [sys.executable, str(FOLDER / f"{name}.py")]
        pipe = subprocess.PIPE
        started.append(subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True))
    try:
        outputs = [one.communicate(timeout=100) for one in started]
    finally:
        for one in started:
            one.kill()
    return [
        subprocess.CompletedProcess(one.args, one.returncode, *output)
        for one, output in zip(started, outputs, strict=True)
    ]


@pytest.fixture
def own_launch() -> None:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        pytest.skip("starts ranks of its own: for a run of these tests with one rank")


@pytest.mark.usefixtures("own_launch")
def test_hello_as_processes_that_share_a_gpu() -> None:
    for rank, done in enumerate(processes("hello", 2)):
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(f"hello: rank {rank} of 2 on cuda:0 of ")


@pytest.mark.usefixtures("own_launch")
def test_the_ranks_go_on_without_the_one_that_dies() -> None:
    """It serves the others' store, as rank 0 does without an agent, for as long as it lives: so it is not rank 0."""
    first, second, _ = processes("dead_rank", 3)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert first.stdout.splitlines()[-1] == "dead_rank: 3 steps on 3 ranks, 3 on 2: all sums are right"
