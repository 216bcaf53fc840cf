"""Helpers of the rendezvous tests: environments, ports, and how a call ended."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import pynccl
from pynccl import Communicator

AT_ONCE = 30.0  # seconds: well below the timeouts of 60 that must not elapse
_reserved: list[socket.socket] = []


class End(NamedTuple):
    """How a call ended."""

    error: str  # name of the exception class; "" if none
    message: str
    seconds: float
    frames: int = 0  # of pynccl, in its traceback


def free_port() -> int:
    """Return a loopback port without a listener, reserved while this process lives."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # lets the test listen on the port
    sock.bind(("127.0.0.1", 0))
    _reserved.append(sock)
    return int(sock.getsockname()[1])


def set_environment(rank: int, size: int, port: int, **more: str) -> None:
    names = {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in names.items()} | more)


def total(comm: Communicator) -> float:
    with comm:
        return comm.all_reduce(torch.tensor(float(comm.rank + 1))).item()


def end_of(call: Callable[[], Any]) -> End:
    """Run `call` and return what it raised and how long it took."""
    with contextlib.suppress(pynccl.NcclError):
        pynccl.load()  # so that the time of the first load is not measured
    started = time.monotonic()
    try:
        call()
    except BaseException as error:  # KeyboardInterrupt too
        files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
        inner = sum("/pynccl/" in file for file in files)
        return End(type(error).__name__, str(error), time.monotonic() - started, inner)
    return End("", "", time.monotonic() - started)


def interrupted(call: Callable[[], Any]) -> End:
    """Run `call`, send Ctrl-C after 0.4 s, and return how the call ended."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.4, os.kill, (os.getpid(), signal.SIGINT))
    try:
        return end_of(lambda: (timer.start(), call()))
    finally:
        timer.cancel()
        timer.join()
        signal.signal(signal.SIGINT, before)
