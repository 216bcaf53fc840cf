"""README: CI runs its two commands as they stand, and the report of the job that hangs is real."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pages
import pytest

README = pages.ROOT / "README.md"
BLOCKS = pages.blocks(README)
SECONDS = 100.0


def test_ci_runs_the_commands_of_the_first_block_as_they_stand() -> None:
    lines = [line.split(" #")[0].strip() for line in BLOCKS[0].text.splitlines()]
    clone, *commands = lines
    steps = [re.sub(r"^timeout \d+ ", "", line) for line in (pages.ROOT / ".ci" / "run").read_text().splitlines()]
    assert [command for command in commands if command.startswith("make") and command not in steps] == []
    assert commands == ["make demo", "make test", "pip install ."]
    repository = re.search(r'^Repository = "(.+)"$', (pages.ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert repository and clone == f"git clone {repository[1]} && cd {repository[1].rpartition('/')[2]}"


def test_the_readme_is_short() -> None:
    assert len(README.read_text().splitlines()) <= 150


LAUNCH = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2", "example.py"]
ENVIRONMENT = {**os.environ, "COLUMNS": "100", "PYNCCL_LIBRARY": "host", "OMP_NUM_THREADS": "1"}


@pytest.mark.timeout(2 * SECONDS)
def test_the_report_of_the_job_that_hangs_is_what_hang_prints(tmp_path: Path) -> None:
    """Of the page's program with torch.distributed, in which rank 1 sleeps before its last step."""
    (program,) = (block.text for block in BLOCKS if 'init_process_group("pynccl")' in block.text)
    sleep = re.search(r"With `(.*sleep.*?)` above `model", README.read_text())
    assert sleep
    (tmp_path / "example.py").write_text(program.replace("    model(", f"    {sleep[1]}\n    model("))
    shown = re.search(r"^    (rank 1 never .*\n)    ( .*\n)    (rank 1: .*\n)", README.read_text(), re.MULTILINE)
    assert shown
    environment = {**ENVIRONMENT, "PYNCCL_WATCH_DIR": str(tmp_path / "watch")}
    with open(tmp_path / "log", "w") as log:
        job = subprocess.Popen([sys.executable, *LAUNCH], cwd=tmp_path, env=environment, stdout=log, stderr=log)
    try:
        said, end = "", time.monotonic() + SECONDS
        while without_numbers(said) != without_numbers("".join(shown.groups())) and job.poll() is None:
            assert time.monotonic() < end, said
            hang: Any = {"env": environment, "capture_output": True, "text": True, "timeout": SECONDS}
            said = subprocess.run([sys.executable, "-m", "pynccl", "hang"], check=False, **hang).stdout
            said = "".join(said.splitlines(keepends=True)[:3])
        assert job.poll() is None, (tmp_path / "log").read_text()
    finally:
        job.terminate()
        job.wait(SECONDS)


def without_numbers(report: str) -> str:
    """Of calls and seconds: torch's versions make different numbers of calls before the first step."""
    return re.sub(r"#\d+|[\d.]+ s there", "N", report)
