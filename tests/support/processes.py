"""Processes and threads for tests of how communicators end.

Each test of process exit runs in its own process, which is checked by its stderr and the log of its stub.
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
HANG_SECONDS = 60.0  # seconds after which a process counts as hung
DESTROYED = ["ncclCommGetAsyncError", "ncclCommFinalize", "ncclCommDestroy"]
IGNORE_FORK_WARNING = ("-W", "ignore:This process:DeprecationWarning")  # a warning of Python 3.12

# Without torch, which the stub does not need, the process starts in 0.1 s.
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


class Finished(NamedTuple):
    code: int
    out: str
    err: str
    calls: list[str]  # names of the C functions called, except inits
    seconds: float


def process(folder: Path, source: str, *options: str, first: str = "") -> Finished:
    """Run `source` after PRELUDE in a process that uses the stub; `first` runs before pynccl is imported."""
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
        timeout=HANG_SECONDS,
        env={**os.environ, **paths},
    )
    seconds = time.monotonic() - started
    calls = [line.split()[0] for line in log.read_text().splitlines()]
    return Finished(done.returncode, done.stdout, done.stderr, [c for c in calls if c != "ncclCommInitRank"], seconds)


def wait_for_return(name: str) -> None:
    """Wait until an abandoned call, which continues in its own thread, has returned."""
    wait_for(lambda: not any(name in thread.name for thread in threading.enumerate()))


def count_overlaps(stub: Stub, bodies: list[Callable[[], Any]]) -> int:
    """Run each body twenty times in its own thread; return how many C calls began while another was running."""
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
    deadline = time.monotonic() + HANG_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        os.sched_yield()
