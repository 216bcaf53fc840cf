"""The steps of gpu_check.sh: run each in processes of its own, within a budget, and write down what came of it.

Each call (single steps together are one, named "steps") writes $OUT/gpu_check_CALL.json and $OUT/gpu_check_CALL.log,
anew after every step and while one runs, so that a call that is killed leaves what it found; the log holds the whole
output of every process, the longest cut in the middle. Beside them lie trace.json.gz and loss.png: 8 files at most.

A step gets its limit or what is left of the budget, and is "not run" where that is less than a quarter of its limit.
Tests behind one that failed on several ranks, or that ended the process, are run in new processes within that time.
Where two ranks cannot reach each other on a shared GPU, settings of NCCL are tried, and the rest of the call is run
with the first that help. --nccl-env hands on what another call has found.

Without a GPU every step is skipped, and that is exit code 0.

Only the standard library is needed here, since the project is installed by the first step. GPU_CHECK_FAKE=FILE.py
rehearses without a GPU: `FILE.py STEP` is run in place of every step, and the results say so.

examples:
  scripts/gpu_check.sh --list
  scripts/gpu_check.sh probe --budget 300
  OUT=results scripts/gpu_check.sh ranks --nccl-env NCCL_SOCKET_IFNAME=lo
  scripts/gpu_check.sh --report out/gpu_check_probe.json            # a page in Markdown
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent)]

import gpu_report  # noqa: E402
import gpu_run  # noqa: E402
from gpu_steps import CALL_SECONDS, CALLS, LEAST_SHARE, REACH, ROOT, WRONG_VALUES, Step, listing, names, selected  # noqa: E402

from pynccl.bindings.library import gpu_count, gpu_problem  # noqa: E402
from pynccl.tools import command  # noqa: E402

FILE_BYTES = 15 << 20  # of a file at most, to be carried away
SHOWN_CHARACTERS = 2500  # of a step that failed; the JSON has more, the log everything
TICK_SECONDS = 10.0  # how often the results are written while a step runs
KEPT = {"train_2_float32/loss.png": "loss.png", "trace.json.gz": "trace.json.gz"}  # of what the steps write


class Call:
    """One call: its steps in turn, until the budget is used up."""

    def __init__(self, name: str, steps: list[Step], options: argparse.Namespace, work: Path, machine: dict[str, Any]):
        self.name, self.steps, self.options, self.work, self.machine = name, steps, options, work, machine
        self.out = Path(os.environ.get("OUT", "out"))
        self.deadline = time.monotonic() + options.budget
        self.settings = dict(options.nccl_env)  # of NCCL, that the ranks of this call take
        self.ready = ""  # what keeps every further step from running
        self.apart = ""  # what keeps those from running whose ranks share a GPU
        self.reached = False
        self._written = 0.0
        self.out.mkdir(parents=True, exist_ok=True)

    def run(self, done: dict[str, Step]) -> None:
        """All steps; of those in `done`, from an earlier call, the outcome is taken over."""
        self.write()
        for step in self.steps:
            if step.name in done:
                step.__dict__.update(done[step.name].__dict__, logs=[])
                step.reason = step.reason or "in an earlier call"
            elif hindrance := self.hindrance(step):
                step.status, step.reason = hindrance
            else:
                self.perform(step)
                self.learn(step)
            print(line(step), flush=True)
            if step.status == "failed":
                print(step.output[-SHOWN_CHARACTERS:], flush=True)
            self.write()

    def hindrance(self, step: Step) -> tuple[str, str] | None:
        """(status, reason) of a step that is not to be run now."""
        if self.machine["problem"]:
            return "skipped", self.machine["problem"]
        if self.ready:
            return "not run", self.ready
        if step.remedy and self.reached:
            return "skipped", "not needed"
        if self.apart and step.ranks > self.machine["gpus"] and not step.name.startswith(REACH):
            return "not run", self.apart
        left = self.deadline - time.monotonic()
        if self.options.limit:
            step.limit = min(step.limit, self.options.limit)
        step.allotted = round(min(step.limit, left), 1)
        if left < LEAST_SHARE * step.limit:
            return "not run", f"budget: {max(left, 0):.0f} of {self.options.budget:g} s left, limit {step.limit:g} s"
        return None

    def perform(self, step: Step) -> None:
        step.status, step.reason = "running", ""
        step.env = {**self.settings, **step.env}
        if "pytest" in step.command:
            step.command += self.options.pytest
        if self.machine["fake"]:
            step.command = [self.machine["fake"], step.name]
        self.write()
        manner = gpu_run.Manner(step.ranks > self.machine["gpus"], self.options.grace, self.tick)
        try:
            gpu_run.perform(step, self.work, manner)
        except KeyboardInterrupt:
            step.status, step.reason = "failed", "interrupted"
            raise

    def learn(self, step: Step) -> None:
        """What the outcome means for the steps that follow."""
        passed = step.status == "passed"
        if step.name == "install" and not passed:
            self.install_by_path(step)
        if step.name == "versions":
            if passed and step.results:
                self.machine["versions"] = step.results[0]
            if not passed and step.returncodes[0] in (1, 2):  # not where it only took too long
                self.ready = "the versions could not be read: is torch there, and does the project import?"
        if step.name.startswith(REACH):
            self.learn_reach(step, passed or WRONG_VALUES in step.returncodes)

    def learn_reach(self, step: Step, reached: bool) -> None:
        if reached:
            self.reached, self.apart = True, ""
            self.settings.update(step.remedy)
            for other in self.steps if step.remedy else []:
                if other.name.startswith(REACH) and other.status == "failed" and other is not step:
                    how = " ".join(f"{name}={value}" for name, value in step.remedy.items())
                    other.status, other.reason = "worked around", f"{other.reason}; works with {how}"
        elif not self.reached:
            self.apart = f"two ranks on one GPU do not reach each other: see {REACH}"

    def install_by_path(self, step: Step) -> None:
        """The folder autograd/ is imported as pynccl_autograd: by a link, where pip does not install it."""
        site = self.work / "site"
        site.mkdir(exist_ok=True)
        (site / "pynccl_autograd").symlink_to(ROOT / "autograd")
        path = [str(ROOT), str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
        os.environ["PYTHONPATH"] = os.pathsep.join(path)
        step.status, step.reason = "worked around", f"pip: {step.reason}; imported by PYTHONPATH instead"

    def tick(self) -> None:
        if time.monotonic() - self._written > TICK_SECONDS:
            self.write()

    def write(self) -> None:
        """The JSON and the log, as far as it goes: by way of a second file, so that there is always a whole one."""
        self._written = time.monotonic()
        stem = f"gpu_check_{self.name}"
        found = {"call": self.name, "machine": self.machine, "budget": self.options.budget, "nccl_env": self.settings}
        for status in ("failed", "worked around", "not run"):
            found[status] = [step.name for step in self.steps if step.status == status]
        found["steps"] = [{k: v for k, v in asdict(step).items() if k != "logs"} for step in self.steps]
        draft = self.work / "draft"
        draft.write_text(json.dumps(found, indent=1) + "\n")
        shutil.move(draft, self.out / f"{stem}.json")
        gpu_run.bundle(draft, [Path(log) for step in self.steps for log in step.logs], FILE_BYTES)
        shutil.move(draft, self.out / f"{stem}.log")
        for source, name in KEPT.items():
            path = self.work / source
            if path.exists() and path.stat().st_size <= FILE_BYTES:
                shutil.copy(path, self.out / name)


def line(step: Step) -> str:
    counts = ", ".join(f"{number} {name}" for name, number in step.tests.items())
    told = "; ".join(filter(None, (counts, step.reason)))
    return f"{step.status:14s}{step.name:22s}{step.seconds:6.1f} s  {told}"


def describe_machine(argv: list[str]) -> dict[str, Any]:
    """Of this run: when, where, from which commit, by which command."""
    fake = os.environ.get("GPU_CHECK_FAKE", "")
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "command": shlex.join(["scripts/gpu_check.sh", *argv]),
        "commit": output_of("git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "gpus": gpu_count() or (1 if fake else 0),
        "driver": output_of("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"),
        "problem": "" if fake else gpu_problem(),
        "fake": str(Path(fake).resolve()) if fake else "",
    }


def output_of(*words: str) -> str:
    """What a program prints; "" where it is not there, or does not work."""
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def read_options(argv: list[str]) -> argparse.Namespace:
    parser = command.Parser(__doc__, prog="gpu_check.py", failed="something failed; 3 nothing did, but not all was run")
    parser.add_argument("what", nargs="*", help="probe, ranks, train, or names of steps; default: all three calls")
    parser.add_argument(
        "--budget", type=float, default=CALL_SECONDS, help="seconds for each call (default %(default)g)"
    )
    parser.add_argument("--limit", type=float, help="seconds that no step may exceed; default: each has its own")
    parser.add_argument("--grace", type=float, default=10.0, help="seconds for the other ranks, once one has failed")
    parser.add_argument("--nccl-env", type=setting, action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--pytest", type=shlex.split, default=[], metavar="ARGS", help="for every pytest: '-k errors'")
    parser.add_argument("--list", action="store_true", help="print the steps and their limits, and run nothing")
    parser.add_argument(
        "--report",
        nargs="+",
        type=command.input_file,
        metavar="JSON",
        help="print a page in Markdown of results, run nothing",
    )
    options = parser.parse_args(argv)
    known = [*CALLS, *names()]
    unknown = [name for name in options.what if name not in known]
    if unknown:
        parser.error(f"{', '.join(unknown)}: neither a call nor a step; there are {', '.join(known)}")
    if options.what and 0 < sum(name in CALLS for name in options.what) < len(options.what):
        parser.error("name calls (probe, ranks, train) or single steps, not both: 8 files come back at most")
    for name in ("budget", "limit", "grace"):
        value = getattr(options, name)
        if value is not None and not value > 0:
            parser.error(f"--{name} is {value:g}, expected seconds above 0")
    return options


def results_of(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"--report {path}: no JSON of gpu_check: {error}") from None


def setting(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"{text!r}, expected NAME=VALUE, as NCCL_SOCKET_IFNAME=lo")
    return name, value


def main(argv: list[str]) -> int:
    options = read_options(argv)
    if options.list:
        print(listing(max(gpu_count(), 1)))
        return 0
    if options.report:
        print(gpu_report.page([results_of(path) for path in options.report]))
        return 0
    signal.signal(signal.SIGTERM, _interrupt)
    machine = describe_machine(argv)
    if machine["problem"]:
        print(f"no GPU, so nothing to check: {machine['problem']}")
    work = Path(tempfile.mkdtemp(prefix="gpu_check-"))
    calls: list[Call] = []
    try:
        run_all(options, work, machine, calls)
    except KeyboardInterrupt:
        for call in calls[-1:]:
            call.write()
        print("interrupted", flush=True)
        return 130
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return verdict(calls)


def run_all(options: argparse.Namespace, work: Path, machine: dict[str, Any], calls: list[Call]) -> None:
    """Each call, appended to `calls` before it starts."""
    done: dict[str, Step] = {}
    for name, steps in selected(options.what, work, machine["gpus"]):
        print(f"--- {name}: {len(steps)} steps, at most {options.budget:g} s", flush=True)
        call = Call(name, steps, options, work, machine)
        calls.append(call)
        if len(calls) > 1:
            call.settings, call.reached = calls[-2].settings, calls[-2].reached
        call.run(done)
        done |= {step.name: step for step in steps if step.status in ("passed", "worked around")}


def verdict(calls: list[Call]) -> int:
    """Print what came of it; the exit code."""
    steps = [step for call in calls for step in call.steps]
    settings = calls[-1].settings
    print("---")
    for status in ("failed", "worked around", "not run"):
        found = list(dict.fromkeys(step.name for step in steps if step.status == status))
        if found:
            print(f"{status}: {', '.join(found)}")
    if settings:
        print("for the other calls:", *(f"--nccl-env {name}={value}" for name, value in settings.items()))
    print("wrote", *(str(call.out / f"gpu_check_{call.name}.json") for call in calls))
    statuses = {step.status for step in steps}
    return 1 if "failed" in statuses else 3 if "not run" in statuses else 0


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    command.run(lambda: main(sys.argv[1:]), "gpu_check.py")
