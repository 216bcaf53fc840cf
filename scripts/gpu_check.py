"""The steps of gpu_check.sh: run each in processes of its own, under a time limit, and write a JSON of the results.

Only the standard library is used here, since the project is installed by the first step.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from pynccl.library import gpu_count, gpu_problem  # noqa: E402

GRACE_SECONDS = 20.0  # for the other ranks, once one has failed: mostly they wait for it
TAIL_CHARACTERS = 6000
INSTALL = ["-m", "pip", "install", "--no-index", "--no-build-isolation", "--no-deps", "-e", "."]
PYTEST = ["-m", "pytest", "tests/gpu", "-v", "--tb=short", "-p", "no:cacheprovider"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone"]
VERSIONS = """
import json, sys, torch, pynccl
library = pynccl.load("nccl")
print(json.dumps({
    "python": sys.version.split()[0], "torch": torch.__version__, "cuda": torch.version.cuda,
    "nccl": ".".join(map(str, library.version)), "libnccl": library.path, "origin": library.origin,
    "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
}))
"""


@dataclass
class Step:
    """What to do, and how it went."""

    name: str
    command: Sequence[str]  # after the interpreter
    seconds_limit: float
    ranks: int = 0  # that many processes with RANK and WORLD_SIZE set; 0: one process, which may be a launcher
    status: str = "skipped"
    reason: str = ""
    seconds: float = 0.0
    returncodes: list[int] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)  # tests passed, failed, skipped: sums over the ranks
    output: str = ""  # the end of it: of each rank if it failed, else of rank 0


def steps(out: Path, gpus: int) -> list[Step]:
    planned = [Step("install", INSTALL, 90), Step("versions", ["-c", VERSIONS], 60)]
    planned += [Step(f"tests_{n}", [], 60 + 30 * n, ranks=n) for n in (1, 2, 4)]
    for n, dtype in ((1, "float32"), (2, "float32"), (2, "bfloat16")):
        device = "cuda" if gpus >= n else "cuda:0"
        options = ["--check", "--steps", "60", "--device", device, "--dtype", dtype]
        launch = [*TORCHRUN, f"--nproc-per-node={n}", "scripts/train.py", "--out", str(out / f"{n}-{dtype}")]
        planned.append(Step(f"train_{n}_{dtype}", [*launch, *options], 90))
    return planned


def environment(rank: int, ranks: int, port: int, shared: bool) -> dict[str, str]:
    """Of one rank; of a single process if `ranks` is 0."""
    env = {**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "2"}
    env.setdefault("PYNCCL_LIBRARY", "nccl")
    env.setdefault("NCCL_DEBUG", "WARN")
    if not ranks:
        return env
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    env.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1")
    if shared:  # NCCL refuses two ranks of one host on one GPU: before 2.30 they pretend to be on different hosts
        env.update(NCCL_MULTI_RANK_GPU_ENABLE="1", NCCL_HOSTID=f"rank{rank}")
    return env


def perform(step: Step, work: Path, gpus: int) -> None:
    """Run it and fill in how it went."""
    started = time.monotonic()
    port, count = free_port(), max(step.ranks, 1)
    logs = [work / f"{step.name}-{rank}.log" for rank in range(count)]
    reports = [work / f"{step.name}-{rank}.xml" for rank in range(count)]
    processes = []
    for rank in range(count):
        command = step.command or [*PYTEST, f"--junitxml={reports[rank]}"]
        with logs[rank].open("w") as log:
            processes.append(
                subprocess.Popen(
                    [sys.executable, *command],
                    cwd=ROOT,
                    env=environment(rank, step.ranks, port, shared=step.ranks > gpus),
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # so that all that it starts can be ended with it
                )
            )
    in_time = wait(processes, started + step.seconds_limit)
    step.seconds = round(time.monotonic() - started, 1)
    step.returncodes = [process.returncode for process in processes]
    step.counts = count_tests(reports)
    step.status = "passed" if in_time and not any(step.returncodes) else "failed"
    if not in_time:
        alone = any(code not in (0, -signal.SIGKILL) for code in step.returncodes)
        step.reason = "a rank failed, the others were ended" if alone else f"not done within {step.seconds_limit} s"
    shown = logs if step.status == "failed" else logs[:1]
    step.output = "\n".join(f"--- {log.stem}\n{tail(log)}" for log in shown)


def wait(processes: list[subprocess.Popen[bytes]], deadline: float) -> bool:
    """Until all have ended or the deadline has passed; then end what is left. Whether none had to be ended."""
    in_time = True
    while None in (codes := [process.poll() for process in processes]):
        if any(codes):
            deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if time.monotonic() > deadline:
            in_time = False
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        time.sleep(0.1)
    return in_time


def count_tests(reports: list[Path]) -> dict[str, int]:
    """Sums over pytest's reports of all ranks; {} for a step that is no pytest."""
    suites = [xml.etree.ElementTree.parse(path).getroot().find("testsuite") for path in reports if path.exists()]
    found = [
        {name: int(s.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
        for s in suites
        if s is not None
    ]
    if not found:
        return {}
    total = {name: sum(row[name] for row in found) for name in found[0]}
    failed = total["failures"] + total["errors"]
    return {"passed": total["tests"] - failed - total["skipped"], "failed": failed, "skipped": total["skipped"]}


def tail(path: Path) -> str:
    return path.read_text(errors="replace")[-TAIL_CHARACTERS:].strip()


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def write(path: Path, machine: dict[str, Any], done: list[Step]) -> None:
    """After every step, so that a run that is cut short leaves what it found."""
    failed = [step.name for step in done if step.status == "failed"]
    result = {
        "machine": machine,
        "failed": failed,
        "steps": [{**asdict(step), "command": list(step.command)} for step in done],
    }
    path.write_text(json.dumps(result, indent=1) + "\n")


def line(step: Step) -> str:
    counts = ", ".join(f"{number} {name}" for name, number in step.counts.items())
    return f"{step.status:8s} {step.name:18s} {step.seconds:6.1f} s  {'; '.join(filter(None, (counts, step.reason)))}"


def main() -> int:
    folder = Path(os.environ.get("OUT", "out"))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "gpu_check.json"
    gpus, problem = gpu_count(), gpu_problem()
    machine: dict[str, Any] = {
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "gpus": gpus,
        "problem": problem,
    }
    work = Path(tempfile.mkdtemp(prefix="gpu_check-"))
    planned = steps(work, gpus)
    if not gpus:
        print(f"no GPU, so nothing to check: {problem}")
    hindrance = problem
    for step in planned:
        if hindrance:
            step.reason = hindrance
        else:
            perform(step, work, gpus)
        if step.name == "install" and step.status == "failed":
            hindrance = "the project could not be installed"
        if step.name == "versions" and step.status == "passed":
            machine["versions"] = json.loads(step.output[step.output.index("{") : step.output.rindex("}") + 1])
        print(line(step), *[step.output] * (step.status == "failed"), sep="\n", flush=True)
        write(path, machine, planned)
    curve = work / "2-float32" / "loss.png"
    if curve.exists():
        shutil.copy(curve, folder / "gpu_loss.png")
    shutil.rmtree(work, ignore_errors=True)
    print(f"wrote {path}")
    return 1 if any(step.status == "failed" for step in planned) else 0


if __name__ == "__main__":
    sys.exit(main())
