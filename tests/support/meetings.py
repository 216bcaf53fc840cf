"""What the tests of the ways to meet share: environments, ports, and how a call ended."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import pynccl
from pynccl import Communicator

AT_ONCE = 30.0  # seconds; the timeouts that must not have been waited for are 60
_held: list[socket.socket] = []


class End(NamedTuple):
    """How a call ended."""

    error: str  # name of the class
    message: str
    seconds: float


def free_port() -> int:
    """A port of the loopback where nobody listens, and which the system gives nobody else while this process lives."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # so that who is told the port may listen there
    held.bind(("127.0.0.1", 0))
    _held.append(held)
    return int(held.getsockname()[1])


def set_environment(rank: int, size: int, port: int, **more: str) -> None:
    names = {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in names.items()} | more)


def total(comm: Communicator) -> float:
    with comm:
        return comm.all_reduce(torch.tensor(float(comm.rank + 1))).item()


def end_of(call: Callable[[], Any]) -> End:
    """What `call` raises, and the seconds until then."""
    with contextlib.suppress(pynccl.NcclError):
        pynccl.load()  # what the first call of a process does, and which is no waiting
    started = time.monotonic()
    try:
        call()
    except BaseException as error:  # KeyboardInterrupt too
        return End(type(error).__name__, str(error), time.monotonic() - started)
    return End("", "", time.monotonic() - started)


def interrupted(call: Callable[[], Any]) -> End:
    """How `call` ends, which hears Ctrl-C after a while."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.4, os.kill, (os.getpid(), signal.SIGINT))
    try:
        return end_of(lambda: (timer.start(), call()))
    finally:
        timer.cancel()
        timer.join()
        signal.signal(signal.SIGINT, before)
