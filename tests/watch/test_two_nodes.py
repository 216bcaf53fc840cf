"""A job on two nodes: a rank that is late or has exited is named on the other node, with its line.

The nodes are namespaces of network, host name and processes. Each has its own folder for flight records.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hanging import REPORT_PREFIX
from nodes import ADDRESSES, Node, two_nodes

ROOT = Path(__file__).parents[2]
PORT = 29511
MAX_WAIT_SECONDS = 60.0

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
def nodes(tmp_path: Path) -> Iterator[tuple[Node, Node]]:
    with two_nodes(tmp_path) as both:
        yield both


def start(node: Node, number: int, folder: Path) -> subprocess.Popen[bytes]:
    """Start torchrun with one rank on this node. Its output goes to a file."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYNCCL_LIBRARY": "host", "OMP_NUM_THREADS": "1"}
    environment |= {"PYNCCL_WATCH_DIR": str(folder / node.host), "PYNCCL_WATCH_TIMEOUT": "2"}
    where = [f"--node-rank={number}", f"--master-addr={ADDRESSES[0]}", f"--master-port={PORT}"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", *where]
    command = node.command(*launcher, folder / "train.py", folder)
    with (folder / f"{number}.log").open("wb") as file:
        return subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT)


def wait_for(output: Path, pattern: str) -> str:
    """Wait until the pattern is in the output, and return all of it."""
    end = time.monotonic() + MAX_WAIT_SECONDS
    while not re.search(pattern, text := output.read_text(), re.DOTALL):
        assert time.monotonic() < end, text
        time.sleep(0.02)
    return text


def line(marker: str) -> str:
    [number] = [number for number, line in enumerate(ONE_IS_LATE.splitlines(), 1) if line.endswith(f"# {marker}")]
    return f"train.py:{number}"


def test_a_rank_on_another_node_is_named_while_it_is_late_and_after_it_has_raised(
    nodes: tuple[Node, Node], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(ONE_IS_LATE)
    launchers = [start(node, number, tmp_path) for number, node in enumerate(nodes)]
    try:
        call = f"all_reduce #2 (comm 'world', 2 ranks, FLOAT32 x 4, {line('waits')})"
        never = re.escape(f"rank 1 never entered {call}")
        output = wait_for(tmp_path / "0.log", f"{REPORT_PREFIX}[^\n]*\n[^\n]*{never}.*this rank's stack")
        assert f"its main thread is in {line('late')} <module>" in output
        assert "node1" in output
        (tmp_path / "go on").touch()
        error = wait_for(tmp_path / "0.log", "end of the error").partition("the error: ")[2]
        assert f"rank 1 exited with ValueError at {line('raises')}" in error and ": no such file" in error
        assert [launcher.wait(MAX_WAIT_SECONDS) for launcher in launchers] == [1, 1]
    finally:
        for launcher in launchers:
            launcher.kill()
            launcher.wait()
