"""scripts/gpu/gpu_check.py: limits, the end of hangs, what is written; and its steps, as far as they go on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts" / "gpu"))

import gpu_check  # noqa: E402
import torch  # noqa: E402
from gpu.launches import alone, as_ranks  # noqa: E402
from gpu.overlapped import Timeline  # noqa: E402
from ranks import RankPool  # noqa: E402

import pynccl_autograd as ad  # noqa: E402
from pynccl import Communicator  # noqa: E402
from pynccl.comm.observing import observing  # noqa: E402
from pynccl_autograd import OverlapConfig  # noqa: E402

CHECK = [sys.executable, "scripts/gpu/gpu_check.py"]
ON_HOST = {"PYNCCL_LIBRARY": "host", "OMP_NUM_THREADS": "1"}
HELD_SECONDS, TRANSFER_SECONDS = 1800, 90  # for which a machine is held; of the latter for each call
HANG = """
import ctypes, os, signal, sys
def here_it_hangs():
    ctypes.PyDLL(None).pause()  # with the GIL
if os.environ.get("RANK", "0") == "1":
    sys.exit(5)
here_it_hangs()
"""


def step_of(code: str, ranks: int = 0, seconds: float = 60.0) -> gpu_check.Step:
    return gpu_check.Step("it", ranks, seconds, ["-c", code])


def perform(step: gpu_check.Step, work: Path, limit: float = 90.0) -> str:
    """Run it as gpu_check does, on the host library; what its processes have printed."""
    step.env.update(ON_HOST)
    return "".join(log.read_text() for log in gpu_check.perform(step, work, 0, limit))


def check(out: Path, *options: str, **env: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "OUT": str(out), **env}
    return subprocess.run(
        [*CHECK, *options], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100, check=False
    )


def test_every_file_of_gpu_tests_is_in_one_step_of_one_rank_or_of_two() -> None:
    """Whichever has processes of its own, perf among them, is run by one rank: others would start as many again."""
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests" / "gpu").glob("test_*.py")}
    found: dict[int, list[str]] = {1: [], 2: []}
    for step in [step for steps in gpu_check.calls(Path("work"), 1).values() for step in steps]:
        if "pytest" in step.command and step.ranks in found and not step.env:
            found[step.ranks] += sorted(files & set(step.command))
    assert all(len(set(names)) == len(names) for names in found.values())
    assert set(found[1]) == files - {*gpu_check.files("overlap_streams", "effects", "transforms")}
    assert set(found[2]) == files - {*gpu_check.files("ends", "perf")}


def test_the_limits_of_a_call_fit_into_its_budget_and_all_calls_into_the_time_of_a_machine() -> None:
    every = gpu_check.calls(Path("work"), 1)
    for steps in every.values():
        assert 100 < sum(step.seconds for step in steps) <= gpu_check.CALL_SECONDS <= 510
        assert len({step.name for step in steps}) == len(steps)
    assert len(every) * gpu_check.CALL_SECONDS <= HELD_SECONDS - len(every) * TRANSFER_SECONDS


def test_a_hang_in_c_ends_at_the_limit_with_its_stack_in_the_log(tmp_path: Path) -> None:
    step = step_of(HANG)
    printed = perform(step, tmp_path, 3.0)
    assert step.status == "failed" and step.reason.startswith("not done within 3 s; rank 0 was killed")
    assert "in here_it_hangs" in printed and "in here_it_hangs" in step.output and step.took < 20


def test_a_failure_is_told_and_the_other_steps_run_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    steps = [step_of("raise SystemExit('a failure')"), step_of("print('a result')"), step_of("", seconds=1000.0)]
    for number, step in enumerate(steps):
        step.name = f"step_{number}"
    gpu_check.run("probe", steps, tmp_path, 1, 100.0)
    assert [step.status for step in steps] == ["failed", "passed", "not run"]
    assert " s are left, its limit is 1000 s" in steps[2].reason
    page = (tmp_path / "out" / "gpu_probe.md").read_text()
    assert "| step_0 | 0 | failed |" in page and "a failure" in page and "a result" in page
    assert "===== step_0-0\na failure" in (tmp_path / "out" / "gpu_probe.log").read_text()


def test_without_a_gpu_nothing_is_run_and_the_reason_is_said(tmp_path: Path) -> None:
    done = check(tmp_path / "out", PYNCCL_LIBRARY="")
    assert done.returncode == 0 and done.stdout.startswith("no GPU, so nothing to check: ")
    assert not (tmp_path / "out").exists()


def test_a_process_that_a_gpu_test_starts_is_not_a_rank_of_its_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would wait for rank 0 of two, or claim to be it a second time."""
    place = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "NCCL_HOSTID": "rank1"}
    for name, value in {**place, "MASTER_PORT": str(gpu_check.free_port())}.items():
        monkeypatch.setenv(name, value)
    words = ["all_reduce", "-b", "8", "-e", "8", "-n", "2", "-c", "1"]
    done = alone(["-m", "pynccl", "perf", *words], 30, PYNCCL_LIBRARY="host")
    assert (done.code, "# rank 1" in done.out) == (0, False), done.err
    names = "import os; print(*(os.environ[name] for name in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'NCCL_HOSTID')))"
    ended = as_ranks(["-c", names], 2)
    assert [one.out for one in ended] == ["0 2 0 rank0\n", "1 2 0 rank1\n"]


def timeline_of(comm: Communicator) -> tuple[int, int]:
    """How many collectives and matmuls the GPU tests' observer sees of a layer that overlaps."""
    with observing(timeline := Timeline()):
        layer = ad.RowParallelLinear(8, 6, comm, overlap=OverlapConfig("slices", chunks=4))
        layer(torch.ones(8, 8 // comm.size)).sum().backward()
    return len(timeline.on("comm")), len(timeline.on("main", "second"))


def test_the_observer_of_gpu_tests_takes_all_that_it_is_told(ranks: RankPool) -> None:
    for collectives, matmuls in ranks.run(2, timeline_of):
        assert collectives == 8 and matmuls >= 4  # of both passes
