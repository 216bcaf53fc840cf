"""What a reader needs to trust the figures: library, ranks, devices, transport, how it was measured."""

from __future__ import annotations

import argparse
import json
import os
import platform
from pathlib import Path
from typing import Any

from ... import __version__
from ...bindings.library import host_module
from ...comm.communicator import Communicator
from .options import AGGREGATES

_ROW_BYTES = 512
_RULES = {
    "max": "the slowest rank counts (-a 3)",
    "min": "the fastest rank counts (-a 2)",
    "avg": "the average of the ranks (-a 1)",
    "rank0": "rank 0 counts (-a 0)",
}
_BUFFERS = ("of torch's memory", "of torch's memory, registered (-R 1)", "of NCCL's memory, symmetric windows (-R 2)")


def head(comm: Communicator, options: argparse.Namespace, backend: str) -> dict[str, Any]:
    """All of it, equal on all ranks."""
    import torch

    library = comm.library
    calls = "prepared calls" if options.plan else "plain calls"
    if options.graph:
        calls = f"{options.graph} replays of a CUDA graph of all {options.iters}"
    ranks = _ranks(comm)
    return {
        "collective": options.collective,
        "library": "host library" if library.is_host else "NCCL",
        "version": ".".join(map(str, library.version)),
        "path": library.path,
        "origin": library.origin,
        "pynccl": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "nodes": len({one["machine"] for one in ranks}),
        "ranks": ranks,
        "transport": _transport(comm),
        "iterations": options.iters,
        "warm_up": options.warmup_iters,
        "clock": "perf_counter from a moment at which all ranks begin" if library.is_host else "CUDA events",
        "calls": calls,
        "rule": _RULES[AGGREGATES[options.average]],
        "buffers": _BUFFERS[options.local_register],
        "data": f"-c {options.check}: compared with a local reference" if options.check else "not checked (-c 0)",
        "checked": bool(options.check),
        "backend": backend,
    }


def _ranks(comm: Communicator) -> list[dict[str, Any]]:
    """Of each rank: host, machine, pid, device, and its name."""
    import torch

    name = torch.cuda.get_device_name(comm.device) if not comm.library.is_host else _processor()
    node = {"host": platform.node()[:64], "machine": _machine()}
    text = json.dumps({**node, "pid": os.getpid(), "device": str(comm.device), "name": name[:128]})
    mine = torch.tensor(list(text.encode()[:_ROW_BYTES].ljust(_ROW_BYTES)), dtype=torch.uint8, device=comm.device)
    rows = comm.all_gather(mine).view(comm.size, _ROW_BYTES).cpu()
    return [json.loads(bytes(row.tolist())) for row in rows]


def _transport(comm: Communicator) -> str:
    """What the host library's collectives go through; "" for NCCL, whose NCCL_DEBUG=INFO says it."""
    if not comm.library.is_host:
        return ""
    found = "memory that the ranks share" if host_module().comm.find(comm.handle).shared else "sockets"
    if comm.size == 1:
        found = "none, one rank"
    link = os.environ.get("PYNCCL_HOST_LINK")
    return f"{found}, link modelled as {link}" if link else found


def _machine() -> str:
    """Equal for ranks that read one clock."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return platform.node()[:64]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{models[0] if models else platform.machine()}, {cores} cores"
