"""scripts/train.py: it learns, agrees with the unsharded model, saves a checkpoint and rejects bad options."""

from __future__ import annotations

import contextlib
import io
import math
import os
import re
import sys
from pathlib import Path

import pytest
import torch
from ranks import RankPool

from pynccl import Communicator

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from train import read_options, train
from train_model import ModelConfig, Transformer, Windows, read_text

SMALL = ["--device", "cpu", "--layers", "2", "--width", "32", "--heads", "4", "--seq", "32", "--batch", "4"]


def run_training(comm: Communicator, words: list[str]) -> tuple[int, str, str]:
    """Return its exit code, output and errors."""
    os.environ |= {"WORLD_SIZE": str(comm.size), "RANK": str(comm.rank)}
    sys.argv = ["train.py", *SMALL, *words]
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = train(read_options(), comm)
    return code, out.getvalue(), err.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize("model", ["own", "llama"])
def test_training_learns_agrees_with_the_unsharded_model_and_saves(ranks: RankPool, model: str, tmp_path: Path) -> None:
    if model == "llama":
        pytest.importorskip("transformers")
    words = ["--check", "--steps", "12", "--lr", "1e-2", "--out", str(tmp_path)]
    words += ["--model", "llama"] if model == "llama" else []
    (code, output, err), (_, other_output, _) = ranks.run(2, run_training, words, timeout=300)
    assert (code, other_output) == (0, ""), err
    rows = re.findall(r"^ +(\d+) +([\d.]+) +([\d.]+) +(\S+)$", output, re.MULTILINE)
    assert [int(step) for step, *_ in rows] == list(range(1, 13))
    for _, sharded, unsharded, difference in rows:
        assert float(sharded) == pytest.approx(float(unsharded), rel=1e-4) and float(difference) < 1e-4
    assert float(rows[-1][1]) < float(rows[0][1]) - 1
    assert "the sharded and the unsharded model agree" in output
    if model == "llama":
        return
    assert float(rows[0][1]) == pytest.approx(math.log(256), abs=0.2)  # the untrained model predicts bytes uniformly
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    model_of_checkpoint = Transformer(ModelConfig(**saved["config"]))
    model_of_checkpoint.load_state_dict(saved["model"])
    held_out = Windows(read_text(32)[1], 32, 4, "cpu")
    with torch.no_grad():
        losses = [model_of_checkpoint(*held_out.next()).item() for _ in range(8)]
    assert sum(losses) / 8 == pytest.approx(saved["validation_loss"], rel=1e-5)
    assert f"{saved['validation_loss']:.4f} on held-out text" in output
    pytest.importorskip("matplotlib")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_invalid_options_print_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "0")  # rank 0 writes
    for options, message in (
        ("--heads 6", "--heads 6: --width 32 must be a multiple of 12, so that each head"),
        ("--heads 2", "argument --heads: 2 is not divisible by 4 ranks"),
        ("--seq 30", "argument --seq: 30 is not divisible by 4 ranks"),
        ("--seq 8000000", "--seq 8000000 needs at least 80000010"),
        ("--device tpu", "--device is 'tpu', expected cpu, cuda, or cuda:0"),
        ("--out /dev/null", "/dev/null/checkpoint.pt: File exists; pass a writable file"),
    ):
        monkeypatch.setattr(sys, "argv", ["train.py", *SMALL, "--out", str(tmp_path), *options.split()])
        with pytest.raises(SystemExit) as exit_error:
            read_options()
        output = capsys.readouterr().err
        assert (exit_error.value.code, len(output.splitlines())) == (2, 1), output
        assert output.startswith("train.py: error: ") and message in output
