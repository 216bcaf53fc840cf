"""Run all checks that need a GPU in one call of at most 9 minutes; then, with --failed, those again that failed.

A step is one test file on one number of ranks, or a command: doctor; reach (whether two ranks reach each other);
train.py --check; PYNCCL_CHECK=1; perf compared with torch; tests under compute-sanitizer; the host time of calls and of
training steps; the same and overlap for two ranks that share a GPU under CUDA's Multi-Process Service; tests of the
host library on a machine with a GPU. Ranks share GPUs if there are too few. Steps with one rank, those with several,
and those that mostly wait run beside each other; then come, alone, the steps that measure.

After each test, its ranks meet. A rank that does not come is killed with its step, its test is marked hung, and the
step starts again with the tests that are left. It also starts again after a test that failed on some ranks only, as
their communicators may be out of step.

Writes to $OUT (OUT: out): gpu.jsonl, a line per test and rank as they end; gpu.md, the steps and each kind of failure;
gpu.log, the output of all processes; and the traces of train.py. Steps inherit NCCL's settings from the environment:
set NCCL_SOCKET_IFNAME=lo if two ranks do not reach each other. Requires torch with CUDA, libnccl, cuda-core and pytest;
installs and downloads nothing.

Without a GPU, it runs nothing and exits with 0. PYNCCL_LIBRARY=host rehearses the steps on the CPU, where the tests
are skipped.

examples:
  python scripts/gpu/gpu_check.py --list
  python scripts/gpu/gpu_check.py  # long
  python scripts/gpu/gpu_check.py --failed out/gpu.md  # long
  PYNCCL_LIBRARY=host python scripts/gpu/gpu_check.py doctor reach  # long
"""

from __future__ import annotations

import dataclasses
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from check_report import Report, Result, ends_of, read
from check_step import AFTER, BEFORE, ROOT, Setting, Step, StepRun, pytest_step
from under_mps import CONTROL

from pynccl.bindings.library import gpu_count, gpu_problem
from pynccl.tools import command

GOOD = ("passed", "skipped")  # outcomes
BUDGET_SECONDS = 540.0  # of the 600 that a command may take
START_SECONDS = 10.0  # of a step, about
SPARE_SECONDS = 75.0  # the limit of a step above its usual time: a hung test, and a second start
PERF = ["-m", "pynccl", "perf", "all_reduce", "-f", "4", "-c", "1", "-b", "8", "-e"]

# tests/gpu/test_gpu_*.py: seconds by number of ranks, on one H200, start included. Not measured yet: training,
# survivors, lifetimes, and below memcheck, bench, mps and suite.
SECONDS: dict[str, dict[int, float]] = {
    "streams": {1: 20, 2: 17},
    "collectives": {1: 12, 2: 13, 4: 15},
    "ends": {1: 230},
    "autograd": {1: 15, 2: 18},
    "data_parallel": {1: 13, 2: 19},
    "training": {1: 13, 2: 19},
    "torch_backend": {1: 17, 2: 19, 4: 25},
    "overlap": {2: 32},
    "overlap_streams": {2: 24},
    "transforms": {1: 29, 2: 22},
    "memory": {1: 10, 2: 11},
    "errors": {1: 10, 2: 12},
    "compat": {1: 10, 2: 12},
    "watch": {1: 14, 2: 14},
    "examples": {1: 51, 2: 23},
    "survivors": {1: 80},
}
ALONE = {"trace": {1: 12, 2: 12}, "effects": {2: 15}, "perf": {1: 23}, "lifetimes": {1: 60}}
WAITS = ("ends", "survivors")
MEMCHECKED = {"streams": "one", "memory": "waits"}  # file -> lane
SANITIZER = "compute-sanitizer"
MPS = [sys.executable, "scripts/gpu/under_mps.py"]
SUITE = ["-m", "pytest", "-o", "addopts=", "-n", "8", "--dist", "worksteal", "-m", "not slow", "-q", "tests/binding"]


def steps_of(work: Path, gpus: int) -> list[Step]:
    """Return all steps. train.py writes its checkpoints to the folder `work`."""
    files = {name: f"tests/gpu/test_gpu_{name}.py" for name in (*SECONDS, *ALONE)}
    return [
        Step("doctor", 0, 12, ["-m", "pynccl", "doctor"]),
        Step("reach", 2, 15, [*PERF, "64M"], {"NCCL_DEBUG": "INFO"}),
        *(
            pytest_step(f"{name}_{ranks}", ranks, seconds, files[name], "waits" if name in WAITS else "")
            for name, row in SECONDS.items()
            for ranks, seconds in row.items()
        ),
        pytest_step("checked_2", 2, 15, files["collectives"], PYNCCL_CHECK="1"),
        *(train(work, ranks, dtype, gpus) for ranks, dtype in ((1, "float32"), (2, "float32"), (2, "bfloat16"))),
        *(memcheck(name, files[name], lane) for name, lane in MEMCHECKED.items()),
        *benches(gpus),
        *(
            pytest_step(f"{name}_{ranks}", ranks, seconds, files[name], "alone")
            for name, row in ALONE.items()
            for ranks, seconds in row.items()
        ),
        *(Step(f"perf_torch_{n}", n, 20, [*PERF, "128M", "--compare", "torch"], lane="alone") for n in (1, 2)),
        Step("suite", 0, 150, SUITE, {"PYNCCL_LIBRARY": "host", "GPU_TESTS_LIBRARY": "nccl"}, "alone"),
    ]


