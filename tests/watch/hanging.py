"""Make ranks wait for another rank until their watchdogs report, and read what they wrote to stderr.

In a rank of a RankPool:

    with standard_error(folder, comm.rank):
        if comm.rank == 1:
            elsewhere(folder)   # until rank 0's watchdog has reported
        comm.all_reduce(x)
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

REPORT_PREFIX = "pynccl watchdog: "
MAX_WAIT_SECONDS = 40.0


@contextlib.contextmanager
def standard_error(folder: str, rank: int) -> Iterator[None]:
    """Redirect file descriptor 2 to a file, which `stderr_of` reads."""
    sys.stderr.flush()
    before = os.dup(2)
    file = os.open(_path(folder, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(file, 2)
    os.close(file)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(before, 2)
        os.close(before)


def stderr_of(folder: str | Path, rank: int) -> str:
    """Return what rank `rank` has written to stderr so far."""
    path = _path(folder, rank)
    return path.read_text() if path.exists() else ""


def elsewhere(folder: str, word: str = "") -> None:
    """Wait, in the line marked `# elsewhere`, until rank 0's watchdog has reported, with this word."""
    reported = threading.Event()

    def listen() -> None:
        end = time.monotonic() + MAX_WAIT_SECONDS
        while time.monotonic() < end:
            if REPORT_PREFIX in (text := stderr_of(folder, 0)) and word in text and text.endswith("\n"):
                reported.set()
                return
            time.sleep(0.01)

    threading.Thread(target=listen, daemon=True).start()
    assert reported.wait(MAX_WAIT_SECONDS + 1), "the watchdog did not report"  # elsewhere


def place_of(marker: str, path: str = __file__) -> str:
    """Return the line that ends with the comment `# marker`, such as "hanging.py:52"."""
    lines = Path(path).read_text().splitlines()
    [number] = [number for number, line in enumerate(lines, 1) if line.endswith(f"  # {marker}")]
    return f"{Path(path).name}:{number}"


def _path(folder: str | Path, rank: int) -> Path:
    return Path(folder, f"stderr-{rank}")


# Each kind of call in which a rank can wait. A comment with the function's name marks the waiting line.


def all_reduce(comm: Any) -> None:
    comm.all_reduce(torch.ones(4))  # all_reduce


def on_a_stream(comm: Any) -> None:
    import pynccl

    stream = pynccl.create_stream()
    comm.all_reduce(torch.ones(4), stream=stream)  # on_a_stream
    stream.synchronize()


def recv(comm: Any) -> None:
    if comm.rank == 0:
        comm.recv(torch.ones(4), 1)  # recv
    else:
        comm.send(torch.ones(4), 0)


def split(comm: Any) -> None:
    comm.split(0)  # split


def group(comm: Any) -> None:
    import pynccl

    with pynccl.group():
        comm.all_gather(torch.ones(4))  # group
        comm.all_reduce(torch.ones(4))
