"""scripts/gpu/gpu_check.py runs every GPU test file in a step."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts" / "gpu"))

import gpu_check  # noqa: E402


def test_every_gpu_test_file_is_in_a_step() -> None:
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests" / "gpu").glob("test_*.py")}
    steps = [step for steps in gpu_check.calls(Path("work"), 1).values() for step in steps]
    assert files <= {word for step in steps if "pytest" in step.command for word in step.command}
