"""Progress bars: on a terminal, of a command, on rank 0; wiped away at the end, whatever the end; nowhere else."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

pytest.importorskip("tqdm")

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 100.0  # of patience, on a busy machine
# Ends in naps rather than a sleep: a signal that comes just before a system call does not interrupt it.
BEGIN = """
import os, sys, time
from pynccl import progress
from pynccl.tools import command
def nap(seconds):
    for _ in range(int(seconds * 50)):
        time.sleep(0.02)
def count():
    for i in progress.over(range(5), "counting", "step"):
        time.sleep(0.15)
"""
SHOWN = f"{BEGIN}\nwith progress.shown():\n    count()\nprint('done')"
NOWHERE = f"""{BEGIN}
count()  # unasked
with progress.shown():
    for name, value in (("RANK", "1"), ("TERM", "dumb"), ("CI", "true")):
        before = os.environ.get(name)
        os.environ[name] = value
        count()
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before
    sys.modules["tqdm"] = None  # not installed
    count()
print("done")
"""
A_BAR = f"""{BEGIN}
def main():
    with progress.Bar(100, "counting", "step") as bar:
        bar.line("above the bar")
        time.sleep(0.2)
        bar.step(3, note="loss 1.5")
        nap(60)
command.run(main, "counting.py")
"""
A_LOOP = f"""{BEGIN}
def main():
    for i in progress.over(range(100), "counting", "step"):
        nap(0.2 if i < 2 else 60)
command.run(main, "counting.py")
"""


def environment() -> dict[str, str]:
    plain = {name: value for name, value in os.environ.items() if name not in ("CI", "RANK")}
    return {**plain, "PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "80"}


def on_a_terminal(source: str, interrupt_after: str = "") -> tuple[int, str]:
    """The exit code, and all that a terminal is sent by a program; Ctrl-C once `interrupt_after` is there."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-c", source], stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs, env=environment()
    )
    os.close(theirs)
    text, end = "", time.monotonic() + SECONDS
    with contextlib.suppress(OSError):  # of a terminal that nobody writes to any more
        while time.monotonic() < end:
            if select.select([ours], [], [], 0.1)[0]:
                text += os.read(ours, 4096).decode()
            if interrupt_after and interrupt_after in text:
                process.send_signal(signal.SIGINT)
                interrupt_after = ""
    os.close(ours)
    return process.wait(SECONDS), text


def screen(text: str) -> list[str]:
    """What is left to see: rows of letters, as carriage returns, line feeds and erasing leave them."""
    rows, row, at = [""], 0, 0
    for part in re.findall(r"\x1b\[[0-9;]*[A-Za-z]|.|\n", text, re.DOTALL):
        if part == "\r":
            at = 0
        elif part == "\n":
            row, at = row + 1, 0
            rows += [""] * (row + 1 - len(rows))
        elif part == "\x1b[A":
            row -= 1
        elif part == "\x1b[K":
            rows[row] = rows[row][:at]
        elif not part.startswith("\x1b"):
            rows[row] = rows[row][:at].ljust(at) + part + rows[row][at + 1 :]
            at += 1
    return [one.rstrip() for one in rows]


def test_a_bar_is_drawn_and_wiped_away() -> None:
    code, text = on_a_terminal(SHOWN)
    assert code == 0
    assert re.search(r"counting: +0%", text) and re.search(r"counting: +\d0%.* [1-5]/5 ", text)
    assert screen(text) == ["done", ""]


def test_no_bar_unasked_on_other_ranks_on_a_dumb_terminal_in_ci_and_without_tqdm() -> None:
    assert on_a_terminal(NOWHERE) == (0, "done\r\n")


def test_no_bar_in_a_pipe_and_where_standard_error_is_closed() -> None:
    for redirect in ("2>&1 | cat", "2>&-"):
        command = ["bash", "-o", "pipefail", "-c", f'"$0" -c "$1" {redirect}', sys.executable, SHOWN]
        done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=SECONDS, check=False)
        assert (done.returncode, done.stdout) == (0, "done\n"), redirect


@pytest.mark.parametrize(
    ("source", "seen", "left"),
    # Of a loop at the second step: at the first one tqdm is still being made.
    [(A_BAR, "loss 1.5", ["above the bar"]), (A_LOOP, " 1/100", [])],
    ids=["a bar", "a loop"],
)
def test_ctrl_c_leaves_nothing_half_drawn(source: str, seen: str, left: list[str]) -> None:
    code, text = on_a_terminal(source, interrupt_after=seen)
    assert code == 130
    assert screen(text) == [*left, "counting.py: interrupted", ""]
