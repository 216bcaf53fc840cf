"""Jobs on two machines: the rank that is missing, or has ended, is named on the other one, with its line.

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
from typing import NamedTuple

import pytest
from hanging import SPEAKS
from nodes import ADDRESSES, CABLE, ip, two_nodes

ROOT = Path(__file__).parents[2]
TIMEOUT = 2.0
PORT = 29511
HOSTS = ("node-a", "node-b")
PATIENCE = 60.0


@pytest.fixture(scope="module")
def nodes() -> Iterator[tuple[str, str]]:
    program = shutil.which("unshare")
    if program is None:
        pytest.skip("needs the program unshare (package util-linux)")
    command = ["unshare", *OWN, "sh", "-c", "hostname pynccl-test"]
    tried = subprocess.run(command, capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"cannot make namespaces of processes here: {tried.stderr.strip()}")
    with two_nodes() as names:
        yield names


OWN = ("--uts", "--pid", "--fork", "--kill-child", "--mount-proc")


class Node(NamedTuple):
    """What was started on one of them, and where its output goes."""

    launcher: subprocess.Popen[bytes]
    output: Path

    def text(self) -> str:
        return self.output.read_text()

    def wait_for(self, pattern: str) -> str:
        """All of its output, once this is in it."""
        end = time.monotonic() + PATIENCE
        while not re.search(pattern, text := self.text(), re.DOTALL):
            assert time.monotonic() < end, text
            time.sleep(0.02)
        return text


@pytest.fixture
def started(nodes: tuple[str, str], tmp_path: Path) -> Iterator[list[Node]]:
    """To be filled by the test; what still runs is killed."""
    running: list[Node] = []
    yield running
    for node in running:
        node.launcher.kill()
        node.launcher.wait()
    ip("-n", nodes[0], "link", "set", CABLE, "up")


def start(nodes: tuple[str, str], folder: Path, launcher: str, source: str, **environment: str) -> list[Node]:
    """One rank on each: started by torchrun, or with the variables that other launchers set."""
    script = folder / "train.py"
    script.write_text(source)
    # torch asks for the names of addresses, and there is nobody to answer.
    names = folder / "hosts"
    names.write_text(
        "127.0.0.1 localhost\n" + "".join(f"{one} {host}\n" for one, host in zip(ADDRESSES, HOSTS, strict=True))
    )
    found = []
    for number, name in enumerate(nodes):
        env = {**os.environ, "PYTHONPATH": str(ROOT), "PYNCCL_LIBRARY": "host", "OMP_NUM_THREADS": "1"}
        env |= {"PYNCCL_WATCH_DIR": str(folder / HOSTS[number]), "PYNCCL_WATCH_TIMEOUT": str(TIMEOUT), **environment}
        rank = [sys.executable]
        if launcher == "torchrun":
            where = [f"--node-rank={number}", f"--master-addr={ADDRESSES[0]}", f"--master-port={PORT}"]
            rank += ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", *where]
        else:
            env |= {"RANK": str(number), "WORLD_SIZE": "2", "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": str(PORT)}
        named = ["sh", "-c", f'mount --bind {names} /etc/hosts && hostname {HOSTS[number]} && exec "$@"', "sh"]
        command = ["ip", "netns", "exec", name, "unshare", *OWN, *named, *rank, str(script), str(folder)]
        output = folder / f"{HOSTS[number]}.log"
        with output.open("wb") as file:
            found.append(Node(subprocess.Popen(command, env=env, stdout=file, stderr=subprocess.STDOUT), output))
    return found


def line(source: str, marker: str) -> str:
    [number] = [number for number, line in enumerate(source.splitlines(), 1) if line.endswith(f"# {marker}")]
    return f"train.py:{number}"


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


def test_a_rank_on_the_other_machine_is_named_while_it_is_late_and_once_it_has_raised(
    nodes: tuple[str, str], tmp_path: Path, started: list[Node]
) -> None:
    started += start(nodes, tmp_path, "torchrun", ONE_IS_LATE)
    first, second = started
    said = first.wait_for(f"{SPEAKS}.*this rank's stack")
    call = f"all_reduce #2 (comm 'world', 2 ranks, FLOAT32 x 4, {line(ONE_IS_LATE, 'waits')})"
    assert f"rank 1 never entered {call}" in said
    assert f"its main thread is in {line(ONE_IS_LATE, 'late')} <module>" in said
    assert "node-b" in said
    (tmp_path / "go on").touch()
    said = first.wait_for("end of the error").partition("the error: ")[2]
    assert f"rank 1 left by ValueError at {line(ONE_IS_LATE, 'raises')}" in said and ": no such file" in said
    assert (first.launcher.wait(PATIENCE), second.launcher.wait(PATIENCE)) == (1, 1)
    assert SPEAKS not in second.text()


ONE_IS_KILLED = """
import os, signal, subprocess, sys, torch, pynccl
os.environ["WORLD_SIZE"] = "3"
if os.environ["RANK"] == "0": other = subprocess.Popen([sys.executable, *sys.argv], env={**os.environ, "RANK": "2"})
comm = pynccl.init(timeout=20)
pair = comm.split(0 if comm.rank < 2 else None)
comm.all_reduce(torch.ones(4))
if comm.rank == 2:
    os.kill(os.getpid(), signal.SIGKILL)
if comm.rank == 1: pair.all_reduce(torch.ones(4))
comm.all_reduce(torch.ones(4))
"""


@pytest.mark.slow
def test_who_serves_the_store_tells_of_the_dead_of_its_machine_before_it_goes(
    nodes: tuple[str, str], tmp_path: Path, started: list[Node]
) -> None:
    started += start(nodes, tmp_path, "variables", ONE_IS_KILLED)
    assert [node.launcher.wait(PATIENCE) for node in started] == [1, 1]
    for node in started:
        text = node.text()
        assert re.search(r"\n  rank 2's process \d+ was killed or crashed \(no last word\)", text)
        assert "Connection reset" not in text and "recvValue" not in text


CUT = """
import os, sys, torch, pynccl
comm = pynccl.init()
x = torch.ones(1 << 20)
comm.all_reduce(x)
print("under way", flush=True)
while True:
    comm.all_reduce(x)  # cut
"""


@pytest.mark.slow
def test_both_sides_of_a_cut_cable_report_and_end(nodes: tuple[str, str], tmp_path: Path, started: list[Node]) -> None:
    started += start(nodes, tmp_path, "variables", CUT, PYNCCL_WATCH_ACTION="raise")
    for node in started:
        node.wait_for("under way")
    ip("-n", nodes[0], "link", "set", CABLE, "down")
    texts = [node.wait_for(rf"{SPEAKS}.*this rank's stack") for node in started]
    assert [node.launcher.wait(PATIENCE) for node in started] == [1, 1]
    call = rf"in all_reduce #\d+ \(comm 'world', 2 ranks, FLOAT32 x 1,048,576, {line(CUT, 'cut')}\)"
    for rank, text in enumerate(texts):
        assert re.search(
            rf"rank {1 - rank} on host {HOSTS[1 - rank]} cannot be asked|nothing is known of rank {1 - rank}", text
        )
        assert re.search(rf"rank {rank} has waited \d\.\d s ({call}|there)", text)
    assert f"could not be asked: the store at which the ranks met ({ADDRESSES[0]}:{PORT}) did not answer" in texts[1]
    for rank, node in enumerate(started):
        assert re.search(rf"NcclTimeout: rank {rank} waited \d\.\d s: ", node.text())
