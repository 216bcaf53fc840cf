"""scripts/bench/ run and measure what they say; what they compute of times, and the bounds, follow from the times."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts"
sys.path.insert(0, str(SCRIPTS))

from bench import overhead  # noqa: E402
from bench.overlap import BY_HAND, Case, Found, bound_lines  # noqa: E402

pytestmark = pytest.mark.slow
compiles = pytest.mark.skipif(not (shutil.which("cc") or shutil.which("gcc")), reason="no C compiler")


def run(script: str, *options: str, **environment: str) -> str:
    command = [sys.executable, str(SCRIPTS / "bench" / script), *options]
    own = {**os.environ, **environment}
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False, env=own)
    assert done.returncode == 0, done.stderr
    return done.stdout


def cells(lines: list[str]) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


def test_data_parallel_times_every_way_and_has_the_same_gradients() -> None:
    sizes = ["--width", "16", "--layers", "3", "--rows", "64", "--rounds", "3", "--bucket-mb", "0.01", "--asleep", "3"]
    head, _, plain, link = cells(run("data_parallel.py", *sizes, "--markdown").splitlines()[2:])
    assert head[:2] == ["way", "ranks"] and (plain[0], link[0]) == ("plain", "link")
    for row in (plain, link):
        found = dict(zip(head, row, strict=True))
        assert (found["ranks"], found["width x layers"], found["bucket MB"]) == ("2", "16 x 3", "0.01")
        assert all(float(found[name]) > 0 for name in ("ours", "DDP")) and float(found["difference"]) < 1e-5
        assert float(found["compute"]) > 3 * 3  # milliseconds, of layers that sleep
        assert bool(found["comm"]) is bool(found["hidden, ours"]) is (row is link)
        median, low, high = map(float, re.findall(r"[\d.]+", found["DDP / ours"]))
        assert low <= median <= high


# ----------------------------------------------------------------------------------------------------- overhead


def rows_of(text: str) -> list[list[str]]:
    """The cells of the table of ways."""
    return cells(text[text.index("| way |") :].partition("\n\n")[0].splitlines()[2:])


@compiles
def test_overhead_measures_every_way_per_call_and_its_page_has_a_row_for_each() -> None:
    """Each way has been seen to reach the C function, or there would be an error."""
    # As a user's shell might have it: neither variable may reach the benchmark.
    done = run("overhead.py", "--rounds", "9", "--calls", "64", "--markdown", PYNCCL_CHECK="1", PYNCCL_LIBRARY="host")
    rows = {name: (float(ns), float(ratio)) for name, ns, ratio in rows_of(done + "\n\n")}
    ways = {"loop in C", overhead.BARE, overhead.RAW_PLAN, overhead.PLAN, *overhead.ONE_TENSOR, *overhead.TWO_TENSORS}
    assert rows.keys() >= {*ways, "group plan of 32", "with group(): 32 x all_reduce(t, t)"}
    assert rows["bare ctypes"][1] == 1
    # A loop in C and a call by Python differ by a factor of about 40: enough to be sure of on any machine.
    assert 0 < rows["loop in C"][0] * 5 < rows["bare ctypes"][0]
    assert rows["group plan of 32"][1] < 5  # per call, and not per group of 32
    page = {row[0] for row in rows_of((ROOT / "docs" / "overhead.md").read_text())}
    assert [way for way in rows.keys() ^ page if not way.startswith(("nccl4py", "torch.distributed"))] == []


@compiles
def test_overhead_of_wrappers_is_printed_fastest_first() -> None:
    _, *rows = run("overhead.py", "--wrappers", "--rounds", "3", "--calls", "50").splitlines()
    ratios = [float(row.split()[-1]) for row in rows]
    assert ratios == sorted(ratios) and ratios[0] > 0
    names = {re.split(r"  +", row)[0] for row in rows}
    assert {"bare ctypes", "plan()", "comm.all_reduce(t, t)", "pynccl.compat.vllm all_reduce(t, t)"} <= names


# ------------------------------------------------------------------------------------------------------- scale


@compiles
def test_scale_has_every_rank_that_waits_say_which_one_is_missing_and_where() -> None:
    done = run("scale.py", "--ranks", "16", "--processes", "1", "--timeout", "0.5")
    assert re.search(r"^\| 16 \| 15 \| [\d.]+ \| [\d.]+ \|$", done, re.MULTILINE)
    said = done.partition("ranks that wait have said:\n")[2]
    line = r"scale\.py:\d+"
    call = rf"all_reduce #4 \(comm 'world', 16 ranks, FLOAT32 x 1, {line}\)"
    assert re.search(rf"rank 15 never entered {call}; 15 ranks have waited", said)
    assert len(re.findall("rank 15 never entered", said)) == len(re.findall("never entered", said))
    place = rf"last completed #3; its main thread is in {line} next_batch"
    assert re.search(rf"\nrank 15: process alive, {place}", said)


# ----------------------------------------------------------------------------------------------------- overlap


@pytest.mark.timeout(120)
def test_overlap_measures_every_case_in_every_way() -> None:
    tiny = ["--rows", "16", "--balance", "1", "none", "--width", "8", "--hidden", "12", "--rounds", "3"]
    table, bounds, where = run("overlap.py", *tiny, "--markdown").split("\n\n")
    head, _, *rows = cells(table.splitlines())
    assert head[5:12] == ["bulk", "slices 2", "slices 4", "slices 8", "ring", "plain", "auto/off"]
    assert all(float(cell) > 0 for row in rows for cell in row[5:12])
    assert [(*row[:3], row[3].partition(" ")[0]) for row in rows] == [
        (layer, passes, "16", balance)
        for layer in ("column", "row")
        for passes in ("forward", "+ backward")
        for balance in ("1", "none")
    ]
    assert len(bounds.splitlines()) == 2 + 6 and "2 ranks, width 8, hidden 12" in where


TIMES = {**{name: [1.0] * 3 for name in (*BY_HAND, "plain")}, "comm": [0.5, 0.4, 0.4], "mm": [1.0, 0.4, 0.6]}
CASE = Case(1024, "column", False, 1.0)


def found(auto: float = 0.7, best: float = 0.7, case: Case = CASE, chosen: str = "slices 2", **more: Any) -> Found:
    """Slices 2 take `best` of the time of off, "auto" has chosen it and takes `auto`."""
    times = {**TIMES, "slices 2": [best] * 3, "auto": [auto] * 3, **more}
    return Found(case, more.pop("calls", 25), chosen.split(", "), times)


def test_figures_are_medians_of_the_rounds() -> None:
    one = found()
    one = one._replace(times={**one.times, "off": [1.0, 2.0, 3.0], "auto": [0.5, 1.8, 1.5]})
    assert one.ratio("auto") == 0.5
    assert one.best == "slices 2" and one.ratio("auto", one.best) == pytest.approx(1.5 / 0.7)
    assert one.efficiency == pytest.approx(1.0)  # of 1.0, 0.5 and 3.75


def failed(*found: Found) -> dict[str, str]:
    """What does not hold, and of which case."""
    return {line[0].partition(",")[0]: line[3] for line in bound_lines(found) if line[4] == "FAIL"}


HIDDEN = {"comm": [0.4] * 3, "mm": [0.4] * 3}  # an efficiency of 0.3 / 0.4
BADLY = {"comm": [0.4] * 3, "mm": [0.5] * 3, "off": [0.8] * 3}


def test_bounds_are_those_that_were_asked_for_and_name_their_worst_case() -> None:
    for one, whats in [
        (found(**HIDDEN), []),
        (found(auto=1.06, **HIDDEN), ["auto / off", "auto / best by hand", "efficiency"]),
        (found(auto=1.04, best=0.93, case=Case(64, "row", False, 1.0)), []),  # the best gains less than 8%
        (found(**BADLY), ["efficiency"]),
        (found(case=CASE._replace(backward=True), **HIDDEN), ["efficiency"]),  # 0.75 of 0.8
        (found(case=CASE._replace(rows=256), **BADLY), []),
        (found(case=CASE._replace(balance=2.0), **BADLY), []),
        (found(**HIDDEN)._replace(calls=26), ["calls until decided"]),
        (found(chosen="off, off", plain=[0.68] * 3, **HIDDEN), ["auto that chose off / F.linear and collective"]),
        (found(chosen="off, ring", plain=[0.68] * 3, **HIDDEN), []),
    ]:
        assert list(failed(found(**HIDDEN), one)) == whats, one
    worst = found(auto=1.2, case=Case(64, "column", False, None))
    assert failed(found(auto=1.1), worst, found())["auto / off"] == "column, forward, 64 rows, T_comm/T_mm none"
    assert [line[3] for line in bound_lines([worst])][3:5] == ["no case", "no case"]
