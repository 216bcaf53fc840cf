"""Start processes for GPU tests, single or as ranks that share a GPU, outside the launch of the tests; and make torch's
process group of this launch.

A process that inherits RANK and MASTER_PORT would try to join the ranks of this launch under a rank already taken."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

_LAUNCH_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_LAUNCH_PREFIXES = ("LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_")


class ProcessResult(NamedTuple):
    """The result of a process; `out` without NCCL's version. code is -9 if it was killed at the time limit."""

    code: int
    out: str
    err: str
    seconds: float


def clean_environment(**more: object) -> dict[str, str]:
    """Return the environment without the variables of this process's launch, and with `more`."""
    kept = {k: v for k, v in os.environ.items() if k not in _LAUNCH_VARIABLES and not k.startswith(_LAUNCH_PREFIXES)}
    return {
        **kept,
        "PYNCCL_LIBRARY": os.environ["GPU_TESTS_LIBRARY"],
        **{name: str(value) for name, value in more.items()},
    }


def run_ranks(command: list[str], n: int, seconds: float = 100.0, **more: object) -> list[ProcessResult]:
    """Run `python *command` as n ranks on GPU 0, without an agent that would kill all ranks when one exits.

    They use sockets, as NCCL does between hosts."""
    port = _free_port()
    place = {"WORLD_SIZE": n, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    place |= {"NCCL_SOCKET_IFNAME": "lo", "PYNCCL_SHARE_GPU": 1, **more}
    environments = [clean_environment(RANK=rank, **place) for rank in range(n)]
    return _run(environments, command, seconds)


def run_process(command: list[str], seconds: float = 100.0, **more: object) -> ProcessResult:
    """Run `python *command` as a process that belongs to no launch."""
    return _run([clean_environment(**more)], command, seconds)[0]


def _run(environments: list[dict[str, str]], command: list[str], seconds: float) -> list[ProcessResult]:
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
            printed = [line for line in texts[0].splitlines(True) if not line.startswith("NCCL version ")]  # NCCL_DEBUG
            ended.append(ProcessResult(process.returncode, "".join(printed), texts[1], seconds_taken))
    return ended


@contextlib.contextmanager
def process_group(backend: str, folder: Path) -> Iterator[None]:
    """Make the default process group of torch.distributed for the ranks of this launch, and destroy it."""
    options: dict[str, Any] = {"timeout": timedelta(seconds=60)}
    if "RANK" not in os.environ:
        options |= {"store": dist.FileStore(str(folder / "store"), 1), "rank": 0, "world_size": 1}
    dist.init_process_group(backend, **options)
    yield
    dist.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
