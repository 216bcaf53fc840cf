"""scripts/bench/overhead.py runs, measures what it says, and every way it measures reaches the C function."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from libraries import torch_with_cuda

from pynccl.bindings.abi import HEADER_VERSION, version_code

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts"
sys.path.insert(0, str(SCRIPTS))

import bench.overhead as bench  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (shutil.which("cc") or shutil.which("gcc")), reason="no C compiler"),
]


def run(*options: str) -> subprocess.CompletedProcess[str]:
    # As a user's shell might have it: neither may reach the benchmark.
    environment = {**os.environ, "PYNCCL_CHECK": "1", "PYNCCL_LIBRARY": "host"}
    command = [sys.executable, str(SCRIPTS / "bench" / "overhead.py"), "--rounds", "9", "--calls", "64", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=environment)


@pytest.fixture(scope="module")
def found() -> list[list[str]]:
    done = run("--markdown")
    assert done.returncode == 0, done.stderr
    return rows_of(done.stdout + "\n\n")


def test_every_way_of_this_binding_is_measured(found: list[list[str]]) -> None:
    """Each of them has been seen to reach the C function, or there would be an error."""
    calls = {"comm.all_reduce(t, t)", "comm.all_reduce(t)", *bench.ONE_TENSOR, *bench.TWO_TENSORS}
    groups = {"group plan of 32", "with group(): 32 x all_reduce(t, t)"}
    assert {row[0] for row in found} >= {"loop in C", bench.BARE, bench.RAW_PLAN, bench.PLAN, *calls, *groups}


def test_times_are_per_call_and_ratios_to_bare_ctypes(found: list[list[str]]) -> None:
    rows = {name: (float(ns), float(ratio)) for name, ns, ratio in found}
    assert rows["bare ctypes"][1] == 1
    # A loop in C and a call by Python differ by a factor of about 40: enough to be sure of on any machine.
    assert 0 < rows["loop in C"][0] * 5 < rows["bare ctypes"][0]
    # Per call, and not per group of 32, which would be over ten times as much.
    assert rows["group plan of 32"][1] < 5


def test_the_page_has_a_row_for_each_way(found: list[list[str]]) -> None:
    """docs/overhead.md, made by --markdown; its times are of the machine that it names."""
    page = {cells[0] for cells in rows_of((ROOT / "docs" / "overhead.md").read_text())}
    now = {cells[0] for cells in found}
    elsewhere = {way for way in now ^ page if way.startswith(("nccl4py", "torch.distributed"))}
    assert page - elsewhere == now - elsewhere


def rows_of(text: str) -> list[list[str]]:
    """The cells of the table of ways."""
    lines = text[text.index("| way |") :].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_a_way_that_does_not_reach_the_c_function_is_an_error(tmp_path: Path) -> None:
    stub = ctypes.CDLL(str(bench.compile_stub(tmp_path, bench.STUB)))
    with pytest.raises(RuntimeError, match=r"idle: 0 calls reached the stub, expected 1"):
        bench.check_reach([bench.Way("idle", "pass", {})], stub)


def test_a_torch_for_cuda_imports_beside_the_stub(tmp_path: Path) -> None:
    """Other bindings get the stub by its name all the same; torch gets from its own what the stub lacks."""
    torch_with_cuda(tmp_path)
    stub = bench.compile_stub(tmp_path, bench.STUB)
    code = f"""
import ctypes, os, sys
from pathlib import Path
sys.path[:0] = {[str(SCRIPTS), str(tmp_path)]!r}
import bench.overhead as bench
bench.first_of_its_name(Path({str(stub)!r}))
import torch
print(torch.cdll.version(), ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD).stub_calls())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, f"{version_code(HEADER_VERSION)} 0\n"), done.stderr


def test_a_number_of_rounds_below_one_is_refused() -> None:
    done = run("--rounds", "0")
    assert done.returncode == 2
    assert "argument --rounds: '0': expected a whole number, 1 or more" in done.stderr
