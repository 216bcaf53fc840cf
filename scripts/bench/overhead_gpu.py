"""`overhead.py --gpu`: what a call costs the host on the real libnccl, with tensors on a GPU.

One rank, or those of a launch (RANK, WORLD_SIZE, ...), which may share a GPU. A way is called so many times without
waiting for the GPU in between; what it has queued is waited for before the next way's turn, outside the time that
counts. torch.distributed has its nccl backend; nccl4py is measured where it can be imported. A way that one rank cannot
go is left out on all. On one rank NCCL launches nothing for a reduction in place, so that the binding alone is left.

PYNCCL_LIBRARY=host rehearses all this on the CPU, with gloo: its times say nothing about a GPU.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bench.ways as bench
import torch
import torch.distributed as dist

import pynccl
from pynccl.interop.buffers import data_type

TORCH, TORCH_ASYNC = "torch.distributed", "torch.distributed, async_op=True"
PATIENCE = datetime.timedelta(seconds=30)


def join() -> pynccl.Communicator:
    """The communicator of the launch, whose ranks share GPUs where there are too few, or of this process alone."""
    os.environ.pop("PYNCCL_CHECK", None)
    library = pynccl.load()
    gpus = 0 if library.is_host else torch.cuda.device_count()
    device = int(os.environ.get("LOCAL_RANK", "0")) % gpus if gpus else None
    if "RANK" in os.environ:
        comm = pynccl.init(device=device)
    else:
        comm = pynccl.Communicator.init(1, pynccl.get_unique_id(library), 0, device=device, library=library)
    if gpus:
        torch.cuda.set_device(comm.device)
    return comm


def own_ways(comm: pynccl.Communicator, t: Any, u: Any) -> list[bench.Way]:
    stream = 0 if comm.library.is_host else torch.cuda.current_stream().cuda_stream
    raw = (t.data_ptr(), t.data_ptr(), t.numel(), int(data_type(t.dtype)), int(pynccl.RedOp.SUM), comm.handle, stream)
    names = {"function": comm.library.ncclAllReduce, **{f"a{i}": value for i, value in enumerate(raw)}}
    tensors = {"comm": comm, "t": t, "u": u}
    return [
        bench.Way(bench.BARE, "function(a0, a1, a2, a3, a4, a5, a6)", names),
        bench.Way(bench.PLAN, "plan()", {"plan": comm.plan.all_reduce(t, t)}),
        bench.Way(bench.CHECKED, "comm.all_reduce(t, t)", tensors),
        bench.Way("comm.all_reduce(t, u)", "comm.all_reduce(t, u)", tensors),
        bench.Way("comm.all_reduce(t)", "comm.all_reduce(t)", tensors),
    ]


@contextlib.contextmanager
def process_group(comm: pynccl.Communicator) -> Iterator[None]:
    """torch.distributed over the same ranks; they meet in a file, whose name rank 0 hands out."""
    made = tempfile.mkdtemp(prefix="bench-overhead-") if comm.rank == 0 else ""
    text = torch.tensor(list(made.encode().ljust(256)), dtype=torch.uint8, device=comm.device)
    comm.broadcast(text, text, root=0)
    path = Path(bytes(text.tolist()).decode().rstrip()) / "store"
    backend = "gloo" if comm.library.is_host else "nccl"
    dist.init_process_group(
        backend, init_method=f"file://{path}", rank=comm.rank, world_size=comm.size, timeout=PATIENCE
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def other_ways(comm: pynccl.Communicator, t: Any) -> list[bench.Way]:
    names = {"all_reduce": dist.all_reduce, "t": t}
    return [
        bench.Way(TORCH, "all_reduce(t)", names),
        bench.Way(TORCH_ASYNC, "all_reduce(t, async_op=True)", names),
        *([] if comm.library.is_host else bench.nccl4py_ways(comm, t)),
    ]


def usable(comm: pynccl.Communicator, ways: list[bench.Way]) -> tuple[list[bench.Way], dict[str, str]]:
    """(the ways that every rank can go, why the others are left out). Each is gone once, which warms it up, too."""
    left_out, kept = {}, []
    for way in ways:
        error = ""
        try:
            way.seconds(1)
            synchronize(comm)
        except Exception as found:  # of another binding, of whatever type
            error = f"{type(found).__name__}: {found}"
        if some_rank(comm, bool(error)):
            left_out[way.name] = error or "another rank could not"
        else:
            kept.append(way)
    return kept, left_out


def some_rank(comm: pynccl.Communicator, says: bool) -> bool:
    """Whether `says` on one rank at least: the ranks have to go on alike."""
    count = torch.tensor([float(says)], device=comm.device)
    return bool(float(comm.all_reduce(count, count)))


def synchronize(comm: pynccl.Communicator) -> None:
    if not comm.library.is_host:
        torch.cuda.synchronize()


def measure(comm: pynccl.Communicator, ways: list[bench.Way], rounds: int, calls: int) -> dict[str, list[float]]:
    """Seconds per call of each way, one number per round; the ranks begin together."""
    times: dict[str, list[float]] = {way.name: [] for way in ways}
    for _ in range(rounds):
        for way in ways:
            comm.barrier()
            times[way.name].append(way.seconds(calls))
            synchronize(comm)
    return times


def results(comm: pynccl.Communicator, times: dict[str, list[float]], left_out: dict[str, str]) -> dict[str, Any]:
    def ratio(name: str) -> float:
        return statistics.median(a / b for a, b in zip(times[name], times[bench.BARE], strict=True))

    rows = [
        {"way": name, "us": round(1e6 * statistics.median(found), 2), "ratio": round(ratio(name), 2)}
        for name, found in times.items()
    ]
    where = "the CPU, by the host library and gloo" if comm.library.is_host else torch.cuda.get_device_name()
    nccl = ".".join(map(str, comm.library.version))
    about = {"python": platform.python_version(), "torch": torch.__version__, "nccl": nccl}
    return {"where": where, "ranks": comm.size, **about, "calls": rows, "left out": left_out}


def table(found: dict[str, Any]) -> str:
    lines = [f"{found['ranks']} ranks on {found['where']}; torch {found['torch']}, NCCL {found['nccl']}"]
    lines += [f"{'way':<42}{'us per call':>12}{'x bare ctypes':>15}"]
    lines += [f"{row['way']:<42}{row['us']:>12.2f}{row['ratio']:>15.2f}" for row in found["calls"]]
    return "\n".join([*lines, *(f"left out: {name}: {why}" for name, why in found["left out"].items())])


def run(rounds: int, calls: int) -> dict[str, Any]:
    """What --gpu measures, on every rank."""
    with join() as comm:
        t, u = (torch.zeros(bench.ELEMENTS, device=comm.device) for _ in range(2))
        with contextlib.ExitStack() as stack:
            others: list[bench.Way] = []
            error = ""
            try:
                stack.enter_context(process_group(comm))
                others = other_ways(comm, t)
            except Exception as found:
                error = f"{type(found).__name__}: {found}"
            missing = some_rank(comm, bool(error))
            left_out = {TORCH: error or "another rank could not"} if missing else {}
            ways, more = usable(comm, [*own_ways(comm, t, u), *([] if missing else others)])
            times = measure(comm, ways, rounds, calls)
            return results(comm, times, {**left_out, **more})
