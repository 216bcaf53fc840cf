"""The host library beside torch.distributed's gloo backend, in one run: eight collectives, and a message to and fro.

Both sides move the same float32 tensors between the same processes. Batches of calls alternate between the two and
start after a barrier; the slowest rank counts; medians over batches are shown, and of the ratios within a pair of
batches. "bytes" is the size of the full tensor: the buffer of all_reduce, broadcast, reduce and of a message, the
output of all_gather and gather, the input of reduce_scatter, all_to_all and scatter. Ours is called through the C
function pointers.

"x memcpy" is the time beside that of a memcpy by all ranks at once, on the same cores, of the bytes that every rank has
to move: those that come of its peers and, for an all_gather, its own (all_reduce 2(p-1)/p, all_gather 1, reduce_scatter
(p-1)/p of the full tensor). "blocked" is the processor time of all ranks together while all but one wait for a second.

examples:
  python scripts/bench_host.py --bytes 4096 --rounds 4
  python scripts/bench_host.py                                             # long
  python scripts/bench_host.py --ranks 2 4 --transport sockets --markdown  # long
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import multiprocessing
import os
import platform
import queue
import socket
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist

from pynccl import host, progress
from pynccl.bindings import abi
from pynccl.bindings.abi import DataType, RedOp
from pynccl.tools import command

SIZES = (16, 1 << 16, 1 << 20, 16 << 20, 64 << 20)
MANY_RANKS, MOST_OF_MANY = 8, 1 << 16  # more ranks than this take no more bytes than that
FLOAT32, SUM = int(DataType.FLOAT32), int(RedOp.SUM)
LARGE = 16 << 20
WARM_UP = 2
TRANSPORT = "PYNCCL_HOST_TRANSPORT"
Call = Callable[[], Any]
Row = dict[str, Any]


def check(code: int) -> None:
    if code:
        raise command.FailedError(host.function("ncclGetLastError")(None).decode())


def connect(rank: int, ranks: int, port: int) -> int:
    """torch.distributed's default group, and the host library's communicator over an id that it broadcasts."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    identity = abi.UniqueId()
    if rank == 0:
        check(host.function("ncclGetUniqueId")(ctypes.byref(identity)))
    carrier = [ctypes.string_at(ctypes.addressof(identity), ctypes.sizeof(identity))]
    dist.broadcast_object_list(carrier, src=0)
    comm = ctypes.c_void_p()
    identity = abi.UniqueId.from_buffer_copy(carrier[0])
    check(host.function("ncclCommInitRank")(ctypes.byref(comm), ranks, identity, rank))
    assert comm.value
    return comm.value


