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
  python scripts/bench/host.py --bytes 4096 --rounds 4
  python scripts/bench/host.py                                             # long
  python scripts/bench/host.py --ranks 2 4 --transport sockets --markdown  # long
"""

from __future__ import annotations

import ctypes
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from bench.ranks import columns, measure, run_ranks, surroundings

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


def connect(rank: int, ranks: int) -> int:
    """The host library's communicator, over an id that torch.distributed broadcasts."""
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


def must_move(name: str, ranks: int, nbytes: int) -> int:
    """The bytes that every rank has to move; 0 where no bound is held against them."""
    parts = {"all_reduce": 2 * (ranks - 1), "all_gather": ranks, "reduce_scatter": ranks - 1}
    return nbytes * parts.get(name, 0) // ranks


def memcpy_seconds(nbytes: int, rounds: int) -> float:
    source, target = torch.ones(nbytes, dtype=torch.uint8), torch.ones(nbytes, dtype=torch.uint8)

    def copy() -> None:
        ctypes.memmove(target.data_ptr(), source.data_ptr(), nbytes)

    return statistics.median(measure("cpu", copy) for _ in range(rounds))


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


def run(rank: int, ranks: int, sizes: Sequence[int], rounds: int) -> list[Row]:
    """The rows of a number of ranks, on each of them."""
    comm = connect(rank, ranks)
    rows: list[Row] = []
    for nbytes in progress.over(sizes, f"{ranks} ranks", "size", own=rank == 0):
        batches = rounds if nbytes < LARGE else max(rounds // 2, 5)
        for name, (ours, theirs) in pairs(comm, rank, ranks, nbytes).items():
            batch = (60 if ranks <= 4 else 10) if nbytes <= 1 << 16 else 20 if nbytes < LARGE else 5
            times = [(measure("cpu", ours, batch), measure("cpu", theirs, batch)) for _ in range(batches)][WARM_UP:]
            mine, other = (statistics.median(t[i] for t in times) for i in (0, 1))
            ratio = statistics.median(theirs_s / ours_s for ours_s, theirs_s in times)
            row: Row = {"ranks": ranks, "operation": name, "bytes": nbytes, "ours_s": mine, "torch_s": other}
            row |= {"ratio": ratio, "at_least": bound(name, ranks, nbytes)}
            if nbytes >= LARGE and (moved := must_move(name, ranks, nbytes)):
                row["memcpy"] = mine / memcpy_seconds(moved, batches)
            rows.append(row)
    rows.append({"ranks": ranks, "operation": "blocked", "seconds": blocked_seconds(comm, rank)})
    dist.barrier()
    check(host.function("ncclCommDestroy")(comm))
    return rows


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


def where() -> str:
    """Command, machine and date."""
    here = surroundings()
    machine, versions = here["machine"], here["versions"]
    return (
        f"`{here['command']}` on {here['date']}: {machine['cores']} cores of {machine['cpu']}, Python "
        f"{versions['python']}, torch {versions['torch']}, load {machine['load']:.1f} at the end."
    )


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
        rows += run_ranks(ranks, "cpu", run, ranks, sizes, options.rounds)[0]
    if options.json:
        print(json.dumps({"cores": os.cpu_count(), "rows": rows}))
    else:
        print(columns([HEADINGS, *(cells(row) for row in rows)], options.markdown))
        if options.markdown:
            print(f"\n{where()}")


if __name__ == "__main__":
    command.run(main)
