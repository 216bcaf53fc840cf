"""Processes that GPU tests start: alone, or as ranks of their own that share a GPU, outside of the launch of the tests.

A process that inherits RANK and MASTER_PORT would meet the ranks of this launch, as one that is there already."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

_OF_A_LAUNCH = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_OF_LAUNCHES = ("LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_")


class Ended(NamedTuple):
    """A process that has ended, or was killed: code is -9 then."""

    code: int
    out: str
    err: str
    seconds: float


def outside(**more: object) -> dict[str, str]:
    """The environment without the launch that this process belongs to, and with `more`."""
    own = {k: v for k, v in os.environ.items() if k not in _OF_A_LAUNCH and not k.startswith(_OF_LAUNCHES)}
    return {**own, "PYNCCL_LIBRARY": "nccl", **{name: str(value) for name, value in more.items()}}


def as_ranks(command: list[str], n: int, seconds: float = 100.0, **more: object) -> list[Ended]:
    """`python *command` as n ranks on GPU 0, without an agent that would end them all when one ends.

    NCCL refuses two ranks on one GPU of one machine, so each has an NCCL_HOSTID of its own, and they use sockets."""
    port = _free_port()
    place = {"WORLD_SIZE": n, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    place |= {"NCCL_SOCKET_IFNAME": "lo", **more}
    return _run([outside(RANK=rank, NCCL_HOSTID=f"rank{rank}", **place) for rank in range(n)], command, seconds)


def alone(command: list[str], seconds: float = 100.0, **more: object) -> Ended:
    """`python *command` as a process of no launch."""
    return _run([outside(**more)], command, seconds)[0]


def _run(environments: list[dict[str, str]], command: list[str], seconds: float) -> list[Ended]:
    began, ended = time.monotonic(), []
    with contextlib.ExitStack() as stack:
        started = []
        for env in environments:
            out, err = (stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2))  # a pipe may fill up
            process = subprocess.Popen([sys.executable, *command], env=env, stdout=out, stderr=err)
            stack.callback(process.kill)
            started.append((process, out, err))
        for process, out, err in started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(began + seconds - time.monotonic(), 0.1))
            seconds_taken = time.monotonic() - began
            if process.poll() is None:
                process.kill()
                process.wait()
            texts = [file.seek(0) or file.read() for file in (out, err)]
            ended.append(Ended(process.returncode, *texts, seconds_taken))
    return ended


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
