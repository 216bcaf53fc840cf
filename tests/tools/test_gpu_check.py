"""scripts/gpu_check.sh with little programs in place of the GPU steps: budget, selection, logs, the end of hangs."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts" / "gpu"))

import gpu_steps  # noqa: E402

CHECK = str(ROOT / "scripts" / "gpu_check.sh")
HELD_SECONDS, TRANSFER_SECONDS = 1800, 90  # where it is to run; of the latter for each call
MOST_FILES, MOST_BYTES = 8, 16 << 20  # that come back from the machine that this is for

# Run as `fake.py STEP`; KINDS says by step what it does.
FAKE = r"""
import ctypes, importlib.util, json, os, signal, subprocess, sys, time
step, rank = sys.argv[1], int(os.environ.get("RANK", 0))
kind = json.loads(os.environ["KINDS"]).get(step, "passes")
print(f"{step} {rank} begins", flush=True)
if kind == "fails":
    sys.exit("a fake failure")
if kind == "wrong values":
    sys.exit(3)
if kind == "hangs in C":  # with the GIL, and deaf to all signals that can be blocked
    signal.pthread_sigmask(signal.SIG_BLOCK, range(1, signal.NSIG))
    ctypes.PyDLL(None).pause()
if kind == "hangs":
    def here_it_hangs():
        ctypes.PyDLL(None).pause()
    here_it_hangs()
if kind == "leaves a process":
    left = [sys.executable, "-c", "import ctypes; ctypes.CDLL(None).pause()"]
    print("RESULT", subprocess.Popen(left, start_new_session=True).pid, flush=True)
    sys.exit(1)
if kind == "rank 1 fails" and rank != 1:
    ctypes.PyDLL(None).pause()
if kind == "rank 1 fails":
    sys.exit(5)
if kind == "is slow":
    time.sleep(2.2)
if kind == "floods":
    for _ in range(50):
        os.write(1, b"x" * (1 << 20))
if kind == "needs lo" and os.environ.get("NCCL_SOCKET_IFNAME") != "lo":
    sys.exit(1)