def memcheck(name: str, file: str, lane: str) -> Step:
    """Return a step under the sanitizer, which sees the bounds of a tensor only if torch's allocator does not cache.

    NCCL and torch ask the driver for things that an older one lacks: such errors of the API are none here."""
    under = [SANITIZER, "--tool", "memcheck", "--error-exitcode", "99", "--report-api-errors", "no"]
    under += ["--launch-timeout", "120"]
    step = pytest_step(f"memcheck_{name}", 1, 90, file, lane, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    step.command += ["-k", "not captured and not pool"]
    return dataclasses.replace(step, under=under, needs=SANITIZER, slower=2.0)


def benches(gpus: int) -> list[Step]:
    """Return the steps that measure host times, and two ranks that share a GPU. On the CPU they are rehearsed."""
    device, out = "cuda" if gpus else "cpu", out_folder()
    backend = ["scripts/bench/torch_backend.py", "--device", device, "--only", "collectives", "steps", "--markdown"]
    backend += ["--sizes", "16", "4194304", "--rounds", "9", "--ranks"]
    shape = ["--device", device, "--hidden", "32768"] if gpus else ["--hidden", "64"]
    rows = ["1024", "4096", "16384"] if gpus else ["16"]
    overlap = ["scripts/bench/overlap.py", *shape, "--rows", *rows, "--layer", "column", "--rounds", "7", "--markdown"]
    timeline = ["scripts/timeline.py", *shape, "--tokens", rows[-1], "--rounds", "5", "--out", f"{out}/timeline.json"]
    reach = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2", *PERF, "8M"]
    steps = [
        Step("bench_calls", 0, 20, ["scripts/bench/host_time.py", "--device", device, "--markdown"]),
        Step("bench_backend", 0, 60, [*backend, "1" if gpus else "2"]),
    ]
    if gpus < 2:  # else each of two ranks has a GPU
        shared = [
            ("reach", 20, reach),
            ("backend", 60, [*backend, "2"]),
            ("overlap", 120, overlap),
            ("timeline", 25, timeline),
        ]
        under, needs = (MPS, CONTROL) if gpus else ([], "")
        steps += [
            Step(f"mps_{name}", 0, seconds, words, under=under, needs=needs, after="mps_reach")
            for name, seconds, words in shared
        ]
    return [dataclasses.replace(step, lane="alone") for step in steps]


def train(work: Path, ranks: int, dtype: str, gpus: int) -> Step:
    name = f"train_{ranks}_{dtype}"
    device = "cpu" if not gpus else "cuda" if gpus >= ranks else "cuda:0"
    options = ["--check", "--steps", "20", "--device", device, "--dtype", dtype, "--out", str(work / name)]
    return Step(name, ranks, 25, ["scripts/train.py", *options, "--trace", str(out_folder() / f"{name}.json.gz")])


def out_folder() -> Path:
    return Path(os.environ.get("OUT", "out")).resolve()


def only_failed(steps: list[Step], results: list[Result]) -> list[Step]:
    """Return what failed, hung or was not run: the tests if they are known, else the step."""
    again, ends = [], ends_of(results)
    for step in steps:
        own = [result for result in results if result.step == step.name]
        bad = {result.test for result in own if result.outcome not in GOOD} - {"", BEFORE, AFTER}
        if own and ends[step.name].outcome not in GOOD:
            if not bad or ends[step.name].outcome != "failed":  # it was cut off
                again.append(dataclasses.replace(step, tests=None))
                continue
            share = len(bad) / len({result.test for result in own})
            seconds = min(step.seconds, START_SECONDS + share * step.seconds)
            again.append(dataclasses.replace(step, tests=sorted(bad), seconds=round(seconds)))
    return again


def still_valid(results: list[Result], again: list[Step]) -> list[Result]:
    """Return the results that steps which run again do not replace."""
    tests = {step.name: step.tests for step in again}
    return [
        result
        for result in results
        if result.step not in tests or (result.test and result.test not in (tests[result.step] or [result.test]))
    ]


def setting_of(report: Report, work: Path, gpus: int) -> Setting:
    """Return the setting of steps in an empty folder. There, a link makes autograd/ importable as pynccl_autograd."""
    link = work / "site" / "pynccl_autograd"
    link.parent.mkdir()
    link.symlink_to(ROOT / "autograd")
    env = {"PYNCCL_LIBRARY": "nccl", "OMP_NUM_THREADS": "1", "NCCL_DEBUG": "WARN", **os.environ}
    env["PATH"] = f"{env.get('PATH', os.defpath)}:/usr/local/cuda/bin:/usr/local/nvidia/bin"
    env |= {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", "COLUMNS": "200"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(link.parent), *filter(None, [env.get("PYTHONPATH")])])
    return Setting(report, work, gpus, env)


def run(steps: list[Step], setting: Setting, budget: float) -> bool:
    """Run the lanes side by side, then the steps that run alone. Return whether all passed that could run here."""
    deadline = time.monotonic() + budget
    setting.report.add(*(Result(step.name, step.ranks, 0, "", "not run", "cut off") for step in steps))
    lanes: dict[str, list[Step]] = {name: [] for name in ("many", "one", "waits", "alone")}
    for step in steps:
        lanes[step.lane or ("many" if step.ranks > 1 else "one")].append(step)
    alone = lanes.pop("alone")
    with ThreadPoolExecutor(len(lanes)) as pool:
        try:
            list(pool.map(lambda lane: run_lane(lane, setting, deadline), lanes.values()))
        except BaseException:
            setting.stop.set()  # the lanes then kill their processes
            raise
    run_lane(alone, setting, deadline)
    return all(end.outcome in GOOD for end in ends_of(setting.report.results).values())


def run_lane(steps: list[Step], setting: Setting, deadline: float) -> None:
    """Run steps one after the other, as long as they fit in the time that is left."""
    for step in steps:
        began = time.monotonic()
        if step.needs and not shutil.which(step.needs, path=setting.env["PATH"]):
            outcome, why = "skipped", f"no {step.needs} on the PATH"
        elif deadline - began < step.seconds:
            outcome, why = "not run", f"{max(deadline - began, 0):.0f} s left; it takes about {step.seconds:g} s"
        elif (before := step.after or ("reach" if step.ranks > setting.gpus else "")) in setting.failed:
            outcome, why = "not run", f"{before} failed: two ranks on one GPU do not reach each other"
        else:
            outcome, why = StepRun(step, setting, min(deadline, began + step.seconds + SPARE_SECONDS)).run()
        if outcome == "failed":
            setting.failed.add(step.name)
        seconds = time.monotonic() - began
        setting.report.add(Result(step.name, step.ranks, 0, "", outcome, why, round(seconds, 1)))
        print(f"{outcome:8s}  {step.name:18s}{seconds:6.1f} s  {why}", flush=True)


def main() -> int:
    parser = command.Parser(__doc__, failed="a step failed or was not run")
    parser.add_argument("steps", nargs="*", help="names of steps (default: all)")
    seconds = command.number(1, "seconds")
    parser.add_argument("--budget", type=seconds, default=BUDGET_SECONDS, help="seconds in all (%(default)g)")
    parser.add_argument("--failed", type=Path, metavar="PAGE", help="only what failed, hung or was not run there")
    parser.add_argument("--list", action="store_true", help="print the steps without running them")
    options = parser.parse_args()
    rehearsed = os.environ.get("PYNCCL_LIBRARY") == "host"
    gpus = 0 if rehearsed else gpu_count()
    with tempfile.TemporaryDirectory(prefix="gpu_check-", ignore_cleanup_errors=True) as folder:
        steps = steps_of(Path(folder), gpus)
        if unknown := {*options.steps} - {step.name for step in steps}:
            parser.error(f"{min(unknown)}: not a step; --list prints the steps")
        steps = [step for step in steps if step.name in options.steps or not options.steps]
        if options.failed and not options.failed.with_suffix(".jsonl").is_file():
            parser.error(f"--failed {options.failed}: no gpu.jsonl beside it; name the page of an earlier run")
        before = read(options.failed) if options.failed else []
        steps = only_failed(steps, before) if options.failed else steps
        if options.list:
            for step in steps:
                words = " ".join(step.command[:3])
                print(f"{step.name:18s}{step.seconds:5g} s  {step.ranks or 1} x python {words} ...")
            return 0
        if not rehearsed and (problem := gpu_problem()):
            print(f"no GPU, nothing to check: {problem}")
            return 0
        if not steps:
            print(f"nothing failed in {options.failed}")
            return 0
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the processes of the steps are killed
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        print(f"{len(steps)} steps on {gpus} GPUs and {len(os.sched_getaffinity(0))} CPU cores", flush=True)
        report = Report(out_folder(), still_valid(before, steps))
        return int(not run(steps, setting_of(report, Path(folder), gpus), options.budget))


if __name__ == "__main__":
    command.run(main)
