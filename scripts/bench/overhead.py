"""Measure the host overhead of a call, before NCCL starts to work, for every variant of the call.

The script compiles a stub library whose functions return 0, so that it measures only the binding. All variants run
alternately (A B C ... A B C ...) with the garbage collector off. It reports medians over the rounds, and ratios as the
median of the ratios within a round, so that a slow phase of the machine affects both sides. Before timing, it checks
that every variant reaches the stub. The tensors are in CPU memory; on a GPU, torch's lookup of the current stream adds
to the time. Other bindings are measured if they can be imported. Needs a C compiler and torch.

The cost of the flight recorder is the difference from a run with PYNCCL_WATCH=off.

--wrappers compares Python wrappers of NCCL instead, each through its own classes: this package, pynccl.compat.vllm,
nccl4py if it can be imported, and with --vllm FOLDER, an unpacked wheel, vLLM:

    pip download --no-deps vllm==0.33.0 && unzip vllm-*.whl 'vllm/distributed/device_communicators/pynccl*' -d FOLDER

examples:
  python scripts/bench/overhead.py --rounds 3 --calls 50 --markdown  # long
  python scripts/bench/overhead.py --wrappers --rounds 5 --calls 200
  python scripts/bench/overhead.py  # long
"""

from __future__ import annotations

import ctypes
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.stub import compile_stub
from bench.ways import WRAPPER, Variant, measure, nccl4py_variants, torch_variants, vllm_variants

import pynccl
from pynccl.bindings import abi
from pynccl.bindings.library import torchs_own
from pynccl.interop.buffers import data_type
from pynccl.tools import command

GROUP = 32  # calls in a group
LOOP = 1000  # calls of the loop in C
ELEMENTS = 1024

BARE, CHECKED, PLAN = "bare ctypes", "comm.all_reduce(t, t)", "plan()"
GROUP_PLAN = f"group plan of {GROUP}"
RAW_PLAN = "plan() of raw buffers"
ONE_TENSOR = ["comm.broadcast(t, t)", "comm.send(t, 1)", "comm.recv(t, 1)"]
TWO_TENSORS = [
    *("comm.all_reduce(t, u)", "comm.broadcast(t, u)", "comm.reduce(t, u)", "comm.all_gather(t, w)"),
    *("comm.reduce_scatter(w, t)", "comm.all_to_all(t, u)", "comm.gather(t, w)", "comm.scatter(w, t)"),
]

STUB = r"""
static long calls;

long stub_calls(void) { return calls; }
int ncclAllReduce(const void *send, void *recv, size_t count, int type, int op, void *comm, void *stream) {
  calls++;
  return 0;
}
int stub_loop(long n, const void *send, void *recv, size_t count, int type, int op, void *comm, void *stream) {
  int (*volatile call)(const void *, void *, size_t, int, int, void *, void *) = ncclAllReduce;
  for (long i = 0; i < n; i++)
    if (call(send, recv, count, type, op, comm, stream)) return 1;
  return 0;
}
#define COUNTED(name) int name() { calls++; return 0; }  /* accepts any arguments in C11 */
COUNTED(ncclBroadcast) COUNTED(ncclReduce) COUNTED(ncclAllGather) COUNTED(ncclReduceScatter) COUNTED(ncclAlltoAll)
COUNTED(ncclGather) COUNTED(ncclScatter) COUNTED(ncclSend) COUNTED(ncclRecv)
"""


def load_stub_first(path: Path) -> ctypes.CDLL:
    """Load the stub before torch loads its own libnccl.so.2, so that other bindings find the stub by its soname.

    Then load torch's library, too: a torch for CUDA cannot be imported without the symbols that the stub lacks.
    """
    stub = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    torch_library = torchs_own()
    if os.path.isabs(torch_library):
        ctypes.CDLL(torch_library, mode=ctypes.RTLD_GLOBAL)
    return stub


def communicator(path: Path) -> pynccl.Communicator:
    """Return rank 0 of 2 on the stub, for tensors in CPU memory."""
    library = pynccl.load(str(path))
    library.is_host = True  # use CPU memory and do not look for a GPU
    os.environ.pop("PYNCCL_CHECK", None)  # there is no rank 1 to compare calls with
    return pynccl.Communicator.init(2, bytes(abi.UNIQUE_ID_BYTES), 0, library=library)


