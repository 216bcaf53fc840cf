"""scripts/train.py as a user runs it: it learns, agrees with the unsharded model, saves, refuses, and never hangs."""

from __future__ import annotations

import argparse
import contextlib
import io
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ranks import RankPool

from pynccl import Communicator

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))

from train import Losses, read_options, train  # noqa: E402
from train_model import ModelConfig, Transformer, Windows, read_text  # noqa: E402

SMALL = ["--device", "cpu", "--layers", "2", "--width", "32", "--heads", "4", "--seq", "32", "--batch", "4"]
SECONDS = 100.0  # of patience, on a busy machine


def trained(comm: Communicator, words: list[str]) -> tuple[int, str, str]:
    """Its exit code, what it prints, and its errors."""
    os.environ |= {"WORLD_SIZE": str(comm.size), "RANK": str(comm.rank)}
    sys.argv = ["train.py", *SMALL, *words]
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = train(read_options(), comm)
    return code, out.getvalue(), err.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize("model", ["own", "llama"])
def test_it_learns_agrees_with_the_unsharded_model_and_saves(ranks: RankPool, model: str, tmp_path: Path) -> None:
    if model == "llama":
        pytest.importorskip("transformers")
    words = ["--check", "--steps", "12", "--lr", "1e-2", "--out", str(tmp_path)]
    words += ["--model", "llama"] if model == "llama" else []
    (code, said, err), (_, silent, _) = ranks.run(2, trained, words, timeout=SECONDS)
    assert (code, silent) == (0, ""), err
    rows = re.findall(r"^ +(\d+) +([\d.]+) +([\d.]+) +(\S+)$", said, re.MULTILINE)
    assert [int(step) for step, *_ in rows] == list(range(1, 13))
    for _, sharded, unsharded, difference in rows:
        assert float(sharded) == pytest.approx(float(unsharded), rel=1e-4) and float(difference) < 1e-4
    assert float(rows[-1][1]) < float(rows[0][1]) - 1
    assert "the sharded and the unsharded model agree" in said
    assert re.search(r"loss [\d.]+ after 12 steps.*; [1-9][\d,]* tokens/s$", said, re.MULTILINE)
    assert "/12 [" not in said + err  # no bar, as in a pipe
    if model == "llama":
        return
    assert float(rows[0][1]) == pytest.approx(math.log(256), abs=0.2)  # it starts by knowing nothing about bytes
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    whole = Transformer(ModelConfig(**saved["config"]))
    whole.load_state_dict(saved["model"])
    held_out = Windows(read_text(32)[1], 32, 4, "cpu")
    with torch.no_grad():
        losses = [whole(*held_out.next()).item() for _ in range(8)]
    assert sum(losses) / 8 == pytest.approx(saved["validation_loss"], rel=1e-5)
    assert f"{saved['validation_loss']:.4f} on held-out text" in said
    pytest.importorskip("matplotlib")
    image = (tmp_path / "loss.png").read_bytes()
    assert image.startswith(b"\x89PNG\r\n") and int.from_bytes(image[16:20], "big") >= 800  # pixels wide


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--heads 6", "argument --width: 32 is not a multiple of 12, twice --heads 6"),
        ("--heads 2", "argument --heads: 2 is not divisible by 4 ranks"),
        ("--seq 30", "argument --seq: 30 is not divisible by 4 ranks"),
        ("--seq 8000000", "--seq 8000000 needs at least 80000010"),
        ("--device tpu", "--device is 'tpu', expected cpu, cuda, or cuda:0"),
        ("--lr 0", "argument --lr: '0': expected a number, 1e-09 or more"),
        ("--out /dev/null", "/dev/null/checkpoint.pt: File exists; pass a file that can be written"),
    ],
)
def test_options_that_cannot_work_are_said_in_a_line(
    options: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "0")  # which writes
    monkeypatch.setattr(sys, "argv", ["train.py", *SMALL, "--out", str(tmp_path), *options.split()])
    with pytest.raises(SystemExit) as ended:
        read_options()
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("train.py: error: ") and len(said.splitlines()) == 1
    assert message in said


def test_a_difference_or_a_loss_that_is_no_number_fails_the_check() -> None:
    losses = Losses(argparse.Namespace(steps=3, dtype="float32"))
    losses.sharded, losses.unsharded = [5.0, 4.0, 3.0], [5.0, 4.0, 3.0]
    assert losses.agree()
    losses.sharded[1] = 4.001
    assert not losses.agree()
    assert "FAILED" in losses.verdict() and "2.5e-04" in losses.verdict()
    losses.sharded[1] = math.nan
    assert not losses.agree()


@pytest.mark.slow
def test_ctrl_c_ends_all_ranks(tmp_path: Path) -> None:
    """Two ranks, started without torchrun, that would train for hours and have made their first step."""
    port = 20_000 + os.getpid() % 12_000  # below those that the kernel hands out
    command = [sys.executable, str(SCRIPTS / "train.py"), *SMALL, "--check", "--steps", "1000000"]
    ranks = []
    for rank in range(2):
        place = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        ranks.append(
            subprocess.Popen(
                [*command, "--out", str(tmp_path)],
                env={**os.environ, **place},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE if rank == 0 else subprocess.STDOUT,
                text=True,
            )
        )
    try:
        assert ranks[0].stdout is not None
        assert any(line.startswith("       1 ") for line in ranks[0].stdout)  # the table's first row
        for process in ranks:
            process.send_signal(signal.SIGINT)
        said = [process.communicate(timeout=SECONDS)[1 - rank] for rank, process in enumerate(ranks)]
    finally:
        for process in ranks:
            process.kill()
    for process, text in zip(ranks, said, strict=True):
        assert process.returncode == 130 and "train.py: rank" in text, text
