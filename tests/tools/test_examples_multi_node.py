"""scripts/examples/multi_node.sh: its three lines, on two machines that network namespaces stand for."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from nodes import ADDRESSES, two_nodes

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SCRIPT = "scripts/examples/multi_node.sh"
HELLO = "scripts/examples/hello.py"
HOSTS = ("node-a", "node-b")
SECONDS = 60.0

# What a launcher does on these machines: a process on each, with the variables that it sets.
START = r"""
wait_for=()
for node in 0 1; do
    env {variables} in_node_$node "$@" &
    wait_for+=($!)
done
for pid in "${{wait_for[@]}}"; do wait "$pid" || exit 1; done
"""
SRUN = r"""#!/usr/bin/env bash
[ "$1" = --kill-on-bad-exit=1 ] || exit 9
shift
""" + START.format(variables="SLURM_PROCID=$node SLURM_NTASKS=2 SLURM_LOCALID=0")
SCONTROL = """#!/usr/bin/env bash
[ "$*" = "show hostnames node-[a-b]" ] && printf 'node-a\\nnode-b\\n'
"""
OPEN_MPI = r"""#!/usr/bin/env bash
if [ "$1" = --version ]; then echo "mpirun (Open MPI) 5.0.11"; exit; fi
[ "$1 $2 $3 $4 $5 $6" = "--host node-a:1,node-b:1 -x MASTER_ADDR -x MASTER_PORT" ] || exit 9
shift 6
""" + START.format(variables="OMPI_COMM_WORLD_RANK=$node OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=0")


@pytest.fixture(scope="module")
def nodes() -> Iterator[tuple[str, str]]:
    tried = subprocess.run(["unshare", "--uts", "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"cannot make namespaces of host names here: {tried.stderr.strip()}")
    with two_nodes() as names:
        yield names


@pytest.fixture
def programs(nodes: tuple[str, str], tmp_path: Path) -> Path:
    """A folder of programs: in_node_0 and in_node_1 run their arguments on a machine, which knows both by name."""
    names = tmp_path / "hosts"
    known = "".join(f"{address} {host}\n" for address, host in zip(ADDRESSES, HOSTS, strict=True))
    names.write_text(f"127.0.0.1 localhost\n{known}")
    folder = tmp_path / "bin"
    folder.mkdir()
    for number, node in enumerate(nodes):
        inside = f'mount --bind {names} /etc/hosts && hostname {HOSTS[number]} && exec "$@"'
        program(
            folder / f"in_node_{number}",
            f"#!/bin/sh\nexec ip netns exec {node} unshare --uts sh -c '{inside}' sh \"$@\"\n",
        )
    return folder


def program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def environment(programs: Path, **more: str) -> dict[str, str]:
    found = f"{programs}{os.pathsep}{os.environ['PATH']}"
    own = {
        "PATH": found,
        "PYTHON": sys.executable,
        "PYTHONPATH": str(ROOT),
        "PYNCCL_LIBRARY": "host",
        "OMP_NUM_THREADS": "1",
    }
    return {**os.environ, **own, **more}


def test_torchrun_with_the_same_line_on_every_machine(programs: Path) -> None:
    line = ["bash", SCRIPT, "torchrun", "node-a", "2", "1", HELLO]
    started = [
        subprocess.Popen(
            [programs / f"in_node_{number}", *line],
            cwd=ROOT,
            env=environment(programs, PORT="29533"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    try:
        outputs = [one.communicate(timeout=SECONDS) for one in started]
    finally:
        for one in started:
            one.kill()
    assert [one.returncode for one in started] == [0, 0], outputs
    # Which machine has which rank is decided where they meet.
    found = re.findall(r"hello: rank (\d) of 2 on cpu of (\S+): the sum is 3\n", "".join(out for out, _ in outputs))
    assert {rank for rank, _ in found} == {"0", "1"} and {host for _, host in found} == set(HOSTS)


@pytest.mark.parametrize(
    ("launcher", "text", "arguments"),
    [
        ("srun", SRUN, []),
        ("mpirun", OPEN_MPI, ["node-a:1,node-b:1"]),
    ],
    ids=["slurm", "open-mpi"],
)
def test_the_launchers_variables_are_handed_on(programs: Path, launcher: str, text: str, arguments: list[str]) -> None:
    program(programs / launcher, text)
    program(programs / "scontrol", SCONTROL)
    done = subprocess.run(
        ["bash", SCRIPT, launcher, *arguments, HELLO],
        cwd=ROOT,
        env=environment(programs, PORT="29534", SLURM_JOB_NODELIST="node-[a-b]"),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = [f"hello: rank {rank} of 2 on cpu of {host}: the sum is 3" for rank, host in enumerate(HOSTS)]
    assert sorted(line for line in done.stdout.splitlines() if line.startswith("hello")) == said


def test_wrong_usage_shows_the_lines() -> None:
    for arguments in ([], ["ssh"], ["torchrun", "node-a", "2"], ["srun"], ["mpirun", "a:1"]):
        command = ["bash", SCRIPT, *arguments]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=False)
        assert (done.returncode, done.stdout) == (2, ""), arguments
        for launcher in ("torchrun HEAD", "srun SCRIPT", "mpirun HOST"):
            assert f"multi_node.sh {launcher}" in done.stderr, arguments
