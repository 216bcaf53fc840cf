"""A step of gpu_check: its processes are started, followed from test to test, killed, and started again."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from check_report import Report, Result

ROOT = Path(__file__).resolve().parents[2]
PLUGIN = "scripts.gpu.check_plugin"
BEFORE, AFTER = "(start)", "(exit)"  # in place of a test, for what the processes do before and after their tests
# Seconds for the first rank to come, and for the others after it (or after the death of a rank).
START, TEST, EXIT = (60.0, 60.0), (45.0, 12.0), (30.0, 30.0)
TEST_ALONE = (100.0, 100.0)  # of one rank, whose test may start ranks of its own
POLL_SECONDS = 0.01
STACKS_SECONDS = 5.0  # for faulthandler to write, and under_mps.py to end its service, between SIGABRT and SIGKILL
OUTPUT_CHARACTERS = 5000


@dataclass
class Step:
    """A command of Python.

    ranks    number of processes with RANK set; 0: one without
    seconds  on one H200, start included
    lane     steps of a lane run one after the other, beside those of other lanes; "": by the number of ranks
    under    words before those of Python
    needs    a program; where there is none, the step is skipped
    after    name of the step without whose success this one is not run
    slower   factor of the time limits of start and tests
    tests    ids of the tests to run; None: all"""

    name: str
    ranks: int
    seconds: float
    command: list[str]
    env: dict[str, str] = field(default_factory=dict)
    lane: str = ""
    under: list[str] = field(default_factory=list)
    needs: str = ""
    after: str = ""
    slower: float = 1.0
    tests: list[str] | None = None

    @property
    def is_pytest(self) -> bool:
        return PLUGIN in self.command


def pytest_step(name: str, ranks: int, seconds: float, file: str, lane: str = "", **env: str) -> Step:
    """Return a step that runs a test file, without other plugins. Output is not captured: it survives a killed rank."""
    options = ["-v", "-s", "--tb=short", "-o", "addopts=", "-p", "no:cacheprovider", "-p", PLUGIN]
    env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    return Step(name, ranks, seconds, ["-m", "pytest", file, *options], env, lane)


@dataclass
class Setting:
    """What all steps share.

    stop    set when the processes must be killed
    failed  names of the steps that have failed"""

    report: Report
    work: Path
    gpus: int
    env: dict[str, str]
    stop: threading.Event = field(default_factory=threading.Event)
    failed: set[str] = field(default_factory=set)


class StepRun:
    """Runs a step until `deadline`, with new processes for the tests that are left after a hang."""

    def __init__(self, step: Step, setting: Setting, deadline: float) -> None:
        self.step, self.setting, self.deadline = step, setting, deadline
        self.ranks = range(max(step.ranks, 1))
        self.folder = setting.work  # of the current start
        self.processes: list[subprocess.Popen[bytes]] = []
        self.notes: list[str] = []
        self.seen: set[str] = set()  # outcomes

    def run(self) -> tuple[str, str]:
        """Return the outcome of the step, and what the results of its tests do not say."""
        again, left, starts = True, self.step.tests, 0
        while again and time.monotonic() < self.deadline:
            starts += 1
            self.folder = self.setting.work / self.step.name / str(starts)
            self.folder.mkdir(parents=True)
            if left is not None:
                (self.folder / "chosen").write_text(json.dumps(left))
            with self.started():
                again, left = self.follow(left or [])
            for rank in self.ranks:
                self.setting.report.add_log(f"{self.step.name}, start {starts}, rank {rank}", self.log(rank))
        for test in left or []:
            self.add(test, 0, "not run")
        if self.step.is_pytest and self.setting.gpus and "passed" not in self.seen:
            self.notes.append("no test passed")
        return "failed" if self.notes or self.seen - {"passed", "skipped"} else "passed", "; ".join(self.notes)

    def follow(self, left: list[str]) -> tuple[bool, list[str]]:
        """Follow the ranks from test to test. Return if they must start again, and the tests that are left."""
        if self.step.is_pytest:
            if "hung" in self.meet(BEFORE, "start", START):
                return False, left
            tests = json.loads((self.folder / "tests").read_text())
            for number, test in enumerate(tests):
                outcomes = self.meet(test, str(number), TEST if len(self.ranks) > 1 else TEST_ALONE)
                hung, failed = ([r for r in self.ranks if outcomes[r] == name] for name in ("hung", "failed"))
                if hung or 0 < len(failed) < len(outcomes):  # else the ranks are still in step
                    how = f"hung on ranks {hung}" if hung else f"failed on ranks {failed}"
                    self.notes.append(f"started again, as {test.rpartition('::')[2]} {how}")
                    return number + 1 < len(tests), tests[number + 1 :]
                (self.folder / f"{number}-go").touch()
        self.meet(AFTER, "exit", EXIT if self.step.is_pytest else (math.inf, EXIT[1]))
        return False, []

    def meet(self, test: str, point: str, patience: tuple[float, float]) -> list[str]:
        """Wait until all ranks have come to a point, report the outcome on each rank, and return the outcomes."""
        missing, until = self.wait(point, *(self.step.slower * seconds for seconds in patience))
        codes = [process.poll() for process in self.processes]
        if missing:
            self.interrupt()
        results = [
            ["hung", self.fate(rank, codes[rank], until)] if rank in missing else self.result(point, rank, codes[rank])
            for rank in self.ranks
        ]
        outcomes = [result[0] for result in results]
        if {test, *outcomes} - {BEFORE, AFTER, "passed"} or not self.step.is_pytest:
            for rank, result in enumerate(results):
                self.add(test, rank, *result)
        return outcomes

    def wait(self, point: str, first: float, others: float) -> tuple[list[int], str]:
        """Wait until all ranks have come to a point. Return those that have not, and until when they had time."""
        end = min((time.monotonic() + first, f"after {first:g} s"), (self.deadline, "at the limit of the step"))
        while True:
            exited = [process.poll() is not None for process in self.processes]  # first: a rank may come and exit
            came = exited if point == "exit" else [(self.folder / f"{point}-{rank}").exists() for rank in self.ranks]
            missing = [rank for rank in self.ranks if not came[rank]]
            if any(came) or any(exited):
                end = min(end, (time.monotonic() + others, f"{others:g} s after another rank"))
            if all(exited[rank] for rank in missing) or time.monotonic() > end[0]:
                return missing, end[1]
            if self.setting.stop.wait(POLL_SECONDS):
                raise KeyboardInterrupt

    def result(self, point: str, rank: int, code: int | None) -> list[Any]:
        """Return [outcome, message, seconds] of a rank that has come. pytest's code 1 means that a test failed."""
        if point != "exit":
            written: list[Any] = json.loads((self.folder / f"{point}-{rank}").read_text())
            return written
        return ["passed"] if code == 0 or (code == 1 and self.step.is_pytest) else ["failed", self.fate(rank, code)]

    def fate(self, rank: int, code: int | None, until: str = "") -> str:
        """Return the end of a rank's output, and in a last line how it died or hung, and where."""
        output = self.log(rank).read_text(errors="replace")[-OUTPUT_CHARACTERS:].strip()
        frame = re.search(r"^Current thread.*\n\s*(File .*)", output, re.MULTILINE)
        place = frame[1] if frame else output.rpartition("\n")[2]
        exited = "" if code is None else signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return f"{output}\n\n{f'died: {exited}' if exited else f'hung: not done {until}'}; {place}"

    def add(self, test: str, rank: int, outcome: str, message: str = "", seconds: float = 0.0) -> None:
        self.seen.add(outcome)
        self.setting.report.add(Result(self.step.name, self.step.ranks, rank, test, outcome, message, seconds))

    @contextlib.contextmanager
    def started(self) -> Iterator[None]:
        """Start the processes in sessions of their own; at the end, kill them and the processes that they started."""
        self.processes = []
        try:
            port = free_port()
            for rank in self.ranks:
                self.processes.append(self.start(rank, port))
            yield
        finally:
            for process in self.processes:  # C code responds to SIGKILL only
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            for process in self.processes:
                with contextlib.suppress(subprocess.TimeoutExpired):  # a process stuck in the driver is left behind
                    process.wait(5)

    def start(self, rank: int, port: int) -> subprocess.Popen[bytes]:
        ranks, gpus = self.step.ranks, self.setting.gpus
        env = {**self.setting.env, "GPU_CHECK_FOLDER": str(self.folder)}
        if ranks:
            local = rank % max(gpus, 1)
            place = {"RANK": rank, "LOCAL_RANK": local, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
            env |= {name: str(value) for name, value in place.items()}
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        if ranks > gpus:
            env |= {"PYNCCL_SHARE_GPU": "1"}
        words, env = [*self.step.under, sys.executable, *self.step.command], env | self.step.env
        with self.log(rank).open("wb") as log:
            return subprocess.Popen(
                words, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def interrupt(self) -> None:
        """Let all processes write their stacks to their logs and die, if they still can."""
        for process in self.processes:
            process.send_signal(signal.SIGABRT)  # to faulthandler
        deadline = time.monotonic() + STACKS_SECONDS
        while time.monotonic() < deadline and None in [process.poll() for process in self.processes]:
            time.sleep(POLL_SECONDS)

    def log(self, rank: int) -> Path:
        return self.folder / f"rank{rank}.log"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
