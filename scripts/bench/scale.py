"""Measure how soon a hang among many ranks is reported, and check that all ranks name the missing one.

The ranks are threads of a few processes that share one real TCPStore. They run on a stub library whose collectives
return immediately, or block in C until they are released. All ranks but the last enter an all_reduce; the last rank
never does, since its process stays in next_batch(). The watchdogs find this through the store only, because their files
are in separate folders, as on separate nodes. Needs a C compiler and torch.

examples:
  python scripts/bench/scale.py --ranks 4 --processes 2 --timeout 1
  python scripts/bench/scale.py  # long
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.ranks import columns
from bench.stub import compile_stub

import pynccl
from pynccl import progress
from pynccl.tools import command

CALLS = 3  # collectives before the one that hangs
PATIENCE_SECONDS = 60.0
REPORT = re.compile(r"^pynccl watchdog: rank (\d+) of[^\n]*\n(.*?)^  this rank's stack", re.MULTILINE | re.DOTALL)

STUB = r"""
#include <pthread.h>
static int held;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;

static int set(int *flag, int value) {
  pthread_mutex_lock(&lock);
  *flag = value;
  pthread_cond_broadcast(&changed);
  pthread_mutex_unlock(&lock);
  return 0;
}
/* 1: collectives block from now on; 0: release them. */
void stub_hold(int value) { set(&held, value); }
int ncclAllReduce(const void *send, void *recv, size_t count, int type, int op, comm_t comm, void *stream) {
  pthread_mutex_lock(&lock);
  while (held && !comm->aborted) pthread_cond_wait(&changed, &lock);
  pthread_mutex_unlock(&lock);
  return comm->aborted ? 6 : 0;
}
int ncclCommAbort(comm_t comm) { return set(&comm->aborted, 1); }
"""


# One process with some of the ranks


def child(port: int, first: int, last: int, nranks: int, library_path: str) -> None:
    """Run ranks first to last - 1. All make some calls; then all but the last rank of the job enter one more."""
    import torch
    import torch.distributed as dist

    store = dist.PrefixStore("job", dist.TCPStore("127.0.0.1", port, is_master=False))
    library = pynccl.load(library_path)
    library.is_host = True  # use CPU memory and do not look for a GPU
    stub, tensor = ctypes.CDLL(library_path), torch.zeros(1)
    calling, hang, end = [threading.Event() for _ in range(first, last)], threading.Event(), threading.Event()

    def rank(number: int) -> None:
        comm = pynccl.Communicator.from_store(store, number, nranks, library=library, timeout=120)
        for _ in range(CALLS):
            comm.all_reduce(tensor, tensor)
        calling[number - first].set()
        hang.wait()
        if number < nranks - 1:
            comm.all_reduce(tensor, tensor)
        end.wait()
        comm.destroy()

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(first, last)]
    for thread in threads:
        thread.start()
    for one in calling:
        one.wait()
    stub.stub_hold(1)
    store.add("ready", last - first)
    while not store.check(["hang"]):  # poll: a blocking wait would lock the store's client for other threads
        time.sleep(0.05)
    hang.set()
    next_batch(store)
    stub.stub_hold(0)
    end.set()
    for thread in threads:
        thread.join()


def next_batch(store: Any) -> None:
    """Block the main thread of each process, including the missing rank's, until the hang is reported."""
    while not store.check(["reported"]):
        time.sleep(0.1)


# All processes


