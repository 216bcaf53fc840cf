"""Progress bars are drawn on a terminal and erased at the end, also after Ctrl-C; none in a pipe."""

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
SECONDS = 100.0  # timeout, for a busy machine
SHOWN = """
import time
from pynccl import progress
with progress.shown():
    for i in progress.over(range(5), "counting", "step"):
        time.sleep(0.15)
print("done")
"""
# Many short sleeps: a signal just before a system call does not interrupt the call.
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


def run_on_terminal(source: str, interrupt_after: str = "") -> tuple[int, str]:
    """Return the exit code and the terminal output of a program; send Ctrl-C once `interrupt_after` is printed."""
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-c", source], stdin=subprocess.DEVNULL, stdout=terminal, stderr=terminal, env=environment()
    )
    os.close(terminal)
    text, end = "", time.monotonic() + SECONDS
    with contextlib.suppress(OSError):  # reading fails once the program has closed the terminal
        while time.monotonic() < end:
            if select.select([controller], [], [], 0.1)[0]:
                text += os.read(controller, 4096).decode()
            if interrupt_after and interrupt_after in text:
                process.send_signal(signal.SIGINT)
                interrupt_after = ""
    os.close(controller)
    return process.wait(SECONDS), text


def visible_lines(text: str) -> list[str]:
    """Return the visible text of each line: everything after the last carriage return."""
    plain = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", text).replace("\r\n", "\n")
    return [visible for line in plain.split("\n") if (visible := line.rpartition("\r")[2].rstrip())]


def test_a_bar_is_drawn_and_erased_also_by_ctrl_c() -> None:
    code, text = run_on_terminal(SHOWN)
    assert code == 0 and visible_lines(text) == ["done"]
    assert re.search(r"counting: +0%", text) and re.search(r"counting: +\d0%.* [1-5]/5 ", text)
    code, text = run_on_terminal(STOPPED, interrupt_after="loss 1.5")
    assert code == 130 and visible_lines(text) == ["above the bar", "counting.py: interrupted"]


def test_no_bar_is_drawn_in_a_pipe() -> None:
    command = [sys.executable, "-c", SHOWN]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=SECONDS, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
