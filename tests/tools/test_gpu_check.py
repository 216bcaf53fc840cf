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


def test_every_file_of_gpu_tests_is_in_a_step() -> None:
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests" / "gpu").glob("test_*.py")}
    steps = [step for steps in gpu_check.calls(Path("work"), 1).values() for step in steps]
    assert files <= {word for step in steps if "pytest" in step.command for word in step.command}


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
    assert "not done within 5 s; rank 0 was killed" in steps[1].reason and "in here_it_hangs" in steps[1].output
    page = (tmp_path / "out" / "gpu_probe.md").read_text()
    assert "| fails | 0 | failed |" in page and "a failure" in page and "a result" in page
