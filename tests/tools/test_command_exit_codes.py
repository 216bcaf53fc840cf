"""Exit codes of commands, one-line errors, and quiet exits on closed pipes and Ctrl-C."""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import pynccl
from pynccl.__main__ import main
from pynccl.bindings.values import did_you_mean
from pynccl.tools import command

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 100.0  # timeout, for a busy machine


def test_each_error_has_its_exit_code(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(error: BaseException) -> int:
        def raise_error() -> None:
            raise error

        return command.exit_code_of(raise_error, "it.py")

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
        printed = capsys.readouterr().err
        assert printed.startswith("it.py: ") and len(printed.splitlines()) == 1
        assert sys.last_value is error  # the flight recorder reports it to the other ranks
    with pytest.raises(KeyError):  # a bug in the program keeps its traceback
        ended(KeyError("a key of the program's own"))
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert ended(ValueError("a line\nwhat to do")) == 2
    assert capsys.readouterr().err == "it.py: rank 3: a line\n  what to do\n"


def test_option_types(tmp_path: Path) -> None:
    assert [command.integer(1)("1"), command.integer(2, 64)("64"), command.number(0.5)("0.5")] == [1, 64, 0.5]
    assert command.output_file(str(tmp_path / "a" / "b.txt")).parent.is_dir()
    rows: list[tuple[Any, str, str]] = [
        (command.integer(1), "0", "'0': expected an integer, 1 or more"),
        (command.integer(2, 64), "65", "'65': expected an integer from 2 to 64"),
        (command.integer(2, 64), "two", "'two': expected an integer from 2 to 64"),
        (command.number(0.5), "0.4", "'0.4': expected a number, 0.5 or more"),
        (command.number(0, "GB/s"), "nan", "'nan': expected GB/s, 0 or more"),
        (command.output_file, str(tmp_path), f"{tmp_path}: Is a directory; pass a writable file"),
        (command.output_file, "/proc/nowhere/x", "/proc/nowhere/x: No such file or directory; pass a writable file"),
    ]
    for kind, text, message in rows:
        with pytest.raises(argparse.ArgumentTypeError) as caught:
            kind(text)
        assert str(caught.value).startswith(message)


def test_without_a_command_the_commands_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("usage: python -m pynccl <command>") and "\n  doctor " in err
    assert main(["--help"]) == 0
    assert capsys.readouterr() == (err, "")
    assert main(["nonsense"]) == 2
    assert "unknown command 'nonsense'; expected one of doctor, " in capsys.readouterr().err


def test_a_misspelt_name_prints_one_line_with_the_closest_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doktor"]) == 2
    line = "python -m pynccl: error: unknown command 'doktor'; did you mean doctor?\n"
    assert capsys.readouterr() == ("", line)
    names = ["all_reduce", "reduce", "reduce_scatter", "send_recv"]
    for text, name in {"reduce_scater": "reduce_scatter", "AllReduce": "all_reduce", "send-recv": "send_recv"}.items():
        assert did_you_mean(text, names) == f"did you mean {name}?"
    assert did_you_mean("nope", names) == ""


@pytest.mark.parametrize("library", ["host", "/etc/hostname"])
def test_version_is_one_line_with_or_without_a_library(
    library: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYNCCL_LIBRARY", library)
    assert main(["--version"]) == 0
    nccl = r"NCCL \d+\.\d+\.\d+ \(host library\)" if library == "host" else r"no usable NCCL library \(.*doctor\)"
    out, err = capsys.readouterr()
    assert re.fullmatch(rf"pynccl-autograd {re.escape(pynccl.__version__)}, {nccl}\n", out) and err == ""


def program(folder: Path, body: str) -> str:
    path = folder / "program.py"
    path.write_text(f"import time\nfrom pynccl.tools import command\ndef main():\n{body}\ncommand.run(main)\n")
    return str(path)


def test_a_closed_pipe_and_a_full_disk_print_no_traceback(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for body, words, ended in (
        ("    for i in range(100000):\n        print(i)", '"$1" "$2" | head -1; exit ${PIPESTATUS[0]}', (1, "0\n", "")),
        ("    print('a line')", '"$1" "$2" >&-', (0, "", "")),
        ("    print('a line')", '"$1" "$2" >/dev/full', (2, "", "program.py: No space left on device\n")),
    ):
        line = ["bash", "-c", words, "bash", sys.executable, program(tmp_path, body)]
        done = subprocess.run(line, capture_output=True, text=True, timeout=SECONDS, check=False, env=environment)
        assert (done.returncode, done.stdout, done.stderr) == ended, words


def test_ctrl_c_prints_one_line_and_exits_with_130(tmp_path: Path) -> None:
    # Many short sleeps: a signal just before a system call is handled only after the call returns.
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
