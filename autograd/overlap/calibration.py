"""The planner's constants of the machine at hand: measured once, kept in a file, and the same on all ranks."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import socket
import tempfile
import weakref
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from pynccl import Communicator, NcclInvalidUsage
from pynccl.comm.consistency import refuse_capture

from ..agreement import gathered
from .machine import CPU_ROWS, GPU_ROWS, Device, Link, Machine, dtype_name
from .measure import apart, measured

CACHE = "PYNCCL_CACHE"  # the folder of the files
_ALWAYS = ("all_gather", "all_reduce", "wire", "overhead", "copy", "gather", "matmul", "both")
_ALWAYS_POSITIVE = ("overhead", "copy")
# Settings of NCCL that say where it writes or whom it meets, not how fast it is.
_BESIDE = ("NCCL_DEBUG", "NCCL_COMM_ID", "NCCL_HOSTID", "NCCL_RAS")


def calibrate(comm: Communicator, *, dtypes: Iterable[Any] | None = None, use_cache: bool = True) -> Machine:
    """The link between the ranks of a communicator and its devices, by measurement: in about a second, or from a file.

    A collective: every rank comes here, with the same dtypes. Each measures the same at the same time; what counts is
    the shortest time of all ranks, by one all_reduce, so that all get the same constants to the bit.

    dtypes     of the matmuls to be timed; None: float32, on a GPU bfloat16 too
    use_cache  take the constants from this machine's file if all ranks have one, and else write it. It lies in
               $PYNCCL_CACHE, $XDG_CACHE_HOME/pynccl_autograd or ~/.cache/pynccl_autograd; one that cannot be read or
               written is as good as none. False: measure, and touch no file.

    The file holds for one host name, device, version of NCCL and torch, number of ranks, nodes and threads, modelled
    link and setting of NCCL. NcclInvalidUsage where the ranks' dtypes differ, and in the capture of a CUDA graph.
    """
    refuse_capture(comm.library, "calibrate()", "Run one step, or calibrate, before the capture")
    names = _names(comm, dtypes)
    with apart(comm):
        host = socket.gethostname()
        hosts = gathered(comm, [zlib.crc32(host.encode()), zlib.crc32(" ".join(names).encode())])
        if len({row[1] for row in hosts}) > 1:
            raise NcclInvalidUsage(f"calibrate: the ranks' dtypes differ; rank {comm.rank} has {', '.join(names)}")
        key = _key(comm, host, nodes=len({row[0] for row in hosts}))
        times = _read(key, names) if use_cache else None
        from_files = all(row[0] for row in gathered(comm, [int(times is not None)]))
        if times is None or not from_files:
            times = measured(comm, names)
        times = _shortest_of_all(comm, times)
    if use_cache and not from_files:
        _write(key, times)
    return _machine(comm, times)


_machines: weakref.WeakKeyDictionary[Communicator, Machine] = weakref.WeakKeyDictionary()


def machine_of(comm: Communicator, dtype: Any = "float32") -> Machine:
    """What `calibrate` finds, once per communicator, with the rate of matmuls in dtype. A collective, as that is."""
    known, name = _machines.get(comm), dtype_name(dtype)
    if known is None or name not in known.device.flops:
        found = calibrate(comm, dtypes={name, *_names(comm, None)} if known is None else [name])
        if known is not None:  # what is planned already stays as it is: only the rate is new
            rates = {**known.device.flops, name: found.device.flops[name]}
            found = replace(known, device=replace(known.device, flops=rates))
        _machines[comm] = known = found
    return known


def known_machine(comm: Communicator, dtype: Any) -> Machine | None:
    """The same if it is known: nothing is measured."""
    known = _machines.get(comm)
    return known if known is not None and dtype_name(dtype) in known.device.flops else None


def _names(comm: Communicator, dtypes: Iterable[Any] | None) -> list[str]:
    if dtypes is None:
        dtypes = ("float32",) if comm.library.is_host else ("bfloat16", "float32")
    return sorted({dtype_name(one) for one in dtypes})


def _shortest_of_all(comm: Communicator, times: Mapping[str, float]) -> dict[str, float]:
    names = sorted(times)
    row = torch.tensor([times[name] for name in names], device=comm.device, dtype=torch.float64)
    found: list[float] = comm.all_reduce(row, row, "min").tolist()
    return dict(zip(names, found, strict=True))


def _machine(comm: Communicator, times: Mapping[str, float]) -> Machine:
    """The constants that the times come to: a small all_gather takes latency + (p-1) hops, an all_reduce twice as
    many."""
    latency = hop = 0.0
    if comm.size > 1:
        steps, gather = comm.size - 1, times["all_gather"]
        hop = min(max(times["all_reduce"] - gather, 0.0), gather) / steps
        latency = gather - steps * hop
    bandwidth = 1 / times["wire"] if times["wire"] else math.inf
    rates = {name.partition(":")[2]: 1 / seconds for name, seconds in times.items() if name.startswith("flop:")}
    on = torch.device(comm.device).type
    rows = CPU_ROWS if comm.library.is_host else GPU_ROWS
    shorter = min(times["gather"], times["matmul"])
    hidden = (times["gather"] + times["matmul"] - times["both"]) / shorter if shorter else 0.0
    beside = min(max(hidden, 0.0), 1.0)
    device = Device(on, rates, overhead=times["overhead"], memory_bandwidth=1 / times["copy"], beside=beside, **rows)
    return Machine(Link("measured", latency, hop, bandwidth), device)


# ---------------------------------------------------------------------------------------------- the file


def _key(comm: Communicator, host: str, nodes: int) -> dict[str, Any]:
    """All that the times depend on, and that can be known."""
    device = torch.device(comm.device)
    settings = {name: os.environ[name] for name in sorted(os.environ) if name.startswith(("NCCL_", "PYNCCL_HOST_"))}
    return {
        "host": host,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "library": [Path(comm.library.path).name, *comm.library.version],
        "config": str(comm.config),  # of which max_ctas, for one, is felt
        "ranks": comm.size,
        "nodes": nodes,
        "settings": {name: value for name, value in settings.items() if value and not name.startswith(_BESIDE)},
        "checking": comm.checking,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def _path(key: Mapping[str, Any]) -> Path:
    named = os.environ.get(CACHE)
    base = os.environ.get("XDG_CACHE_HOME")
    folder = Path(named) if named else Path(base or Path("~/.cache").expanduser()) / "pynccl_autograd"
    digest = hashlib.blake2b(json.dumps(key, sort_keys=True).encode(), digest_size=12).hexdigest()
    return folder / f"calibration-{digest}.json"


def _read(key: Mapping[str, Any], dtypes: Iterable[str]) -> dict[str, float] | None:
    """The times of the file, of these data types; None if it has not all of them, or makes no sense."""
    times = _stored(key)
    names = [*_ALWAYS, *(f"flop:{dtype}" for dtype in dtypes)]
    return {name: times[name] for name in names} if all(name in times for name in names) else None


def _stored(key: Mapping[str, Any]) -> dict[str, float]:
    """All of the file's times that are times."""
    try:
        found = json.loads(_path(key).read_text())
        if found["key"] != key:
            return {}
        return {str(name): value for name, value in found["times"].items() if _is_time(name, value)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError):  # RuntimeError: there is no home
        return {}


def _is_time(name: str, value: Any) -> bool:
    positive = name in _ALWAYS_POSITIVE or name.startswith("flop:")
    return isinstance(value, float) and math.isfinite(value) and (value > 0 if positive else value >= 0)


def _write(key: Mapping[str, Any], times: Mapping[str, float]) -> None:
    """In one go: another rank, or another program, may be reading or writing it. Rates of other types stay."""
    stored = {name: value for name, value in _stored(key).items() if name.startswith("flop:")}
    text = json.dumps({"key": key, "times": {**stored, **times}}, indent=1, sort_keys=True)
    with contextlib.suppress(OSError, RuntimeError):
        path = _path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        number, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem)
        try:
            with os.fdopen(number, "w") as file:
                file.write(text)
            os.replace(name, path)
        except OSError:
            os.unlink(name)
