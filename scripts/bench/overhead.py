"""What a call costs before NCCL starts to work, for each way there is to make it.

A stub library is compiled whose functions return 0, so that what is measured is the binding alone. All ways are
measured in one run: rounds A B C ... A B C ... with the garbage collector off, medians over the rounds, and ratios as
the median of the ratios within a round, so that a machine that slows down slows down both sides. Every way is first
seen to reach the stub. The tensors are in CPU memory; on a GPU torch's look-up of the current stream comes on top. The
other bindings are measured where they can be imported. Needs a C compiler and torch.

What the flight recorder costs is the difference to a run with PYNCCL_WATCH=off.

--wrappers measures the wrappers of NCCL in Python instead, each by its own classes: this one's, pynccl.compat.vllm,
nccl4py where it can be imported, and with --vllm FOLDER, an unpacked wheel, vLLM's:
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
from bench.ways import WRAPPER, Way, measure, nccl4py_ways, torch_ways, vllm_ways

import pynccl
from pynccl.bindings import abi
from pynccl.bindings.library import torchs_own
from pynccl.interop.buffers import data_type
from pynccl.tools import command

GROUP = 32  # calls in a group
LOOP = 1000  # calls that the loop in C makes at once
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
#define COUNTED(name) int name() { calls++; return 0; }  /* of any arguments, in C11 */
COUNTED(ncclBroadcast) COUNTED(ncclReduce) COUNTED(ncclAllGather) COUNTED(ncclReduceScatter) COUNTED(ncclAlltoAll)
COUNTED(ncclGather) COUNTED(ncclScatter) COUNTED(ncclSend) COUNTED(ncclRecv)
"""


def first_of_its_name(path: Path) -> ctypes.CDLL:
    """The stub, opened where other bindings find it by its name: before torch brings a libnccl.so.2 of its own.

    A torch for CUDA then finds in its own what the stub lacks, or it would not import."""
    stub = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    own = torchs_own()
    if os.path.isabs(own):
        ctypes.CDLL(own, mode=ctypes.RTLD_GLOBAL)
    return stub


def communicator(path: Path) -> pynccl.Communicator:
    """Rank 0 of 2 on the stub, for tensors in CPU memory."""
    library = pynccl.load(str(path))
    library.is_host = True  # its buffers are CPU memory: no GPU is looked for
    os.environ.pop("PYNCCL_CHECK", None)  # there is no rank 1 to compare calls with
    return pynccl.Communicator.init(2, bytes(abi.UNIQUE_ID_BYTES), 0, library=library)


def own_ways(comm: pynccl.Communicator, stub: ctypes.CDLL, t: Any, u: Any, w: Any) -> list[Way]:
    """C, ctypes and this binding. w is as large as t and u together."""
    raw = (t.data_ptr(), t.data_ptr(), t.numel(), int(data_type(t.dtype)), int(pynccl.RedOp.SUM), comm.handle, None)
    function, loop = comm.library.ncclAllReduce, stub.stub_loop
    loop.argtypes = [ctypes.c_long, *function.argtypes]
    names = {f"a{i}": value for i, value in enumerate(raw)}
    given = ", ".join(names)
    plan = comm.plan.all_reduce(t, t)
    buffer = (t.data_ptr(), t.numel(), t.dtype)
    raw_plan = comm.plan.all_reduce(buffer, buffer, stream=0)
    many = comm.plan.group([plan] * GROUP)
    in_group = "with group():\n    for _ in numbers:\n        comm.all_reduce(t, t)"
    tensors = {"comm": comm, "t": t, "u": u, "w": w}
    return [
        Way("loop in C", f"loop({LOOP}, {given})", {**names, "loop": loop}, calls=LOOP),
        Way(BARE, f"function({given})", {**names, "function": function}),
        Way(RAW_PLAN, "plan()", {"plan": raw_plan}),
        Way(PLAN, "plan()", {"plan": plan}),
        Way(GROUP_PLAN, "plan()", {"plan": many}, calls=GROUP),
        *(Way(call, call, tensors) for call in (CHECKED, *ONE_TENSOR, *TWO_TENSORS)),
        Way("comm.all_reduce(t)", "comm.all_reduce(t)", tensors),
        Way(
            f"with group(): {GROUP} x all_reduce(t, t)",
            in_group,
            {**tensors, "group": pynccl.group, "numbers": range(GROUP)},
            calls=GROUP,
        ),
    ]


def check_reach(ways: list[Way], stub: ctypes.CDLL) -> None:
    """Raises unless each statement calls the C function as often as the way says. Warms up, too."""
    for way in ways:
        before = stub.stub_calls()
        way.seconds(way.calls)
        found, expected = stub.stub_calls() - before, way.calls if way.reaches_stub else 0
        if found != expected:
            raise RuntimeError(f"{way.name}: {found} calls reached the stub, expected {expected}")


def lines_of(times: dict[str, list[float]]) -> list[list[str]]:
    """The table of docs/overhead.md, fastest first."""
    ratios = {
        name: statistics.median(a / b for a, b in zip(found, times[BARE], strict=True)) for name, found in times.items()
    }
    rows = [[name, f"{1e9 * statistics.median(times[name]):.0f}", f"{ratios[name]:.2f}"] for name in times]
    return [["way", "ns per call", "x bare ctypes"], *sorted(rows, key=lambda row: float(row[2]))]


def main() -> None:
    parser = command.Parser(__doc__)
    parser.add_argument("--rounds", type=command.whole(1), default=101, help="rounds over all ways (%(default)s)")
    parser.add_argument("--calls", type=command.whole(1), default=1000, help="of each way in a round (%(default)s)")
    parser.add_argument("--markdown", action="store_true", help="print the table of docs/overhead.md")
    parser.add_argument("--wrappers", action="store_true", help="the wrappers of NCCL, each by its own classes")
    parser.add_argument("--vllm", type=Path, metavar="FOLDER", help="with --wrappers: an unpacked wheel of vLLM")
    options = parser.parse_args()
    if options.vllm and not (options.vllm / WRAPPER).is_file():
        parser.error(f"--vllm {options.vllm}: there is no {WRAPPER} in it; unpack the wheel there")
    with tempfile.TemporaryDirectory(prefix="bench-overhead-") as folder:
        path = compile_stub(Path(folder), STUB)
        stub = first_of_its_name(path)
        import torch
        from bench.ranks import columns

        t, u, w = torch.zeros(ELEMENTS), torch.zeros(ELEMENTS), torch.zeros(2 * ELEMENTS)
        comm = communicator(path)
        ways = own_ways(comm, stub, t, u, w)
        if options.wrappers:
            ways = [way for way in ways if way.name in (BARE, PLAN, CHECKED)]
            ways += [*vllm_ways(comm, path, t, options.vllm), *nccl4py_ways(comm, t)]
        else:
            ways += [*nccl4py_ways(comm, t), *torch_ways(t)]
        check_reach(ways, stub)
        times = measure(ways, options.rounds, options.calls)
        comm.destroy()
    print(columns(lines_of(times), options.markdown))


if __name__ == "__main__":
    command.run(main)
