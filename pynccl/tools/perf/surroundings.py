"""What a reader needs to trust the figures: library, ranks, devices, transport, and the way NCCL took."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from ...bindings.library import Library, host_module
from ...comm.communicator import Communicator

_ROW_BYTES = 512


def everybody(comm: Communicator) -> list[dict[str, Any]]:
    """Of each rank: host, pid, device, and its name. Equal on all ranks."""
    import torch

    name = torch.cuda.get_device_name(comm.device) if not comm.library.is_host else _processor()
    node = {"host": platform.node()[:64], "machine": _machine()}
    text = json.dumps({**node, "pid": os.getpid(), "device": str(comm.device), "name": name[:128]})
    mine = torch.tensor(list(text.encode()[:_ROW_BYTES].ljust(_ROW_BYTES)), dtype=torch.uint8, device=comm.device)
    rows = comm.all_gather(mine).view(comm.size, _ROW_BYTES).cpu()
    return [json.loads(bytes(row.tolist())) for row in rows]


def transport(comm: Communicator) -> str:
    """What the host library's collectives go through; "" for NCCL, which see `taken`."""
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


class Listening:
    """Has NCCL write down which ways its channels take; unless the user has set NCCL_DEBUG, who reads it himself."""

    def __init__(self, library: Library) -> None:
        self._folder: str | None = None
        if library.is_host or "NCCL_DEBUG" in os.environ:
            return
        self._folder = tempfile.mkdtemp(prefix="pynccl-perf-")
        os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,P2P,SHM,NET"}
        os.environ["NCCL_DEBUG_FILE"] = f"{self._folder}/%h.%p"

    def taken(self) -> str:
        """Such as "P2P/CUMEM (24 connections of rank 0)"; "" where it cannot be learnt. Ends the listening."""
        if self._folder is None:
            return ""
        text = "".join(path.read_text(errors="replace") for path in Path(self._folder).iterdir())
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder = None
        ways = Counter(re.findall(r"\bvia (\S+)", text))
        return ", ".join(f"{way} ({number} connections of this rank)" for way, number in ways.most_common())
