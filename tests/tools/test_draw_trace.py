"""scripts/draw_trace.py: a picture of a trace, and what it says of files and options that will not do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pynccl import chrome_trace as chrome

SCRIPT = Path(__file__).parents[2] / "scripts" / "draw_trace.py"


def draw(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def trace(tmp_path: Path) -> str:
    events = [
        *chrome.process(0, "rank 0"),
        *chrome.lane(0, 1, "steps"),
        *chrome.lane(0, 2, "world, ranks 0 1"),
        chrome.piece("step 1", "step", 0, 1, 0.0, 0.010),
        chrome.piece("all_reduce", "comm", 0, 2, 0.002, 0.004),
        chrome.piece("all_reduce", "comm", 1, 2, 0.003, 0.004),
        *chrome.arrows(1, "#1", [(0.002, 0, 2), (0.003, 1, 2)]),
    ]
    path = tmp_path / "trace.json.gz"
    chrome.write(path, events)
    return str(path)


def test_it_draws_what_lies_in_a_span(trace: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "picture.svg"
    done = draw(trace, "--out", str(out), "--span", "step 1")
    assert (done.returncode, done.stdout) == (0, f"wrote {out}\n"), done.stderr
    assert "<svg" in out.read_text()


def test_what_cannot_be_drawn_is_said_in_a_line(trace: str, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text("[]")
    for options, code, words in (
        ((trace, "--span", "step 9"), 1, "there are ['step 1']"),
        ((str(other),), 1, "is no trace"),
        ((str(tmp_path / "none.json"),), 1, "No such file"),
        ((trace, "--begin", "5", "--end", "4"), 1, "nothing between 5 and 4 ms"),
        ((trace, "--out", "picture.doc"), 2, "expected a file that ends in"),
    ):
        done = draw(*options)
        assert done.returncode == code and words in done.stderr, done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_times_are_exact_to_the_nanosecond_and_a_broken_write_leaves_the_old_file(tmp_path: Path) -> None:
    first = chrome.piece("a", "comm", 0, 1, 3600.0000001, 3600.0000002)
    assert (first["ts"], first["dur"]) == (3600000000.1, 0.1)
    path = tmp_path / "trace.json"
    path.write_text("old")

    def broken() -> object:
        yield first
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        chrome.write(path, broken())  # type: ignore[arg-type]
    assert path.read_text() == "old" and [one.name for one in tmp_path.iterdir()] == ["trace.json"]
