"""scripts/gpu/gpu_check.py runs every GPU test file, and a test that fails, hangs or dies costs itself only."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from processes import wait_for

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts" / "gpu"))

import check_report  # noqa: E402
import check_step  # noqa: E402
import gpu_check  # noqa: E402
import under_mps as mps  # noqa: E402

# Test files. `ran` shows whether the processes were started again.
FAILS = """
import os
ran = []

def test_passes():
    ran.append(1)

def test_fails_on_all():
    raise ValueError(f"rank {os.environ['RANK']} of 2 at 0x1f{os.environ['RANK']}")

def test_runs_in_the_same_process():
    assert ran == [1]

def test_fails_on_one():
    assert os.environ["RANK"] != "0"

def test_runs_in_a_new_process():
    assert ran == []
    ran.append(1)

def test_dies_on_one():
    print("last words")
    if os.environ["RANK"] == "1":
        os._exit(3)

def test_last():
    assert ran == []
"""
HANGS = """
import pynccl, pytest

@pytest.fixture(scope="session")
def comm():
    return pynccl.init()

def test_hangs_on_one(comm):
    assert comm.rank == 0
    comm.barrier()

def test_passes(comm):
    comm.barrier()
"""
SLOW_IMPORT = "import time\ntime.sleep(600)\n"
SLOW_EXIT = "import atexit, time\n\ndef test_passes():\n    atexit.register(time.sleep, 600)\n"


class Run(NamedTuple):
    good: bool
    results: list[check_report.Result]
    page: str

    def outcomes(self, step: str) -> dict[str, list[str]]:
        """Return the outcome of each test on each rank; of the step itself under ""."""
        found: dict[str, list[str]] = {}
        for result in self.results:
            if result.step == step:
                test = result.test.rpartition("::")[2]
                found[test] = [*(found.get(test, []) if test else []), result.outcome]
        return found

    def message(self, test: str, rank: int) -> str:
        (found,) = [result for result in self.results if result.test.endswith(test) and result.rank == rank]
        return found.message


def step_of(folder: Path, name: str, source: str, ranks: int = 2) -> check_step.Step:
    (folder / f"test_{name}.py").write_text(source)
    return check_step.pytest_step(name, ranks, 15, str(folder / f"test_{name}.py"))


def run(
    folder: Path, steps: list[check_step.Step], budget: float = 300.0, kept: Sequence[check_report.Result] = ()
) -> Run:
    """Run steps as gpu_check does, on the host library, and read what it has written."""
    number = len([*folder.glob("out*")])
    out, work = folder / f"out{number}", folder / f"work{number}"
    work.mkdir()
    good = gpu_check.run(steps, gpu_check.setting_of(check_report.Report(out, kept), work, 0), budget)
    return Run(good, check_report.read(out / "gpu.md"), (out / "gpu.md").read_text())


def test_every_gpu_test_file_is_in_a_step() -> None:
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests" / "gpu").glob("test_*.py")}
    assert files == {word for step in gpu_check.steps_of(Path("work"), 1) for word in step.command if "/test_" in word}


def test_a_bad_test_costs_itself_only_and_failed_runs_it_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_step, "TEST", (60, 5))
    steps = [step_of(tmp_path, "fails", FAILS), step_of(tmp_path, "hangs", HANGS)]
    done = run(tmp_path, [*steps, step_of(tmp_path, "broken", "import no_such_module\n", 1)])
    assert not done.good
    passed, failed = ["passed"] * 2, ["failed"] * 2
    assert done.outcomes("fails") == {
        "test_passes": passed,
        "test_fails_on_all": failed,
        "test_runs_in_the_same_process": passed,
        "test_fails_on_one": ["failed", "passed"],
        "test_runs_in_a_new_process": passed,
        "test_dies_on_one": ["passed", "hung"],
        "test_last": passed,
        "": ["failed"],
    }
    assert done.outcomes("hangs") == {"test_hangs_on_one": ["hung", "failed"], "test_passes": passed, "": ["failed"]}
    assert done.outcomes("broken") == {"(exit)": ["failed"], "": ["failed"]}
    assert "No module named 'no_such_module'" in done.message("(exit)", 0)
    hung, died = done.message("hangs_on_one", 0), done.message("dies_on_one", 1)
    assert "in test_hangs_on_one" in hung and "\nhung: not done 5 s after another rank; File" in hung
    assert "last words\n" in died and died.splitlines()[-1].startswith("died: exit code 3; ")

    assert "| fails | failed | 10 | 3 | 1 |  |" in done.page and "| hangs | failed | 2 | 1 | 1 |  |" in done.page
    assert "started again, as test_fails_on_one failed on ranks [0]; started again, as test_dies_on_one" in done.page
    kind = r"^## ValueError: rank N of N at N\n\n- fails: \S+::test_fails_on_all failed on ranks \[0, 1\]$"
    assert re.search(kind, done.page, re.MULTILINE)
    assert re.search(r"^- fails: \S+::test_dies_on_one hung on ranks \[1\]$", done.page, re.MULTILINE)

    steps += [step_of(tmp_path, name, "def test_new():\n    pass\n") for name in ("cut_off", "other")]
    before = [*done.results, check_report.Result("cut_off", 2, 0, "", "not run", "cut off")]
    chosen = gpu_check.only_failed(steps, before)
    assert [step.tests and len(step.tests) for step in chosen] == [3, 1, None]
    again = run(tmp_path, [chosen[0], chosen[2]], kept=gpu_check.still_valid(before, [chosen[0], chosen[2]]))
    assert again.outcomes("fails") == {**done.outcomes("fails"), "test_last": passed}
    assert len(again.results) == len(done.results) + 2 + 2  # test_new on two ranks, planned and ended; no test twice
    assert again.outcomes("hangs") == done.outcomes("hangs") and again.outcomes("broken") == done.outcomes("broken")
    assert again.outcomes("cut_off") == {"test_new": passed, "": ["passed"]}


def test_a_hang_before_or_after_the_tests_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_step, "EXIT", (1, 1))
    done = run(tmp_path, [step_of(tmp_path, "exit", SLOW_EXIT, 1)])
    assert done.outcomes("exit") == {"test_passes": ["passed"], "(exit)": ["hung"], "": ["failed"]}

    monkeypatch.setattr(check_step, "START", (2, 2))
    step = step_of(tmp_path, "import", SLOW_IMPORT, 1)
    done = run(tmp_path, [dataclasses.replace(step, tests=["test_a"])])
    assert done.outcomes("import") == {"(start)": ["hung"], "test_a": ["not run"], "": ["failed"]}


def test_commands_pass_or_fail_by_their_exit_code(tmp_path: Path) -> None:
    steps = [check_step.Step(f"exit_{code}", 0, 5, ["-c", f"raise SystemExit({code})"]) for code in (0, 1)]
    done = run(tmp_path, steps)
    assert not done.good
    assert [done.outcomes(f"exit_{code}") for code in (0, 1)] == [
        {"(exit)": ["passed"], "": ["passed"]}, {"(exit)": ["failed"], "": ["failed"]}
    ]  # fmt: skip
    assert run(tmp_path, steps[:1]).good


def test_a_step_that_does_not_fit_in_the_budget_is_not_run(tmp_path: Path) -> None:
    done = run(tmp_path, [step_of(tmp_path, "fails", FAILS)], budget=3.0)
    assert not done.good and done.outcomes("fails") == {"": ["not run"]}
    assert re.search(r"^\| fails \| not run \|.* [23] s left; it takes about 15 s \|$", done.page, re.MULTILINE)


def test_a_step_without_the_program_that_it_needs_is_skipped_which_is_good(tmp_path: Path) -> None:
    step = check_step.Step("needs", 0, 5, ["-c", ""], needs="no-such-program")
    done = run(tmp_path, [step])
    assert done.good and done.outcomes("needs") == {"": ["skipped"]}
    assert "| no no-such-program on the PATH |" in done.page
    assert gpu_check.only_failed([step], done.results) == []
    under = dataclasses.replace(step, command=["-c", "raise SystemExit(4)"], under=["env", "-i"], needs="env")
    done = run(tmp_path, [under])
    assert not done.good and "died: exit code 4" in done.message("(exit)", 0)


def test_failed_tests_take_a_share_of_the_time_of_their_step() -> None:
    by_name = {step.name: step for step in gpu_check.steps_of(Path("work"), 1)}
    ends = by_name["ends_1"]
    tests = [check_report.Result(ends.name, 1, 0, f"test_{number}", "passed") for number in range(9)]
    tests += [check_report.Result(ends.name, 1, 0, name, "failed") for name in ("test_a", "")]
    (again,) = gpu_check.only_failed([ends], tests)
    assert again.tests == ["test_a"] and gpu_check.START_SECONDS < again.seconds < ends.seconds / 4


def test_what_depends_on_a_step_that_failed_is_not_run(tmp_path: Path) -> None:
    first = check_step.Step("first", 0, 5, ["-c", "raise SystemExit(1)"])
    done = run(tmp_path, [first, check_step.Step("second", 0, 5, ["-c", ""], after="first")])
    assert done.outcomes("second") == {"": ["not run"]} and "first failed: two ranks on one GPU" in done.page


def test_the_steps_that_measure_come_alone_and_mps_only_where_ranks_share_a_gpu() -> None:
    by_name = {step.name: step for step in gpu_check.steps_of(Path("work"), 1)}
    measured = {name for name in by_name if name.startswith(("bench_", "mps_", "perf_", "trace_", "lifetimes_"))}
    assert len(measured) >= 10 and {by_name[name].lane for name in measured} == {"alone"}
    assert {name for name, step in by_name.items() if step.needs == "nvidia-cuda-mps-control"} == {
        name for name in by_name if name.startswith("mps_")
    }
    assert not [step.name for step in gpu_check.steps_of(Path("work"), 2) if step.name.startswith("mps_")]


# In place of nvidia-cuda-mps-control: notes how it is called. The variable FAKE says what goes wrong.
CONTROL = """#!/bin/sh
asked=$([ "$1" = -d ] || cat)
echo "$1$asked $CUDA_MPS_PIPE_DIRECTORY" >> $NOTES
case "$FAKE $1$asked" in
  "fails -d") echo "no such device"; exit 1;;
  "unused get_server_list") ;;
  "frozen "*) exec sleep 100;;
  *" get_server_list") echo $SERVER;;
  "lingers quit") exec sleep 100;;
