"""What the benchmarks on rank processes share: the processes, links between them, times of calls, where it ran."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import platform
import queue
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import pynccl
from pynccl import Communicator, progress
from pynccl.host.link import VARIABLE as LINK
from pynccl.tools import command

Call = Callable[[], Any]
LATENCY = 50e-6  # seconds a step, of the modelled link


def run_ranks(ranks: int, device: str, fn: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What fn(rank, *arguments) returns on each of so many processes. FailedError with the first rank's error."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # A fork has all modules already, and this process has started no threads of torch. CUDA wants no forks.
    context: Any = multiprocessing.get_context("spawn" if device == "cuda" else "fork")
    results: Any = context.Queue()
    workers = [
        context.Process(target=_run, args=(rank, ranks, device, port, results, fn, arguments), daemon=True)
        for rank in range(ranks)
    ]
    for worker in workers:
        worker.start()
    patience = 0.5  # once one has failed, or Ctrl-C
    try:
        found = _collected(workers, results)
        patience = 10.0
        return found
    finally:
        for worker in workers:
            worker.join(timeout=patience)
            worker.kill()


def _collected(workers: Sequence[Any], results: Any) -> list[Any]:
    found: dict[int, Any] = {}
    while len(found) < len(workers):
        dead = [rank for rank, worker in enumerate(workers) if rank not in found and worker.exitcode is not None]
        try:
            rank, error, value = results.get(timeout=1.0)
        except queue.Empty:
            if dead:
                code = workers[dead[0]].exitcode
                raise command.FailedError(f"rank {dead[0]} ended with exit code {code} and said nothing") from None
            continue
        if error:
            raise command.FailedError(f"rank {rank}: {error}")
        found[rank] = value
    return [found[rank] for rank in range(len(workers))]


def _run(
    rank: int, ranks: int, device: str, port: int, results: Any, fn: Callable[..., Any], arguments: Sequence[Any]
) -> None:
    try:
        for name in (LINK, "PYNCCL_CHECK", "PYNCCL_TRACE"):
            os.environ.pop(name, None)
        torch.set_num_threads(1)
        warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 renames functional collectives
        backend = "gloo"
        if device == "cuda":
            torch.cuda.set_device(rank)
            backend = "cpu:gloo,cuda:nccl"  # gloo for the moment at which all begin
        else:
            os.environ["PYNCCL_LIBRARY"] = "host"
        dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
        with progress.shown():
            value = fn(rank, *arguments)
        dist.barrier()
        dist.destroy_process_group()
    except KeyboardInterrupt:  # the program has heard of it, too
        raise SystemExit(command.INTERRUPTED) from None
    except Exception as error:
        results.put((rank, str(error) if command.code_of(error) else f"\n{traceback.format_exc()}", None))
        raise SystemExit(command.FAILED) from None
    results.put((rank, "", value))


def here(device: str) -> torch.device:
    """This rank's."""
    return torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")


@contextlib.contextmanager
def linked(device: str, link: str) -> Iterator[Communicator]:
    """A communicator of all ranks over the modelled link; "": over none, as on GPUs. Each reads the variable when it is
    made."""
    os.environ[LINK] = link
    comm = Communicator.from_process_group(device=here(device))
    try:
        yield comm
    finally:
        os.environ.pop(LINK)
        comm.destroy()


def link_text(bandwidth: float, latency: float = LATENCY) -> str:
    """As PYNCCL_HOST_LINK has it.   bandwidth in bytes/s, latency in seconds"""
    return f"latency={latency * 1e6:g}us,bandwidth={bandwidth / 1e6:.4f}MB/s"


def link_for(seconds: float, steps: int, nbytes: float) -> str:
    """The link on which so many bytes a rank take so long, in so many steps."""
    return link_text(nbytes / max(seconds - steps * LATENCY, 1e-4))


def slowest(value: float) -> float:
    """The largest of all ranks."""
    found = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def measure(device: str, call: Call, batch: int = 1) -> float:
    """Seconds per call of a batch, of the slowest rank, from a moment at which all begin: a barrier alone lets them go
    one after the other."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = slowest(time.perf_counter() + 0.001 + 0.0005 * dist.get_world_size())
    time.sleep(max(start - time.perf_counter(), 0.0))
    if device == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(batch):
            call()
        end.record()
        end.synchronize()
        return slowest(begin.elapsed_time(end) / 1e3 / batch)
    for _ in range(batch):
        call()
    return slowest((time.perf_counter() - start) / batch)


def rounds_of(device: str, calls: Mapping[str, Call], rounds: int, batch: int = 1) -> dict[str, list[float]]:
    """Seconds per call, one number per round: in each, all of them in turn, beginning with another one every time."""
    names = list(calls)
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            times[name].append(measure(device, calls[name], batch))
    return times


def columns(lines: Sequence[Sequence[str]], markdown: bool) -> str:
    """A table of these cells, its head first, for docs/ or for a terminal."""
    if markdown:
        rows = ["| " + " | ".join(line) + " |" for line in lines]
        return "\n".join([rows[0], "|---" + "|---:" * (len(lines[0]) - 1) + "|", *rows[1:]])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def surroundings() -> dict[str, Any]:
    """Command, date, machine and versions."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "command": f"python scripts/bench/{Path(sys.argv[0]).name} {' '.join(sys.argv[1:])}".strip(),
        "date": str(datetime.now(timezone.utc).date()),
        "machine": {
            "cpu": models[0] if models else platform.machine(),
            "cores": len(os.sched_getaffinity(0)),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            "load": round(os.getloadavg()[0], 2),
        },
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "pynccl": getattr(pynccl, "__version__", None),
        },
    }
