"""`python -m pynccl perf` on one GPU: timed with events, data checked. In separate processes of one rank."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gpu.launches import run_process

pytestmark = pytest.mark.usefixtures("own_launch")


@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "send_recv"])
def test_one_gpu(tmp_path: Path, collective: str) -> None:
    file = tmp_path / "perf.json"
    words = [collective, "-b", "1K", "-e", "1M", "-f", "32", "-n", "5", "-c", "1", "--json", str(file)]
    done = run_process(["-m", "pynccl", "perf", *words])
    assert done.code == 0, done.err
    found = json.loads(file.read_text())
    assert (found["library"], found["clock"], found["summary"]["wrong"]) == ("NCCL", "CUDA events", 0)
    assert all(row["out_of_place"]["time_s"] > 0 for row in found["rows"])
