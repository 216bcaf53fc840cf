"""scripts/gpu/gpu_check.py: every GPU test is in a step; a step that fails or hangs is told, and the others run on."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts" / "gpu"))

import gpu_check  # noqa: E402

HANG = """
import ctypes
def here_it_hangs():
    ctypes.PyDLL(None).pause()  # with the GIL
here_it_hangs()
"""


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


def test_without_a_gpu_nothing_is_run_and_the_reason_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYNCCL_LIBRARY", "")
    monkeypatch.setattr(gpu_check, "gpu_problem", lambda: "there is no driver")
    monkeypatch.setattr(sys, "argv", ["gpu_check.py"])
    assert gpu_check.main() == 0
    assert capsys.readouterr().out == "no GPU, so nothing to check: there is no driver\n"


@pytest.mark.slow
def test_a_step_that_fails_or_hangs_is_told_and_the_others_run_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    programs = {"fails": "raise SystemExit('a failure')", "hangs": HANG, "prints": "print('a result')"}
    steps = [gpu_check.Step(name, 0, 5.0, ["-c", code]) for name, code in programs.items()]
    steps.append(gpu_check.Step("long", 0, 1000.0, ["-c", ""]))
    gpu_check.run("probe", steps, tmp_path, 1, 100.0)
    assert [step.status for step in steps] == ["failed", "failed", "passed", "not run"]
    assert (
        steps[1].reason.startswith("not done within 5 s; rank 0 was killed") and "in here_it_hangs" in steps[1].output
    )
    assert " s are left, its limit is 1000 s" in steps[3].reason
    page = (tmp_path / "out" / "gpu_probe.md").read_text()
    assert "| fails | 0 | failed |" in page and "a failure" in page and "a result" in page
    assert "===== fails-0\na failure" in (tmp_path / "out" / "gpu_probe.log").read_text()
