"""What the benchmarks on rank processes share: the processes, links between them, times of calls, where it ran."""

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
LATENCY = 50e-6  # seconds a step, of the modelled link


def run_ranks(ranks: int, fn: Callable[..., Any], *arguments: Any) -> Any:
    """What fn(0, *arguments) returns, run on so many processes. FailedError with the first error of a rank."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        try:  # a fork has all modules already, and this process has started no threads of torch
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
    """A communicator of all ranks over the modelled link; "": over none. Each reads the variable when it is made."""
    os.environ[LINK] = link
    try:
        with Communicator.from_process_group(device="cpu") as comm:
            yield comm
    finally:
        os.environ.pop(LINK)


def link_text(bandwidth: float) -> str:
    """As PYNCCL_HOST_LINK has it.   bandwidth in bytes/s"""
    return f"latency={LATENCY * 1e6:g}us,bandwidth={bandwidth / 1e6:.4f}MB/s"


def link_for(seconds: float, steps: int, nbytes: float) -> str:
    """The link on which so many bytes a rank take so long, in so many steps."""
    return link_text(nbytes / max(seconds - steps * LATENCY, 1e-4))


def slowest(value: float) -> float:
    """The largest of all ranks."""
    found = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def measure(call: Call, batch: int = 1) -> float:
    """Seconds per call of a batch, of the slowest rank, from a moment at which all begin: a barrier alone lets them go
    one after the other."""
    start = slowest(time.perf_counter() + 0.001 + 0.0005 * dist.get_world_size())
    time.sleep(max(start - time.perf_counter(), 0.0))
    for _ in range(batch):
        call()
    return slowest((time.perf_counter() - start) / batch)


def undisturbed(call: Call) -> float:
    """Seconds of a call: the best of three, once the best of the next three is within 5% of it."""
    found = 0.0
    for _ in range(10):
        before, found = found, min(measure(call) for _ in range(3))
        if abs(found - before) <= 0.05 * found:
            break
    return found


def rounds_of(calls: Mapping[str, Call], rounds: int, batch: int = 1) -> dict[str, list[float]]:
    """Seconds per call, one number per round: in each, all of them in turn, beginning with another one every time."""
    names = list(calls)
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            times[name].append(measure(calls[name], batch))
    return times


def columns(lines: Sequence[Sequence[str]], markdown: bool) -> str:
    """A table of these cells, its head first, for docs/ or for a terminal."""
    if markdown:
        rows = ["| " + " | ".join(line) + " |" for line in lines]
        return "\n".join([rows[0], "|---" + "|---:" * (len(lines[0]) - 1) + "|", *rows[1:]])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def surroundings() -> str:
    """Command, date, machine and versions."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    script = Path(sys.argv[0]).resolve()
    words = " ".join(["python", f"scripts/{script.parent.name}/{script.name}", *sys.argv[1:]])
    return (
        f"`{words}` on {datetime.now(timezone.utc).date()}: {len(os.sched_getaffinity(0))} cores, "
        f"{models[0] if models else platform.machine()}, load {os.getloadavg()[0]:.2f}, Python "
        f"{platform.python_version()}, torch {torch.__version__}"
    )
