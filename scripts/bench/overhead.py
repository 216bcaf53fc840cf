"""What a call costs before NCCL starts to work, for each way there is to make it.

A stub library is compiled whose functions return 0, so that what is measured is the binding alone. All ways are
measured in one run: rounds A B C ... A B C ... with the garbage collector off, medians over the rounds, and ratios as
the median of the ratios within a round, so that a machine that slows down slows down both sides. Every way is first
seen to reach the stub. The tensors are in CPU memory; on a GPU torch's look-up of the current stream comes on top. The
other bindings are measured where they can be imported. Needs a C compiler and torch.

What the flight recorder costs is measured in other processes, in turn with PYNCCL_WATCH=on and off, beside bare
ctypes in each of them: a process has one of them, and CPython adapts its bytecode to what it sees there.

--wrappers measures the wrappers of NCCL in Python instead, each by its own classes: this one's, pynccl.compat.vllm,
nccl4py where it can be imported, and with --vllm FOLDER, an unpacked wheel, vLLM's:
pip download --no-deps vllm==0.33.0 && unzip vllm-*.whl 'vllm/distributed/device_communicators/pynccl*' -d FOLDER

--gpu measures on a GPU and the real libnccl instead, on the ranks of a launch, beside torch.distributed's nccl backend;
overhead_gpu.py says how. Not yet run on a GPU.

examples:
  python scripts/bench/overhead.py --rounds 3 --calls 50 --markdown  # long
  PYNCCL_LIBRARY=host torchrun --standalone --nproc-per-node=2 scripts/bench/overhead.py --gpu --rounds 3 --calls 20
  python scripts/bench/overhead.py --wrappers --rounds 5 --calls 200
  python scripts/bench/overhead.py  # long
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.vllm_ways import WRAPPER, vllm_ways
from bench.ways import BARE, CHECKED, ELEMENTS, PLAN, Way, measure, nccl4py_ways

import pynccl
from pynccl import progress
from pynccl.bindings import abi
from pynccl.bindings.library import torchs_own
from pynccl.interop.buffers import data_type
from pynccl.tools import command

ROOT = Path(__file__).resolve().parents[2]
GROUP = 32  # calls in a group
LOOP = 1000  # calls that the loop in C makes at once

GROUP_PLAN = f"group plan of {GROUP}"
RAW_PLAN = "plan() of raw buffers"
ONE_TENSOR = ["comm.broadcast(t, t)", "comm.send(t, 1)", "comm.recv(t, 1)"]
TWO_TENSORS = [
    *("comm.all_reduce(t, u)", "comm.broadcast(t, u)", "comm.reduce(t, u)", "comm.all_gather(t, w)"),
    *("comm.reduce_scatter(w, t)", "comm.all_to_all(t, u)", "comm.gather(t, w)", "comm.scatter(w, t)"),
]

# What the flight recorder costs: these ways with each PYNCCL_WATCH.
RECORDED = [CHECKED, PLAN, RAW_PLAN, GROUP_PLAN, "comm.all_reduce(t)"]
NAMES = {"on": "{}", "off": "{}, watch off"}
PROCESSES = 7  # for each, of as many rounds as the others have in all

# (way, beside which way, ratio at most)
BOUNDS = [
    *[(RAW_PLAN, BARE, 0.85), (PLAN, BARE, 0.85), (GROUP_PLAN, BARE, 0.5)],
    *((way, BARE, 3.3) for way in (CHECKED, *ONE_TENSOR)),
    *((way, BARE, 4.2) for way in TWO_TENSORS),
]
IMPORT_BOUND = 60.0  # milliseconds

STUB = r"""
#include <stddef.h>

