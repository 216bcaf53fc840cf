"""Two nodes, as network namespaces, and a link between them that can be cut or lose packets.

The link is a thread that forwards frames between two TAP devices. It needs no packet scheduler of the kernel, and the
frames that it drops are really lost.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import random
import select
import shutil
import struct
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor

DEVICE = "nccl0"
ADDRESSES = ("10.78.0.1", "10.78.0.2")
_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _TAP_NO_PI = 0x400454CA, 0x1002
_FRAME_BYTES = 1 << 16


class Nodes:
    """A pair of nodes for one run at a time. `close` removes them.

    loss  share of the frames that the link drops: 0.0 to 1.0
    """

    addresses = ADDRESSES

    def __init__(self, slot: int) -> None:
        self.names = tuple(f"pynccl-{os.getpid()}-{slot}-{side}" for side in "ab")
        self.loss = 0.0
        self._random = random.Random()
        self._files: list[int] = []
        self._closing, self._wake = os.pipe()
        self._thread = threading.Thread(target=self._forward, daemon=True)
        try:
            self._make()
        except BaseException:
            self.close()
            raise

    def _make(self) -> None:
        for name, address in zip(self.names, self.addresses, strict=True):
            command("ip", "netns", "add", name)
            with ThreadPoolExecutor(1) as executor:  # a separate thread, as the caller would stay in the namespace
                self._files.append(executor.submit(_open_tap, name).result())
            command("ip", "-n", name, "addr", "add", f"{address}/24", "dev", DEVICE)
            for device in ("lo", DEVICE):
                command("ip", "-n", name, "link", "set", device, "up")
        self._thread.start()

    def start(self, loss: float, seed: int) -> None:
        """Restore the link for a new run, and drop this share of the frames."""
        self._random.seed(seed)
        self.loss = loss
        command("ip", "-n", self.names[0], "link", "set", DEVICE, "up")

    def cut(self, silently: bool) -> None:
        """Cut the link. Unless `silently`, the device of the first node goes down, so that node notices."""
        self.loss = 1.0
        if not silently:
            command("ip", "-n", self.names[0], "link", "set", DEVICE, "down")

    def close(self) -> None:
        os.write(self._wake, b"x")
        if self._thread.is_alive():
            self._thread.join()
        for file in (*self._files, self._closing, self._wake):
            os.close(file)
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    def _forward(self) -> None:
        a, b = self._files
        while True:
            ready = select.select([a, b, self._closing], [], [])[0]
            if self._closing in ready:
                return
            for file in ready:
                frame = os.read(file, _FRAME_BYTES)
                if self._random.random() >= self.loss:
                    _send(b if file == a else a, frame)


def _send(file: int, frame: bytes) -> None:
    try:
        os.write(file, frame)
    except OSError:  # the device at the other end is down
        return


def _open_tap(namespace: str) -> int:
    """Return the file of a new TAP device in this namespace. The calling thread stays in the namespace."""
    enter_network(f"/run/netns/{namespace}")
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
    fcntl.ioctl(file, _TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), _TAP_NO_PI))
    return file


def enter_network(path: str) -> None:
    """Move the calling thread into the network namespace of this path."""
    libc = ctypes.CDLL(None, use_errno=True)
    place = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if libc.setns(place, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the network of {path}")
    finally:
        os.close(place)


def command(*words: str) -> None:
    """Run a command. Raise RuntimeError with its stderr if it fails."""
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")


def unavailable_reason() -> str:
    """Return why two nodes cannot be created here; "" if they can."""
    if shutil.which("ip") is None:
        return "needs the program ip (package iproute2)"
    try:
        Nodes(999).close()
    except (OSError, RuntimeError) as error:
        return str(error)
    return ""
