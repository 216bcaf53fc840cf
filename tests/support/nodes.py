"""Two nodes, simulated by network namespaces with one link between them and no other network."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator

import pytest

NODES = (f"pynccl-{os.getpid()}-a", f"pynccl-{os.getpid()}-b")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
CABLE = "nccl0"  # name of the interface on both nodes


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextlib.contextmanager
def two_nodes() -> Iterator[tuple[str, str]]:
    """Create the namespaces and yield their names, for `ip netns exec`. Skips the test if this is not possible."""
    if shutil.which("ip") is None:
        pytest.skip("needs the program ip (package iproute2)")
    try:
        try:
            for name in NODES:
                ip("netns", "add", name)
            ip("link", "add", CABLE, "netns", NODES[0], "type", "veth", "peer", "name", CABLE, "netns", NODES[1])
        except subprocess.CalledProcessError as error:
            pytest.skip(f"cannot make network namespaces here: {error.stderr.decode().strip()}")
        for address, name in zip(ADDRESSES, NODES, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", CABLE)
            for device in ("lo", CABLE):
                ip("-n", name, "link", "set", device, "up")
        yield NODES
    finally:
        for name in NODES:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