static struct { int rank, size, device; } only = {0, 2, 0};
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
#define MOVES(name, ...) int name(__VA_ARGS__) { calls++; return 0; }
MOVES(ncclBroadcast, const void *send, void *recv, size_t count, int type, int root, void *comm, void *stream)
MOVES(ncclReduce, const void *send, void *recv, size_t count, int type, int op, int root, void *comm, void *stream)
MOVES(ncclAllGather, const void *send, void *recv, size_t count, int type, void *comm, void *stream)
MOVES(ncclReduceScatter, const void *send, void *recv, size_t count, int type, int op, void *comm, void *stream)
MOVES(ncclAlltoAll, const void *send, void *recv, size_t count, int type, void *comm, void *stream)
MOVES(ncclGather, const void *send, void *recv, size_t count, int type, int root, void *comm, void *stream)
MOVES(ncclScatter, const void *send, void *recv, size_t count, int type, int root, void *comm, void *stream)
MOVES(ncclSend, const void *send, size_t count, int type, int peer, void *comm, void *stream)
MOVES(ncclRecv, void *recv, size_t count, int type, int peer, void *comm, void *stream)
int ncclGetVersion(int *version) { *version = VERSION; return 0; }
const char *ncclGetErrorString(int code) { return "no error"; }
const char *ncclGetLastError(void *comm) { return ""; }
int ncclCommInitRank(void **comm, int size, struct { char bytes[128]; } id, int rank) { *comm = &only; return 0; }
int ncclCommCount(void *comm, int *out) { *out = only.size; return 0; }
int ncclCommCuDevice(void *comm, int *out) { *out = only.device; return 0; }
int ncclCommUserRank(void *comm, int *out) { *out = only.rank; return 0; }
"""


def compile_stub(folder: Path, source: str = STUB, *options: str) -> Path:
    """The library, under the name by which other bindings look for one that is already loaded."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise FileNotFoundError("a stub library is compiled: install a C compiler (cc or gcc)")
    target = folder / "libnccl.so.2"
    (folder / "stub.c").write_text(source)
    # Weak, so that those with a body win. `()` takes any arguments in C11, as it no longer does in C23.
    plain = "".join(f"__attribute__((weak)) int {name}() {{ return 0; }}\n" for name in abi.FUNCTIONS)
    (folder / "plain.c").write_text(plain)
    words = [compiler, "-O2", "-std=gnu11", "-w", "-shared", "-fPIC", f"-Wl,-soname,{target.name}", *options]
    words.append(f"-DVERSION={abi.version_code(abi.HEADER_VERSION)}")
    subprocess.run([*words, "stub.c", "plain.c", "-o", target.name], cwd=folder, check=True)
    return target


def first_of_its_name(path: Path) -> ctypes.CDLL:
    """The stub, opened where other bindings find it by its name: before torch brings a libnccl.so.2 of its own.

    A torch for CUDA then finds in its own what the stub lacks, or it would not import."""
    stub = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    own = torchs_own()
    if os.path.isabs(own):
        ctypes.CDLL(own, mode=ctypes.RTLD_GLOBAL)
    return stub


def communicator(path: Path, watch: str = "on") -> pynccl.Communicator:
    """Rank 0 of 2 on the stub, for tensors in CPU memory; `watch` is what PYNCCL_WATCH says."""
    os.environ["PYNCCL_WATCH"] = watch
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