esac
"""
CLIENT = """
import os, signal, sys
print(os.path.isdir(os.environ["CUDA_MPS_PIPE_DIRECTORY"]), os.environ["PYNCCL_SHARE_GPU"], flush=True)
if sys.argv[1] in ("SIGTERM", "SIGABRT"):
    signal.signal(signal.SIGTERM, lambda *_: (print("ends its own", flush=True), sys.exit()))
    os.kill(os.getppid(), signal.Signals[sys.argv[1]])
    signal.pause()
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize(("how", "code"), [("0", 0), ("5", 5), ("SIGTERM", 130), ("SIGABRT", 130)])
def test_a_command_runs_under_a_service_that_ends_with_it(tmp_path: Path, how: str, code: int) -> None:
    done, notes = under_mps(tmp_path, [sys.executable, "-c", CLIENT, how], PYTHONFAULTHANDLER="1")
    assert done.returncode == code and done.stdout == ("True 1\nends its own\n" if code == 130 else "True 1\n"), done
    asked, pipes = zip(*(line.split() for line in notes), strict=True)
    assert (asked[0], asked[-1]) == ("-d", "quit") and len({*pipes}) == 1 and not Path(pipes[0]).exists()


@pytest.mark.parametrize(
    ("fake", "words", "code", "error"),
    [
        ("fails", ["true"], 1, "nvidia-cuda-mps-control -d ended with 1; it wrote: no such device\n"),
        ("unused", ["true"], 1, "the command has not used a GPU through the service; it wrote no log\n"),
        ("unused", ["false"], 1, ""),
        ("", ["no-such-command"], 2, "no-such-command: no such command; --help shows the options\n"),
        ("none", ["true"], 2, "nvidia-cuda-mps-control is not on the PATH; it comes with NVIDIA's driver; --help"),
    ],
)
def test_what_is_wrong_with_a_service_is_said(
    tmp_path: Path, fake: str, words: list[str], code: int, error: str
) -> None:
    done, _ = under_mps(tmp_path, words, FAKE=fake, **({"PATH": "/usr/bin:/bin"} if fake == "none" else {}))
    assert done.returncode == code and error in done.stderr and bool(error) == bool(done.stderr), done.stderr


