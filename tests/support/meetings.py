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

AT_ONCE = 8.0  # seconds; the timeouts that must not have been waited for are 60


class End(NamedTuple):
    """How a call ended."""

    error: str  # name of the class
    message: str
    seconds: float


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def set_environment(rank: int, size: int, port: int, **more: str) -> None:
    names = {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in names.items()} | more)


def total(comm: Communicator) -> float:
    with comm:
        return comm.all_reduce(torch.tensor(float(comm.rank + 1))).item()


def load() -> None:
    """What the first call of a process does, and which is no waiting."""
    with contextlib.suppress(pynccl.NcclError):
        pynccl.load()


def end_of(call: Callable[[], Any]) -> End:
    """What `call` raises, and the seconds until then."""
    load()
    started = time.monotonic()
    try:
        call()
    except BaseException as error:  # KeyboardInterrupt too
        return End(type(error).__name__, str(error), time.monotonic() - started)
    return End("", "", time.monotonic() - started)


def interrupted(call: Callable[[], Any], after: float = 0.4) -> float:
    """Seconds from Ctrl-C to the KeyboardInterrupt that ends `call`; infinity if something else ends it."""
    load()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    sent: list[float] = []

    def send() -> None:
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    timer = threading.Timer(after, send)
    timer.start()
    try:
        end = end_of(call)
        return time.monotonic() - sent[0] if end.error == "KeyboardInterrupt" else float("inf")
    finally:
        timer.cancel()
        timer.join()
        signal.signal(signal.SIGINT, before)
