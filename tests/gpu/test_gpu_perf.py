"""`python -m pynccl perf` on one GPU: times by events, data checked, CUDA graphs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "send_recv"])
@pytest.mark.parametrize("way", [[], ["--plan"], ["-G", "2"]], ids=["plain", "plan", "graph"])
def test_one_gpu(tmp_path: Path, collective: str, way: list[str]) -> None:
    file = tmp_path / "perf.json"
    words = [collective, "-b", "1K", "-e", "1M", "-f", "32", "-n", "5", "-c", "1", "--json", str(file), *way]
    command = [sys.executable, "-m", "pynccl", "perf", *words]
    env = {**os.environ, "PYNCCL_LIBRARY": "nccl"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=env)
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    assert (found["library"], found["clock"], found["summary"]["wrong"]) == ("NCCL", "CUDA events", 0)
    assert all(row["out_of_place"]["time_s"] > 0 for row in found["rows"])