@pytest.mark.parametrize("fake", ["lingers", "frozen"])
def test_a_service_that_waits_for_a_client_or_is_frozen_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake: str
) -> None:
    monkeypatch.setattr(mps, "SECONDS", 1.0)
    server, daemon = (subprocess.Popen(["sleep", "100"]) for _ in range(2))
    (tmp_path / f"{mps.CONTROL}.pid").write_text(f"{daemon.pid}\n")
    env = environment_of_mps(tmp_path, FAKE=fake, SERVER=str(server.pid))
    monkeypatch.setenv("PATH", env["PATH"])
    mps.stop({**env, "CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)})
    assert daemon.wait(10) == -9
    if fake == "frozen":  # it could not say who its server is
        server.kill()
    assert server.wait(10) == -9


def environment_of_mps(folder: Path, **env: str) -> dict[str, str]:
    control = folder / mps.CONTROL
    control.write_text(CONTROL)
    control.chmod(0o755)
    path = f"{folder}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "NOTES": str(folder / "notes"), "FAKE": "", "SERVER": "7", **env}


def under_mps(folder: Path, words: list[str], **env: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Run a command under the service that CONTROL stands for. Return also how that was called, line by line."""
    options: Any = {"env": environment_of_mps(folder, **env), "capture_output": True, "text": True, "timeout": 60}
    done = subprocess.run([sys.executable, str(ROOT / "scripts/gpu/under_mps.py"), *words], check=False, **options)
    notes = folder / "notes"
    return done, notes.read_text().splitlines() if notes.exists() else []


INTERRUPTED = """
import os, signal, sys
from pathlib import Path
import check_report, check_step, gpu_check

folder = Path(sys.argv[1])
signal.signal(signal.SIGTERM, signal.default_int_handler)
program = "import os, sys, time; print(os.getpid(), flush=True); time.sleep(600)"
step = check_step.Step("sleeps", 1, 100, ["-c", program])
gpu_check.run([step], gpu_check.setting_of(check_report.Report(folder / "out"), folder, 0), 200.0)
"""


def test_an_interrupt_kills_the_processes(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen([sys.executable, "-c", INTERRUPTED, str(tmp_path)], env=env, stderr=subprocess.PIPE)
    log = tmp_path / "sleeps" / "1" / "rank0.log"
    wait_for(lambda: log.exists() and log.read_text().endswith("\n"))
    process.terminate()
    _, err = process.communicate(timeout=60)
    assert b"KeyboardInterrupt" in err
    with pytest.raises(ProcessLookupError):
        os.kill(int(log.read_text()), 0)


LIBRARY = """
import os
import pytest

@pytest.fixture(scope="module")
def made():
    return os.environ["PYNCCL_LIBRARY"]

def test_library(made):
    assert [made, os.environ["PYNCCL_LIBRARY"]] == [%r] * 2
"""


@pytest.mark.parametrize("chosen", ["", "/opt/libnccl.so.2"])
def test_gpu_tests_use_libnccl_where_the_others_use_the_host_library(tmp_path: Path, chosen: str) -> None:
    """In one process of pytest-xdist, on a machine that seems to have a GPU."""
    ini = f"[pytest]\npythonpath = {ROOT}/tests/support {tmp_path}\nmarkers =\n  gpu\n  slow\n"
    (tmp_path / "pytest.ini").write_text(ini)
    (tmp_path / "seems.py").write_text("import torch\ntorch.cuda.is_available = lambda: True\n")
    for folder, library in (("tests/gpu", chosen or "nccl"), ("tests/tools", chosen or "host")):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / f"test_{len(folder)}.py").write_text(LIBRARY % library)
    for name in ("tests/conftest.py", "tests/gpu/conftest.py"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    unset = ("PYNCCL_LIBRARY", "GPU_TESTS_LIBRARY")
    environment = {name: value for name, value in os.environ.items() if name not in unset and "PYTEST" not in name}
    environment |= {"PYNCCL_LIBRARY": chosen} if chosen else {}
    environment["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, "-m", "pytest", "-q", "-n", "1", "-p", "seems", "-p", "no:cacheprovider", "tests"]
    options: Any = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True, "timeout": 100}
    done = subprocess.run(command, check=False, **options)
    assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout + done.stderr
