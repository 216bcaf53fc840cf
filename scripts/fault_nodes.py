"""Two network namespaces as two nodes with one cable between them, which can be cut or lose packets."""

from __future__ import annotations

import os
import shutil
import subprocess

DEVICE = "nccl0"


class Nodes:
    """A pair of nodes for one run at a time; `close` removes them."""

    def __init__(self, slot: int) -> None:
        self.names = tuple(f"pynccl-{os.getpid()}-{slot}-{side}" for side in "ab")
        self.addresses = ("10.78.0.1", "10.78.0.2")
        try:
            self._make()
        except BaseException:
            self.close()
            raise

    def _make(self) -> None:
        for name in self.names:
            command("ip", "netns", "add", name)
        a, b = self.names
        command("ip", "link", "add", DEVICE, "netns", a, "type", "veth", "peer", "name", DEVICE, "netns", b)
        for name, address in zip(self.names, self.addresses, strict=True):
            command("ip", "-n", name, "addr", "add", f"{address}/24", "dev", DEVICE)
            for device in ("lo", DEVICE):
                command("ip", "-n", name, "link", "set", device, "up")

    def cut(self) -> None:
        command("ip", "-n", self.names[0], "link", "set", DEVICE, "down")

    def mend(self) -> None:
        command("ip", "-n", self.names[0], "link", "set", DEVICE, "up")
        for name in self.names:
            subprocess.run(["tc", "-n", name, "qdisc", "del", "dev", DEVICE, "root"], capture_output=True, check=False)

    def lose(self, percent: int) -> None:
        for name in self.names:
            command("tc", "-n", name, "qdisc", "add", "dev", DEVICE, "root", "netem", "loss", f"{percent}%")

    def close(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def command(*words: str) -> None:
    """Run it; RuntimeError with what it says if it fails."""
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")


def why_not(loss: bool) -> str:
    """Why there can be no such nodes here, or none whose cable loses packets; "" if there can be."""
    needed = ("ip", "tc") if loss else ("ip",)
    missing = [name for name in needed if shutil.which(name) is None]
    if missing:
        return f"needs the program {missing[0]} (package iproute2)"
    try:
        nodes = Nodes(999)
        try:
            if loss:
                nodes.lose(5)
        finally:
            nodes.close()
    except RuntimeError as error:
        return str(error)
    return ""
