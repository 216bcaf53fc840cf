"""Progress bars: on a terminal, wiped away at the end, also by Ctrl-C; not in a pipe."""

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
SHOWN = """
import time
from pynccl import progress
with progress.shown():
    for i in progress.over(range(5), "counting", "step"):
        time.sleep(0.15)
print("done")
"""
# Naps rather than a sleep: a signal that comes just before a system call does not interrupt it.
STOPPED = """
import time
from pynccl import progress
from pynccl.tools import command
def main():
    with progress.Bar(100, "counting", "step") as bar:
        bar.line("above the bar")
        time.sleep(0.2)
        bar.step(3, note="loss 1.5")
        for _ in range(3000):
            time.sleep(0.02)
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


def lines_left(text: str) -> list[str]:
    """What is left to see of each line: what was written since the last carriage return."""
    plain = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", text).replace("\r\n", "\n")
    return [left for line in plain.split("\n") if (left := line.rpartition("\r")[2].rstrip())]


def test_a_bar_is_drawn_and_wiped_away_also_by_ctrl_c() -> None:
    code, text = on_a_terminal(SHOWN)
    assert code == 0 and lines_left(text) == ["done"]
    assert re.search(r"counting: +0%", text) and re.search(r"counting: +\d0%.* [1-5]/5 ", text)
    code, text = on_a_terminal(STOPPED, interrupt_after="loss 1.5")
    assert code == 130 and lines_left(text) == ["above the bar", "counting.py: interrupted"]


def test_no_bar_in_a_pipe() -> None:
    command = [sys.executable, "-c", SHOWN]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=SECONDS, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
