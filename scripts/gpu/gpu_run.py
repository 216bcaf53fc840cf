"""Run one step of gpu_check: its processes, their environment and logs, the limit, and the end of all that it started.

A call of NCCL or CUDA that hangs cannot be interrupted from Python, and a process in one answers no signal but SIGKILL.
So a step is ended from outside: first SIGABRT, upon which faulthandler writes the stacks of all threads to the log,
then SIGKILL to everything that carries the step's token in its environment, whichever process group it has gone to.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import gpu_tests
from gpu_steps import HERE, LEAST_SHARE, ROOT, Step

STACKS_SECONDS = 2.0  # for faulthandler to write, between SIGABRT and SIGKILL
UNKILLABLE_SECONDS = 5.0  # how long a process may stay after SIGKILL: one that the driver holds is left alone
TAIL_CHARACTERS = 4000
RESULT = "RESULT "  # a step's script prints its figures as one line: this, then JSON
TOKEN = "GPU_CHECK_TOKEN"
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


class Manner(NamedTuple):
    """How the processes of a step are run."""

    shared: bool  # whether its ranks share a GPU
    grace: float  # seconds that the other ranks get once one has failed
    tick: Callable[[], None]  # called while it runs


def perform(step: Step, work: Path, manner: Manner) -> None:
    """Run `step` for at most `step.allotted` seconds, with files in `work`, and fill in how it went."""
    started = time.monotonic()
    deadline, first, reasons = started + step.allotted, 0, []
    try:
        while True:
            stem = work / (f"{step.name}.from{first}" if first else step.name)
            records = [Path(f"{stem}-{rank}.jsonl") for rank in range(max(step.ranks, 1))]
            reason = run(step, stem, records, first, deadline, manner)
            reasons.append(f"from test {first + 1} on: {reason}" if first else reason)
            left = gpu_tests.count(step, records)
            if left is None or deadline - time.monotonic() < LEAST_SHARE * step.limit:
                break
            first = left
    finally:
        step.seconds = round(time.monotonic() - started, 1)
    if left is not None:
        reasons.append(f"the tests from number {left + 1} on were not run: no time left")
    if step.skips and not step.tests.get("passed"):
        reasons.append("no test has passed: see the skips")
    step.reason = "; ".join(filter(None, reasons))
    step.status = "failed" if step.reason else "passed"
    step.results = [found for log in step.logs if (found := result_of(Path(log))) is not None]
    step.output = "\n".join(f"--- {Path(log).stem}\n{tail(Path(log))}" for log in telling(step))


def run(step: Step, stem: Path, records: list[Path], first: int, deadline: float, manner: Manner) -> str:
    """The step's processes once, until they have ended; what went wrong, else "". Tests begin with number `first`."""
    token, port = uuid.uuid4().hex, free_port()
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank, record in enumerate(records):
            env = environment(step, rank, port, manner.shared)
            env.update({TOKEN: token, "GPU_CHECK_RECORD": str(record), "GPU_CHECK_FIRST": str(first)})
            step.logs.append(f"{stem}-{rank}.log")
            processes.append(start(step.command, env, step.logs[-1]))
        hindrance = wait(processes, deadline - STACKS_SECONDS, manner)
    finally:
        end(processes, token)
        codes = [process.returncode for process in processes]
        step.returncodes += codes
    wrong = [f"rank {rank} ended with {in_words(code)}" for rank, code in enumerate(codes) if code != 0]
    return hindrance or "; ".join(wrong)


def environment(step: Step, rank: int, port: int, shared: bool) -> dict[str, str]:
    """Of one rank; of a single process if the step has no ranks."""
    env = {**os.environ, "PYNCCL_LIBRARY": "nccl", "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", "COLUMNS": "200"}
    env.setdefault("OMP_NUM_THREADS", "2")
    env.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # no pool of processes per rank
    env.setdefault("NCCL_DEBUG", "WARN")
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(HERE), env.get("PYTHONPATH"))))
    if step.ranks:
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": step.ranks, "LOCAL_WORLD_SIZE": step.ranks}
        env.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    if shared:  # NCCL refuses two ranks of one host on one GPU: before 2.30 they pretend to be on different hosts
        env.update(NCCL_MULTI_RANK_GPU_ENABLE="1", NCCL_HOSTID=f"rank{rank}")
    env.update(step.env)
    return env


