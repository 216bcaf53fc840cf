"""A job on two machines: the rank that is missing, or has ended, is named on the other one, with its line.

The machines are namespaces: of the network, of host names, of processes. Each has its own folder for the recorders.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hanging import SPEAKS
from nodes import ADDRESSES, two_nodes

ROOT = Path(__file__).parents[2]
PORT = 29511
HOSTS = ("node-a", "node-b")
OWN = ("--uts", "--pid", "--fork", "--kill-child", "--mount-proc")
PATIENCE = 60.0

ONE_IS_LATE = """
import os, sys, time, torch, pynccl
folder = sys.argv[1]
comm = pynccl.init()
comm.all_reduce(torch.ones(4))
if comm.rank == 1:
    while not os.path.exists(f"{folder}/go on"): time.sleep(0.01)  # late
    raise ValueError("no such file")  # raises
try:
    comm.all_reduce(torch.ones(4))  # waits
except pynccl.NcclRemoteError as error:
    print(f"the error: {error}\\nend of the error", flush=True)
    raise
"""


@pytest.fixture
def nodes() -> Iterator[tuple[str, str]]:
    if shutil.which("unshare") is None:
        pytest.skip("needs the program unshare (package util-linux)")
    command = ["unshare", *OWN, "sh", "-c", "hostname pynccl-test"]
    tried = subprocess.run(command, capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"cannot make namespaces of processes here: {tried.stderr.strip()}")
    with two_nodes() as names:
        yield names


def start(name: str, number: int, folder: Path) -> subprocess.Popen[bytes]:
    """torchrun with one rank on this node; its output goes to a file."""
    # torch asks for the names of addresses, and there is nobody to answer.
    names = folder / "hosts"
    known = "".join(f"{one} {host}\n" for one, host in zip(ADDRESSES, HOSTS, strict=True))
    names.write_text(f"127.0.0.1 localhost\n{known}")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYNCCL_LIBRARY": "host", "OMP_NUM_THREADS": "1"}
    environment |= {"PYNCCL_WATCH_DIR": str(folder / HOSTS[number]), "PYNCCL_WATCH_TIMEOUT": "2"}
    where = [f"--node-rank={number}", f"--master-addr={ADDRESSES[0]}", f"--master-port={PORT}"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", *where]
    named = ["sh", "-c", f'mount --bind {names} /etc/hosts && hostname {HOSTS[number]} && exec "$@"', "sh"]
    command = ["ip", "netns", "exec", name, "unshare", *OWN, *named, *launcher, str(folder / "train.py"), str(folder)]
    with (folder / f"{number}.log").open("wb") as file:
        return subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT)


def wait_for(output: Path, pattern: str) -> str:
    """All of the output, once this is in it."""
    end = time.monotonic() + PATIENCE
    while not re.search(pattern, text := output.read_text(), re.DOTALL):
        assert time.monotonic() < end, text
        time.sleep(0.02)
    return text


def line(marker: str) -> str:
    [number] = [number for number, line in enumerate(ONE_IS_LATE.splitlines(), 1) if line.endswith(f"# {marker}")]
    return f"train.py:{number}"


def test_a_rank_on_the_other_machine_is_named_while_it_is_late_and_once_it_has_raised(
    nodes: tuple[str, str], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(ONE_IS_LATE)
    launchers = [start(name, number, tmp_path) for number, name in enumerate(nodes)]
    try:
        call = f"all_reduce #2 (comm 'world', 2 ranks, FLOAT32 x 4, {line('waits')})"
        never = re.escape(f"rank 1 never entered {call}")
        said = wait_for(tmp_path / "0.log", f"{SPEAKS}[^\n]*\n[^\n]*{never}.*this rank's stack")
        assert f"its main thread is in {line('late')} <module>" in said
        assert "node-b" in said
        (tmp_path / "go on").touch()
        said = wait_for(tmp_path / "0.log", "end of the error").partition("the error: ")[2]
        assert f"rank 1 left by ValueError at {line('raises')}" in said and ": no such file" in said
        assert [one.wait(PATIENCE) for one in launchers] == [1, 1]
    finally:
        for one in launchers:
            one.kill()
            one.wait()