class Buffers:
    """What the calls of one size move. The full tensors of ours and torch's, and a rank's part of them."""

    def __init__(self, ranks: int, nbytes: int) -> None:
        self.count = max(nbytes // 4 // ranks, 1)
        self.full, self.shard = torch.rand(self.count * ranks), torch.rand(self.count)
        self.out, self.out2 = self.full.clone(), self.full.clone()
        self.part, self.part2 = torch.zeros_like(self.shard), torch.zeros_like(self.shard)
        self.rows2 = list(self.out2.chunk(ranks))
        self.full_rows = list(self.full.chunk(ranks))


def pairs(comm: int, rank: int, ranks: int, nbytes: int) -> dict[str, tuple[Call, Call]]:
    """Operation -> (ours, torch's), after checking that both give the same. The closures keep the tensors alive."""
    b = Buffers(ranks, nbytes)
    full, out, shard, part = (t.data_ptr() for t in (b.full, b.out, b.shard, b.part))
    n, whole, root = b.count, b.full.numel(), rank == 0

    def ours(name: str, *arguments: Any) -> Call:
        function = host.function(name)
        return lambda: check(function(*arguments, comm, None))

    peer = rank ^ 1  # a message to and fro between neighbours; the last of an odd number has none

    def to_and_fro(send: Call, recv: Call) -> Call:
        if peer >= ranks:
            return lambda: None
        first, second = (send, recv) if rank < peer else (recv, send)
        return lambda: (first(), second())

    calls: dict[str, tuple[Call, Call]] = {
        "all_reduce": (ours("ncclAllReduce", out, out, whole, FLOAT32, SUM), lambda: dist.all_reduce(b.out2)),
        "reduce_scatter": (
            ours("ncclReduceScatter", full, part, n, FLOAT32, SUM),
            lambda: dist.reduce_scatter_tensor(b.part2, b.full),
        ),
        "all_gather": (
            ours("ncclAllGather", shard, out, n, FLOAT32),
            lambda: dist.all_gather_into_tensor(b.out2, b.shard),
        ),
        "all_to_all": (
            ours("ncclAlltoAll", full, out, n, FLOAT32),
            lambda: dist.all_to_all_single(b.out2, b.full),
        ),
        "broadcast": (ours("ncclBroadcast", out, out, whole, FLOAT32, 0), lambda: dist.broadcast(b.out2, 0)),
        "reduce": (ours("ncclReduce", out, out, whole, FLOAT32, SUM, 0), lambda: dist.reduce(b.out2, 0)),
        "gather": (
            ours("ncclGather", shard, out, n, FLOAT32, 0),
            lambda: dist.gather(b.shard, b.rows2 if root else None, 0),
        ),
        "scatter": (
            ours("ncclScatter", full, part, n, FLOAT32, 0),
            lambda: dist.scatter(b.part2, b.full_rows if root else None, 0),
        ),
        "send, recv": (
            to_and_fro(ours("ncclSend", full, whole, FLOAT32, peer), ours("ncclRecv", out, whole, FLOAT32, peer)),
            to_and_fro(lambda: dist.send(b.full, peer), lambda: dist.recv(b.out2, peer)),
        ),
    }
    for name, (mine, theirs) in calls.items():
        b.out.copy_(b.full)
        b.out2.copy_(b.full)
        mine()
        theirs()
        if root or name != "reduce":  # elsewhere torch leaves its own in the buffer
            torch.testing.assert_close(b.out, b.out2, msg=f"{name} of {nbytes} B differs")
        torch.testing.assert_close(b.part, b.part2, msg=f"{name} of {nbytes} B differs")
    for tensor in (b.out, b.out2):  # all_reduce is in place on both sides, again and again: zeros stay finite
        tensor.zero_()
    return calls


def measure(call: Call, batch: int) -> float:
    """Seconds per call of a batch, of the slowest rank, from a moment at which all begin: a barrier lets them go one
    after the other, which takes longer than what is measured."""
    moment = torch.tensor([time.perf_counter() + 0.001 + 0.0005 * dist.get_world_size()], dtype=torch.float64)
    dist.all_reduce(moment, dist.ReduceOp.MAX)
    start = float(moment)
    time.sleep(max(start - time.perf_counter(), 0.0))
    for _ in range(batch):
        call()
    seconds = torch.tensor([(time.perf_counter() - start) / batch], dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


def must_move(name: str, ranks: int, nbytes: int) -> int:
    """The bytes that every rank has to move; 0 where no bound is held against them."""
    parts = {"all_reduce": 2 * (ranks - 1), "all_gather": ranks, "reduce_scatter": ranks - 1}
    return nbytes * parts.get(name, 0) // ranks


def memcpy_seconds(nbytes: int, rounds: int) -> float:
    source, target = torch.ones(nbytes, dtype=torch.uint8), torch.ones(nbytes, dtype=torch.uint8)

    def copy() -> None:
        ctypes.memmove(target.data_ptr(), source.data_ptr(), nbytes)

    return statistics.median(measure(copy, 1) for _ in range(rounds))


def blocked_seconds(comm: int, rank: int) -> float:
    """Processor time of all ranks together while rank 0 lets the others wait for a second."""
    x = torch.zeros(4)
    dist.barrier()
    start = time.process_time()
    if rank == 0:
        time.sleep(1.0)
    check(host.function("ncclAllReduce")(x.data_ptr(), x.data_ptr(), 4, FLOAT32, SUM, comm, None))
    used = torch.tensor([time.process_time() - start], dtype=torch.float64)
    dist.all_reduce(used)
    return float(used)


def rank_process(rank: int, ranks: int, sizes: Sequence[int], rounds: int, port: int, results: Any) -> None:
    """`run` in a process of its own. Puts the rows of rank 0, or the error of a rank, into `results`."""
    try:
        with progress.shown():
            run(rank, ranks, sizes, rounds, port, results)
    except KeyboardInterrupt:  # the program has heard of it, too
        raise SystemExit(command.INTERRUPTED) from None
    except Exception as error:
        results.put(f"rank {rank}: " + (str(error) if command.code_of(error) else f"\n{traceback.format_exc()}"))
        raise SystemExit(command.FAILED) from None


def run(rank: int, ranks: int, sizes: Sequence[int], rounds: int, port: int, results: Any) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 renames two of its functions
    comm = connect(rank, ranks, port)
    rows: list[Row] = []
    for nbytes in progress.over(sizes, f"{ranks} ranks", "size", own=rank == 0):
        batches = rounds if nbytes < LARGE else max(rounds // 2, 5)
        for name, (ours, theirs) in pairs(comm, rank, ranks, nbytes).items():
            batch = (60 if ranks <= 4 else 10) if nbytes <= 1 << 16 else 20 if nbytes < LARGE else 5
            times = [(measure(ours, batch), measure(theirs, batch)) for _ in range(batches)][WARM_UP:]
            mine, other = (statistics.median(t[i] for t in times) for i in (0, 1))
            ratio = statistics.median(theirs_s / ours_s for ours_s, theirs_s in times)
            row: Row = {"ranks": ranks, "operation": name, "bytes": nbytes, "ours_s": mine, "torch_s": other}
            row |= {"ratio": ratio, "at_least": bound(name, ranks, nbytes)}
            if nbytes >= LARGE and (moved := must_move(name, ranks, nbytes)):
                row["memcpy"] = mine / memcpy_seconds(moved, batches)
            rows.append(row)
    rows.append({"ranks": ranks, "operation": "blocked", "seconds": blocked_seconds(comm, rank)})
    if rank == 0:
        results.put(rows)
    dist.barrier()
    check(host.function("ncclCommDestroy")(comm))
    dist.destroy_process_group()


def bound(name: str, ranks: int, nbytes: int) -> float:
    """How many times as fast as gloo it has to be; 0 where nothing is asked for."""
    reducing, gathering = name in ("all_reduce", "reduce_scatter"), name in ("all_gather", "all_to_all")
    if ranks > 4:
        return 3.0 if (name, nbytes) == ("all_reduce", 16) else 0.0
    if nbytes == 16:
        return (10.0 if ranks == 2 else 6.0) if reducing else 6.0 if gathering else 2.0
    if nbytes == 1 << 16:
        return 8.0 if reducing else 4.0 if gathering else 0.0
    if nbytes == 1 << 20:
        return {"all_reduce": 5.0, "reduce_scatter": 5.0, "all_gather": 3.0}.get(name, 0.0)
    return {"all_reduce": 3.0, "reduce_scatter": 6.0, "all_gather": 2.5}.get(name, 0.0) if nbytes >= LARGE else 0.0


MOST_MEMCPY, MOST_BLOCKED = 2.5, 0.2


def verdict(row: Row) -> str:
    """PASS or FAIL, where there is a bound."""
    if row["operation"] == "blocked":
        return "" if row["ranks"] != 4 else "PASS" if row["seconds"] < MOST_BLOCKED else "FAIL"
    if not row["at_least"]:
        return ""
    return "PASS" if row["ratio"] >= row["at_least"] and row.get("memcpy", 0.0) <= MOST_MEMCPY else "FAIL"


HEADINGS = ("ranks", "operation", "bytes", "ours us", "gloo us", "gloo / ours", "at least", "x memcpy", "")


def cells(row: Row) -> list[str]:
    if row["operation"] == "blocked":
        return [str(row["ranks"]), "blocked for 1 s", "", f"{row['seconds'] * 1e6:.0f} cpu", *[""] * 4, verdict(row)]
    return [
        *(str(row[key]) for key in ("ranks", "operation", "bytes")),
        *(f"{row[key] * 1e6:.1f}" for key in ("ours_s", "torch_s")),
        f"{row['ratio']:.2f}",
        f"{row['at_least']:g}" if row["at_least"] else "",
        f"{row['memcpy']:.2f}" if "memcpy" in row else "",
        verdict(row),
    ]


def table(rows: Sequence[Row]) -> str:
    widths = (6, 16, 10, 12, 12, 12, 9, 9, 5)
    lines = [HEADINGS, *(cells(row) for row in rows)]
    return "\n".join(" ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)) for line in lines)


def markdown(rows: Sequence[Row]) -> str:
    lines = [HEADINGS, ["---:", "---", *["---:"] * 6, "---"], *(cells(row) for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + f"\n\n{surroundings()}"


def surroundings() -> str:
    """Command, machine and date."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    cores = len(os.sched_getaffinity(0))
    today = datetime.now(timezone.utc).date()
    return (
        f"`python scripts/bench_host.py {' '.join(sys.argv[1:])}` on {today}: {cores} cores of "
        f"{models[0] if models else platform.machine()}, Python {platform.python_version()}, torch "
        f"{torch.__version__}, load {os.getloadavg()[0]:.1f} at the end."
    )


def run_ranks(ranks: int, sizes: Sequence[int], rounds: int) -> list[Row]:
    """The rows. FailedError with the error of a rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    arguments = (ranks, sizes, rounds, port, results)
    workers = [context.Process(target=rank_process, args=(rank, *arguments)) for rank in range(ranks)]
    for worker in workers:
        worker.start()
    found: list[Row] | str = ""
    try:
        while not found:
            gone = any(worker.exitcode not in (None, 0) for worker in workers)
            with contextlib.suppress(queue.Empty):
                found = results.get(timeout=1.0)
                continue
            if gone:
                found = "a rank has died"
    finally:
        for worker in workers:
            worker.join(timeout=None if isinstance(found, list) else 2.0)
            worker.kill()
            worker.join()
    if isinstance(found, str):
        raise command.FailedError(found)
    if any(worker.exitcode for worker in workers):
        raise command.FailedError("a rank failed at its end")
    return found


def main() -> None:
    parser = command.Parser(__doc__, failed="a rank failed")
    parser.add_argument(
        "--ranks", type=command.whole(2, 64), nargs="+", default=[2], help="numbers of processes (default 2)"
    )
    parser.add_argument("--bytes", type=command.whole(4), nargs="+", default=SIZES, help="sizes of the full tensor")
    parser.add_argument(
        "--rounds", type=command.whole(WARM_UP + 1), default=17, help="pairs of batches, of small sizes (default 17)"
    )
    parser.add_argument("--transport", choices=("auto", "shm", "sockets"), help=f"as {TRANSPORT}")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument("--markdown", action="store_true", help="print the table of docs/host.md")
    options = parser.parse_args()
    if options.transport:
        os.environ[TRANSPORT] = options.transport
    rows: list[Row] = []
    for ranks in options.ranks:
        sizes = [n for n in options.bytes if ranks <= MANY_RANKS or n <= MOST_OF_MANY]
        rows += run_ranks(ranks, sizes, options.rounds)
    if options.json:
        print(json.dumps({"cores": os.cpu_count(), "rows": rows}))
    else:
        print(markdown(rows) if options.markdown else table(rows))


if __name__ == "__main__":
    command.run(main)
