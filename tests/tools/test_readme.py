"""The README's examples run as they stand there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import TORCHRUN

README = Path(__file__).parents[2] / "README.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


@pytest.mark.parametrize(
    ("example", "expected"),
    [
        (0, r"rank 0 of 2 on cpu> \[1\.0, 1\.0, 1\.0, 1\.0, 1\.0, 1\.0, 1\.0, 1\.0\]"),
        (2, r"3\.3892\d* 4,293,376 bytes on this rank, 8,585,984 in the whole model"),
        (
            3,
            r"^layer +pass +chosen.*\nRowParallelLinear\(256, 64\) #1  forward   slices 4 .*\n.*backward  slices 4 +1",
        ),
        (1, r"^2676\.\d+ 25\.84\d+ (\d\.\d+e-1[5-9]|0\.0)\n$"),
    ],
)
def test_example_runs_under_torchrun_as_it_says(example: int, expected: str, tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(EXAMPLES[example])
    assert len(EXAMPLES[example].strip().splitlines()) <= 12
    command = [sys.executable, *TORCHRUN, "--nproc-per-node=2", str(script)]
    environment = {**os.environ, "PYNCCL_LIBRARY": "host", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(expected, done.stdout), done.stdout
