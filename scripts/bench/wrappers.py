"""What a call costs through the wrappers of NCCL in Python, before NCCL starts to work: each by its own classes.

On the stub library of overhead.py, in turns, garbage collector off; medians over the rounds. FOLDER has an
unpacked wheel of vLLM, of which two files are loaded with stand-ins for the rest of it:
pip download --no-deps vllm==0.33.0 && unzip vllm-*.whl 'vllm/distributed/device_communicators/pynccl*' -d FOLDER
nccl4py is measured where it can be imported.

examples:
  python scripts/bench/wrappers.py --rounds 5 --calls 200
  python scripts/bench/wrappers.py  # long
"""

from __future__ import annotations

import ctypes
import importlib
import statistics
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.overhead import check_reach, communicator, compile_stub, first_of_its_name
from bench.ways import BARE, CHECKED, ELEMENTS, PLAN, Way, measure, nccl4py_ways

import pynccl
from pynccl.bindings.library import Library
from pynccl.compat import vllm as compat
from pynccl.tools import command


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


def main() -> None:
    parser = command.Parser(__doc__)
    parser.add_argument("--vllm", type=Path, metavar="FOLDER", help="an unpacked wheel of vLLM")
    parser.add_argument("--rounds", type=command.whole(1), default=51, help="of all ways in turn (%(default)s)")
    parser.add_argument("--calls", type=command.whole(1), default=1000, help="of each way in a round (%(default)s)")
    options = parser.parse_args()
    theirs = "vllm/distributed/device_communicators/pynccl_wrapper.py"
    if options.vllm and not (options.vllm / theirs).is_file():
        parser.error(f"--vllm {options.vllm}: there is no {theirs} in it; unpack the wheel there")
    with tempfile.TemporaryDirectory(prefix="bench-wrappers-") as folder:
        path = compile_stub(Path(folder))
        stub = first_of_its_name(path)
        import torch

        t = torch.zeros(ELEMENTS)
        comm = communicator(path)
        names = {f"a{i}": one for i, one in enumerate((t.data_ptr(), t.data_ptr(), ELEMENTS, 7, 0, comm.handle, None))}
        ways = [
            Way(BARE, f"function({', '.join(names)})", {**names, "function": comm.library.ncclAllReduce}),
            Way(PLAN, "plan()", {"plan": comm.plan.all_reduce(t, t)}),
            Way(CHECKED, CHECKED, {"comm": comm, "t": t}),
            *ways_of("pynccl.compat.vllm", c := mine(comm, path, t.device), compat, t, comm.handle),
            Way("pynccl.compat.vllm all_reduce(t, t), no stream named", "c.all_reduce(t, t)", {"c": c, "t": t}),
            *nccl4py_ways(comm, t),
        ]
        if options.vllm:
            stand_ins(options.vllm.resolve())
            wrapper = importlib.import_module("vllm.distributed.device_communicators.pynccl_wrapper")
            kind = importlib.import_module("vllm.distributed.device_communicators.pynccl").PyNcclCommunicator
            c = without_init(kind, wrapper.NCCLLibrary(str(path)), comm.handle, t.device)
            ways += ways_of("vLLM's", c, wrapper, t, comm.handle)
        check_reach(ways, stub)
        times = measure(ways, options.rounds, options.calls)
        comm.destroy()
    width = max(map(len, times))
    print(f"{'way':{width}}  ns per call, median of {options.rounds} rounds")
    for name, seconds in sorted(times.items(), key=lambda row: statistics.median(row[1])):
        print(f"{name:{width}}  {statistics.median(seconds) * 1e9:6.0f}")


def mine(comm: pynccl.Communicator, path: Path, device: Any) -> Any:
    nccl = compat.NCCLLibrary(str(path))
    assert isinstance(nccl.lib, Library)
    c = without_init(compat.PyNcclCommunicator, nccl, comm.handle, device)
    c.communicator, c.stream = comm, None
    return c


if __name__ == "__main__":
    command.run(main)
