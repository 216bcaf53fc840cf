"""What ranks ask of their store as they grow in number, and how soon a hang among many of them is reported.

The ranks are threads of a few processes, at one real TCPStore, on a stub library whose collectives return at once, or
block in C until they are let go. Each meets the others by Communicator.from_store, splits, runs some collectives; then
all but one enter an all_reduce that the last one never enters: it has a process of its own, whose main thread stays in
next_batch(). The watchdogs of the processes find that out by themselves, through the store alone: their files lie in
folders of their own, as on several machines. Needs a C compiler and torch.

examples:
  python scripts/bench/scale.py --ranks 4 --processes 2 --timeout 1 --json
  python scripts/bench/scale.py  # long
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.overhead import compile_stub

import pynccl
from pynccl import progress
from pynccl.tools import command

CALLS = 3  # collectives before the one that hangs
PART = 8  # ranks of a communicator after the split
QUIET_POLLS = 2
PATIENCE_SECONDS = 60.0

STUB = r"""
#include <pthread.h>
#include <stdlib.h>

typedef struct { int rank, nranks, aborted; } *comm_t;
typedef struct { char internal[128]; } unique_id_t;
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
static int make(comm_t *out, int rank, int nranks) {
  *out = malloc(sizeof **out);
  **out = (typeof(**out)){rank, nranks, 0};
  return 0;
}
/* From now on collectives block, or those that block return. */
void stub_hold(int value) { set(&held, value); }
int ncclAllReduce(const void *send, void *recv, size_t count, int type, int op, comm_t comm, void *stream) {
  pthread_mutex_lock(&lock);
  while (held && !comm->aborted) pthread_cond_wait(&changed, &lock);
  pthread_mutex_unlock(&lock);
  return comm->aborted ? 6 : 0;
}
int ncclCommAbort(comm_t comm) { return set(&comm->aborted, 1); }
int ncclGetVersion(int *version) { *version = VERSION; return 0; }
const char *ncclGetErrorString(int code) { return code ? "aborted" : "no error"; }
const char *ncclGetLastError(comm_t comm) { return ""; }
int ncclCommInitRank(comm_t *comm, int nranks, unique_id_t id, int rank) { return make(comm, rank, nranks); }
int ncclCommSplit(comm_t comm, int color, int key, comm_t *out, void *config) {
  return make(out, comm->rank % PART, comm->nranks < PART ? comm->nranks : PART);
}
int ncclCommCount(comm_t comm, int *out) { *out = comm->nranks; return 0; }
int ncclCommCuDevice(comm_t comm, int *out) { *out = 0; return 0; }
int ncclCommUserRank(comm_t comm, int *out) { *out = comm->rank; return 0; }
"""


class Counted:
    """A store, and what is asked of it, by thread: each rank bootstraps in a thread of its own. Looks for others that
    it waits for are left out, and what the watchdog asks is counted apart: it has a clone of the store."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.operations: Counter[threading.Thread] = Counter()
        self.polled: list[float] = []  # when it was looked whether there is a question
        self.watchdogs: Counted | None = None

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)

        def counted(*arguments: Any) -> Any:
            if name != "check" or arguments[0] not in (["over"], ["rank/0"]):
                self.operations[threading.current_thread()] += 1
            if (name, *arguments) == ("add", "watch/asked", 0):
                self.polled.append(time.monotonic())
            return found(*arguments)

        return counted if name in ("add", "get", "set", "check", "append") else found

    def clone(self) -> Counted:
        self.watchdogs = Counted(self._store.clone())
        return self.watchdogs

    def beyond_polls(self) -> int:
        return self.operations.total() - len(self.polled)

    def wait_for_polls(self, count: int) -> None:
        end = len(self.polled) + count
        while len(self.polled) < end:
            time.sleep(0.02)


def all_here(store: Any, name: str, processes: int, meanwhile: Callable[[], None] = lambda: None) -> None:
    """All processes, and the one that started them, at one point; not counted."""
    here = store.add(f"gather/{name}", 1)
    while here < processes:
        time.sleep(0.02)
        meanwhile()
        here = store.add(f"gather/{name}", 0)


# One process, with a part of the ranks


