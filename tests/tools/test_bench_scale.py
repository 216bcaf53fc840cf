"""scripts/bench_scale.py: a hang among many ranks is reported, and what a rank asks of the store stays the same."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench_scale.py"

pytestmark = pytest.mark.skipif(not (shutil.which("cc") or shutil.which("gcc")), reason="no C compiler")


def run(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def test_operations_do_not_grow_with_the_ranks_and_the_missing_one_is_named() -> None:
    quick = ["--processes", "2", "--timeout", "0.5", "--interval", "0.2", "--json"]
    done = run("--ranks", "8", "64", *quick)
    assert done.returncode == 0, done.stderr
    few, many = json.loads(done.stdout)
    for row in (few, many):
        assert row["texts"] == [f"rank {row['ranks'] - 1} never entered #4: data.py:41 next_batch"]
        assert row["reports"] == row["stuck"] == row["ranks"] - 1
        assert row["last report seconds"] < 5
        assert (row["asked"], row["asked in an interval"]) == (1, 1)
        assert row["split"] == 0
        assert row["roster"] == 2
        assert row["quiet poll"] == pytest.approx(1, abs=0.5)  # a poll may be half way when it is counted
    assert abs(many["bootstrap"] - few["bootstrap"]) <= 1
    assert many["report"] < few["report"] + 4
    assert many["report, reporter"] < few["report, reporter"] + 10  # it may have to read the answers once more


def test_a_job_of_one_rank_is_refused() -> None:
    done = run("--ranks", "1")
    assert done.returncode == 2
    assert "--ranks is at least 2" in done.stderr
