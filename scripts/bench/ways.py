"""Variants of a call, timed in the same manner, including other bindings: NVIDIA's nccl4py, vLLM's classes, torch.

All use the stub library of overhead.py. From an unpacked vLLM wheel only two files are loaded; stubs replace the rest.
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


class Variant(NamedTuple):
    """A statement that makes the call."""

    name: str
    statement: str
    names: dict[str, Any]  # globals of the statement
    calls: int = 1  # number of calls that the statement makes
    reaches_stub: bool = True
    before: Any = "pass"  # run before each measurement

    def seconds(self, calls: int) -> float:
        """Return seconds per call, measured over about `calls` calls."""
        times = max(calls // self.calls, 1)
        return timeit.Timer(self.statement, self.before, globals=self.names).timeit(times) / (times * self.calls)


def measure(variants: list[Variant], rounds: int, calls: int) -> dict[str, list[float]]:
    """Return seconds per call of each variant, one number per round. Each round starts with a different variant.
    `timeit` disables the garbage collector."""
    times: dict[str, list[float]] = {variant.name: [] for variant in variants}
    for number in progress.over(range(rounds), "measuring", "round"):
        first = number % len(variants)
        for variant in variants[first:] + variants[:first]:
            times[variant.name].append(variant.seconds(calls))
    return times


def torch_variants(t: Any) -> list[Variant]:
    """Return torch.distributed with its fake backend, which launches nothing and never reaches the stub."""
    try:
        import torch.distributed as dist
        from torch.testing._internal.distributed.fake_pg import FakeStore
    except ImportError:
        return []
    if not dist.is_available():
        return []
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    names = {"all_reduce": dist.all_reduce, "t": t}
    return [Variant("torch.distributed, fake backend", "all_reduce(t)", names, reaches_stub=False)]


def nccl4py_variants(comm: pynccl.Communicator, t: Any) -> list[Variant]:
    """Return the calls of NVIDIA's binding. It uses the stub because a library with that soname is already loaded."""
    if not importlib.util.find_spec("nccl"):
        return []
    core = importlib.import_module("nccl.core")
    low = importlib.import_module("nccl.bindings.nccl")
    theirs = core.Communicator(comm.handle)
    # Without this it would look for a GPU. A CPU tensor's device index is None, so the comparison succeeds.
    theirs._device = types.SimpleNamespace(device_id=t.device.index)
    dtype, op = int(core.NcclDataType.FLOAT32), int(core.NcclRedOp.SUM)
    raw = {"all_reduce": low.all_reduce, "p": t.data_ptr(), "n": t.numel(), "c": low.Comm(comm.handle)}
    names = {"comm": theirs, "t": t, "SUM": core.NcclRedOp.SUM}
    return [
        Variant("nccl4py low-level all_reduce", f"all_reduce(p, p, n, {dtype}, {op}, c, 0)", raw),
        Variant("nccl4py Communicator.allreduce", "comm.allreduce(t, t, SUM)", names),
    ]


class HandleZero:
    """Replacement for a torch stream: the wrappers' `current_stream()` needs a GPU."""

    cuda_stream = 0


def install_vllm_stubs(folder: Path) -> None:
    """Register stub modules for everything that vLLM's two files import."""
    modules: dict[str, dict[str, Any]] = {
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
    for name, contents in modules.items():
        module = types.ModuleType(name)
        vars(module).update(contents)
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)


def without_init(kind: Any, nccl: Any, handle: int, device: Any) -> Any:
    """Return a PyNcclCommunicator of rank 0 of 2 without calling its __init__, which would look for a GPU."""
    comm = kind.__new__(kind)
    comm.rank, comm.world_size, comm.device, comm.nccl = 0, 2, device, nccl
    comm.available, comm.disabled, comm.comm = True, False, ctypes.c_void_p(handle)
    return comm


def variants_of(name: str, c: Any, wrapper: Any, t: Any, handle: int) -> list[Variant]:
    args = (t.data_ptr(), t.data_ptr(), t.numel(), 7, 0, ctypes.c_void_p(handle), None)
    raw = {"call": c.nccl.ncclAllReduce, "pointer": wrapper.buffer_type, "args": args}
    call = "call(pointer(args[0]), pointer(args[1]), *args[2:])"
    return [
        Variant(f"{name} NCCLLibrary.ncclAllReduce", call, raw),
        Variant(f"{name} all_reduce(t, t)", "c.all_reduce(t, t, stream=s)", {"c": c, "t": t, "s": HandleZero()}),
    ]


def vllm_variants(comm: pynccl.Communicator, path: Path, t: Any, folder: Path | None) -> list[Variant]:
    """Return the calls of pynccl.compat.vllm, and with `folder`, an unpacked vLLM wheel, also vLLM's."""
    nccl = compat.NCCLLibrary(str(path))
    assert isinstance(nccl.lib, Library)
    c = without_init(compat.PyNcclCommunicator, nccl, comm.handle, t.device)
    c.communicator = comm
    variants = variants_of("pynccl.compat.vllm", c, compat, t, comm.handle)
    variants.append(Variant("pynccl.compat.vllm all_reduce(t, t), no stream", "c.all_reduce(t, t)", {"c": c, "t": t}))
    if folder:
        install_vllm_stubs(folder.resolve())
        wrapper = importlib.import_module("vllm.distributed.device_communicators.pynccl_wrapper")
        kind = importlib.import_module("vllm.distributed.device_communicators.pynccl").PyNcclCommunicator
        theirs = without_init(kind, wrapper.NCCLLibrary(str(path)), comm.handle, t.device)
        variants += variants_of("vLLM's", theirs, wrapper, t, comm.handle)
    return variants
