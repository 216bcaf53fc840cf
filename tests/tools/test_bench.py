"""scripts/bench/ run, and print a row with plausible times for every case and method."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow
compiles = pytest.mark.skipif(not (shutil.which("cc") or shutil.which("gcc")), reason="no C compiler")


def run(script: str, *options: str, **environment: str) -> str:
    command = [sys.executable, str(ROOT / "scripts" / "bench" / script), *options]
    merged_environment = {**os.environ, **environment}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=merged_environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def cells(lines: list[str]) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


def test_data_parallel_times_both_methods_with_equal_gradients() -> None:
    sizes = ["--width", "16", "--layers", "3", "--rows", "64", "--rounds", "3", "--bucket-mb", "0.01", "--asleep", "3"]
    head, _, plain, link = cells(run("data_parallel.py", *sizes, "--markdown").splitlines()[2:])
    assert (plain[0], link[0]) == ("plain", "link")
    for row in (plain, link):
        found = dict(zip(head, row, strict=True))
        assert (found["ranks"], found["width x layers"], found["bucket MB"]) == ("2", "16 x 3", "0.01")
        assert all(float(found[name]) > 0 for name in ("ours", "DDP")) and float(found["difference"]) < 1e-5
        assert float(found["compute"]) > 3 * 3  # milliseconds: the layers sleep


def rows_of(text: str) -> list[list[str]]:
    """Return the cells of the table of calls."""
    return cells(text[text.index("| call |") :].partition("\n\n")[0].splitlines()[2:])


@compiles
def test_overhead_measures_every_call_and_its_page_has_a_row_for_each() -> None:
    # A user's shell may have these variables set; the benchmark must ignore them.
    done = run("overhead.py", "--rounds", "9", "--calls", "64", "--markdown", PYNCCL_CHECK="1", PYNCCL_LIBRARY="host")
    rows = {name: (float(ns), float(ratio)) for name, ns, ratio in rows_of(done + "\n\n")}
    assert rows["bare ctypes"][1] == 1
    # A loop in C is about 40 times faster than a call from Python; a factor of 5 holds on any machine.
    assert 0 < rows["loop in C"][0] * 5 < rows["bare ctypes"][0]
    assert rows["group plan of 32"][1] < 5  # per call, not per group of 32
    page = {row[0] for row in rows_of((ROOT / "docs" / "overhead.md").read_text())}
    assert [call for call in rows.keys() ^ page if not call.startswith(("nccl4py", "torch.distributed"))] == []


@compiles
def test_scale_reports_the_missing_rank_and_where_it_is() -> None:
    done = run("scale.py", "--ranks", "16", "--processes", "1", "--timeout", "0.5")
    report = done.partition("waiting ranks report:\n")[2]
    call = r"all_reduce #4 \(comm 'world', 16 ranks, FLOAT32 x 1, scale\.py:\d+\)"
    assert re.search(rf"rank 15 never entered {call}; 15 ranks have waited", report)
    assert re.search(
        r"\nrank 15: process alive, last completed #3; its main thread is in scale\.py:\d+ next_batch", report
    )


def test_overlap_measures_every_case_with_every_schedule() -> None:
    tiny = ["--rows", "16", "--balance", "1", "none", "--width", "8", "--hidden", "12", "--rounds", "3"]
    table, bounds, where = run("overlap.py", *tiny, "--markdown").split("\n\n")
    head, _, *rows = cells(table.splitlines())
    assert head[5:12] == ["bulk", "slices 2", "slices 4", "slices 8", "ring", "plain", "auto/off"]
    assert all(float(cell) > 0 for row in rows for cell in row[5:12])
    assert len(rows) == 8 and len(bounds.splitlines()) == 2 + 6 and "2 ranks, width 8, hidden 12" in where


def test_torch_backend_times_both_backends() -> None:
    head, _, *rows = cells(run("torch_backend.py", "--sizes", "16", "--rounds", "2", "--markdown").splitlines()[2:])
    assert head == ["call", "bytes", "gloo", "pynccl", "gloo / pynccl"]
    names = [row[0] for row in rows]
    assert {"all_reduce", "isend, irecv", "DDP, MLP", "FSDP2, Llama", "memory, MiB"} <= set(names)
    assert all(float(cell.replace(",", "")) > 0 for row in rows for cell in row[2:])