def recorded(path: Path, rounds: int, calls: int) -> dict[str, list[dict[str, Any]]]:
    """What `main_watch` says, for each PYNCCL_WATCH in several processes, which take turns."""
    processes = max(1, min(PROCESSES, rounds // 8))
    options = ["--rounds", str(-(-rounds // processes)), "--calls", str(calls), "--stub", str(path)]
    found: dict[str, list[dict[str, Any]]] = {watch: [] for watch in NAMES}
    for _ in progress.over(range(processes), "flight recorder", "process"):
        for watch, said in found.items():
            command = [sys.executable, __file__, *options, "--watch", watch]
            done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
            said.append(json.loads(done.stdout))
    return found


def main_watch(options: argparse.Namespace) -> None:
    """The ways of which the flight recorder's cost is shown, with one PYNCCL_WATCH: in a process of its own."""
    path = Path(options.stub)
    stub = first_of_its_name(path)
    import torch

    t, u, w = torch.zeros(ELEMENTS), torch.zeros(ELEMENTS), torch.zeros(2 * ELEMENTS)
    comm = communicator(path, options.watch)
    ways = [way for way in own_ways(comm, stub, t, u, w) if way.name in (BARE, *RECORDED)]
    reached = check_reach(ways, stub)
    rows = rows_of(measure(ways, options.rounds, options.calls), reached)
    comm.destroy()
    print(json.dumps({row["way"]: row for row in rows}))


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


def check_reach(ways: list[Way], stub: ctypes.CDLL) -> dict[str, int]:
    """Calls of the C function by each statement. Raises unless they are as many as the way says. Warms up, too."""
    reached = {}
    for way in ways:
        before = stub.stub_calls()
        way.seconds(way.calls)
        found, expected = stub.stub_calls() - before, way.calls if way.reaches_stub else 0
        if found != expected:
            raise RuntimeError(f"{way.name}: {found} calls reached the stub, expected {expected}")
        reached[way.name] = found
    return reached


def import_times(rounds: int) -> dict[str, float]:
    """Milliseconds that an import takes in a new interpreter: medians over processes in turn.

    Processor time, which is what it takes on an idle machine, and nearly so on a busy one; each process measures its
    own import alone. Compiled once beforehand, as pip leaves what it installs."""
    modules = ["pynccl", *(["nccl.core"] if importlib.util.find_spec("nccl") else [])]
    times: dict[str, list[float]] = {module: [] for module in modules}
    with tempfile.TemporaryDirectory(prefix="bench-overhead-") as folder:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONPYCACHEPREFIX": folder}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        for module in modules:
            import_time(module, environment)
        for _ in range(rounds):
            for module in modules:
                times[module].append(import_time(module, environment))
    return {module: 1e3 * statistics.median(found) for module, found in times.items()}


def import_time(module: str, environment: dict[str, str]) -> float:
    """Seconds of processor time of one import, in a process of its own."""
    code = f"import time; start = time.process_time(); import {module}; print(time.process_time() - start)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    return float(done.stdout)


def ratio(times: dict[str, list[float]], name: str, base: str) -> float:
    return statistics.median(a / b for a, b in zip(times[name], times[base], strict=True))


def rows_of(times: dict[str, list[float]], reached: dict[str, int]) -> list[dict[str, Any]]:
    """Nanoseconds per call, ratio to bare ctypes, calls that reached the stub."""
    return [
        {
            "way": name,
            "ns": 1e9 * statistics.median(found),
            "ratio": ratio(times, name, BARE),
            "stub_calls": reached[name],
        }
        for name, found in times.items()
    ]


def recorded_rows(found: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Those of other processes, without the flight recorder: medians."""
    rows = []
    for watch, form in NAMES.items():
        for name in RECORDED if watch != "on" else ():
            same = [said[name] for said in found[watch]]
            row = {key: statistics.median(one[key] for one in same) for key in ("ns", "ratio")}
            rows.append({"way": form.format(name), **row, "stub_calls": same[0]["stub_calls"]})
    return rows


def results(
    times: dict[str, list[float]],
    reached: dict[str, int],
    imports: dict[str, float],
    watched: dict[str, list[dict[str, Any]]],
) -> dict[str, Any]:
    """What --json prints: nanoseconds per call, ratio to bare ctypes, calls that reached the stub; the bounds."""
    rows = [*rows_of(times, reached), *recorded_rows(watched)]
    bounds: list[dict[str, Any]] = [
        {"what": f"{name} / {base}", "found": ratio(times, name, base), "at_most": limit}
        for name, base, limit in BOUNDS
        if base in times
    ]
    bounds.append({"what": "import pynccl, ms", "found": imports["pynccl"], "at_most": IMPORT_BOUND})
    for bound in bounds:
        bound["pass"] = bound["found"] <= bound["at_most"]
    python = f"{platform.python_implementation()} {platform.python_version()}"
    return {"python": python, "calls": rows, "imports_ms": imports, "bounds": bounds}


def table(found: dict[str, Any]) -> str:
    lines = [f"{'way':<42}{'ns per call':>12}{'x bare ctypes':>15}"]
    lines += [f"{row['way']:<42}{row['ns']:>12.0f}{row['ratio']:>15.2f}" for row in found["calls"]]
    lines += ["", *(f"{'import ' + name:<42}{ms:>9.0f} ms" for name, ms in found["imports_ms"].items()), ""]
    for bound in found["bounds"]:
        verdict = "PASS" if bound["pass"] else "FAIL"
        lines.append(f"{verdict}  {bound['what']}: {bound['found']:.2f}, at most {bound['at_most']:g}")
    return "\n".join(lines)


def fastest_first(times: dict[str, list[float]]) -> str:
    """What --wrappers prints."""
    width = max(map(len, times))
    rows = sorted((statistics.median(seconds), name) for name, seconds in times.items())
    lines = [f"{'way':{width}}  ns per call, medians of the rounds"]
    return "\n".join([*lines, *(f"{name:{width}}  {seconds * 1e9:6.0f}" for seconds, name in rows)])


def markdown(found: dict[str, Any]) -> str:
    """The table of docs/overhead.md."""
    bounds = {bound["what"].removesuffix(f" / {BARE}"): f"{bound['at_most']:g}" for bound in found["bounds"]}
    lines = ["| way | ns per call | x bare ctypes | at most |", "|---|---:|---:|---:|"]
    for row in sorted(found["calls"], key=lambda row: float(row["ratio"])):
        way, ns, ratio = row["way"], row["ns"], row["ratio"]
        lines.append(f"| {way} | {ns:.0f} | {ratio:.2f} | {bounds.get(way, '')} |")
    return "\n".join(lines)


def main_gpu(options: argparse.Namespace) -> None:
    """Rank 0 prints the table, and below it the line RESULT that gpu_check looks for; or the JSON alone."""
    problem = pynccl.bindings.library.gpu_problem()
    if problem and os.environ.get("PYNCCL_LIBRARY") != "host":
        raise ValueError(f"--gpu: {problem}; PYNCCL_LIBRARY=host rehearses it on the CPU")
    from bench import overhead_gpu

    found = overhead_gpu.run(options.rounds, options.calls)
    if os.environ.get("RANK", "0") == "0":
        table = f"{overhead_gpu.table(found)}\nRESULT {json.dumps(found)}"
        print(json.dumps(found, indent=2) if options.json else table)


def main() -> None:
    parser = command.Parser(__doc__)
    parser.add_argument("--rounds", type=command.whole(1), default=101, help="rounds over all ways (default 101)")
    parser.add_argument(
        "--calls", type=command.whole(1), default=1000, help="calls of each way in a round (default 1000)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument("--markdown", action="store_true", help="print the table of docs/overhead.md")
    parser.add_argument("--watch", choices=NAMES, help=argparse.SUPPRESS)  # of a process of `recorded`
    parser.add_argument("--stub", help=argparse.SUPPRESS)
    parser.add_argument("--wrappers", action="store_true", help="the wrappers of NCCL, each by its own classes")
    parser.add_argument("--vllm", type=Path, metavar="FOLDER", help="with --wrappers: an unpacked wheel of vLLM")
    parser.add_argument("--gpu", action="store_true", help="on a GPU and the real libnccl instead of the stub")
    options = parser.parse_args()
    if options.vllm and not (options.vllm / WRAPPER).is_file():
        parser.error(f"--vllm {options.vllm}: there is no {WRAPPER} in it; unpack the wheel there")
    if options.gpu:
        main_gpu(options)
        return
    if options.watch:
        with progress.shown(False):  # it is a step of another process's bar
            main_watch(options)
        return
    with tempfile.TemporaryDirectory(prefix="bench-overhead-") as folder:
        path = compile_stub(Path(folder))
        stub = first_of_its_name(path)
        import torch

        t, u, w = torch.zeros(ELEMENTS), torch.zeros(ELEMENTS), torch.zeros(2 * ELEMENTS)
        comm = communicator(path)
        ways = own_ways(comm, stub, t, u, w)
        if options.wrappers:
            ways = [way for way in ways if way.name in (BARE, PLAN, CHECKED)]
            ways += [*vllm_ways(comm, path, t, options.vllm), *nccl4py_ways(comm, t)]
        else:
            ways += [*nccl4py_ways(comm, t), *torch_ways(t)]
        reached = check_reach(ways, stub)
        times = measure(ways, options.rounds, options.calls)
        comm.destroy()
        if options.wrappers:
            print(fastest_first(times))
            return
        watched = recorded(path, options.rounds, options.calls)
        found = results(times, reached, import_times(max(options.rounds // 5, 1)), watched)
    show = markdown if options.markdown else table
    print(json.dumps(found, indent=2) if options.json else show(found))


if __name__ == "__main__":
    command.run(main)