def own_variants(comm: pynccl.Communicator, stub: ctypes.CDLL, t: Any, u: Any, w: Any) -> list[Variant]:
    """Return the variants of C, ctypes and this binding. w is as large as t and u together."""
    raw = (t.data_ptr(), t.data_ptr(), t.numel(), int(data_type(t.dtype)), int(pynccl.RedOp.SUM), comm.handle, None)
    function, loop = comm.library.ncclAllReduce, stub.stub_loop
    loop.argtypes = [ctypes.c_long, *function.argtypes]
    names = {f"a{i}": value for i, value in enumerate(raw)}
    arguments = ", ".join(names)
    plan = comm.plan.all_reduce(t, t)
    buffer = (t.data_ptr(), t.numel(), t.dtype)
    raw_plan = comm.plan.all_reduce(buffer, buffer, stream=0)
    many = comm.plan.group([plan] * GROUP)
    in_group = "with group():\n    for _ in numbers:\n        comm.all_reduce(t, t)"
    tensors = {"comm": comm, "t": t, "u": u, "w": w}
    return [
        Variant("loop in C", f"loop({LOOP}, {arguments})", {**names, "loop": loop}, calls=LOOP),
        Variant(BARE, f"function({arguments})", {**names, "function": function}),
        Variant(RAW_PLAN, "plan()", {"plan": raw_plan}),
        Variant(PLAN, "plan()", {"plan": plan}),
        Variant(GROUP_PLAN, "plan()", {"plan": many}, calls=GROUP),
        *(Variant(call, call, tensors) for call in (CHECKED, *ONE_TENSOR, *TWO_TENSORS)),
        Variant("comm.all_reduce(t)", "comm.all_reduce(t)", tensors),
        Variant(
            f"with group(): {GROUP} x all_reduce(t, t)",
            in_group,
            {**tensors, "group": pynccl.group, "numbers": range(GROUP)},
            calls=GROUP,
        ),
    ]


def check_reach(variants: list[Variant], stub: ctypes.CDLL) -> None:
    """Check that each statement calls the C function as often as the variant states. This also warms up."""
    for variant in variants:
        before = stub.stub_calls()
        variant.seconds(variant.calls)
        found, expected = stub.stub_calls() - before, variant.calls if variant.reaches_stub else 0
        if found != expected:
            raise RuntimeError(f"{variant.name}: {found} calls reached the stub, expected {expected}")


def table_lines(times: dict[str, list[float]]) -> list[list[str]]:
    """Return the table of docs/overhead.md, fastest first."""
    ratios = {
        name: statistics.median(a / b for a, b in zip(found, times[BARE], strict=True)) for name, found in times.items()
    }
    rows = [[name, f"{1e9 * statistics.median(times[name]):.0f}", f"{ratios[name]:.2f}"] for name in times]
    return [["call", "ns per call", "x bare ctypes"], *sorted(rows, key=lambda row: float(row[2]))]


def main() -> None:
    parser = command.Parser(__doc__)
    parser.add_argument("--rounds", type=command.integer(1), default=101, help="rounds over all variants (%(default)s)")
    parser.add_argument("--calls", type=command.integer(1), default=1000, help="calls per round (%(default)s)")
    parser.add_argument("--markdown", action="store_true", help="print a Markdown table for docs/overhead.md")
    parser.add_argument("--wrappers", action="store_true", help="compare Python wrappers of NCCL instead")
    parser.add_argument("--vllm", type=Path, metavar="FOLDER", help="with --wrappers: an unpacked vLLM wheel")
    options = parser.parse_args()
    if options.vllm and not (options.vllm / WRAPPER).is_file():
        parser.error(f"--vllm {options.vllm}: does not contain {WRAPPER}; unpack the vLLM wheel there")
    with tempfile.TemporaryDirectory(prefix="bench-overhead-") as folder:
        path = compile_stub(Path(folder), STUB)
        stub = load_stub_first(path)
        import torch
        from bench.ranks import columns

        t, u, w = torch.zeros(ELEMENTS), torch.zeros(ELEMENTS), torch.zeros(2 * ELEMENTS)
        comm = communicator(path)
        variants = own_variants(comm, stub, t, u, w)
        if options.wrappers:
            variants = [variant for variant in variants if variant.name in (BARE, PLAN, CHECKED)]
            variants += [*vllm_variants(comm, path, t, options.vllm), *nccl4py_variants(comm, t)]
        else:
            variants += [*nccl4py_variants(comm, t), *torch_variants(t)]
        check_reach(variants, stub)
        times = measure(variants, options.rounds, options.calls)
        comm.destroy()
    print(columns(table_lines(times), options.markdown))


if __name__ == "__main__":
    command.run(main)
