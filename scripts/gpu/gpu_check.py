"""Run all checks that need a GPU, in three calls of at most 8.5 minutes each: probe, ranks, train.

probe   doctor; whether two ranks reach each other; streams, overlap, hangs and failures
ranks   the rest of tests/gpu with 1, 2 and 4 ranks, which share GPUs if there are too few
train   train.py --check and --trace; PYNCCL_CHECK=1; perf compared with torch

Each step runs processes with a time limit. If a process hangs, its stacks go to the log, and all processes of the step
are killed. Rewrites $OUT/gpu_CALL.log and .md (OUT: out) after each step. All steps inherit NCCL's settings from the
environment: set NCCL_SOCKET_IFNAME=lo if two ranks do not reach each other. Requires torch with CUDA, libnccl,
cuda-core and pytest; installs and downloads nothing. Not yet run on a GPU.

Without a GPU, it runs nothing and exits with 0. PYNCCL_LIBRARY=host rehearses the steps on the CPU, where the tests
are skipped.

examples:
  python scripts/gpu/gpu_check.py --list
  python scripts/gpu/gpu_check.py probe  # long
  PYNCCL_LIBRARY=host python scripts/gpu/gpu_check.py doctor reach  # long
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pynccl.bindings.library import gpu_count, gpu_problem
from pynccl.tools import command

ROOT = Path(__file__).resolve().parents[2]
CALL_SECONDS = 510.0
GRACE_SECONDS = 10.0  # for the other ranks after one failed
STACKS_SECONDS = 2.0  # for faulthandler to write, between SIGABRT and SIGKILL
PERF = ["-m", "pynccl", "perf", "all_reduce", "-f", "4", "-c", "1"]


@dataclass
class Step:
    """A command and its outcome. ranks: number of processes with RANK set; 0: one without. seconds: the limit."""

    name: str
    ranks: int
    seconds: float
    command: list[str]
    env: dict[str, str] = field(default_factory=dict)
    status: str = "not run"  # passed, failed
    reason: str = ""
    took: float = 0.0
    output: str = ""  # its end, of a failed rank if there is one, else of rank 0


def pytest_of(name: str, ranks: int, seconds: float, *what: str, **env: str) -> Step:
    """Return a step that runs pytest. With several ranks, a rank stops at its first failure, as it is out of step."""
    options = ["-v", "--tb=short", "-p", "no:cacheprovider", "-o", "faulthandler_timeout=25", *["-x"] * (ranks > 1)]
    return Step(name, ranks, seconds, ["-m", "pytest", *what, *options], env)


def files(*names: str) -> list[str]:
    return [f"tests/gpu/test_gpu_{name}.py" for name in names]


def calls(work: Path, gpus: int) -> dict[str, list[Step]]:
    """Return the steps of each call. They write to the folder `work`."""
    streams, overlap = files("streams", "trace", "watch"), files("overlap_streams", "effects")
    transforms, launchers = files("transforms"), files("ends", "perf")  # launchers start their own processes
    separate = {*streams, *overlap, *transforms, *launchers, *files("examples")}
    paths = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "tests" / "gpu").glob("test_*.py"))
    others = [path for path in paths if path not in separate]
    return {
        "probe": [
            Step("doctor", 0, 20, ["-m", "pynccl", "doctor"]),
            Step("reach", 2, 40, [*PERF, "-b", "8", "-e", "64M"], {"NCCL_DEBUG": "INFO"}),
            pytest_of("streams_1", 1, 40, *streams),
            pytest_of("streams_2", 2, 60, *streams),
            pytest_of("overlap_2", 2, 95, *overlap),
            pytest_of("ends_1", 1, 125, *files("ends")),
            pytest_of("examples_1", 1, 35, *files("examples")),
            pytest_of("examples_2", 2, 40, *files("examples")),
        ],
        "ranks": [
            pytest_of("tests_1", 1, 80, *others),
            pytest_of("tests_2", 2, 110, *others),
            pytest_of("tests_4", 4, 120, *others),
            pytest_of("transforms_2", 2, 100, *transforms),
        ],
        "train": [
            *(train(work, ranks, dtype, gpus) for ranks, dtype in ((1, "float32"), (2, "float32"), (2, "bfloat16"))),
            pytest_of("checked_2", 2, 60, *files("collectives"), PYNCCL_CHECK="1"),
            Step("perf_torch_1", 1, 40, [*PERF, "-b", "8", "-e", "128M", "--compare", "torch"]),
            Step("perf_torch_2", 2, 60, [*PERF, "-b", "8", "-e", "128M", "--compare", "torch"]),
            pytest_of("perf_1", 1, 60, *files("perf")),
        ],
    }


def train(work: Path, ranks: int, dtype: str, gpus: int) -> Step:
    name = f"train_{ranks}_{dtype}"
    device = "cpu" if not gpus else "cuda" if gpus >= ranks else "cuda:0"
    options = ["--check", "--steps", "40", "--device", device, "--dtype", dtype, "--out", str(work / name)]
    out = Path(os.environ.get("OUT", "out")).resolve()
    return Step(name, ranks, 60, ["scripts/train.py", *options, "--trace", str(out / f"{name}.json.gz")])


def perform(step: Step, work: Path, gpus: int, limit: float) -> list[Path]:
    """Run a step for at most `limit` seconds, fill in its outcome, and return the logs of its processes."""
    logs = [work / f"{step.name}-{rank}.log" for rank in range(max(step.ranks, 1))]
    started, port = time.monotonic(), free_port()
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank, log in enumerate(logs):
            processes.append(start(step, environment(step, work, rank, port, gpus), log))
        step.reason = wait(processes, started + limit)
    finally:
        end(processes)
        step.took = round(time.monotonic() - started, 1)
    wrong = [(rank, process.returncode) for rank, process in enumerate(processes) if process.returncode]
    step.reason = step.reason or "; ".join(f"rank {rank} exited with code {code}" for rank, code in wrong)
    step.output = logs[wrong[0][0] if wrong else 0].read_text(errors="replace")[-4000:].strip()
    if "pytest" in step.command and " passed" not in step.output:
        step.reason = step.reason or "no test passed"
    step.status = "failed" if step.reason else "passed"
    return logs


def start(step: Step, env: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Start a process in a new session, so that its children can be killed with it."""
    words = [sys.executable, *step.command]
    with open(log, "wb") as output:
        return subprocess.Popen(
            words, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )


