"""scripts/bench/ run, and print a row with plausible times for every case and method."""

from __future__ import annotations

import math
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from bench import torch_backend
from bench.ranks import interval, surroundings

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


def test_host_time_measures_each_way_of_a_call_and_is_refused_without_a_gpu() -> None:
    done = run("host_time.py", "--device", "cpu", "--rounds", "3", "--calls", "20", "--markdown", PYNCCL_CHECK="1")
    rows = {name: (float(us), float(ratio)) for name, us, ratio in rows_of(done + "\n\n")}
    ways = ("ctypes", "ctypes, stream", "comm.all_reduce", "plan")
    expected = {f"{way}: {place}" for way in ways for place in ("in place", "to another tensor")}
    expected |= {"gloo: all_reduce, async", "pynccl: all_reduce, future", "pynccl: broadcast", "x.mul_(1)"}
    expected |= {"pynccl.compat.vllm all_reduce(t, t)"}
    assert expected <= set(rows) and rows["ctypes: in place"][1] == 1 and all(us > 0 for us, _ in rows.values())
    words = [sys.executable, str(ROOT / "scripts/bench/host_time.py")]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    refused = subprocess.run(words, capture_output=True, text=True, timeout=100, check=False, env=environment)
    assert refused.returncode == 2 and "finds no GPU" in refused.stderr and "--device cpu" in refused.stderr


def test_the_card_and_how_ranks_share_it_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvidia-smi").write_text('#!/bin/sh\necho "NVIDIA H200, 580.1"\n')
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr("torch.cuda.nccl.version", lambda: (2, 28, 9))
    assert surroundings("cuda", 1).endswith("; 1 x NVIDIA H200, 580.1, NCCL 2.28.9")
    assert surroundings("cuda", 2).endswith("; 2 ranks share them, taking turns, and communicate through sockets")
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/tmp/mps")
    assert "; 2 ranks share them, under MPS, and" in surroundings("cuda", 2)
    (tmp_path / "nvidia-smi").unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert "; 1 x a GPU that nvidia-smi does not name, NCCL" in surroundings("cuda", 1)


def test_times_may_be_written_and_drawn_later(tmp_path: Path) -> None:
    times, picture = tmp_path / "times.json", tmp_path / "picture.svg"
    small = ["--pattern", "row_backward", "--tokens", "64", "--rounds", "1"]
    measured = run("../timeline.py", *small, "--out", str(times))
    drawn = run("../timeline.py", "--load", str(times), "--out", str(picture))
    assert measured.splitlines()[0] == drawn.splitlines()[0] and "row-parallel backward pass" in picture.read_text()


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
    table, bounds, telling, where = run("overlap.py", *tiny, "--markdown").split("\n\n")
    head, _, *rows = cells(table.splitlines())
    assert head[5:13] == ["off again", "bulk", "slices 2", "slices 4", "slices 8", "ring", "plain", "auto/off"]
    assert all(float(cell) > 0 for row in rows for cell in row[5:13])
    silent = [row for row in rows if row[-1].endswith("; cannot tell")]
    assert all(abs(float(row[5]) - 1) >= 0.025 for row in silent)  # rounded
    assert telling == f"{8 - len(silent)} of 8 cases can tell."
    assert len(rows) == 8 and len(bounds.splitlines()) == 2 + 6 and "2 ranks, width 8, hidden 12" in where


SECTION_ROWS = {
    "collectives": {"all_reduce", "gather, async", "all_to_all, future"},
    "messages": {"send, recv, one at a time", "8 isend, 8 irecv, back to back"},
    "small": {"barrier", "all_gather_object, 1 KB"},
    "steps": {"DDP, 8 buckets of 1 KB", "DDP, MLP", "FSDP2, Llama"},
    "groups": {"new_group, 8 groups", "first send, recv of a group", "init_device_mesh, 2 dimensions"},
    "start": {"init, 8 new_group, destroy"},
    "binding": {"comm.all_reduce", "comm.send, recv"},
    "memory": {"memory, MiB"},
}


@pytest.mark.parametrize("section", SECTION_ROWS)
def test_torch_backend_measures_a_section_with_both_backends(section: str) -> None:
    options = ["--only", section, "--sizes", "16", "--rounds", "1", "--markdown"]
    options += ["--busy", "1"] if section == "small" else []
    where, table, last = run("torch_backend.py", *options).split("\n\n")
    head, _, *rows = cells(table.splitlines())
    assert head == [section, "bytes", "gloo", "pynccl", "ratio", "95% interval", ""] and "2 ranks" in where
    times = {row[0]: row[2:] for row in rows}
    assert SECTION_ROWS[section] <= set(times) and len(times) == len(rows)
    for name, (theirs, *ours) in times.items():
        if theirs == "none":  # gloo of torch 2.13 has no such future, that of 2.11 no all_to_all
            assert name == "reduce_scatter_tensor, future" or name.startswith("all_to_all"), name
            continue
        assert all(float(cell.replace(",", "")) > 0 for cell in (theirs, *ours[:2])), name
        assert ours[2:] == ["0.00 to inf", ""], name  # a single round
    assert re.fullmatch(rf"slowest: .+ \d+\.\d\d; 0 of {len(rows)} rows are slower\n", last)


def test_the_interval_holds_the_median_of_a_skewed_distribution_in_at_least_95_percent_of_samples() -> None:
    draw, samples = random.Random(1), 4000
    for count in (6, 15, 40):
        found = [interval([draw.lognormvariate(0, 2) for _ in range(count)]) for _ in range(samples)]
        assert 0.945 < sum(low <= 1 <= high for low, high in found) / samples < 0.99, count
    # the ranks of the tables of the sign test
    found = [interval(values) for values in ([*range(15, 0, -1)], [*range(1, 26)], [1.0] * 5)]
    assert found == [(4, 12), (8, 18), (0, math.inf)]


def test_a_row_is_slower_if_its_whole_interval_is_above_one() -> None:
    slower = torch_backend.Row("all_reduce", 4096, [1e-6] * 15, [2e-6] * 12 + [1e-7] * 3)
    assert slower.cells() == ["all_reduce", "4,096", "1.0", "2.0", "2.00", "2.00 to 2.00", "slower"]
    unclear = torch_backend.Row("barrier", 0, [1e-6] * 15, [3e-6] * 11 + [1e-6] * 4)
    assert unclear.cells() == ["barrier", "", "1.0", "3.0", "3.00", "1.00 to 3.00", ""]
    # the ratio is the median of the rounds' ratios, not the ratio of the medians
    paired = torch_backend.Row("reduce", 16, [1.0, 4.0, 100.0], [2.0, 2.0, 50.0])
    absent = torch_backend.Row("scatter", 16)
    assert paired.ratio == (0.5, 0.0, math.inf) and absent.cells()[2:] == ["none", "", "", "", ""]
    last = torch_backend.summary([slower, unclear, paired, absent])
    assert last == "slowest: barrier 3.00; 1 of 4 rows are slower"
    assert torch_backend.summary([slower, paired]) == "slowest: all_reduce, 4,096 bytes 2.00; 1 of 2 rows are slower"
