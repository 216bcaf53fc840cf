"""Ways to make a call, each timed alike, and those of other bindings: NVIDIA's nccl4py, vLLM's classes, torch.

All get the stub library of overhead.py. Of an unpacked wheel of vLLM two files are loaded, with stand-ins for the rest.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import sys
import timeit
import types
from pathlib import Path
from typing import Any, NamedTuple

import pynccl
from pynccl import progress
from pynccl.bindings.library import Library
from pynccl.compat import vllm as compat

WRAPPER = "vllm/distributed/device_communicators/pynccl_wrapper.py"


class Way(NamedTuple):
    """One way to make the call."""

    name: str
    statement: str
    names: dict[str, Any]  # that the statement uses
    calls: int = 1  # calls that the statement makes
    reaches_stub: bool = True

    def seconds(self, calls: int) -> float:
        """Time per call, over about so many calls."""
        times = max(calls // self.calls, 1)
        return timeit.Timer(self.statement, globals=self.names).timeit(times) / (times * self.calls)


def measure(ways: list[Way], rounds: int, calls: int) -> dict[str, list[float]]:
    """Seconds per call of each way, one number per round. `timeit` turns the garbage collector off."""
    times: dict[str, list[float]] = {way.name: [] for way in ways}
    for _ in progress.over(range(rounds), "measuring", "round"):
        for way in ways:
            times[way.name].append(way.seconds(calls))
    return times


def torch_ways(t: Any) -> list[Way]:
    """torch.distributed with its fake backend, which launches nothing and so never reaches the stub."""
    try:
        import torch.distributed as dist
        from torch.testing._internal.distributed.fake_pg import FakeStore
    except ImportError:
        return []
    if not dist.is_available():
        return []
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    names = {"all_reduce": dist.all_reduce, "t": t}
    return [Way("torch.distributed, fake backend", "all_reduce(t)", names, reaches_stub=False)]


def nccl4py_ways(comm: pynccl.Communicator, t: Any) -> list[Way]:
    """NVIDIA's binding, which takes the stub because a library of that name is in the process already."""
    if not importlib.util.find_spec("nccl"):
        return []
    core = importlib.import_module("nccl.core")
    low = importlib.import_module("nccl.bindings.nccl")
    theirs = core.Communicator(comm.handle)
    # Asked for, it would look for a GPU. A CPU tensor's index is None, and so it compares equal.
    theirs._device = types.SimpleNamespace(device_id=t.device.index)
    dtype, op = int(core.NcclDataType.FLOAT32), int(core.NcclRedOp.SUM)
    raw = {"all_reduce": low.all_reduce, "p": t.data_ptr(), "n": t.numel(), "c": low.Comm(comm.handle)}
    names = {"comm": theirs, "t": t, "SUM": core.NcclRedOp.SUM}
    return [
        Way("nccl4py low-level all_reduce", f"all_reduce(p, p, n, {dtype}, {op}, c, 0)", raw),
        Way("nccl4py Communicator.allreduce", "comm.allreduce(t, t, SUM)", names),
    ]


class HandleZero:
    """A stream as torch's are to these wrappers: their `current_stream()` needs a GPU."""

    cuda_stream = 0


def stand_ins(folder: Path) -> None:
    """Of vLLM's package, what its two files import."""
    found: dict[str, dict[str, Any]] = {
        "vllm": {"__path__": [str(folder / "vllm")]},
        "vllm.distributed": {"__path__": [str(folder / "vllm" / "distributed")]},
        "vllm.distributed.device_communicators": {"__path__": [str(folder / "vllm/distributed/device_communicators")]},
        "vllm.distributed.utils": {"StatelessProcessGroup": type("StatelessProcessGroup", (), {})},
        "vllm.envs": {"VLLM_DISABLE_PYNCCL": False, "VLLM_USE_NCCL_SYMM_MEM": False},
        "vllm.logger": {"init_logger": lambda name: None},
        "vllm.platforms": {
            "current_platform": types.SimpleNamespace(fp8_dtype=lambda: None, is_rocm=lambda: True),
        },
        "vllm.utils": {"__path__": []},
        "vllm.utils.nccl": {"find_nccl_library": lambda: ""},
        "vllm.utils.torch_utils": {"current_stream": HandleZero},
    }
    for name, contents in found.items():
        module = types.ModuleType(name)
        vars(module).update(contents)
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)


def without_init(kind: Any, nccl: Any, handle: int, device: Any) -> Any:
    """A PyNcclCommunicator of rank 0 of 2 that nobody has met: its __init__ would look for a GPU."""
    made = kind.__new__(kind)
    made.rank, made.world_size, made.device, made.nccl = 0, 2, device, nccl
    made.available, made.disabled, made.comm = True, False, ctypes.c_void_p(handle)
    return made


def ways_of(name: str, c: Any, wrapper: Any, t: Any, handle: int) -> list[Way]:
    args = (t.data_ptr(), t.data_ptr(), t.numel(), 7, 0, ctypes.c_void_p(handle), None)
    raw = {"call": c.nccl.ncclAllReduce, "pointer": wrapper.buffer_type, "args": args}
    call = "call(pointer(args[0]), pointer(args[1]), *args[2:])"
    return [
        Way(f"{name} NCCLLibrary.ncclAllReduce", call, raw),
        Way(f"{name} all_reduce(t, t)", "c.all_reduce(t, t, stream=s)", {"c": c, "t": t, "s": HandleZero()}),
    ]


def vllm_ways(comm: pynccl.Communicator, path: Path, t: Any, folder: Path | None) -> list[Way]:
    """folder: an unpacked wheel of vLLM; None: only what pynccl.compat.vllm has."""
    nccl = compat.NCCLLibrary(str(path))
    assert isinstance(nccl.lib, Library)
    c = without_init(compat.PyNcclCommunicator, nccl, comm.handle, t.device)
    c.communicator = comm
    ways = ways_of("pynccl.compat.vllm", c, compat, t, comm.handle)
    ways.append(Way("pynccl.compat.vllm all_reduce(t, t), no stream named", "c.all_reduce(t, t)", {"c": c, "t": t}))
    if folder:
        stand_ins(folder.resolve())
        wrapper = importlib.import_module("vllm.distributed.device_communicators.pynccl_wrapper")
        kind = importlib.import_module("vllm.distributed.device_communicators.pynccl").PyNcclCommunicator
        theirs = without_init(kind, wrapper.NCCLLibrary(str(path)), comm.handle, t.device)
        ways += ways_of("vLLM's", theirs, wrapper, t, comm.handle)
    return ways
