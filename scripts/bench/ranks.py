"""Shared by the benchmarks on rank processes: starting ranks, simulated links, timing, intervals, tables, machines."""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import platform
import statistics
import subprocess
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
SPIN = 2e-4  # seconds before an agreed start in which a rank does not sleep: waking up takes up to 0.1 ms
SINGLE_CALLS = 5  # of which one_at_a_time takes the median
CONFIDENCE = 0.95


def run_ranks(ranks: int, fn: Callable[..., Any], *arguments: Any, device: str = "cpu") -> Any:
    """Run fn(rank, *arguments) on `ranks` processes and return rank 0's result. Raises FailedError if a rank fails.

    The default process group is gloo's. With device "cuda" each rank has a current GPU, shared if there are too few.
    """
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        fork_ranks(ranks, _run, ranks, device, folder, fn, arguments)
        return pickle.loads(Path(folder, "found").read_bytes())


def fork_ranks(ranks: int, fn: Callable[..., Any], *arguments: Any) -> None:
    """Run fn(rank, *arguments) on `ranks` processes without a process group. Raises FailedError if a rank fails."""
    try:  # fork avoids importing the modules again; it is safe since torch has started no threads here
        start_processes(fn, arguments, ranks, daemon=True, start_method="fork")
    except ProcessException as error:
        raise command.FailedError(str(error).strip()) from None


