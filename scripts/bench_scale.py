"""What ranks ask of their store as they grow in number, and how soon a hang among many of them is reported.

    python scripts/bench_scale.py [--ranks 16 128 1024] [--timeout S] [--interval S] [--json]

The ranks are threads of a few processes, at one real TCPStore, on a stub library whose collectives return at once, or
block in C until they are let go. Each meets the others by Communicator.from_store, splits, runs some collectives; then
all but one enter an all_reduce that the last one never enters. Counted are the operations that each asks of the store.
Needs a C compiler and torch.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import pynccl
from pynccl.bindings import abi
from pynccl.watch.asking import Answers, Exchange
from pynccl.watch.records import COMPLETED, INSIDE, CallRecord, CommRecord, ProcessRecord

CALLS = 3  # collectives before the one that hangs
PART = 8  # ranks of a communicator after the split
QUIET_POLLS = 3
PATIENCE_SECONDS = 60.0
WORLD = "world"

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


def compile_stub(folder: Path) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        sys.exit("bench_scale.py compiles a stub library: install a C compiler (cc or gcc)")
    target = folder / "libstub.so"
    (folder / "stub.c").write_text(STUB)
    plain = "".join(f"__attribute__((weak)) int {name}() {{ return 0; }}\n" for name in abi.FUNCTIONS)
    (folder / "plain.c").write_text(plain)
    numbers = [f"-DVERSION={abi.version_code(abi.HEADER_VERSION)}", f"-DPART={PART}"]
    command = [compiler, "-O2", "-std=gnu11", "-w", "-shared", "-fPIC", "-pthread", *numbers]
    subprocess.run([*command, "stub.c", "plain.c", "-o", target.name], cwd=folder, check=True)
    return target


# One rank


class Counted:
    """A store, and what one rank asks of it; the turns of waiting for the others are counted apart."""

    def __init__(self, store: Any, watching: Any, counts: Counter[str] | None = None) -> None:
        self._store, self._watching = store, watching
        self.counts: Counter[str] = Counter() if counts is None else counts

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)

        def counted(*arguments: Any) -> Any:
            waits = name == "check" and arguments[0] in (["over"], ["rank/0"])
            self.counts["turns" if waits else "operations"] += 1
            return found(*arguments)

        return counted if name in ("add", "get", "set", "check", "append") else found

    def clone(self) -> Counted:
        """All ranks of a process have one connection for this."""
        return Counted(self._watching, self._watching, self.counts)


class Rank:
    """A rank of the job: what it does, and what is known of it."""

    def __init__(self, number: int, nranks: int, store: Counted) -> None:
        self.number, self.nranks, self.store = number, nranks, store
        self.spent: dict[str, int] = {}
        self.entered = self.completed = 0
        self.since = 0.0  # when it entered the call that it is in
        self.communicators: list[pynccl.Communicator] = []
        self._before = 0

    def start(self, library: pynccl.Library) -> None:
        import torch

        comm = pynccl.Communicator.from_store(self.store, self.number, self.nranks, library=library, timeout=120)
        self.count("bootstrap")
        part = comm.split(self.number // PART, self.number)
        self.count("split")
        assert part is not None
        self.communicators = [comm, part]
        self.tensor = torch.zeros(1)
        for _ in range(CALLS):
            self.call()

    def call(self) -> None:
        self.entered, self.since = self.entered + 1, time.time()
        self.communicators[0].all_reduce(self.tensor, self.tensor)
        self.completed, self.since = self.completed + 1, 0.0

    def count(self, phase: str) -> None:
        """What was asked since the last time."""
        now = self.store.counts["operations"]
        self.spent[phase], self._before = now - self._before, now


# The watchdog


class Watch(Protocol):
    """What watches the ranks of a process: notices that one has been in a call for too long, and asks all."""

    reports: dict[int, tuple[float, str]]  # rank -> when it was reported, and the text
    questions: dict[int, list[float]]  # rank -> when it was asked
    polls: Counter[int]  # rank -> how often it has looked whether it is asked

    def start(self) -> None: ...
    def stop(self) -> None: ...


class ByHand:
    """One Exchange a rank, as if each were a process; all of them polled by one thread once an interval."""

    def __init__(self, ranks: list[Rank], timeout: float, interval: float) -> None:
        self.timeout, self.interval = timeout, interval
        self.reports: dict[int, tuple[float, str]] = {}
        self.questions: dict[int, list[float]] = {}
        self.polls: Counter[int] = Counter()
        self._raised: set[int] = set()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.exchanges: dict[int, Exchange] = {}
        self.ranks = {rank.number: rank for rank in ranks}
        for number, rank in self.ranks.items():
            exchange = Exchange(rank.store, f"node{number // PART}", 10000 + number, f"node{number // PART}", judge)
            exchange.enrol(WORLD, number)
            exchange.enrol(f"part{number // PART}", number % PART)
            self.exchanges[number] = exchange

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()
        for exchange in self.exchanges.values():
            exchange.close()

    def _run(self) -> None:
        while not self._stopped.is_set():
            end = time.monotonic() + self.interval
            for number, exchange in self.exchanges.items():
                self._poll(number, exchange)
            self._stopped.wait(max(end - time.monotonic(), 0.0))

    def _poll(self, number: int, exchange: Exchange) -> None:
        rank = self.ranks[number]
        news = exchange.poll()
        self.polls[number] += 1
        if news.question:
            self.questions.setdefault(number, []).append(time.time())
            exchange.answer(news.question, [record_of(rank, exchange)])
        if text := news.verdict or news.given_up:
            self.reports[number] = time.time(), text
        since, entered = rank.since, rank.entered
        if since and time.time() - since > self.timeout and number not in self._raised:
            self._raised.add(number)
            exchange.raise_alarm(WORLD, number, entered)


def record_of(rank: Rank, exchange: Exchange) -> ProcessRecord:
    state = INSIDE if rank.since else COMPLETED
    call = CallRecord(rank.entered, rank.entered, "all_reduce", 1, "FLOAT32", "SUM", site="train.py:31", state=state)
    comm = CommRecord(WORLD, "init", rank.number, rank.nranks, entered=rank.entered, completed=rank.completed)
    comm.calls.append(call)
    where = "" if rank.since else "data.py:41 next_batch"
    return ProcessRecord(exchange.pid, exchange.host, exchange.machine, rank=rank.number, where=where, comms=[comm])


def judge(answers: Answers) -> str:
    """Who has entered fewer calls than others."""
    comms = [(comm, record) for record in answers.records for comm in record.comms]
    last = max(comm.entered for comm, _ in comms)
    missing = [
        f"rank {comm.rank} never entered #{last}: {record.where}" for comm, record in comms if comm.entered < last
    ]
    return "; ".join([*missing, *(f"{one} did not answer" for one in answers.silent)])


# One process, with a part of the ranks


def child(port: int, first: int, last: int, nranks: int, options: argparse.Namespace) -> dict[str, Any]:
    import torch.distributed as dist

    clients = [dist.TCPStore("127.0.0.1", port, is_master=False) for _ in range(2)]
    stores = [dist.PrefixStore("job", one) for one in clients]
    ranks = [Rank(number, nranks, Counted(stores[0], stores[1])) for number in range(first, last)]
    library = pynccl.load(options.library)
    library.is_host = True  # its buffers are CPU memory: no GPU is looked for
    stub = ctypes.CDLL(options.library)
    gather = Gather(clients[0], options.processes)

    gather.all_here("start")
    started = time.time()
    together([lambda rank=rank: rank.start(library) for rank in ranks])  # type: ignore[misc]
    seconds = time.time() - started
    watch: Watch = ByHand(ranks, options.timeout, options.interval)
    quiet = quiet_polls(watch, ranks, gather)
    polls = watch.polls.copy()

    stub.stub_hold(1)
    stuck = [threading.Thread(target=rank.call) for rank in ranks if rank.number != nranks - 1]
    for thread in stuck:
        thread.start()
    end = time.time() + options.timeout + PATIENCE_SECONDS
    while len(watch.reports) < len(stuck) and time.time() < end:
        time.sleep(0.02)
    latest = [when - ranks[number - first].since - options.timeout for number, (when, _) in watch.reports.items()]
    watch.stop()
    for rank in ranks:
        rank.count("report")
        rank.spent["report"] -= watch.polls[rank.number] - polls[rank.number]
    stub.stub_hold(0)
    for thread in stuck:
        thread.join()
    for rank in ranks:
        for comm in rank.communicators:
            comm.destroy()
    gather.all_here("end")
    return {
        "spent": [rank.spent for rank in ranks],
        "quiet": quiet,
        "bootstrap seconds": seconds,
        "turns": max(rank.store.counts["turns"] for rank in ranks),
        "report seconds": latest,
        "texts": sorted({text for _, text in watch.reports.values()}),
        "asked": max(map(len, watch.questions.values()), default=0),
        "asked at once": max((most_within(options.interval, times) for times in watch.questions.values()), default=0),
        "stuck": len(stuck),
    }


def most_within(seconds: float, times: list[float]) -> int:
    """The most of these times that lie within so many seconds."""
    return max(sum(start <= one < start + seconds for one in times) for start in times)


def quiet_polls(watch: Watch, ranks: list[Rank], gather: Gather) -> list[float]:
    """Operations of each rank for a poll while nothing happens; what the roster takes is counted apart."""
    watch.start()
    while len(watch.polls) < len(ranks):
        time.sleep(0.02)
    gather.all_here("roster")
    polls = watch.polls.copy()
    for rank in ranks:
        rank.count("roster")
        rank.spent["roster"] -= polls[rank.number]
    while min(watch.polls[number] - n for number, n in polls.items()) < QUIET_POLLS:
        time.sleep(0.02)
    more = watch.polls.copy()
    for rank in ranks:
        rank.count("quiet")
    gather.all_here("quiet")
    return [rank.spent["quiet"] / max(more[rank.number] - polls[rank.number], 1) for rank in ranks]


class Gather:
    """All processes at one point; not counted."""

    def __init__(self, store: Any, processes: int) -> None:
        self.store, self.processes = store, processes

    def all_here(self, name: str) -> None:
        here = self.store.add(f"gather/{name}", 1)
        while here < self.processes:
            time.sleep(0.02)
            here = self.store.add(f"gather/{name}", 0)


def together(bodies: list[Callable[[], None]]) -> None:
    errors: list[BaseException] = []

    def run(body: Callable[[], None]) -> None:
        try:
            body()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


# All processes


def measure(nranks: int, library: Path, options: argparse.Namespace) -> dict[str, Any]:
    """A job of so many ranks; what is printed of it."""
    import torch.distributed as dist

    processes = min(options.processes, max(nranks // PART, 1))
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = ["--library", str(library), "--processes", str(processes)]
    common += ["--timeout", str(options.timeout), "--interval", str(options.interval)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("PYNCCL_CHECK", None)
    bounds = [nranks * i // processes for i in range(processes + 1)]
    running = []
    for first, last in itertools.pairwise(bounds):
        part = ["--child", str(server.port), str(first), str(last), str(nranks)]
        command = [sys.executable, __file__, *part, *common]
        running.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment))
    try:
        said = [one.communicate(timeout=300)[0] for one in running]
    finally:
        for one in running:
            one.kill()
            one.wait()
    if any(one.returncode for one in running):
        sys.exit(f"bench_scale.py: of {nranks} ranks, processes ended with {[one.returncode for one in running]}")
    return summary(nranks, [json.loads(text) for text in said])


def summary(nranks: int, found: list[dict[str, Any]]) -> dict[str, Any]:
    spent = [one for part in found for one in part["spent"]]
    report = sorted((one["report"] for one in spent), reverse=True)
    seconds = [one for part in found for one in part["report seconds"]]
    return {
        "ranks": nranks,
        "bootstrap": max(one["bootstrap"] for one in spent),
        "split": max(one["split"] for one in spent),
        "roster": max(one["roster"] for one in spent),
        "quiet poll": sum(sum(part["quiet"]) for part in found) / nranks,
        "report": sum(report) / nranks,
        "report, reporter": report[0],
        "turns of waiting": max(part["turns"] for part in found),
        "bootstrap seconds": max(part["bootstrap seconds"] for part in found),
        "first report seconds": min(seconds, default=-1.0),
        "last report seconds": max(seconds, default=-1.0),
        "reports": len(seconds),
        "stuck": sum(part["stuck"] for part in found),
        "asked": max(part["asked"] for part in found),
        "asked in an interval": max(part["asked at once"] for part in found),
        "texts": sorted({text for part in found for text in part["texts"]}),
    }


COLUMNS = [
    *["ranks", "bootstrap", "split", "roster", "quiet poll", "report", "report, reporter"],
    *["bootstrap seconds", "first report seconds", "last report seconds", "asked", "asked in an interval"],
]


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "Operations on the store, of the rank with most; of a quiet poll and a report (beyond its polls) the mean.",
        "The turns in which a rank waits for the others to come are left out. Seconds of reports are past the timeout.",
    ]
    lines += ["", "| " + " | ".join(COLUMNS) + " |", "|" + "---:|" * len(COLUMNS)]
    for row in rows:
        cells = [f"{row[name]:.1f}" if isinstance(row[name], float) else str(row[name]) for name in COLUMNS]
        lines.append("| " + " | ".join(cells) + " |")
    lines += [
        "",
        *(f"{row['ranks']}: {row['reports']} of {row['stuck']} ranks: {'; '.join(row['texts'])}" for row in rows),
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 128, 1024], help="sizes (default 16 128 1024)")
    parser.add_argument("--timeout", type=float, default=3.0, help="seconds in a call that are too long (default 3)")
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between two polls (default 1)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument("--processes", type=int, default=8, help="of which the ranks are threads (default 8)")
    parser.add_argument("--child", type=int, nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--library", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        port, first, last, nranks = options.child
        print(json.dumps(child(port, first, last, nranks, options)))
        return
    if min(options.ranks) < 2 or min(options.timeout, options.interval, options.processes) <= 0:
        parser.error("--ranks is at least 2, --timeout, --interval and --processes are more than 0")
    with tempfile.TemporaryDirectory(prefix="bench-scale-") as folder:
        library = compile_stub(Path(folder))
        rows = [measure(nranks, library, options) for nranks in options.ranks]
    print(json.dumps(rows, indent=2) if options.json else table(rows))


if __name__ == "__main__":
    main()
