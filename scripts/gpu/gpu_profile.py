"""A trace of `ad.start` beside a matmul, and how long kernels of both ran at the same time.

Rank 0 writes the trace, for chrome://tracing or Perfetto. Every rank prints the milliseconds of its own kernels: those
of NCCL, the others, and both at once. Ranks that share a GPU take turns on it, which the trace of one cannot show: only
a GPU per rank tells what is hidden.

examples:
  PYNCCL_LIBRARY=host torchrun --standalone --nproc-per-node=2 scripts/gpu/gpu_profile.py out/trace.json.gz
"""

from __future__ import annotations

import gzip
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from gpu_collectives import join, synchronize

import pynccl
import pynccl_autograd as ad
from pynccl.tools import command

ROUNDS = 5
Interval = tuple[float, float]


def step(comm: pynccl.Communicator, x: torch.Tensor, a: torch.Tensor, busy: int) -> None:
    """An all_gather under way while `busy` matmuls run."""
    with torch.profiler.record_function("start all_gather"):
        handle = ad.start(ad.all_gather, x, comm, grad="sum")
    with torch.profiler.record_function("matmuls"):
        for _ in range(busy):
            a = a @ a
    with torch.profiler.record_function("wait"):
        handle.wait()


def union(intervals: list[Interval]) -> list[Interval]:
    """The same stretch of time in intervals that are apart, in order."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def length(intervals: list[Interval]) -> float:
    return sum(end - begin for begin, end in union(intervals))


def overlap(a: list[Interval], b: list[Interval]) -> float:
    """How long some interval of `a` and some interval of `b` run at the same time."""
    return length(a) + length(b) - length([*a, *b])


def kernels(trace: dict[str, Any]) -> tuple[list[Interval], list[Interval]]:
    """(NCCL's, the others) in a trace of torch's profiler, in microseconds."""
    found: tuple[list[Interval], list[Interval]] = ([], [])
    for event in trace["traceEvents"]:
        if event.get("cat") == "kernel":
            found[not event["name"].startswith("nccl")].append((event["ts"], event["ts"] + event["dur"]))
    return found


def profile(comm: pynccl.Communicator, path: Path) -> float:
    """Write the trace of a few rounds; milliseconds per round on the host's clock."""
    on_gpu = not comm.library.is_host
    size, count, busy = (4096, 8 << 20, 32) if on_gpu else (256, 1 << 16, 4)
    x = torch.ones(count // comm.size, device=comm.device, dtype=torch.bfloat16)
    a = torch.zeros(size, size, device=comm.device, dtype=torch.bfloat16)
    for _ in range(2):  # the first connects, and chooses how to multiply
        step(comm, x, a, busy)
    synchronize(comm)
    comm.barrier()
    activities = [torch.profiler.ProfilerActivity.CPU, *[torch.profiler.ProfilerActivity.CUDA] * on_gpu]
    with torch.profiler.profile(activities=activities) as found:
        started = time.perf_counter()
        for _ in range(ROUNDS):
            step(comm, x, a, busy)
        synchronize(comm)
        seconds = time.perf_counter() - started
    found.export_chrome_trace(str(path))
    return 1e3 * seconds / ROUNDS


def main() -> int:
    parser = command.Parser(__doc__, failed="the trace has no kernels of NCCL beside others")
    parser.add_argument("target", type=command.output_file, metavar="TRACE.json.gz", help="the trace")
    target: Path = parser.parse_args().target
    with join() as comm:
        path = target if comm.rank == 0 else target.with_name(f"rank{comm.rank}-{target.name}")
        milliseconds = profile(comm, path)
        with gzip.open(path) as file:
            nccl, others = kernels(json.load(file))
        if comm.rank:
            os.unlink(path)
        found = {
            "ms per round": milliseconds,
            "kernels of NCCL": len(nccl),
            "ms of them": length(nccl) / 1e3,
            "other kernels": len(others),
            "ms of those": length(others) / 1e3,
            "ms of both at once": overlap(nccl, others) / 1e3,
        }
        print("RESULT " + json.dumps({name: round(value, 3) for name, value in found.items()}), flush=True)
        if not comm.library.is_host and not (nccl and others):
            raise command.FailedError("the trace has no kernels of NCCL beside others: has the profiler seen the GPU?")
    return 0


if __name__ == "__main__":
    command.run(main)