def _run(rank: int, ranks: int, device: str, folder: str, fn: Callable[..., Any], arguments: Sequence[Any]) -> None:
    prepare(rank, ranks, device)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    found = fn(rank, *arguments)
    if rank == 0:
        Path(folder, "found").write_bytes(pickle.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def prepare(rank: int, ranks: int, device: str = "cpu") -> torch.device:
    """Set the environment of this rank's process and return its device."""
    for name in (LINK, "PYNCCL_CHECK", "PYNCCL_TRACE"):
        os.environ.pop(name, None)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 renames functional collectives
    if device == "cpu":
        os.environ["PYNCCL_LIBRARY"] = "host"
        return torch.device(device)
    gpus = torch.cuda.device_count()
    if ranks > gpus:  # NCCL, whoever loads it, reads the last three once in a process
        os.environ["PYNCCL_SHARE_GPU"] = os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
        os.environ["NCCL_HOSTID"] = f"rank-{rank}"
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    torch.cuda.set_device(rank % gpus)
    return torch.device(device, rank % gpus)


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """Run `count` processes that use a core each, until the block or this process ends."""
    spin = f"import os\nwhile os.getppid() == {os.getpid()}: sum(range(100000))"
    processes = [subprocess.Popen([sys.executable, "-c", spin]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


@contextlib.contextmanager
def linked(link: str, device: torch.device | str = "cpu") -> Iterator[Communicator]:
    """Yield a communicator of all ranks over the simulated link, or over none for "".

    The communicator reads the environment variable when it is created.
    """
    os.environ[LINK] = link
    try:
        with Communicator.from_process_group(device=device) as comm:
            yield comm
    finally:
        os.environ.pop(LINK)


def link_text(bandwidth: float) -> str:
    """Return the value of PYNCCL_HOST_LINK for a bandwidth in bytes/s."""
    return f"latency={LATENCY * 1e6:g}us,bandwidth={bandwidth / 1e6:.4f}MB/s"


def link_for(seconds: float, steps: int, nbytes: float) -> str:
    """Return the link on which `nbytes` per rank take `seconds` in `steps` steps."""
    return link_text(nbytes / max(seconds - steps * LATENCY, 1e-4))


def latest(*values: float) -> list[float]:
    """Return the maximum of each value over all ranks."""
    found = torch.tensor(values, dtype=torch.float64, device="cpu")
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return [float(value) for value in found]


def slowest(value: float) -> float:
    """Return the maximum over all ranks."""
    return latest(value)[0]


def measure(call: Call, batch: int = 1) -> float:
    """Return seconds per call of a batch, from when the last rank begins until the last one ends.

    All ranks begin at an agreed time, since they leave a barrier one after the other. On a GPU this is host time: the
    work of earlier calls is waited for before the start, that of these calls is not.
    """
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    start = slowest(time.perf_counter() + 0.001 + 0.0005 * dist.get_world_size())
    time.sleep(max(start - SPIN - time.perf_counter(), 0.0))
    while (begin := time.perf_counter()) < start:
        pass
    for _ in range(batch):
        call()
    begin, end = latest(begin, time.perf_counter())
    return (end - begin) / batch


def completed(call: Call, batch: int = 1) -> float:
    """Return seconds per call as `measure` does, but until the work of the calls has completed on the GPU, too."""

    def calls() -> None:
        for _ in range(batch):
            call()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()

    return measure(calls) / batch


def one_at_a_time(call: Call, batch: int = 1) -> float:
    """Return the median seconds of a few single calls, each of which begins at an agreed time."""
    return statistics.median(measure(call) for _ in range(SINGLE_CALLS))


def middle(cycle: Callable[[], Iterator[None]], batch: int = 1) -> float:
    """Return the seconds between the first two yields of a generator, which prepares before and cleans up after."""
    parts = cycle()
    next(parts)
    seconds = measure(lambda: next(parts))
    for _part in parts:
        pass
    return seconds


def undisturbed(call: Call) -> float:
    """Return the seconds of a call: the best of three, repeated until two such values agree within 5%."""
    found = 0.0
    for _ in range(10):
        before, found = found, min(completed(call) for _ in range(3))
        if abs(found - before) <= 0.05 * found:
            break
    return found


def rounds_of(
    calls: Mapping[str, Call], rounds: int, batch: int = 1, timer: Callable[[Call, int], float] = measure
) -> dict[str, list[float]]:
    """Return timer(call, batch), seconds, one number per round. Each round runs all calls, starting with a different
    one."""
    names = list(calls)
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            times[name].append(timer(calls[name], batch))
    return times


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return a 95% confidence interval of the median that holds for any distribution: two of the values in order.

    The median lies below the k-th smallest of n values with the probability of fewer than k heads in n coins. Fewer
    than 6 values say nothing about it: 0 to infinity, as for the ratio of any two times.
    """
    ordered, n, k, tail = sorted(values), len(values), 0, 0.5 ** len(values)
    while 2 * tail <= 1 - CONFIDENCE:
        k += 1
        tail += math.comb(n, k) * 0.5**n
    return (ordered[k - 1], ordered[n - k]) if k else (0.0, math.inf)


def columns(lines: Sequence[Sequence[str]], markdown: bool) -> str:
    """Format cells, header first, as a Markdown or plain-text table."""
    if markdown:
        rows = ["| " + " | ".join(line) + " |" for line in lines]
        return "\n".join([rows[0], "|---" + "|---:" * (len(lines[0]) - 1) + "|", *rows[1:]])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def surroundings(device: str = "cpu", ranks: int = 1) -> str:
    """Return the command, date, machine and versions of this run. Does not initialize CUDA: ranks are forked later."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    script = os.path.relpath(Path(sys.argv[0]).resolve(), Path(__file__).resolve().parents[2])
    words = " ".join(["python", script, *sys.argv[1:]])
    return (
        f"`{words}` on {datetime.now(timezone.utc).date()}: {len(os.sched_getaffinity(0))} cores, "
        f"{models[0] if models else platform.machine()}, load {os.getloadavg()[0]:.2f}, Python "
        f"{platform.python_version()}, torch {torch.__version__}{_cards(ranks) if device == 'cuda' else ''}"
    )


def _cards(ranks: int) -> str:
    """Return the GPU and its driver, the version of torch's NCCL, and how the ranks share the GPU if they do."""
    words = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        names = subprocess.run(words, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        names = ["a GPU that nvidia-smi does not name"] * torch.cuda.device_count()
    text = f"; {len(names)} x {names[0] if names else 'no GPU'}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
    if ranks > len(names):
        mps = "under MPS" if "CUDA_MPS_PIPE_DIRECTORY" in os.environ else "taking turns"
        text += f"; {ranks} ranks share them, {mps}, and communicate through sockets"
    return text