print(f"{step} {rank} ends", flush=True)
found = importlib.util.find_spec("pynccl_autograd")
names = ("NCCL_SOCKET_IFNAME", "NCCL_HOSTID", "NCCL_DEBUG", "PYNCCL_LIBRARY", "PYNCCL_CHECK", "WORLD_SIZE")
print("RESULT", json.dumps({"autograd": found and found.origin, **{name: os.environ.get(name) for name in names}}))
"""


class Ended(NamedTuple):
    code: int
    stdout: str
    out: Path
    seconds: float

    def result(self, call: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.out / f"gpu_check_{call}.json").read_text())
        return found

    def steps(self, call: str) -> dict[str, dict[str, Any]]:
        return {step["name"]: step for step in self.result(call)["steps"]}

    def log(self, call: str) -> str:
        return (self.out / f"gpu_check_{call}.log").read_text()

    def assert_few_files(self) -> None:
        files = list(self.out.iterdir())
        assert len(files) <= MOST_FILES and all(file.stat().st_size < MOST_BYTES for file in files)


def environment(folder: Path, kinds: dict[str, str]) -> dict[str, str]:
    fake = folder / "fake.py"
    fake.write_text(FAKE)
    told = {"KINDS": json.dumps(kinds), "GPU_CHECK_FAKE": str(fake), "OUT": str(folder / "out"), "TMPDIR": str(folder)}
    return {**os.environ, **told, "PYTHON": sys.executable}


def check(folder: Path, *arguments: str, kinds: dict[str, str] | None = None) -> Ended:
    """One run of gpu_check.sh."""
    started, env = time.monotonic(), environment(folder, kinds or {})
    done = subprocess.run(
        [CHECK, *arguments],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
        check=False,
    )
    return Ended(done.returncode, done.stdout, folder / "out", time.monotonic() - started)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def runs(pid: int) -> bool:
    """Whether the process is there and no zombie, which nobody may have waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def fakes(folder: Path) -> list[int]:
    """Processes that stand for steps of the run in `folder`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if str(folder / "fake.py").encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ended]:
    yield check(tmp_path_factory.mktemp("everything"))


def test_without_an_argument_all_three_calls_run_and_leave_few_files(everything: Ended) -> None:
    assert everything.code == 0, everything.stdout
    for call in gpu_steps.CALLS:
        for name, step in everything.steps(call).items():
            spared = name.startswith("collectives_2_")
            assert (step["status"], step["reason"]) == ("skipped", "not needed") if spared else "passed", name
    everything.assert_few_files()
    assert len(list(everything.out.iterdir())) == 6


def test_what_only_a_gpu_can_show_comes_before_long_matrices_and_perf(everything: Ended) -> None:
    order = [step["name"] for call in gpu_steps.CALLS for step in everything.result(call)["steps"]]
    first = ("streams_1", "streams_2", "overlap_2", "ends_1", "examples_1", "examples_2")
    long = ("tests_1", "tests_2", "tests_4", "transforms_2", "checked_2", "overhead_2", "perf_1")
    assert max(map(order.index, first)) < min(map(order.index, long))


def test_every_file_of_gpu_tests_is_in_one_step_of_one_rank_or_of_two() -> None:
    """Whichever has processes of its own, perf among them, is run by one rank: others would start as many again."""
    files = {str(path.relative_to(ROOT)) for path in (ROOT / "tests" / "gpu").glob("test_*.py")}
    found: dict[int, list[str]] = {1: [], 2: []}
    for step in [step for call in gpu_steps.CALLS for step in gpu_steps.plan(call, Path("work"), 1)]:
        if "pytest" in step.command and step.ranks in found and not step.env:
            left_out = {word.removeprefix("--ignore=") for word in step.command}
            named = files & set(step.command) or files - left_out
            found[step.ranks] += sorted(named)
    assert all(len(set(names)) == len(names) for names in found.values())
    own = {gpu_steps.ENDS, gpu_steps.PERF}
    assert set(found[1]) == files - {*gpu_steps.OVERLAP, gpu_steps.TRANSFORMS}
    assert set(found[2]) == files - own


def test_every_rank_of_a_step_has_a_log_and_its_environment(everything: Ended) -> None:
    log = everything.log("ranks")
    for rank in range(4):
        assert f"===== tests_4-{rank}\ntests_4 {rank} begins\ntests_4 {rank} ends\n" in log
    results = everything.steps("ranks")["tests_4"]["results"]
    assert [found["NCCL_HOSTID"] for found in results] == [f"rank{rank}" for rank in range(4)]
    assert {(found["WORLD_SIZE"], found["PYNCCL_LIBRARY"]) for found in results} == {("4", "nccl")}
    assert everything.steps("probe")["streams_1"]["results"][0]["NCCL_HOSTID"] is None
    assert everything.steps("probe")["collectives_2"]["results"][0]["NCCL_DEBUG"] == "INFO"
    assert everything.steps("train")["checked_2"]["results"][1]["PYNCCL_CHECK"] == "1"


def test_the_page_says_that_it_was_a_rehearsal(everything: Ended) -> None:
    files = sorted(str(path) for path in everything.out.glob("*.json"))
    done = subprocess.run([CHECK, "--report", *files], capture_output=True, text=True, timeout=30, check=True)
    lines = done.stdout.splitlines()
    assert lines[0].startswith("# GPU check: ")
    assert "nothing of this ran on a GPU" in lines[2]
    assert "    scripts/gpu_check.sh" in lines
    assert "| tests_4 | 4 | **passed** |" in done.stdout
    assert "collectives_2_lo | 2 | **skipped** |" in done.stdout


@pytest.mark.parametrize("call", gpu_steps.CALLS)
def test_the_limits_of_a_call_fit_into_its_budget(call: str) -> None:
    steps = gpu_steps.plan(call, Path("work"), 1)
    assert gpu_steps.CALL_SECONDS <= 510
    assert 100 < sum(step.limit for step in steps if not step.remedy) <= gpu_steps.CALL_SECONDS
    assert len({step.name for step in steps}) == len(steps)


def test_three_calls_fit_into_the_time_for_which_a_machine_is_held() -> None:
    assert len(gpu_steps.CALLS) * gpu_steps.CALL_SECONDS <= HELD_SECONDS - 3 * TRANSFER_SECONDS


def test_the_list_runs_nothing_and_names_every_step(tmp_path: Path) -> None:
    done = check(tmp_path, "--list")
    assert done.code == 0 and not done.out.exists()
    for name in gpu_steps.names():
        assert f"  {name} " in done.stdout


def test_a_single_step_brings_along_what_comes_before_it(tmp_path: Path) -> None:
    done = check(tmp_path, "tests_4", "doctor")
    ran = [name for name, step in done.steps("steps").items() if step["status"] == "passed"]
    assert (done.code, ran) == (0, ["install", "versions", "doctor", "collectives_2", "tests_4"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tests_3"], "tests_3: neither a call nor a step; there are probe, ranks, train, install"),
        (["probe", "tests_4"], "name calls .* or single steps, not both"),
        (["--budget", "0"], "--budget is 0, expected seconds above 0"),
        (["--nccl-env", "NCCL_SOCKET_IFNAME"], "expected NAME=VALUE"),
    ],
)
def test_options_that_cannot_work_are_refused(tmp_path: Path, arguments: list[str], message: str) -> None:
    done = check(tmp_path, *arguments)
    assert done.code == 2 and not done.out.exists()
    assert re.search(message, done.stdout)


def test_a_failure_is_told_and_the_other_steps_run_on(tmp_path: Path) -> None:
    done = check(tmp_path, "doctor", "tests_1", kinds={"doctor": "fails"})
    steps = done.steps("steps")
    assert done.code == 1 and done.result("steps")["failed"] == ["doctor"]
    assert (steps["doctor"]["reason"], steps["tests_1"]["status"]) == ("rank 0 ended with exit code 1", "passed")
    assert "a fake failure" in done.stdout and "a fake failure" in done.log("steps")
    assert "failed: doctor" in done.stdout.splitlines()
    page = subprocess.run(
        [CHECK, "--report", str(done.out / "gpu_check_steps.json")],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    ).stdout
    assert "| doctor | 1 | **failed** |" in page
    assert page.index("## What did not pass") < page.index("### doctor") < page.index("a fake failure")


def test_a_hang_in_c_ends_at_the_limit_with_its_stack_in_the_log(tmp_path: Path) -> None:
    kinds = {"doctor": "hangs in C", "tests_1": "hangs"}
    done = check(tmp_path, "doctor", "tests_1", "perf_1", "--limit", "3", kinds=kinds)
    steps = done.steps("steps")
    assert [steps[name]["status"] for name in ("doctor", "tests_1", "perf_1")] == ["failed", "failed", "passed"]
    assert steps["doctor"]["returncodes"] == [-signal.SIGKILL]
    assert steps["tests_1"]["returncodes"] == [-signal.SIGABRT]
    assert all(steps[name]["reason"] == "not done within 3 s: rank 0 was killed" for name in kinds)
    assert "in here_it_hangs" in done.log("steps") and "in here_it_hangs" in steps["tests_1"]["output"]
    assert done.seconds < 30


def test_once_a_rank_has_failed_the_others_are_ended(tmp_path: Path) -> None:
    done = check(tmp_path, "tests_4", "--grace", "1", kinds={"tests_4": "rank 1 fails"})
    step = done.steps("steps")["tests_4"]
    assert step["reason"] == "rank 1 ended with exit code 5; rank 0, 2, 3 had not ended 1 s later and was killed"
    assert step["returncodes"][1] == 5 and step["status"] == "failed" and step["seconds"] < 20
    assert done.code == 1


def test_what_a_step_leaves_behind_in_a_session_of_its_own_is_ended(tmp_path: Path) -> None:
    done = check(tmp_path, "doctor", kinds={"doctor": "leaves a process"})
    (pid,) = done.steps("steps")["doctor"]["results"]
    wait_until(lambda: not runs(pid))
    assert done.code == 1


def test_a_step_that_no_longer_fits_is_not_run_and_said_so(tmp_path: Path) -> None:
    done = check(tmp_path, "probe", "--limit", "16", "--budget", "6", kinds={"versions": "is slow"})
    steps = done.steps("probe")
    assert steps["install"]["allotted"] < 6.1  # what was left, and not the limit
    assert (steps["versions"]["status"], steps["collectives_2"]["status"]) == ("passed", "not run")
    assert steps["collectives_2"]["reason"].startswith("budget: ")
    assert steps["collectives_2"]["reason"].endswith(" of 6 s left, limit 16 s")
    assert done.code == 3
    assert any(line.startswith("not run: ") and "collectives_2" in line for line in done.stdout.splitlines())


def test_a_step_gets_what_is_left_of_the_budget(tmp_path: Path) -> None:
    done = check(tmp_path, "doctor", "--limit", "11", "--budget", "6", kinds={"doctor": "hangs"})
    step = done.steps("steps")["doctor"]
    assert step["status"] == "failed" and step["allotted"] <= 6
    assert done.seconds < 11


def test_a_flood_is_cut_in_the_middle(tmp_path: Path) -> None:
    done = check(tmp_path, "doctor", "tests_1", kinds={"doctor": "floods"})
    log = done.log("steps")
    assert done.code == 0 and len(log) > 10 << 20
    done.assert_few_files()
    assert "doctor 0 begins\nxxx" in log and "xxxdoctor 0 ends" in log and "tests_1 0 ends" in log
    assert " bytes left out ...]" in log
    assert len(json.dumps(done.result("steps"))) < 100_000


def test_a_call_that_is_killed_leaves_what_it_found(tmp_path: Path) -> None:
    env = environment(tmp_path, {"tests_1": "hangs"})
    path = tmp_path / "out" / "gpu_check_steps.json"

    def status(name: str) -> str:
        found = json.loads(path.read_text())["steps"] if path.exists() else []
        return next((step["status"] for step in found if step["name"] == name), "")

    process = subprocess.Popen([CHECK, "doctor", "tests_1", "perf_1"], env=env, stdout=subprocess.DEVNULL)
    try:
        wait_until(lambda: status("tests_1") == "running" and len(fakes(tmp_path)) == 1)
    finally:
        process.kill()
        process.wait()
    steps = {step["name"]: step for step in json.loads(path.read_text())["steps"]}
    assert [steps[name]["status"] for name in ("doctor", "tests_1", "perf_1")] == ["passed", "running", "not run"]
    assert steps["perf_1"]["reason"] == "not reached"
    wait_until(lambda: not fakes(tmp_path))


def test_a_call_that_is_terminated_ends_its_step_and_says_so(tmp_path: Path) -> None:
    env = environment(tmp_path, {"install": "hangs"})
    path = tmp_path / "out" / "gpu_check_steps.json"
    process = subprocess.Popen([CHECK, "doctor"], env=env, stdout=subprocess.PIPE, text=True)
    wait_until(lambda: path.exists() and len(fakes(tmp_path)) == 1)
    process.terminate()
    assert process.communicate(timeout=30)[0].endswith("interrupted\n")
    assert process.returncode == 130
    first = json.loads(path.read_text())["steps"][0]
    assert (first["status"], first["reason"]) == ("failed", "interrupted")
    assert not fakes(tmp_path)


def test_the_settings_that_let_two_ranks_meet_are_found_and_kept(tmp_path: Path) -> None:
    kinds = dict.fromkeys(gpu_steps.names(), "needs lo") | dict.fromkeys(("install", "versions"), "passes")
    done = check(tmp_path, "ranks", kinds=kinds)
    steps = done.steps("ranks")
    assert done.code == 0, done.stdout
    assert done.result("ranks")["nccl_env"] == {"NCCL_SOCKET_IFNAME": "lo"}
    assert steps["collectives_2"]["status"] == "worked around"
    assert steps["collectives_2"]["reason"].endswith("; works with NCCL_SOCKET_IFNAME=lo")
    assert (steps["collectives_2_lo"]["status"], steps["collectives_2_cumem"]["status"]) == ("passed", "skipped")
    assert steps["tests_4"]["results"][3]["NCCL_SOCKET_IFNAME"] == "lo"
    assert "for the other calls: --nccl-env NCCL_SOCKET_IFNAME=lo" in done.stdout.splitlines()


def test_the_settings_of_another_call_can_be_handed_on(tmp_path: Path) -> None:
    done = check(tmp_path, "collectives_2", "--nccl-env", "NCCL_SOCKET_IFNAME=lo", kinds={"collectives_2": "needs lo"})
    assert done.code == 0 and done.steps("steps")["collectives_2"]["status"] == "passed"


def test_where_two_ranks_do_not_meet_no_other_step_waits_for_them(tmp_path: Path) -> None:
    kinds = {name: "fails" for name in gpu_steps.names() if name.startswith("collectives_2")}
    done = check(tmp_path, "tests_2", "hang_2", "doctor", kinds=kinds)
    steps = done.steps("steps")
    assert {steps[name]["reason"] for name in ("tests_2", "hang_2")} == {
        "two ranks on one GPU do not reach each other: see collectives_2"
    }
    assert (steps["doctor"]["status"], done.code) == ("passed", 1)


def test_where_two_ranks_meet_and_compute_nonsense_the_other_steps_run(tmp_path: Path) -> None:
    done = check(tmp_path, "tests_2", kinds={"collectives_2": "wrong values"})
    steps = done.steps("steps")
    assert [steps[name]["status"] for name in ("collectives_2", "tests_2")] == ["failed", "passed"]


def test_without_pip_the_project_is_imported_where_it_lies(tmp_path: Path) -> None:
    done = check(tmp_path, "doctor", kinds={"install": "fails"})
    steps = done.steps("steps")
    assert done.code == 0 and steps["install"]["status"] == "worked around"
    assert "imported by PYTHONPATH instead" in steps["install"]["reason"]
    assert steps["doctor"]["results"][0]["autograd"].endswith("/site/pynccl_autograd/__init__.py")


def test_without_a_gpu_every_step_is_skipped_with_the_reason(tmp_path: Path) -> None:
    env = {**environment(tmp_path, {}), "GPU_CHECK_FAKE": "", "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    done = subprocess.run([CHECK], env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and done.stdout.startswith("no GPU, so nothing to check: ")
    for call in gpu_steps.CALLS:
        found = json.loads((tmp_path / "out" / f"gpu_check_{call}.json").read_text())
        assert {(step["status"], bool(step["reason"])) for step in found["steps"]} == {("skipped", True)}
