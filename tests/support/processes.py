"""Processes and threads that tests of the end of a communicator start, and wait for.

What happens at the end of a process is seen in a process of its own, by what its standard error and its stub's log say.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from libraries import Stub, compiled

from pynccl.bindings.abi import HEADER_VERSION

ROOT = Path(__file__).resolve().parents[2]
HANGS = 60.0  # seconds after which a process is taken to hang
DESTROYED = ["ncclCommGetAsyncError", "ncclCommFinalize", "ncclCommDestroy"]
A_FORK_WITH_THREADS = ("-W", "ignore:This process:DeprecationWarning")  # which Python 3.12 says to whoever forks

# Torch is not imported: the stub needs none, and a process starts in a tenth of a second.
PRELUDE = """
import atexit, ctypes, gc, os, sys, threading, pynccl
from pynccl.bindings.abi import UniqueId
stub, library = ctypes.CDLL(os.environ["PYNCCL_LIBRARY"]), pynccl.load()
stub.stub_record.restype = ctypes.c_char_p
X, Y = (1 << 20, 12, "float32"), (1 << 30, 12, "float32")
def make(rank=1, timeout=60.0):
    handle = ctypes.c_void_p()
    library.ncclCommInitRank(ctypes.byref(handle), 4, UniqueId(), rank)
    return pynccl.Communicator(handle.value, library, timeout)
"""


class Ended(NamedTuple):
    code: int
    out: str
    err: str
    calls: list[str]  # names of the C functions that the stub saw, inits left out
    seconds: float


def process(folder: Path, source: str, *options: str, first: str = "") -> Ended:
    """Run `source`, which may use what PRELUDE defines, on the stub; `first` comes before pynccl is imported."""
    script, log = folder / "script.py", folder / "log"
    script.write_text(first + PRELUDE + source)
    log.write_text("")
    paths = {"PYTHONPATH": str(ROOT), "PYNCCL_LIBRARY": compiled(HEADER_VERSION), "STUB_LOG": str(log)}
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-W", "default", *options, script],
        check=False,
        capture_output=True,
        text=True,
        timeout=HANGS,
        env={**os.environ, **paths},
    )
    seconds = time.monotonic() - started
    calls = [line.split()[0] for line in log.read_text().splitlines()]
    return Ended(done.returncode, done.stdout, done.stderr, [c for c in calls if c != "ncclCommInitRank"], seconds)


def comes_back(name: str) -> None:
    """Wait for a call that was left under way beside the thread that made it, if it has not come back meanwhile."""
    wait_for(lambda: not any(name in thread.name for thread in threading.enumerate()))


def overlapping(stub: Stub, bodies: list[Callable[[], Any]]) -> int:
    """How many calls began while another was in the library, all bodies run twenty times in threads of their own."""
    before = stub.cdll.stub_overlaps()
    go = threading.Barrier(len(bodies))

    def run(body: Callable[[], Any]) -> None:
        go.wait()
        for _ in range(20):
            body()

    threads = [threading.Thread(target=run, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return int(stub.cdll.stub_overlaps() - before)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + HANGS
    while not condition():
        assert time.monotonic() < deadline
        os.sched_yield()
