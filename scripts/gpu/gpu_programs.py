"""What gpu_check runs on the ranks of a launch besides tests: reach, hang, profile. Each prints its figures as JSON.

reach    do the ranks reach each other: an all_reduce with a known sum, and how fast a large one is
hang     how long abort() takes where a peer hangs, with a collective under way that will never end; rank 0 tells the
         others by a file in the folder PATH
profile  a trace of `ad.start` beside matmuls into the file PATH (.json.gz), and how long kernels of NCCL and others ran
         at the same time; ranks that share a GPU run by turns, so only a GPU per rank tells what is hidden

examples:
  PYNCCL_LIBRARY=host torchrun --standalone --nproc-per-node=2 scripts/gpu/gpu_programs.py reach
  PYNCCL_LIBRARY=host torchrun --standalone --nproc-per-node=2 scripts/gpu/gpu_programs.py hang out/hang
  PYNCCL_LIBRARY=host torchrun --standalone --nproc-per-node=2 scripts/gpu/gpu_programs.py profile out/trace.json.gz
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import torch

import pynccl
import pynccl_autograd as ad
from pynccl.bindings.library import gpu_count
from pynccl.tools import command

INIT_SECONDS = 20.0
HANG_SECONDS = 1.0  # nothing tells a collective that hangs from one that has not begun
MOST_SECONDS = 10.0  # of an abort
PEER_SECONDS = 25.0
ROUNDS = 5
Interval = tuple[float, float]


def join() -> pynccl.Communicator:
    """The communicator of the launch; more ranks than GPUs share them."""
    gpus = 0 if pynccl.load().is_host else gpu_count()
    local = int(os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")))
    comm = pynccl.init(device=local % gpus if gpus else None, timeout=INIT_SECONDS)
    if gpus:
        torch.cuda.set_device(comm.device)
    return comm


def synchronize(comm: pynccl.Communicator) -> None:
    """Wait for the GPU, if there is one."""
    if not comm.library.is_host:
        torch.cuda.synchronize()


# Do the ranks reach each other


def reach(comm: pynccl.Communicator) -> dict[str, Any]:
    for count in (1, 1000, 1 << 20):  # NCCL's LL, LL128 and Simple protocols, or thereabouts
        x = torch.full((count,), float(comm.rank), device=comm.device)
        comm.all_reduce(x, x)
        if x.unique().tolist() != [sum(range(comm.size))]:
            raise command.FailedError(f"all_reduce of {count} floats: {x.unique().tolist()[:5]}")
    x, best = torch.zeros(16 << 20, device=comm.device), float("inf")
    for _ in range(6):
        comm.barrier()
        started = time.perf_counter()
        comm.all_reduce(x, x)
        synchronize(comm)
        best = min(best, time.perf_counter() - started)
    return {"device": comm.device, "all_reduce of 64 MiB, GB/s": round(4 * x.numel() / best / 1e9, 2)}


# How long does an abort take


def hang(comm: pynccl.Communicator, folder: Path) -> dict[str, Any]:
    comm.barrier()  # which leaves pinned memory behind, for abort() to give back
    done = folder / f"{os.environ['MASTER_PORT']}.done"
    try:
        found = first(comm) if comm.rank == 0 else later(comm, done)
    finally:
        if comm.rank == 0:
            done.touch()
    if max(found.values()) > MOST_SECONDS:
        raise command.FailedError(f"an abort took over {MOST_SECONDS:g} s: {found}")
    return found


def first(comm: pynccl.Communicator) -> dict[str, float]:
    """Rank 0: seconds of abort(), and until the thread that waits for the collective is free."""
    x = torch.ones(1 << 20, device=comm.device)

    def wait_for_ever() -> None:
        try:
            comm.all_reduce(x, x)
            synchronize(comm)
        except (pynccl.NcclError, RuntimeError) as error:
            print(f"the collective ended: {type(error).__name__}: {error}")

    thread = threading.Thread(target=wait_for_ever, daemon=True)
    thread.start()
    thread.join(HANG_SECONDS)
    if not thread.is_alive():
        raise command.FailedError("the collective ended although the peer takes no part in it")
    started = time.monotonic()
    comm.abort()
    seconds = time.monotonic() - started
    thread.join(MOST_SECONDS)
    free = time.monotonic() - started if not thread.is_alive() else float("inf")
    return {"abort_s": round(seconds, 3), "thread_free_s": round(free, 3)}


def later(comm: pynccl.Communicator, done: Path) -> dict[str, float]:
    """The others: seconds of abort(), once rank 0 has aborted."""
    deadline = time.monotonic() + PEER_SECONDS
    while not done.exists():
        if time.monotonic() > deadline:
            raise command.FailedError(f"rank 0 was not done after {PEER_SECONDS:g} s")
        time.sleep(0.02)
    started = time.monotonic()
    comm.abort()
    return {"abort_s": round(time.monotonic() - started, 3)}


# What runs beside what


def step(comm: pynccl.Communicator, x: torch.Tensor, a: torch.Tensor, busy: int) -> None:
    """An all_gather under way while `busy` matmuls run."""
    with torch.profiler.record_function("start all_gather"):
        handle = ad.start(ad.all_gather, x, comm, grad="sum")
    with torch.profiler.record_function("matmuls"):
        for _ in range(busy):
            a = a @ a
    with torch.profiler.record_function("wait"):
        handle.wait()


def profile(comm: pynccl.Communicator, target: Path) -> dict[str, Any]:
    path = target if comm.rank == 0 else target.with_name(f"rank{comm.rank}-{target.name}")
    milliseconds = trace(comm, path)
    with gzip.open(path) as file:
        nccl, others = kernels(json.load(file))
    if comm.rank:
        path.unlink()
    if not comm.library.is_host and not (nccl and others):
        raise command.FailedError("the trace has no kernels of NCCL beside others: has the profiler seen the GPU?")
    both = length(nccl) + length(others) - length([*nccl, *others])
    found = {
        "ms per round": milliseconds,
        "ms of NCCL": length(nccl),
        "ms of others": length(others),
        "ms of both": both,
    }
    return {name: round(value, 3) for name, value in found.items()}


def trace(comm: pynccl.Communicator, path: Path) -> float:
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


def kernels(found: dict[str, Any]) -> tuple[list[Interval], list[Interval]]:
    """(NCCL's, the others) in a trace of torch's profiler, in milliseconds."""
    both: tuple[list[Interval], list[Interval]] = ([], [])
    for event in found["traceEvents"]:
        if event.get("cat") == "kernel":
            begin, duration = event["ts"] / 1e3, event["dur"] / 1e3
            both[not event["name"].startswith("nccl")].append((begin, begin + duration))
    return both


def length(intervals: list[Interval]) -> float:
    """How long some of these intervals is under way."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(end - max(begin, until), 0.0)
        until = max(until, end)
    return total


def main() -> None:
    parser = command.Parser(__doc__, failed="a result is wrong, or an abort took too long")
    parser.add_argument("what", choices=("reach", "hang", "profile"))
    parser.add_argument("path", nargs="?", type=Path, metavar="PATH", help="a folder of hang, a file of profile")
    options = parser.parse_args()
    if options.what != "reach" and options.path is None:
        parser.error(f"{options.what} needs a PATH")
    if options.path:
        try:
            (command.output_folder if options.what == "hang" else command.output_file)(str(options.path))
        except argparse.ArgumentTypeError as error:
            parser.error(f"PATH {error}")
    comm = join()
    try:
        if options.what == "reach":
            found = reach(comm)
        else:
            found = {"hang": hang, "profile": profile}[options.what](comm, options.path)
    except BaseException:
        comm.abort()
        raise
    print("RESULT " + json.dumps(found), flush=True)
    if options.what != "hang":  # which has aborted
        comm.destroy()


if __name__ == "__main__":
    command.run(main)
