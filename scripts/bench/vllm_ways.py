"""The classes of vLLM, and those of pynccl.compat.vllm, as ways for overhead.py to call all_reduce.

Of an unpacked wheel of vLLM two files are loaded, with stand-ins for the rest of it.
"""

from __future__ import annotations

import ctypes
import importlib
import sys
import types
from pathlib import Path
from typing import Any

from bench.ways import Way

import pynccl
from pynccl.bindings.library import Library
from pynccl.compat import vllm as compat

WRAPPER = "vllm/distributed/device_communicators/pynccl_wrapper.py"


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


def mine(comm: pynccl.Communicator, path: Path, device: Any) -> Any:
    nccl = compat.NCCLLibrary(str(path))
    assert isinstance(nccl.lib, Library)
    c = without_init(compat.PyNcclCommunicator, nccl, comm.handle, device)
    c.communicator = comm
    return c


def vllm_ways(comm: pynccl.Communicator, path: Path, t: Any, folder: Path | None) -> list[Way]:
    """folder: an unpacked wheel of vLLM; None: only what pynccl.compat.vllm has."""
    c = mine(comm, path, t.device)
    ways = ways_of("pynccl.compat.vllm", c, compat, t, comm.handle)
    ways.append(Way("pynccl.compat.vllm all_reduce(t, t), no stream named", "c.all_reduce(t, t)", {"c": c, "t": t}))
    if folder:
        stand_ins(folder.resolve())
        wrapper = importlib.import_module("vllm.distributed.device_communicators.pynccl_wrapper")
        kind = importlib.import_module("vllm.distributed.device_communicators.pynccl").PyNcclCommunicator
        theirs = without_init(kind, wrapper.NCCLLibrary(str(path)), comm.handle, t.device)
        ways += ways_of("vLLM's", theirs, wrapper, t, comm.handle)
    return ways
