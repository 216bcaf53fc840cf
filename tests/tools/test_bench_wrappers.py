"""scripts/bench/overhead.py --wrappers: what it prints, and what it says to wrong options."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPTS = Path(__file__).parents[2] / "scripts"


def run(script: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPTS / script), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)


def test_times_of_each_way_are_printed_fastest_first() -> None:
    done = run("bench/overhead.py", "--wrappers", "--rounds", "3", "--calls", "50")
    assert done.returncode == 0, done.stderr
    head, *rows = done.stdout.splitlines()
    assert head.split("  ")[-1].strip() == "x bare ctypes"
    ratios = [float(row.split()[-1]) for row in rows]
    assert ratios == sorted(ratios) and ratios[0] > 0
    names = [re.split(r"  +", row)[0] for row in rows]
    assert {"bare ctypes", "plan()", "comm.all_reduce(t, t)", "pynccl.compat.vllm all_reduce(t, t)"} <= {*names}


def test_a_folder_without_a_wheel_is_a_wrong_usage(tmp_path: Path) -> None:
    done = run("bench/overhead.py", "--wrappers", "--vllm", str(tmp_path))
    assert done.returncode == 2
    assert f"--vllm {tmp_path}: there is no vllm/distributed/device_communicators/pynccl" in done.stderr
    assert "Traceback" not in done.stderr
