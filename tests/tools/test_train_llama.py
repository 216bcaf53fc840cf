"""scripts/train.py --model llama as a user runs it, and how few lines a user writes."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import TORCHRUN

pytest.importorskip("transformers")

SCRIPTS = Path(__file__).parents[2] / "scripts"

pytestmark = pytest.mark.slow

MOST_LINES = 22


def run(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *TORCHRUN, "--nproc-per-node=2", str(SCRIPTS / "train.py"), "--model", "llama", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def test_it_learns_and_agrees_with_the_unsharded_model(tmp_path: Path) -> None:
    sizes = ["--layers", "1", "--width", "32", "--heads", "4", "--seq", "32", "--batch", "4", "--lr", "3e-3"]
    done = run("--check", "--steps", "20", *sizes, "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^ +(\d+) +([\d.]+) +([\d.]+) +(\S+)$", done.stdout, re.MULTILINE)
    assert [int(step) for step, *_ in rows] == [1, *range(2, 21, 2)]
    assert all(float(difference) < 1e-4 for *_, difference in rows)
    assert float(rows[-1][1]) < float(rows[0][1]) - 1
    assert "the sharded and the unsharded model agree" in done.stdout
    assert (tmp_path / "loss.png").stat().st_size > 10_000


def test_what_cannot_work_is_said_at_once() -> None:
    done = run("--seq", "33")
    assert done.returncode != 0 and "error: argument --seq: 33 is not divisible by 2 ranks" in done.stderr


def test_a_user_writes_few_lines() -> None:
    """From the model to the end of training: what `tune` has, as it is written."""
    source = (SCRIPTS / "recipes" / "hugging_face.py").read_text()
    (tune,) = (node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == "tune")
    assert tune.end_lineno is not None
    lines = [line for line in source.splitlines()[tune.lineno - 1 : tune.end_lineno] if line.strip()]
    assert 5 < len(lines) <= MOST_LINES
    assert any("ad.parallelize(model, comm, ad.plans.llama)" in line for line in lines)