def environment(step: Step, work: Path, rank: int, port: int, gpus: int) -> dict[str, str]:
    """Return the environment of one rank, or of the single process of a step without ranks."""
    env = {"PYNCCL_LIBRARY": "nccl", "OMP_NUM_THREADS": "2", "NCCL_DEBUG": "WARN", **os.environ}
    env |= {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", "COLUMNS": "200"}
    # A link makes the folder autograd/ importable as pynccl_autograd, since nothing is installed.
    link = work / "site" / "pynccl_autograd"
    if not link.exists():
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(ROOT / "autograd")
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(link.parent), *filter(None, [env.get("PYTHONPATH")])])
    if step.ranks:
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": step.ranks, "LOCAL_WORLD_SIZE": step.ranks}
        env |= {**{name: str(value) for name, value in place.items()}, "MASTER_ADDR": "127.0.0.1"}
        env["MASTER_PORT"] = str(port)
    if step.ranks > gpus:  # NCCL rejects two ranks of a host on one GPU; before 2.30, each needs another host id
        env |= {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_HOSTID": f"rank{rank}"}
    return env | step.env


def wait(processes: list[subprocess.Popen[bytes]], deadline: float) -> str:
    """Wait until all processes exit. Return why the rest must be killed; "" if all exited."""
    failed, began = "", time.monotonic()
    while None in (codes := [process.poll() for process in processes]):
        if not failed and any(codes):
            rank = next(rank for rank, code in enumerate(codes) if code)
            failed = f"rank {rank} exited with code {codes[rank]}"
            deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if time.monotonic() > deadline:
            left = ", ".join(str(rank) for rank, code in enumerate(codes) if code is None)
            why = failed or f"not done within {time.monotonic() - began:.0f} s"
            return f"{why}; rank {left} was killed"
        time.sleep(0.05)
    return ""


def end(processes: list[subprocess.Popen[bytes]]) -> None:
    """Kill all processes of a step. A process inside C code responds to SIGKILL only."""
    alive = [process for process in processes if process.poll() is None]
    for process in alive:
        process.send_signal(signal.SIGABRT)  # faulthandler then writes the stacks to the log
    deadline = time.monotonic() + STACKS_SECONDS
    while time.monotonic() < deadline and None in [process.poll() for process in alive]:
        time.sleep(0.05)
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # a process stuck in the driver is left behind
            process.wait(5)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def run(name: str, steps: list[Step], work: Path, gpus: int, budget: float) -> None:
    """Run all steps, and rewrite the page after each."""
    out = Path(os.environ.get("OUT", "out"))
    out.mkdir(parents=True, exist_ok=True)
    (out / f"gpu_{name}.log").unlink(missing_ok=True)
    deadline, unreachable = time.monotonic() + budget, False
    for step in steps:
        left = deadline - time.monotonic()
        if left < step.seconds / 4:
            step.reason = f"only {max(left, 0):.0f} s left; its limit is {step.seconds:g} s"
        elif unreachable and step.ranks > gpus:
            step.reason = "two ranks on one GPU do not reach each other"
        else:
            logs = perform(step, work, gpus, min(step.seconds, left))
            unreachable = unreachable or (step.name == "reach" and step.status == "failed")
            with (out / f"gpu_{name}.log").open("a") as file:
                file.writelines(f"===== {log.stem}\n{log.read_text(errors='replace')}\n\n" for log in logs)
        print(f"{step.status:8s}  {step.name:18s}{step.took:6.1f} s  {step.reason}", flush=True)
        (out / f"gpu_{name}.md").write_text(page(name, steps))


def page(name: str, steps: list[Step]) -> str:
    lines = [f"# GPU check: {name}", "", "| step | ranks | | seconds | |", "|---|---|---|---|---|"]
    for step in steps:
        lines.append(f"| {step.name} | {step.ranks} | {step.status} | {step.took:g} | {step.reason} |")
    for step in steps:
        lines += ["", f"## {step.name}", "", "```text", step.output, "```"] if step.output else []
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = command.Parser(__doc__, failed="a step failed or was not run")
    parser.add_argument("what", nargs="*", help="probe, ranks, train, or names of steps (default: all three calls)")
    parser.add_argument(
        "--budget", type=command.number(1, "seconds"), default=CALL_SECONDS, help="seconds per call (%(default)g)"
    )
    parser.add_argument("--list", action="store_true", help="print the steps and their limits without running them")
    options = parser.parse_args()
    rehearsed = os.environ.get("PYNCCL_LIBRARY") == "host"
    gpus = 0 if rehearsed else gpu_count()
    with tempfile.TemporaryDirectory(prefix="gpu_check-", ignore_cleanup_errors=True) as folder:
        all_calls = calls(Path(folder), gpus)
        steps = {step.name: step for group in all_calls.values() for step in group}
        if unknown := [name for name in options.what if name not in (*all_calls, *steps)]:
            parser.error(f"{unknown[0]}: neither a call nor a step; expected some of {', '.join((*all_calls, *steps))}")
        if options.list:
            for name, group in all_calls.items():
                print(f"{name}: limits of {sum(step.seconds for step in group):g} s in all")
                for step in group:
                    print(f"  {step.name:18s}{step.seconds:5g} s  {step.ranks or 1} x python {' '.join(step.command)}")
            return 0
        if not rehearsed and (problem := gpu_problem()):
            print(f"no GPU, nothing to check: {problem}")
            return 0
        chosen = {name: all_calls[name] for name in all_calls if name in (options.what or all_calls)}
        if single := [steps[name] for name in options.what if name in steps]:
            chosen["steps"] = single
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the processes of a step are killed
        for name, group in chosen.items():
            run(name, group, Path(folder), gpus, options.budget)
        return int(any(step.status != "passed" for group in chosen.values() for step in group))


if __name__ == "__main__":
    command.run(main)
