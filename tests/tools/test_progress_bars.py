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
SECONDS = 60.0
COUNTING = """
import time
from pynccl import progress
def count():
    for i in progress.over(range(5), "counting", "step"):
        time.sleep(0.15)
"""
SHOWN = f"{COUNTING}\nwith progress.shown():\n    count()\nprint('done')"
ENDLESS = """
import time
from pynccl import progress
from pynccl.tools import command
def main():
    with progress.Bar(100, "counting", "step") as bar:
        bar.line("above the bar")
        time.sleep(0.2)
        bar.step(3, note="loss 1.5")
        time.sleep(60)
command.run(main, "counting.py")
"""


def environment(**settings: str | None) -> dict[str, str]:
    plain = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "80"}
    for name, value in {"CI": None, "RANK": None, **settings}.items():
        plain.pop(name, None)
        if value is not None:
            plain[name] = value
    return plain


def on_a_terminal(source: str, interrupt_after: str = "", **settings: str | None) -> tuple[int, str]:
    """The exit code, and all that a terminal is sent by a program; Ctrl-C once `interrupt_after` is there."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-c", source],
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
        env=environment(**settings),
    )
    os.close(theirs)
    text, end = "", time.monotonic() + SECONDS
    with contextlib.suppress(OSError):  # of a terminal that nobody writes to any more
        while time.monotonic() < end:
            if select.select([ours], [], [], 0.1)[0]:
                more = os.read(ours, 4096).decode()
                if not more:
                    break
                text += more
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


@pytest.mark.parametrize("settings", [{"RANK": "1"}, {"TERM": "dumb"}, {"CI": "true"}])
def test_no_bar_on_other_ranks_on_a_dumb_terminal_and_in_ci(settings: dict[str, str]) -> None:
    assert on_a_terminal(SHOWN, **settings) == (0, "done\r\n")


def test_a_library_draws_none_unasked() -> None:
    assert on_a_terminal(f"{COUNTING}\ncount()") == (0, "")


def test_no_bar_without_tqdm() -> None:
    assert on_a_terminal(f"import sys\nsys.modules['tqdm'] = None\n{SHOWN}") == (0, "done\r\n")


def test_no_bar_in_a_pipe() -> None:
    done = subprocess.run([sys.executable, "-c", SHOWN], capture_output=True, text=True, env=environment(), check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


def test_no_bar_where_standard_error_is_closed() -> None:
    command = f'exec "{sys.executable}" -c "$0" 2>&-'
    done = subprocess.run(
        ["bash", "-c", command, SHOWN], capture_output=True, text=True, env=environment(), check=False
    )
    assert (done.returncode, done.stdout) == (0, "done\n")


ENDLESS_LOOP = """
import time
from pynccl import progress
from pynccl.tools import command
def main():
    for i in progress.over(range(100), "counting", "step"):
        time.sleep(0.2 if i < 2 else 60)
command.run(main, "counting.py")
"""


def test_ctrl_c_leaves_nothing_half_drawn() -> None:
    code, text = on_a_terminal(ENDLESS, interrupt_after="loss 1.5")
    assert code == 130
    assert screen(text) == ["above the bar", "counting.py: interrupted", ""]


def test_ctrl_c_in_a_loop_leaves_nothing_half_drawn() -> None:
    code, text = on_a_terminal(ENDLESS_LOOP, interrupt_after=" 1/100")  # at the first one tqdm is still being made
    assert code == 130
    assert screen(text) == ["counting.py: interrupted", ""]
