"""Shared by the benchmarks on rank processes: starting ranks, simulated links, timing, tables, and the environment."""

from __future__ import annotations

import contextlib
import os
import pickle
import platform
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessException, start_processes

from pynccl import Communicator
from pynccl.host.link import VARIABLE as LINK
from pynccl.tools import command

Call = Callable[[], Any]
LATENCY = 50e-6  # seconds per step of the simulated link


def run_ranks(ranks: int, fn: Callable[..., Any], *arguments: Any) -> Any:
    """Run fn(rank, *arguments) on `ranks` processes and return rank 0's result. Raises FailedError if a rank fails."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        try:  # fork avoids importing the modules again; it is safe since torch has started no threads here
            start_processes(_run, (ranks, folder, fn, arguments), ranks, daemon=True, start_method="fork")
        except ProcessException as error:
            raise command.FailedError(str(error).strip()) from None
        return pickle.loads(Path(folder, "found").read_bytes())


def _run(rank: int, ranks: int, folder: str, fn: Callable[..., Any], arguments: Sequence[Any]) -> None:
    for name in (LINK, "PYNCCL_CHECK", "PYNCCL_TRACE"):
        os.environ.pop(name, None)
    os.environ["PYNCCL_LIBRARY"] = "host"
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 renames functional collectives
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    found = fn(rank, *arguments)
    if rank == 0:
        Path(folder, "found").write_bytes(pickle.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


@contextlib.contextmanager
def linked(link: str) -> Iterator[Communicator]:
    """Yield a communicator of all ranks over the simulated link, or over none for "".

    The communicator reads the environment variable when it is created.
    """
    os.environ[LINK] = link
    try:
        with Communicator.from_process_group(device="cpu") as comm:
            yield comm
    finally:
        os.environ.pop(LINK)


def link_text(bandwidth: float) -> str:
    """Return the value of PYNCCL_HOST_LINK for a bandwidth in bytes/s."""
    return f"latency={LATENCY * 1e6:g}us,bandwidth={bandwidth / 1e6:.4f}MB/s"


def link_for(seconds: float, steps: int, nbytes: float) -> str:
    """Return the link on which `nbytes` per rank take `seconds` in `steps` steps."""
    return link_text(nbytes / max(seconds - steps * LATENCY, 1e-4))


def slowest(value: float) -> float:
    """Return the maximum over all ranks."""
    found = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def measure(call: Call, batch: int = 1) -> float:
    """Return seconds per call of a batch on the slowest rank.

    All ranks begin at an agreed time, since they leave a barrier one after the other.
    """
    start = slowest(time.perf_counter() + 0.001 + 0.0005 * dist.get_world_size())
    time.sleep(max(start - time.perf_counter(), 0.0))
    for _ in range(batch):
        call()
    return slowest((time.perf_counter() - start) / batch)


def undisturbed(call: Call) -> float:
    """Return the seconds of a call: the best of three, repeated until two such values agree within 5%."""
    found = 0.0
    for _ in range(10):
        before, found = found, min(measure(call) for _ in range(3))
        if abs(found - before) <= 0.05 * found:
            break
    return found


def rounds_of(calls: Mapping[str, Call], rounds: int, batch: int = 1) -> dict[str, list[float]]:
    """Return seconds per call, one number per round. Each round runs all calls, starting with a different one."""
    names = list(calls)
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            times[name].append(measure(calls[name], batch))
    return times


def columns(lines: Sequence[Sequence[str]], markdown: bool) -> str:
    """Format cells, header first, as a Markdown or plain-text table."""
    if markdown:
        rows = ["| " + " | ".join(line) + " |" for line in lines]
        return "\n".join([rows[0], "|---" + "|---:" * (len(lines[0]) - 1) + "|", *rows[1:]])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def surroundings() -> str:
    """Return the command, date, machine and versions of this run."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    script = Path(sys.argv[0]).resolve()
    words = " ".join(["python", f"scripts/{script.parent.name}/{script.name}", *sys.argv[1:]])
    return (
        f"`{words}` on {datetime.now(timezone.utc).date()}: {len(os.sched_getaffinity(0))} cores, "
        f"{models[0] if models else platform.machine()}, load {os.getloadavg()[0]:.2f}, Python "
        f"{platform.python_version()}, torch {torch.__version__}"
    )
