"""Two nodes, simulated by namespaces, with one link between them and no other network.

A node has its own network, host name, processes, shared memory and /dev/shm, like a pod.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ADDRESSES = ("10.77.0.1", "10.77.0.2")
CABLE = "nccl0"  # name of the interface on both nodes
UNSHARE = ("unshare", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc")


class Node(NamedTuple):
    """One of the two. Each command that runs on it has its own process and mount namespaces."""

    namespace: str  # of the network
    host: str
    hosts: Path  # its /etc/hosts

    def command(self, *words: str | Path, shm: str = "64m") -> list[str]:
        """Return a command line that runs these words on the node. shm: size of /dev/shm, 64m in containers"""
        mounts = f"mount --bind {self.hosts} /etc/hosts && mount -t tmpfs -o size={shm} tmpfs /dev/shm"
        prepare = f'{mounts} && hostname {self.host} && exec "$@"'
        return ["ip", "netns", "exec", self.namespace, *UNSHARE, "sh", "-c", prepare, "sh", *map(str, words)]


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextlib.contextmanager
def two_nodes(folder: Path, hosts: tuple[str, str] = ("node0", "node1")) -> Iterator[tuple[Node, Node]]:
    """Make two nodes with these names, which resolve on both, since there is no DNS. Skip the test if that fails here.

    folder  for their /etc/hosts
    """
    for program, package in (("ip", "iproute2"), ("unshare", "util-linux")):
        if shutil.which(program) is None:
            pytest.skip(f"needs the program {program} (package {package})")
    tried = subprocess.run([*UNSHARE, "sh", "-c", "hostname pynccl-test"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"cannot create process namespaces here: {tried.stderr.strip()}")
    names = [f"pynccl-{os.getpid()}-{side}" for side in "ab"]
    try:
        try:
            for name in names:
                ip("netns", "add", name)
            ip("link", "add", CABLE, "netns", names[0], "type", "veth", "peer", "name", CABLE, "netns", names[1])
        except subprocess.CalledProcessError as error:
            pytest.skip(f"cannot make network namespaces here: {error.stderr.decode().strip()}")
        for address, name in zip(ADDRESSES, names, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", CABLE)
            for device in ("lo", CABLE):
                ip("-n", name, "link", "set", device, "up")
        known = folder / "hosts"
        lines = [f"{address} {host}\n" for address, host in zip(ADDRESSES, hosts, strict=True)]
        known.write_text("127.0.0.1 localhost\n" + "".join(lines))
        yield Node(names[0], hosts[0], known), Node(names[1], hosts[1], known)
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
