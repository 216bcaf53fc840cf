"""scripts/train.py --model llama as a user runs it, and how few lines a user writes."""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import TORCHRUN

pytest.importorskip("transformers")

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))

from train import read_options  # noqa: E402

pytestmark = pytest.mark.slow

MOST_LINES = 22


def run(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *TORCHRUN, "--nproc-per-node=2", str(SCRIPTS / "train.py"), "--model", "llama", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def test_it_learns_and_agrees_with_the_unsharded_model(tmp_path: Path) -> None:
    sizes = ["--layers", "1", "--width", "32", "--heads", "4", "--seq", "32", "--batch", "4", "--lr", "3e-3"]
    done = run("--check", "--describe", "--steps", "20", *sizes, "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^ +(\d+) +([\d.]+) +([\d.]+) +(\S+)$", done.stdout, re.MULTILINE)
    assert [int(step) for step, *_ in rows] == [1, *range(2, 21, 2)]
    assert all(float(difference) < 1e-4 for *_, difference in rows)
    assert float(rows[-1][1]) < float(rows[0][1]) - 1
    assert "the sharded and the unsharded model agree" in done.stdout
    assert re.search(r"lm_head.weight +VocabParallelHead +\[256, 32\] +is model.embed_tokens.weight", done.stdout)
    assert (tmp_path / "loss.png").stat().st_size > 10_000


def test_what_cannot_work_is_said_at_once() -> None:
    done = run("--seq", "33")
    assert done.returncode != 0 and "error: argument --seq: 33 is not divisible by 2 ranks" in done.stderr


def parsed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ranks: int, options: str) -> argparse.Namespace:
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    monkeypatch.setenv("RANK", str(ranks - 1))
    monkeypatch.setattr(sys, "argv", ["train.py", "--model", "llama", "--out", str(tmp_path), *options.split()])
    return read_options()


@pytest.mark.parametrize(
    ("ranks", "options", "message"),
    [
        (1, "--heads 4 --width 20", "argument --width: 20 is not a multiple of 8, twice --heads 4"),
        (2, "--heads 6", "argument --width: 128 is not a multiple of 12, twice --heads 6"),
        (2, "--heads 5 --width 40", "argument --heads: 5 is not divisible by 2 ranks"),
        (4, "--heads 6 --width 48", "argument --heads: 6 is not divisible by 4 ranks"),
        (2, "--seq 33", "argument --seq: 33 is not divisible by 2 ranks"),
        (1, "--heads 8 --kv-heads 3", "argument --kv-heads: 3 does not divide --heads 8"),
        (1, "--heads 4 --kv-heads 8", "argument --kv-heads: 8 does not divide --heads 4"),
        (2, "--heads 6 --width 48 --kv-heads 3", "argument --kv-heads: 3 on 2 ranks: expected one to be a multiple"),
        (2, "--kv-heads 0", "argument --kv-heads: '0': expected a whole number, 1 or more"),
    ],
)
def test_sizes_that_cannot_be_cut_are_an_error_of_an_option(
    ranks: int,
    options: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    with pytest.raises(SystemExit) as ended:
        parsed(monkeypatch, tmp_path, ranks, options)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith(f"train.py: error: {message}") and len(said.splitlines()) == 1


@pytest.mark.parametrize(
    ("ranks", "options", "kv_heads"),
    [
        (2, "", 2),
        (2, "--kv-heads 4", 4),
        (2, "--kv-heads 1", 1),
        (1, "--heads 5 --width 40", 1),
        (1, "--heads 1", 1),
        (2, "--heads 6 --width 48", 1),
        (4, "--heads 4", 2),
    ],
)
def test_heads_of_keys_and_values_are_half_of_the_heads_where_that_fits(
    ranks: int, options: str, kv_heads: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert parsed(monkeypatch, tmp_path, ranks, options).kv_heads == kv_heads


def test_heads_that_do_not_halve_train(tmp_path: Path) -> None:
    sizes = ["--layers", "1", "--width", "48", "--heads", "6", "--seq", "32", "--batch", "4"]
    done = run("--check", "--steps", "2", *sizes, "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "the sharded and the unsharded model agree" in done.stdout


def test_a_user_writes_few_lines() -> None:
    """From the model to the end of training: what `tune` has, as it is written."""
    source = (SCRIPTS / "recipes" / "hugging_face.py").read_text()
    (tune,) = (node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == "tune")
    assert tune.end_lineno is not None
    lines = [line for line in source.splitlines()[tune.lineno - 1 : tune.end_lineno] if line.strip()]
    assert 5 < len(lines) <= MOST_LINES
    assert any("ad.parallelize(model, comm, ad.plans.llama)" in line for line in lines)