class Job:
    """The processes of all ranks but the last, and one for the last. Each writes its watchdog's reports to a file."""

    def __init__(self, nranks: int, port: int, library: Path, options: argparse.Namespace) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYNCCL_WATCH_TIMEOUT": f"{options.timeout:g}"}
        for name in ("PYNCCL_CHECK", "PYNCCL_WATCH", "PYNCCL_WATCH_ACTION", "RANK", "WORLD_SIZE"):
            environment.pop(name, None)
        processes = min(options.processes, nranks - 1)
        bounds = [(nranks - 1) * i // processes for i in range(processes + 1)] + [nranks]
        self.processes: dict[Path, subprocess.Popen[str]] = {}
        for number, (first, last) in enumerate(itertools.pairwise(bounds)):
            arguments = ["--child", str(port), str(first), str(last), str(nranks), "--library", str(library)]
            folder = library.parent / f"{nranks}-{number}"
            log = folder.with_suffix(".txt")
            with log.open("w") as file:
                words, env = [sys.executable, __file__, *arguments], environment | {"PYNCCL_WATCH_DIR": str(folder)}
                self.processes[log] = subprocess.Popen(words, stderr=file, text=True, env=env)

    def reports(self) -> dict[int, str]:
        """Return the verdict of each rank that has printed one."""
        found: dict[int, str] = {}
        for log in self.processes:
            for rank, verdict in REPORT.findall(log.read_text()):
                found[int(rank)] = "\n".join(line.strip() for line in verdict.splitlines())
        return found

    def wait_until(self, done: Callable[[], bool], seconds: float) -> None:
        """Wait until done() or the timeout. Raises FailedError if a process fails."""
        end = time.monotonic() + seconds
        while not done() and time.monotonic() < end:
            for log, process in self.processes.items():
                if code := process.poll():
                    text = "\n".join(log.read_text().splitlines()[-30:])
                    raise command.FailedError(f"a process exited with code {code}:\n{text}")
            time.sleep(0.05)

    def end(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()


def measure(nranks: int, library: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run a job of `nranks` ranks and return its row of the table."""
    import torch.distributed as dist

    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = dist.PrefixStore("job", server)
    job, seen = Job(nranks, server.port, library, options), dict[int, float]()

    def all_reported() -> bool:
        for rank in job.reports():
            seen.setdefault(rank, time.monotonic())
        return len(seen) >= nranks - 1

    try:
        job.wait_until(lambda: store.add("ready", 0) == nranks, 2 * PATIENCE_SECONDS)
        store.set("hang", "")
        began = time.monotonic()
        job.wait_until(all_reported, options.timeout + PATIENCE_SECONDS)
        texts = job.reports().values()
        store.set("reported", "")
        job.wait_until(lambda: all(one.poll() == 0 for one in job.processes.values()), PATIENCE_SECONDS)
    finally:
        job.end()
    seconds = [when - began - options.timeout for when in seen.values()]
    return {
        "ranks": nranks,
        "reports": len(seen),
        "first": min(seconds, default=-1.0),
        "last": max(seconds, default=-1.0),
        "texts": sorted(set(texts)),
    }


def table(rows: list[dict[str, Any]]) -> str:
    head = ("ranks", "reports", "first", "last")
    lines = [head, *([f"{row[name]:.1f}" if name in head[2:] else str(row[name]) for name in head] for row in rows)]
    reports = [f"\n{row['ranks']}: {row['reports']} waiting ranks report:\n" + "\n".join(row["texts"]) for row in rows]
    return "\n".join(["Seconds after the timeout of the call.\n", columns(lines, markdown=True), *reports])


def main() -> None:
    parser = command.Parser(__doc__, failed="a process failed")
    parser.add_argument(
        "--ranks",
        type=command.integer(2, 4096),
        nargs="+",
        default=[16, 128, 1024],
        help="sizes (default 16 128 1024)",
    )
    parser.add_argument(
        "--timeout", type=command.number(0.1, "seconds"), default=3.0, help="PYNCCL_WATCH_TIMEOUT (default 3)"
    )
    parser.add_argument(
        "--processes", type=command.integer(1, 256), default=8, help="processes to divide the ranks among (default 8)"
    )
    parser.add_argument("--child", type=int, nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--library", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        port, first, last, nranks = options.child
        child(port, first, last, nranks, options.library)
        return
    with tempfile.TemporaryDirectory(prefix="bench-scale-") as folder:
        library = compile_stub(Path(folder), STUB, "-pthread")
        rows = [measure(nranks, library, options) for nranks in progress.over(options.ranks, "measuring", "size")]
    print(table(rows))


if __name__ == "__main__":
    command.run(main)
