"""Ranks on two machines, which network namespaces stand for: no default route, another interface."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from nodes import CABLE, two_nodes

from pynccl.host import interfaces
from pynccl.host.failure import HostFailure

ROOT = Path(__file__).parents[2]

JOB = """
    import os, pathlib, sys, time, torch, pynccl
    rank, folder = int(sys.argv[1]), pathlib.Path(sys.argv[2])
    if rank == 0:
        (folder / "new").write_bytes(bytes(pynccl.get_unique_id()))
        (folder / "new").rename(folder / "id")
    while not (folder / "id").exists():
        time.sleep(0.01)
    comm = pynccl.Communicator.init(2, (folder / "id").read_bytes(), rank, timeout=30)
    print(comm.all_reduce(torch.full((1 << 18,), rank + 1.0))[-1].item(), comm.split(0).size, flush=True)
"""


@pytest.fixture(scope="module")
def nodes() -> Iterator[tuple[str, str]]:
    with two_nodes() as names:
        yield names


def start(nodes: tuple[str, str], folder: Path, **environment: str) -> list[subprocess.Popen[str]]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYNCCL_LIBRARY": "host", **environment}
    job = [sys.executable, "-c", textwrap.dedent(JOB)]
    return [
        subprocess.Popen(
            ["ip", "netns", "exec", node, *job, str(rank), str(folder)],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, node in enumerate(nodes)
    ]


@pytest.mark.slow
def test_two_nodes_without_a_default_route(nodes: tuple[str, str], tmp_path: Path) -> None:
    ranks = start(nodes, tmp_path, NCCL_SOCKET_IFNAME=CABLE)
    assert [rank.communicate(timeout=60)[0] for rank in ranks] == ["3.0 2\n"] * 2


@pytest.mark.slow
def test_a_node_that_cannot_be_reached_is_named(nodes: tuple[str, str], tmp_path: Path) -> None:
    rank, other = start(nodes, tmp_path, NCCL_SOCKET_IFNAME="lo")  # an address that means the other machine itself
    output = other.communicate(timeout=60)[0]
    rank.kill()
    rank.communicate()
    assert "cannot reach the process that made the unique id" in output and "127.0.0.1" in output
    assert "name one with NCCL_SOCKET_IFNAME" in output


def test_the_variable_names_interfaces_as_nccls_does() -> None:
    for text, interface, named in (
        ("eth", "eth0", True),
        ("eth0,ib", "ib1", True),
        ("=eth", "eth0", False),
        ("=eth0", "eth0", True),
        ("^lo,docker", "docker0", False),
        ("^lo,docker", "eth0", True),
        ("^=eth0", "eth01", True),
        ("eth1", "eth0", False),
    ):
        assert interfaces.is_named(text, interface) is named, text


def test_a_variable_that_names_no_interface_says_which_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere7")
    with pytest.raises(HostFailure, match=r"^GLOO_SOCKET_IFNAME='nowhere7' names no interface.*lo \(127.0.0.1"):
        interfaces.own_addresses()
