"""scripts/bench/data_parallel.py runs, and measures what it says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "bench" / "data_parallel.py"


def run(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *options], capture_output=True, text=True, timeout=100, check=False
    )


def test_every_way_is_timed_and_has_the_same_gradients() -> None:
    sizes = ["--width", "16", "--layers", "3", "--rows", "64", "--rounds", "3", "--bucket-mb", "0.01"]
    done = run(*sizes, "--markdown")
    assert done.returncode == 0, done.stderr
    head, _, plain, link = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines()[2:]]
    assert head[:2] == ["way", "ranks"] and (plain[0], link[0]) == ("plain", "link")
    for row in (plain, link):
        found = dict(zip(head, row, strict=True))
        assert (found["ranks"], found["width x layers"], found["bucket MB"]) == ("2", "16 x 3", "0.01")
        assert all(float(found[name]) > 0 for name in ("compute", "ours", "DDP"))
        assert float(found["difference"]) < 1e-5
        assert bool(found["comm"]) is bool(found["hidden, ours"]) is (row is link)
        median, low, high = map(float, re.findall(r"[\d.]+", found["DDP / ours"]))
        assert low <= median <= high


def test_layers_may_sleep() -> None:
    done = run("--width", "8", "--layers", "3", "--rows", "2", "--rounds", "2", "--asleep", "3")
    assert done.returncode == 0, done.stderr
    *_, plain, link = done.stdout.splitlines()
    for row in (plain, link):
        cells = row.split()
        assert cells[2:5] == ["8", "x", "3"] and float(cells[7]) > 3 * 3  # slept: milliseconds of "compute"
        assert float(cells[-1]) < 1e-5
