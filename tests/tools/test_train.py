"""scripts/train.py as a user runs it: it learns, agrees with the unsharded model, saves, refuses, and never hangs."""

from __future__ import annotations

import argparse
import math
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from ranks import TORCHRUN

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))

from train import Losses, read_options  # noqa: E402
from train_model import ModelConfig, Transformer, Windows, read_text  # noqa: E402

pytestmark = pytest.mark.slow

SMALL = ["--device", "cpu", "--layers", "2", "--width", "32", "--heads", "4", "--seq", "32", "--batch", "4"]
SECONDS = 100.0  # of patience, on a busy machine


class Run:
    """A finished launch of train.py on two ranks."""

    def __init__(self, out: Path, *options: str) -> None:
        self.out = out
        launch = [*TORCHRUN, "--nproc-per-node=2"]
        command = [sys.executable, *launch, str(SCRIPTS / "train.py"), *SMALL, "--out", str(out), *options]
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
        self.code, self.stdout, self.stderr = done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(tmp_path_factory.mktemp("train"), "--check", "--steps", "30", "--lr", "3e-3")


def test_it_learns_and_agrees_with_the_unsharded_model(run: Run) -> None:
    assert run.code == 0, run.stderr
    rows = re.findall(r"^ +(\d+) +([\d.]+) +([\d.]+) +(\S+)$", run.stdout, re.MULTILINE)
    assert [int(step) for step, *_ in rows] == [1, *range(3, 31, 3)]
    for _, sharded, unsharded, difference in rows:
        assert float(sharded) == pytest.approx(float(unsharded), rel=1e-4)
        assert float(difference) < 1e-4
    assert float(rows[0][1]) == pytest.approx(math.log(256), abs=0.2)  # it starts by knowing nothing about bytes
    assert float(rows[-1][1]) < float(rows[0][1]) - 1
    assert "the sharded and the unsharded model agree" in run.stdout


def test_it_ends_with_loss_and_speed(run: Run) -> None:
    found = re.search(r"loss ([\d.]+) after 30 steps.*; ([\d,]+) tokens/s$", run.stdout, re.MULTILINE)
    assert found, run.stdout
    assert int(found[2].replace(",", "")) > 0


def test_no_bar_is_drawn_into_a_pipe(run: Run) -> None:
    assert "/30 [" not in run.stderr + run.stdout
    assert run.stdout.count("2 ranks on cpu") == 1


def test_the_checkpoint_loads_unsharded_and_gives_the_same_loss(run: Run) -> None:
    path = run.out / "checkpoint.pt"
    saved = torch.load(path, weights_only=True)
    model = Transformer(ModelConfig(**saved["config"]))
    model.load_state_dict(saved["model"])
    held_out = Windows(read_text(32)[1], 32, 4, "cpu")
    with torch.no_grad():
        losses = [model(*held_out.next()).item() for _ in range(8)]
    assert sum(losses) / 8 == pytest.approx(saved["validation_loss"], rel=1e-5)
    assert f"{saved['validation_loss']:.4f} on held-out text" in run.stdout


def test_the_trained_weights_are_in_the_checkpoint_not_the_first_ones(run: Run) -> None:
    torch.manual_seed(0)
    first = Transformer(ModelConfig(2, 32, 4, 32)).state_dict()
    saved = torch.load(run.out / "checkpoint.pt", weights_only=True)["model"]
    assert {name: tensor.shape for name, tensor in saved.items()} == {n: t.shape for n, t in first.items()}
    assert not [name for name in first if torch.equal(saved[name], first[name])]


def test_it_draws_the_loss_curve(run: Run) -> None:
    pytest.importorskip("matplotlib")
    image = (run.out / "loss.png").read_bytes()
    assert image.startswith(b"\x89PNG\r\n")
    assert int.from_bytes(image[16:20], "big") >= 800  # pixels wide


def test_a_bad_option_ends_the_launch_before_any_rank_waits(tmp_path: Path) -> None:
    refused = Run(tmp_path / "never made", "--heads", "1")
    assert refused.code != 0
    assert "error: argument --heads: 1 is not divisible by 2 ranks" in refused.stderr
    assert not (tmp_path / "never made").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--steps 0", "argument --steps: '0': expected a whole number, 1 or more"),
        ("--heads 6", "argument --width: 32 is not a multiple of 12, twice --heads 6"),
        ("--heads 2", "argument --heads: 2 is not divisible by 4 ranks"),
        ("--seq 30", "argument --seq: 30 is not divisible by 4 ranks"),
        ("--seq 8000000", "--seq 8000000 needs at least 80000010"),
        ("--device tpu", "--device is 'tpu', expected cpu, cuda, or cuda:0"),
        ("--lr 0", "argument --lr: '0': expected a number, 1e-09 or more"),
        ("--lr nan", "argument --lr: 'nan': expected a number"),
        ("--dtype int8", "argument --dtype: invalid choice: 'int8'"),
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


@pytest.fixture
def endless(tmp_path: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """Two ranks, started without torchrun, that would train for hours and have made their first step."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
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
    assert ranks[0].stdout is not None
    for line in ranks[0].stdout:
        if line.startswith("       1 "):  # the table's first row
            break
    yield ranks
    for process in ranks:
        process.kill()
        process.communicate()


def test_ctrl_c_ends_all_ranks(endless: list[subprocess.Popen[str]]) -> None:
    for process in endless:
        process.send_signal(signal.SIGINT)
    said = [process.communicate(timeout=20)[1 - rank] for rank, process in enumerate(endless)]
    for process, text in zip(endless, said, strict=True):
        assert process.returncode == 130, text
        assert "train.py: rank" in text


def test_a_killed_rank_ends_the_others_with_a_message(endless: list[subprocess.Popen[str]]) -> None:
    endless[1].kill()
    _, said = endless[0].communicate(timeout=20)
    assert endless[0].returncode == 1
    assert "train.py: rank 0:" in said
    assert "REMOTE_ERROR" in said
