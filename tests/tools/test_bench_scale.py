"""scripts/bench/scale.py: the watchdogs of a job report a hang, and name the one that is missing."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench" / "scale.py"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (shutil.which("cc") or shutil.which("gcc")), reason="no C compiler"),
]


def run(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def test_every_rank_that_waits_says_which_one_is_missing_and_where() -> None:
    done = run("--ranks", "16", "--processes", "1", "--timeout", "0.5")
    assert done.returncode == 0, done.stderr
    (row,) = re.findall(r"^\| 16 \| 15 \| [\d.]+ \| ([\d.]+) \|$", done.stdout, re.MULTILINE)
    assert float(row) < 5
    said = done.stdout.partition("ranks that wait have said:\n")[2]
    text = re.sub(r"\d+\.\d s there", "N s there", said).strip()
    line = r"scale\.py:\d+"
    call = rf"all_reduce #4 \(comm 'world', 16 ranks, FLOAT32 x 1, {line}\)"
    assert len(re.findall(rf"rank 15 never entered {call}; 15 ranks have waited", text)) >= 1
    assert len(re.findall("rank 15 never entered", text)) == len(re.findall("never entered", text))
    place = rf"last completed #3; its main thread is in {line} next_batch"
    assert re.search(rf"\nrank 15: process alive, {place}$", text, re.MULTILINE)


def test_a_job_of_one_rank_is_refused() -> None:
    done = run("--ranks", "1")
    assert done.returncode == 2
    assert "argument --ranks: '1': expected a whole number from 2" in done.stderr
