"""How every command ends: exit codes of errors, a line for what a user can mend, quiet where nobody reads on."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import pynccl
from pynccl.__main__ import main
from pynccl.tools import command

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 100.0  # of patience, on a busy machine


def test_each_kind_of_error_has_its_code(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(error: BaseException) -> int:
        def fails() -> None:
            raise error

        return command.ended(fails, "it.py")

    for error, code in (
        (ValueError("--x is 0"), 2),
        (FileNotFoundError(2, "No such file or directory", "x.json"), 2),
        (ImportError("matplotlib is not installed"), 2),
        (pynccl.NcclInvalidUsage("not under torchrun"), 2),
        (pynccl.NcclLibraryNotFound("no libnccl"), 2),
        (pynccl.NcclTimeout("rank 1 never came"), 1),
        (command.FailedError("the results differ"), 1),
        (MemoryError("too large"), 1),
        (RuntimeError("CUDA out of memory"), 1),
        (ConnectionRefusedError("nobody listens"), 1),
        (torch.distributed.DistNetworkError("the port is in use"), 1),
        (KeyboardInterrupt(), 130),
    ):
        assert ended(error) == code, error
        said = capsys.readouterr().err
        assert said.startswith("it.py: ") and len(said.splitlines()) == 1
        assert sys.last_value is error  # for the flight recorder, which tells the other ranks
    with pytest.raises(KeyError):  # a fault of the program keeps its traceback
        ended(KeyError("a key of the program's own"))
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert ended(ValueError("a line\nwhat to do")) == 2
    assert capsys.readouterr().err == "it.py: rank 3: a line\n  what to do\n"


def test_types_of_options(tmp_path: Path) -> None:
    assert [command.whole(1)("1"), command.whole(2, 64)("64"), command.number(0.5)("0.5")] == [1, 64, 0.5]
    assert command.output_file(str(tmp_path / "a" / "b.txt")).parent.is_dir()
    rows: list[tuple[Any, str, str]] = [
        (command.whole(1), "0", "'0': expected a whole number, 1 or more"),
        (command.whole(2, 64), "65", "'65': expected a whole number from 2 to 64"),
        (command.whole(2, 64), "two", "'two': expected a whole number from 2 to 64"),
        (command.number(0.5), "0.4", "'0.4': expected a number, 0.5 or more"),
        (command.number(0, "GB/s"), "nan", "'nan': expected GB/s, 0 or more"),
        (command.output_file, str(tmp_path), f"{tmp_path}: Is a directory; pass a file that can be written"),
        (command.output_file, "/proc/nowhere/x", "/proc/nowhere/x: No such file or directory; pass a file"),
    ]
    for kind, text, message in rows:
        with pytest.raises(argparse.ArgumentTypeError) as refused:
            kind(text)
        assert str(refused.value).startswith(message)


def test_without_a_command_the_commands_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("usage: python -m pynccl <command>") and "\n  doctor " in err
    assert main(["--help"]) == 0
    assert capsys.readouterr() == (err, "")
    assert main(["docter"]) == 2
    assert "unknown command 'docter'" in capsys.readouterr().err


def program(folder: Path, body: str) -> str:
    path = folder / "program.py"
    path.write_text(f"import time\nfrom pynccl.tools import command\ndef main():\n{body}\ncommand.run(main)\n")
    return str(path)


def test_who_stops_reading_and_a_full_disk_get_no_traceback(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for body, words, ended in (
        ("    for i in range(100000):\n        print(i)", '"$1" "$2" | head -1; exit ${PIPESTATUS[0]}', (1, "0\n", "")),
        ("    print('a line')", '"$1" "$2" >&-', (0, "", "")),
        ("    print('a line')", '"$1" "$2" >/dev/full', (2, "", "program.py: No space left on device\n")),
    ):
        line = ["bash", "-c", words, "bash", sys.executable, program(tmp_path, body)]
        done = subprocess.run(line, capture_output=True, text=True, timeout=SECONDS, check=False, env=environment)
        assert (done.returncode, done.stdout, done.stderr) == ended, words


def test_ctrl_c_is_130_and_a_line(tmp_path: Path) -> None:
    # Many naps: a signal just before a system call does not interrupt it, and is seen when it returns.
    body = "    print('there', flush=True)\n    for _ in range(3000):\n        time.sleep(0.02)"
    process = subprocess.Popen(
        [sys.executable, program(tmp_path, body)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None and process.stdout.readline() == "there\n"
    process.send_signal(signal.SIGINT)
    assert (process.communicate(timeout=SECONDS)[1], process.returncode) == ("program.py: interrupted\n", 130)