class Rank:
    """A rank of the job: what it does."""

    def __init__(self, number: int, nranks: int, store: Counted, library: pynccl.Library) -> None:
        self.number, self.nranks, self.store, self.library = number, nranks, store, library
        self.since = 0.0  # when it entered the call that hangs
        self.communicators: list[pynccl.Communicator] = []

    def bootstrap(self) -> None:
        world = pynccl.Communicator.from_store(self.store, self.number, self.nranks, library=self.library, timeout=120)
        self.communicators.append(world)

    def split(self) -> None:
        part = self.communicators[0].split(self.number // PART, self.number)
        assert part is not None
        self.communicators.append(part)

    def call(self) -> None:
        import torch

        tensor = torch.zeros(1)
        self.since = time.time()
        self.communicators[0].all_reduce(tensor, tensor)


def child(port: int, first: int, last: int, nranks: int, options: argparse.Namespace) -> dict[str, Any]:
    import torch.distributed as dist

    here = functools.partial(all_here, dist.TCPStore("127.0.0.1", port, is_master=False), processes=options.processes)
    store = Counted(dist.PrefixStore("job", dist.TCPStore("127.0.0.1", port, is_master=False)))
    library = pynccl.load(options.library)
    library.is_host = True  # its buffers are CPU memory: no GPU is looked for
    ranks = [Rank(number, nranks, store, library) for number in range(first, last)]
    here("start")
    found = start(ranks, store)
    here("split")
    while store.watchdogs is None:  # its first poll
        time.sleep(0.02)
    asked = store.watchdogs
    asked.wait_for_polls(2)  # in which it says once who there is
    here("roster")
    before, polls = asked.operations.total(), len(asked.polled)
    asked.wait_for_polls(QUIET_POLLS)
    times = asked.polled[polls - 1 :]
    found["quiet poll"] = (asked.operations.total() - before) / (len(times) - 1)
    found["apart"] = min(second - first for first, second in itertools.pairwise(times))
    here("quiet")
    return found | hang(ranks, asked, ctypes.CDLL(options.library), here)


def start(ranks: list[Rank], store: Counted) -> dict[str, Any]:
    """Bootstrap, split, some calls: operations on the store."""
    together([rank.bootstrap for rank in ranks])
    assert len(store.operations) == len(ranks)  # a thread each
    bootstrap, before = max(store.operations.values()), store.operations.total()
    together([rank.split for rank in ranks])
    for _ in range(CALLS):
        together([rank.call for rank in ranks])
    return {"bootstrap": bootstrap, "split": store.operations.total() - before}


def hang(ranks: list[Rank], asked: Counted, stub: ctypes.CDLL, here: Callable[[str], None]) -> dict[str, Any]:
    """All ranks but the last one of the job enter a call that does not return until it is reported."""
    before = asked.beyond_polls()
    stub.stub_hold(1)
    waiting = [rank for rank in ranks if rank.number != rank.nranks - 1]
    stuck = [threading.Thread(target=rank.call) for rank in waiting]
    for thread in stuck:
        thread.start()
    reported = threading.Event()

    def wait() -> None:
        here("reported")
        reported.set()

    threading.Thread(target=wait).start()
    if len(waiting) < len(ranks):
        next_batch(reported)
    reported.wait()
    found = {
        "report": asked.beyond_polls() - before,
        "since": [rank.since for rank in waiting],
    }
    stub.stub_hold(0)
    for thread in stuck:
        thread.join()
    for rank in ranks:
        for comm in rank.communicators:
            comm.destroy()
    here("end")
    return found


def next_batch(data: threading.Event) -> None:
    """Where the missing rank is."""
    data.wait()


def together(bodies: list[Callable[[], None]]) -> None:
    """Each in a thread of its own: all of them meet in one barrier first. The first error of any is raised."""
    barrier = threading.Barrier(len(bodies))

    def run(body: Callable[[], None]) -> None:
        barrier.wait()
        body()

    with ThreadPoolExecutor(len(bodies)) as pool:
        for done in [pool.submit(run, body) for body in bodies]:
            done.result()


# All processes


class Process:
    """One of them, and what its watchdog prints."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self.popen = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        self.lines: list[tuple[float, str]] = []
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        assert self.popen.stderr is not None
        for line in self.popen.stderr:
            self.lines.append((time.time(), line.rstrip("\n")))

    def reports(self) -> dict[int, tuple[float, str]]:
        """Of each rank: when it was printed, and the verdict."""
        found: dict[int, tuple[float, str]] = {}
        verdict = False
        for when, line in list(self.lines):
            head = re.match(r"pynccl watchdog: rank (\d+) of", line)
            if head:
                rank, verdict = int(head[1]), True
                found[rank] = when, ""
            elif line.startswith("  this rank's stack"):
                verdict = False
            elif verdict:
                found[rank] = when, f"{found[rank][1]}\n{line.strip()}".strip()
        return found

    def result(self) -> dict[str, Any]:
        assert self.popen.stdout is not None
        said = self.popen.stdout.read()
        code = self.popen.wait(60)
        self._thread.join()
        if code:
            text = "\n".join(line for _, line in self.lines[-30:])
            raise command.FailedError(f"a process ended with exit code {code}:\n{text}")
        found: dict[str, Any] = json.loads(said)
        return found

    def end(self) -> None:
        self.popen.kill()
        self.popen.wait()


def measure(nranks: int, library: Path, options: argparse.Namespace) -> dict[str, Any]:
    """A job of so many ranks; what is printed of it."""
    import torch.distributed as dist

    processes = min(options.processes, max(nranks // PART, 1))
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    running = start_processes(nranks, processes, server.port, library, options.timeout)

    def look() -> None:
        for one in running:
            if one.popen.poll():  # it has failed
                one.result()

    try:
        for name in ("start", "split", "roster", "quiet"):
            all_here(server, name, len(running) + 1, look)
        end = time.time() + options.timeout + PATIENCE_SECONDS
        while sum(len(one.reports()) for one in running) < nranks - 1 and time.time() < end:
            time.sleep(0.1)
        for name in ("reported", "end"):
            all_here(server, name, len(running) + 1, look)
        found = [one.result() for one in running]
    finally:
        for one in running:
            one.end()
    return summary(nranks, found, [one.reports() for one in running], options.timeout)


def start_processes(nranks: int, processes: int, port: int, library: Path, timeout: float) -> list[Process]:
    """Of all ranks but the last one, and one process for that."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYNCCL_WATCH_TIMEOUT": f"{timeout:g}"}
    for name in ("PYNCCL_CHECK", "PYNCCL_WATCH", "PYNCCL_WATCH_ACTION", "RANK", "WORLD_SIZE"):
        environment.pop(name, None)
    bounds = [(nranks - 1) * i // processes for i in range(processes + 1)] + [nranks]
    running = []
    for number, (first, last) in enumerate(itertools.pairwise(bounds)):
        part = ["--child", str(port), str(first), str(last), str(nranks)]
        part += ["--library", str(library), "--processes", str(processes + 2)]
        folder = str(library.parent / f"{nranks}-{number}")
        command = [sys.executable, __file__, *part]
        running.append(Process(command, environment | {"PYNCCL_WATCH_DIR": folder}))
    return running


def summary(
    nranks: int, found: list[dict[str, Any]], reports: list[dict[int, tuple[float, str]]], timeout: float
) -> dict[str, Any]:
    def most(name: str) -> Any:
        return max(one[name] for one in found)

    began = min(since for one in found for since in one["since"])
    when = [time - began - timeout for part in reports for time, _ in part.values()]
    return {
        "ranks": nranks,
        "bootstrap": most("bootstrap"),
        "split": most("split"),
        "quiet poll": sum(one["quiet poll"] for one in found) / len(found),
        "polls apart": min(one["apart"] for one in found),
        "report": median(one["report"] for one in found),
        "report, most": most("report"),
        "first report seconds": min(when, default=-1.0),
        "last report seconds": max(when, default=-1.0),
        "reports": len(when),
        "stuck": nranks - 1,
        "calls": CALLS + 2,  # a split, and the one that hangs
        "texts": sorted({text for part in reports for _, text in part.values()}),
    }


COLUMNS = [
    *("ranks", "bootstrap", "split", "quiet poll", "polls apart", "report", "report, most"),
    *("first report seconds", "last report seconds"),
]


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "Operations on the store. Bootstrap, split: of the rank with most, without the looks for others that it waits",
        "for. Quiet poll, report (beyond its polls; median, and most): of a process, with however many ranks.",
        "Polls apart: the fewest seconds between two of them. Reports: seconds past the timeout of the rank that",
        "entered first.",
    ]
    lines += ["", "| " + " | ".join(COLUMNS) + " |", "|" + "---:|" * len(COLUMNS)]
    for row in rows:
        cells = [f"{row[name]:.1f}" if isinstance(row[name], float) else str(row[name]) for name in COLUMNS]
        lines.append("| " + " | ".join(cells) + " |")
    for row in rows:
        lines += ["", f"{row['ranks']}: {row['reports']} of {row['stuck']} ranks that wait have said:", *row["texts"]]
    return "\n".join(lines)


def main() -> None:
    parser = command.Parser(__doc__, failed="a process failed")
    parser.add_argument(
        "--ranks", type=command.whole(2, 4096), nargs="+", default=[16, 128, 1024], help="sizes (default 16 128 1024)"
    )
    parser.add_argument(
        "--timeout", type=command.number(0.1, "seconds"), default=3.0, help="PYNCCL_WATCH_TIMEOUT (default 3)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument(
        "--processes", type=command.whole(1, 256), default=8, help="of which the ranks are threads (default 8)"
    )
    parser.add_argument("--child", type=int, nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--library", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        port, first, last, nranks = options.child
        print(json.dumps(child(port, first, last, nranks, options)))
        return
    with tempfile.TemporaryDirectory(prefix="bench-scale-") as folder:
        library = compile_stub(Path(folder), STUB, "-pthread", f"-DPART={PART}")
        rows = [measure(nranks, library, options) for nranks in progress.over(options.ranks, "measuring", "size")]
    print(json.dumps(rows, indent=2) if options.json else table(rows))


if __name__ == "__main__":
    command.run(main)
