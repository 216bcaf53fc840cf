"""Latency and bandwidth of the host library beside torch.distributed's gloo backend, in one run.

    python scripts/bench_host.py [--ranks N] [--bytes N ...] [--json]

Both sides move the same float32 tensors between the same processes. Batches of calls alternate between the two and
start after a barrier; the slowest rank counts; medians over batches are shown. "bytes" is the size of the full tensor:
the whole buffer of all_reduce, the output of all_gather, the input of reduce_scatter. Ours is called through the C
function pointers.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import os
import socket
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist

from pynccl import host
from pynccl.bindings import abi
from pynccl.bindings.abi import DataType, RedOp

SIZES = (16, 1 << 10, 1 << 16, 1 << 20, 16 << 20)
FLOAT32, SUM = int(DataType.FLOAT32), int(RedOp.SUM)
BATCHES, WARM_UP = 17, 2
Call = Callable[[], Any]


def check(code: int) -> None:
    if code:
        raise RuntimeError(host.function("ncclGetLastError")(None).decode())


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


def pairs(comm: int, ranks: int, nbytes: int) -> dict[str, tuple[Call, Call]]:
    """Operation -> (ours, torch's), after checking that both give the same. The closures keep the tensors alive."""
    count = max(nbytes // 4 // ranks, 1)
    full, shard = torch.rand(count * ranks), torch.rand(count)
    out, part = torch.empty_like(full), torch.empty_like(shard)
    out2, part2 = full.clone(), torch.empty_like(shard)
    reduce, gather, scatter = (host.function(n) for n in ("ncclAllReduce", "ncclAllGather", "ncclReduceScatter"))
    calls: dict[str, tuple[Call, Call]] = {
        "all_reduce": (
            lambda: check(reduce(out.data_ptr(), out.data_ptr(), full.numel(), FLOAT32, SUM, comm, None)),
            lambda: dist.all_reduce(out2),
        ),
        "all_gather": (
            lambda: check(gather(shard.data_ptr(), out.data_ptr(), count, FLOAT32, comm, None)),
            lambda: dist.all_gather_into_tensor(out2, shard),
        ),
        "reduce_scatter": (
            lambda: check(scatter(full.data_ptr(), part.data_ptr(), count, FLOAT32, SUM, comm, None)),
            lambda: dist.reduce_scatter_tensor(part2, full),
        ),
    }
    for name, (ours, theirs) in calls.items():
        out.copy_(full)
        out2.copy_(full)
        ours()
        theirs()
        mine, other = (part, part2) if name == "reduce_scatter" else (out, out2)
        torch.testing.assert_close(mine, other, msg=f"{name} of {nbytes} B differs")
    for tensor in (out, out2):  # all_reduce is in place on both sides, again and again: zeros stay finite
        tensor.zero_()
    return calls


def measure(call: Call, batch: int) -> float:
    """Seconds per call of a batch, of the slowest rank."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(batch):
        call()
    seconds = torch.tensor([(time.perf_counter() - start) / batch], dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


def run(rank: int, ranks: int, sizes: Sequence[int], port: int, results: Any) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 renames two of its functions
    comm = connect(rank, ranks, port)
    rows = []
    for nbytes in sizes:
        for name, (ours, theirs) in pairs(comm, ranks, nbytes).items():
            batch = 20 if nbytes <= 1 << 16 else 4
            times = [(measure(ours, batch), measure(theirs, batch)) for _ in range(BATCHES)]
            mine, other = (statistics.median(t[i] for t in times[WARM_UP:]) for i in (0, 1))
            rows.append({"operation": name, "bytes": nbytes, "ours_s": mine, "torch_s": other, "ratio": other / mine})
    if rank == 0:
        results.put(rows)
    dist.barrier()
    check(host.function("ncclCommDestroy")(comm))
    dist.destroy_process_group()


def table(rows: list[dict[str, Any]]) -> str:
    lines = [f"{'operation':<16}{'bytes':>10}{'ours us':>12}{'torch us':>12}{'torch/ours':>12}"]
    for row in rows:
        times = f"{row['ours_s'] * 1e6:>12.1f}{row['torch_s'] * 1e6:>12.1f}{row['ratio']:>12.2f}"
        lines.append(f"{row['operation']:<16}{row['bytes']:>10}{times}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="number of processes (default 2)")
    parser.add_argument("--bytes", type=int, nargs="+", default=SIZES, help="sizes of the full tensor")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    options = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    workers = [
        context.Process(target=run, args=(r, options.ranks, options.bytes, port, results)) for r in range(options.ranks)
    ]
    for worker in workers:
        worker.start()
    rows = results.get()
    for worker in workers:
        worker.join()
    print(json.dumps({"ranks": options.ranks, "cores": os.cpu_count(), "rows": rows}) if options.json else table(rows))
    sys.exit(max(abs(worker.exitcode or 0) for worker in workers))


if __name__ == "__main__":
    main()
