"""scripts/bench/data_parallel.py runs, and measures what it says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "bench" / "data_parallel.py"


def run(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *options], capture_output=True, text=True, timeout=100, check=False
    )


def test_every_way_is_timed_and_has_the_same_gradients(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    sizes = ["--width", "16", "--layers", "3", "--rows", "64", "--rounds", "3", "--bucket-mb", "0.01"]
    done = run(*sizes, "--markdown", "--json", str(file))
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(file.read_text())
    plain, link = found["rows"]
    assert (plain["kind"], link["kind"]) == ("plain", "link")
    assert plain["seconds"].keys() == {"compute", "ours", "ddp"}
    assert link["seconds"].keys() == {"compute", "ours", "ddp", "comm"}
    for row in (plain, link):
        assert row["difference"] < 1e-5
        assert row["bytes"] == 3 * 4 * (2 * 16 + 2 * 16 * 64 + 64 + 16)
        low, median, high = row["ddp / ours"]
        assert low <= median <= high
    # Neither can end sooner than the link lets it: so both go over it.
    assert link["link"].startswith("latency=50us,bandwidth=")
    seconds_per_byte = 1 / (float(link["link"].partition("bandwidth=")[2].removesuffix("MB/s")) * 1e6)
    least = link["bytes"] * seconds_per_byte
    assert min(link["seconds"][name] for name in ("ours", "ddp", "comm")) > least > 0
    assert "| way | ranks |" in done.stdout and "| link | 2 | 16 x 3 |" in done.stdout


def test_layers_may_sleep() -> None:
    done = run("--width", "8", "--layers", "3", "--rows", "2", "--rounds", "2", "--asleep", "3")
    assert done.returncode == 0, done.stderr
    *_, plain, link = done.stdout.splitlines()
    for row in (plain, link):
        cells = row.split()
        assert cells[2:5] == ["8", "x", "3"] and float(cells[7]) > 3 * 3  # slept: milliseconds of "compute"
        assert float(cells[-1]) < 1e-5


@pytest.mark.parametrize("wrong", [["--ranks", "1"], ["--balance", "1"]])
def test_wrong_options_are_refused(wrong: list[str]) -> None:
    done = run(*wrong)
    assert done.returncode == 2
    assert "expected" in done.stderr