def start(command: list[str], env: dict[str, str], log: str) -> subprocess.Popen[bytes]:
    """In a process group of its own, but in this session: what ends the session ends it as well."""
    with open(log, "wb") as output:
        return subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            preexec_fn=partial(_as_child, os.getpid()),  # noqa: PLW1509  # this process has one thread
        )


def _as_child(parent: int) -> None:
    os.setpgid(0, 0)
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # which ended before it was asked for
        os._exit(1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # SIGABRT is for the stacks, not for a core


def wait(processes: list[subprocess.Popen[bytes]], deadline: float, manner: Manner) -> str:
    """Until all have ended, or the rest has to be ended: why, else ""."""
    failed, began = "", time.monotonic()
    while None in (codes := [process.poll() for process in processes]):
        now = time.monotonic()
        if not failed and any(codes):  # neither None, still running, nor 0
            rank = next(rank for rank, code in enumerate(codes) if code)
            failed = f"rank {rank} ended with {in_words(codes[rank])}"
            deadline = min(deadline, now + manner.grace)
        if now > deadline:
            left = ", ".join(str(rank) for rank, code in enumerate(codes) if code is None)
            if failed:
                return f"{failed}; rank {left} had not ended {manner.grace:g} s later and was killed"
            return f"not done within {now - began + STACKS_SECONDS:.0f} s: rank {left} was killed"
        manner.tick()
        time.sleep(0.05)
    return ""


def end(processes: list[subprocess.Popen[bytes]], token: str) -> None:
    """Everything that the step has started and that still runs."""
    alive = [process for process in processes if process.poll() is None]
    for process in alive:
        process.send_signal(signal.SIGABRT)
    deadline = time.monotonic() + STACKS_SECONDS
    while time.monotonic() < deadline and None in [process.poll() for process in alive]:
        time.sleep(0.05)
    for process in alive:
        if process.poll() is None:
            process.kill()
    for pid in bearing(token):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + UNKILLABLE_SECONDS
    for process in alive:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(deadline - time.monotonic(), 0.0))


def bearing(token: str) -> list[int]:
    """Processes whose environment has the token: the step's own and all that they have started."""
    mark, found = f"{TOKEN}={token}".encode(), []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


def in_words(code: int | None) -> str:
    if code is None:
        return "nothing: it could not be killed, and still runs"
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-code).name
    return f"signal {-code}"


def result_of(log: Path) -> Any:
    """What the process printed behind RESULT, the last one; None if it did not."""
    for text in reversed(tail(log, 1 << 16).splitlines()):
        if text.startswith(RESULT):
            with contextlib.suppress(json.JSONDecodeError):
                return json.loads(text.removeprefix(RESULT))
    return None


def telling(step: Step) -> list[str]:
    """The logs to show: of those that did not pass, else of rank 0."""
    wrong = [log for log, code in zip(step.logs, step.returncodes, strict=True) if code != 0]
    return wrong or step.logs[:1]


def tail(path: Path, characters: int = TAIL_CHARACTERS) -> str:
    with path.open("rb") as file:
        file.seek(max(path.stat().st_size - characters, 0))
        return file.read().decode(errors="replace").strip()


def bundle(target: Path, logs: list[Path], most: int) -> None:
    """All logs in one file of at most `most` bytes; the longest are cut in the middle."""
    sizes = {log: log.stat().st_size for log in logs if log.exists()}
    left = most - 200 * len(sizes)  # the headings
    with target.open("wb") as out:
        for number, log in enumerate(sorted(sizes, key=lambda log: sizes[log])):
            share = left // (len(sizes) - number)  # what a short one leaves over goes to the longer ones
            left -= min(share, sizes[log])
            sizes[log] = share
        for log, share in sizes.items():
            out.write(f"\n===== {log.stem}\n".encode())
            out.write(middle_out(log, share))


def middle_out(path: Path, most: int) -> bytes:
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= most:
            return file.read(most)
        first = file.read(most // 2)
        file.seek(size - most // 2)
        return first + f"\n[... {size - 2 * (most // 2)} bytes left out ...]\n".encode() + file.read(most // 2)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
