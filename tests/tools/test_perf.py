"""`python -m pynccl perf`: columns and arithmetic, results that are checked, exit codes, and what it refuses."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import TORCHRUN, RankPool

from pynccl import Communicator
from pynccl.__main__ import main
from pynccl.comm.collectives import bus_factor
from pynccl.tools import perf
from pynccl.tools.perf import report
from pynccl.tools.perf.cases import (
    NEVER_IN_PLACE,
    PERIOD,
    case,
    count_wrong,
    fill,
    pattern,
    reduced,
    tolerance,
    torch_type,
)
from pynccl.tools.perf.measure import Row, Side, across, measured
from pynccl.tools.perf.options import COLLECTIVES, OPERATORS, REDUCING, TYPES, configure, problem, size, sizes

SMALL = ["-b", "8", "-e", "4K", "-f", "8", "-n", "4", "-w", "1"]
SECONDS = 100.0
NUMBER = r"\d+(?:\.\d+)?"


def parsed(*words: str, ranks: int = 1) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    configure(parser)
    options = parser.parse_args(list(words))
    assert problem(options, ranks) == ""
    return options


def launched(n: int, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *TORCHRUN, f"--nproc-per-node={n}", "-m", "pynccl", "perf", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)


# ------------------------------------------------------------------------------------------------ sizes and factors


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("8", 8), ("4K", 4096), ("4k", 4096), ("128M", 128 << 20), ("1G", 1 << 30), ("2MB", 2 << 20)],
)
def test_sizes_are_bytes_in_powers_of_1024(text: str, nbytes: int) -> None:
    assert size(text) == nbytes


@pytest.mark.parametrize("text", ["", "0", "-8", "K", "8X", "1e3", "4 K K", "1.5K", "٣"])
def test_what_is_no_size_is_quoted(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=re.escape(repr(text))):
        size(text)


def test_steps_by_factor() -> None:
    assert sizes(8, 64, 2) == [8, 16, 32, 64]
    assert sizes(8, 63, 2) == [8, 16, 32]
    assert sizes(5, 5, 4) == [5]


def test_sizes_that_are_left_out_are_those_of_nccl_tests() -> None:
    options = parsed("all_reduce")
    assert (options.minbytes, options.maxbytes, options.stepfactor) == (32 << 20, 32 << 20, 2)
    assert (parsed("reduce", "-e", "1K").minbytes, parsed("reduce", "-b", "1G").maxbytes) == (1024, 1 << 30)


@pytest.mark.parametrize(
    ("collective", "factors"),
    [
        ("all_reduce", [0, 1, 4 / 3, 1.75]),
        ("all_gather", [0, 1 / 2, 2 / 3, 7 / 8]),
        ("reduce_scatter", [0, 1 / 2, 2 / 3, 7 / 8]),
        ("all_to_all", [0, 1 / 2, 2 / 3, 7 / 8]),
        ("gather", [0, 1 / 2, 2 / 3, 7 / 8]),
        ("scatter", [0, 1 / 2, 2 / 3, 7 / 8]),
        ("broadcast", [1, 1, 1, 1]),
        ("reduce", [1, 1, 1, 1]),
        ("send_recv", [1, 1, 1, 1]),
    ],
)
def test_bus_factors(collective: str, factors: list[float]) -> None:
    assert [bus_factor(collective, n) for n in (1, 2, 3, 8)] == pytest.approx(factors)


def test_count_and_size_of_a_row() -> None:
    assert (case("all_reduce", "half", "sum", 0, 3, 1000).count, case("all_reduce", "half", "sum", 0, 3, 9).nbytes) == (
        500,
        8,
    )
    row = case("all_gather", "float", "sum", 0, 3, 1000)  # 333 bytes a block: 83 elements, 80 from 16 bytes to 16
    assert (row.count, row.nbytes) == (80, 960)
    least = case("reduce_scatter", "double", "sum", 0, 3, 8)
    assert (least.count, least.nbytes) == (1, 24)


# ----------------------------------------------------------------------------------------------------------- data


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("op", OPERATORS)
def test_results_are_exact_in_the_type_and_never_zero(name: str, op: str) -> None:
    kind = torch_type(name)
    for n in (1, 2, 3, 4):
        values = reduced(1, n, name, op)
        assert pattern(n - 1, 1, op).shape == (PERIOD,)
        if op != "avg":
            assert torch.equal(values.to(kind).to(torch.float64), values.double())
            assert int(values.amin()) > 0
            assert tolerance(name, n, op) == 0.0
        if op == "sum":
            assert torch.equal(values.long(), sum(pattern(q, 1, op) for q in range(n)))
    assert reduced(0, 2, name, op).unique().numel() > 1


def test_sums_that_a_type_cannot_hold_exactly_may_be_rounded() -> None:
    assert tolerance("bfloat16", 128, "sum") == 0.0 < tolerance("bfloat16", 129, "sum")
    assert tolerance("int8", 1000, "sum") == tolerance("bfloat16", 1000, "") == 0.0
    total = reduced(0, 200, "bfloat16", "sum")
    rounded = torch.zeros(PERIOD, dtype=torch.bfloat16)
    for rank in range(200):
        rounded += pattern(rank, 0, "sum")
    assert count_wrong(rounded, total, 0.0) > 0 == count_wrong(rounded, total, tolerance("bfloat16", 200, "sum"))


def test_wrong_elements_are_counted() -> None:
    values = pattern(0, 0, "")
    x = torch.empty(3 * PERIOD + 5)
    fill(x, values)
    assert count_wrong(x, values, 0.0) == 0
    assert torch.equal(x[2 * PERIOD : 3 * PERIOD], values.float())
    x[7] = float("nan")
    x[-1] += 1
    assert count_wrong(x, values, 0.0) == 2
    fill(x, values)
    assert count_wrong(x.roll(1), values, 0.0) > PERIOD  # all in the wrong place
    assert count_wrong(x, pattern(1, 0, ""), 0.0) > PERIOD  # another rank's
    mean = reduced(0, 3, "double", "avg")
    y, slack = mean.clone(), tolerance("double", 3, "avg")
    assert count_wrong(y, mean, slack) == 0
    y[3], y[4] = float("nan"), y[4] * 1.001
    assert count_wrong(y, mean, slack) == 2


# ------------------------------------------------------------------------------------------------- on a few ranks


def every_collective(comm: Communicator) -> list[tuple[Any, ...]]:
    """(collective, type, operator) -> wrong elements out of place and in place, for what is wrong or lacks."""
    bad: list[tuple[Any, ...]] = []
    for collective in COLLECTIVES:
        for kind in ("float", "bfloat16", "uint8", "int64"):
            for op in OPERATORS if collective in REDUCING else ("sum",):
                options = parsed(collective, "-c", "1", "-n", "1", "-w", "0")
                for nbytes in (1, 40_000):
                    row = case(collective, kind, op, comm.size - 1, comm.size, nbytes)
                    found = [side and side.wrong for side in measured(comm, row, options).sides]
                    if found != [0, None if collective in NEVER_IN_PLACE else 0]:
                        bad.append((row, found))
    return bad


@pytest.mark.parametrize("n", [2, 3])
def test_every_collective_is_right_in_both_places(ranks: RankPool, n: int) -> None:
    assert ranks.run(n, every_collective) == [[]] * n


def with_a_fault(comm: Communicator, collective: str, guilty: int) -> tuple[int, str]:
    """Its exit code and what it prints if one rank's last element comes out wrong."""
    original = getattr(Communicator, collective)

    def broken(self: Communicator, send: Any, recv: Any = None, *args: Any, **options: Any) -> Any:
        done = original(self, send, recv, *args, **options)
        if recv is not None and recv.dtype == torch.float32 and self.rank == guilty:
            recv[-1] += 1
        return done

    setattr(Communicator, collective, broken)
    try:
        options = parsed(collective, *SMALL, "-c", "1", ranks=comm.size)
        with contextlib.redirect_stdout(io.StringIO()) as said:
            return perf.run_on(comm, options), said.getvalue()
    finally:
        setattr(Communicator, collective, original)


@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
def test_a_wrong_element_of_one_rank_fails_on_all(ranks: RankPool, collective: str) -> None:
    codes, texts = zip(*ranks.run(2, with_a_fault, collective, 1), strict=True)
    assert codes == (1, 1)
    assert texts[1] == ""  # rank 0 alone prints
    rows = [line for line in texts[0].splitlines() if not line.startswith("#")]
    assert len(rows) >= 3 and all(line.endswith("  WRONG") for line in rows)
    places = 1 if collective in NEVER_IN_PLACE else 2
    assert f"# Out of bounds values : {places * len(rows)} FAILED" in texts[0]


def combined(comm: Communicator) -> list[list[float]]:
    mine = [float(comm.rank), 10.0 - comm.rank]
    return [across(comm, mine, how) for how in ("avg", "min", "max")]


def test_how_ranks_are_combined(ranks: RankPool) -> None:
    assert ranks.run(3, combined) == [[[1, 9], [0, 8], [2, 10]]] * 3


# ------------------------------------------------------------------------------------------------ by torchrun, once


class Ran:
    def __init__(self, folder: Path) -> None:
        self.json = folder / "perf.json"
        words = ["all_reduce", *SMALL, "-c", "1", "--compare", "torch", "--json", str(self.json)]
        self.done = launched(2, *words, "--min-busbw", "0")
        self.lines = self.done.stdout.splitlines()


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    found = Ran(tmp_path_factory.mktemp("perf"))
    assert found.done.returncode == 0, found.done.stderr
    return found


def test_the_head_says_what_a_reader_needs(ran: Ran) -> None:
    text = ran.done.stdout
    assert re.search(r"^# pynccl perf all_reduce: 2 ranks on 1 node$", text, re.MULTILINE)
    assert re.search(r"^# library     host library \d+\.\d+\.\d+ \(host; host library\)$", text, re.MULTILINE)
    assert re.search(r"^# transport   (memory that the ranks share|sockets)$", text, re.MULTILINE)
    assert "4 iterations after 1, " in text and "the slowest rank counts" in text
    assert "torch.distributed with gloo" in text
    assert len(re.findall(r"^# rank \d +\S+ pid \d+ cpu$", text, re.MULTILINE)) == 2


def test_rows_have_the_columns_of_nccl_tests_with_torchs_beside(ran: Ran) -> None:
    assert any(re.search(r"out-of-place +in-place$", line) for line in ran.lines)
    side = r" +time +algbw +busbw +#wrong +torch +torch/"
    assert any(re.fullmatch(rf"# +size +count +type +redop +root{side}{side}", line) for line in ran.lines)
    rows = [line.split() for line in ran.lines if re.match(r" +\d+ +\d+ +float +sum +-1 +[\d.]+ ", line)]
    assert [row[:2] for row in rows] == [["8", "2"], ["64", "16"], ["512", "128"], ["4096", "1024"]]
    for row in rows:
        assert len(row) == 5 + 6 + 6
        assert (row[8], row[9], row[10], row[14]) == ("0", "N/A", "N/A", "0")  # torch has no all_reduce out of place
        assert float(row[16]) == pytest.approx(float(row[15]) / float(row[11]), abs=0.02, rel=0.01)
    assert "# Out of bounds values : 0 OK" in ran.lines
    assert any(re.fullmatch(rf"# Avg bus bandwidth    : {NUMBER}(e-\d+)?", line) for line in ran.lines)


def test_the_json_has_what_the_table_is_made_of(ran: Ran) -> None:
    found = json.loads(ran.json.read_text())
    assert (len(found["ranks"]), found["nodes"], found["summary"]["wrong"]) == (2, 1, 0)
    busses = []
    for row in found["rows"]:
        for place in ("out_of_place", "in_place"):
            side = row[place]
            assert side["algbw_GBps"] == pytest.approx(row["size"] / side["time_s"] / 1e9)
            assert side["busbw_GBps"] == pytest.approx(side["algbw_GBps"])  # 2 (n-1) / n is 1 for two ranks
            assert len(side["iterations_s"]) == 4
            assert min(side["iterations_s"]) > 0
            assert (side["torch_time_s"] is None) == (place == "out_of_place")
            busses.append(side["busbw_GBps"])
    assert found["summary"]["avg_busbw_GBps"] == pytest.approx(sum(busses) / len(busses))


def test_nothing_is_said_on_standard_error(ran: Ran) -> None:
    assert [line for line in ran.done.stderr.splitlines() if "measuring" in line or "Warning" in line] == []


def test_bad_options_end_all_ranks_alike_and_are_said_once() -> None:
    done = launched(2, "broadcast", "-r", "2")
    assert done.returncode != 0
    assert len(re.findall(r"^python -m pynccl perf: error: -r 2: expected a rank in 0..1$", done.stderr, re.M)) == 1
    assert re.search(r"exitcode +: 2 ", done.stderr)
    assert done.stderr.count("Traceback") == 1  # torchrun's own


@pytest.mark.parametrize("words", [["broadcast", "-r", "5"], ["broadcast", "-n", "x"]])
def test_the_other_ranks_of_a_machine_end_alike_in_silence(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert refused(words, capsys) == ""


@pytest.mark.slow
@pytest.mark.parametrize("collective", ["all_to_all", "gather", "send_recv"])
def test_torch_beside_others_on_three_ranks(collective: str) -> None:
    done = launched(3, collective, "-b", "4K", "-e", "4K", "-n", "4", "-w", "1", "-c", "1", "--compare", "torch")
    assert done.returncode == 0, done.stderr
    (row,) = [line.split() for line in done.stdout.splitlines() if not line.startswith("#")]
    assert float(row[9]) > 0 and float(row[10]) > 0
    assert row[15:] == ["N/A", "N/A"]


# ------------------------------------------------------------------------------------------------------- one process


def test_one_process_is_one_rank(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["perf", "all_gather", *SMALL, "-c", "0", "-d", "double"]) == 0
    said = capsys.readouterr().out
    assert "1 rank on 1 node" in said
    assert "# Out of bounds values : N/A (-c 0: not checked)" in said
    rows = [line.split() for line in said.splitlines() if not line.startswith("#")]
    assert [row[0] for row in rows] == ["8", "64", "512", "4096"]
    assert all(row[2] == "double" and row[3] == "none" and row[8] == row[12] == "N/A" for row in rows)


@pytest.mark.parametrize("kind", TYPES)
def test_every_type(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["perf", "reduce", "-b", "64", "-e", "64", "-n", "1", "-w", "0", "-d", kind, "-o", "max"]) == 0
    (row,) = [line.split() for line in capsys.readouterr().out.splitlines() if not line.startswith("#")]
    assert row[2:5] == [kind, "max", "0"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_shown_on_a_terminal_and_wiped_away(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tqdm")
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("CI", raising=False)
    assert main(["perf", "broadcast", "-b", "64", "-e", "64", "-n", "1"]) == 0
    assert "64 B of float" in shown.getvalue()
    assert shown.getvalue().split("\r")[-2].strip() == "" and shown.getvalue().endswith("\r")


def test_an_average_below_what_is_asked_for_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["perf", "broadcast", *SMALL, "--min-busbw", "1e9"]) == 1
    assert "# --min-busbw          : 1e+09 FAILED" in capsys.readouterr().out
    assert main(["perf", "broadcast", *SMALL, "--min-busbw", "0"]) == 0


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    try:
        code: Any = main(["perf", *words])
    except SystemExit as left:  # argparse's
        code = left.code
    said = capsys.readouterr()
    assert (code, said.out) == (2, "")
    return said.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "the following arguments are required: collective"),
        ("allreduce", "invalid choice: 'allreduce'"),
        ("all_reduce -b 8X", "'8X': expected bytes, 1 or more, such as 8, 4K, 128M or 1G"),
        ("all_reduce -b 8 -e 4", "-e 4 is less than -b 8"),
        ("all_reduce -f 1", "'1': expected a whole number, 2 or more"),
        ("all_reduce -n 0", "'0': expected a whole number, 1 or more"),
        ("all_reduce -w -1", "expected"),
        ("all_reduce -d complex64", "argument -d/--datatype: invalid choice: 'complex64' (choose from "),
        ("all_reduce -o mean", "argument -o/--op: invalid choice: 'mean' (choose from "),
        ("broadcast -o max", "-o: broadcast reduces nothing"),
        ("broadcast -r 1", "-r 1: expected a rank in 0..0"),
        ("all_reduce --compare mpi", "invalid choice: 'mpi'"),
        ("all_reduce --min-busbw nan", "'nan': expected GB/s"),
        (
            "all_reduce --json /proc/nowhere/perf.json",
            "argument -J/--json: /proc/nowhere/perf.json: No such file or directory; pass a file",
        ),
    ],
)
def test_options_that_cannot_work_are_refused(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(words.split(), capsys)
    assert message in said and "error: " in said
    assert "Traceback" not in said


def test_a_size_that_does_not_fit_is_said_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["perf", "all_reduce", "-b", "900000T", "-e", "900000T"]) == 1
    said = capsys.readouterr().err
    assert re.match(r"python -m pynccl perf: \d+ bytes of all_reduce: .*; pass a smaller -e$", said.strip())


def test_the_help_has_examples_that_parse(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["perf", "--help"])
    assert left.value.code == 0
    examples = re.findall(r"-m pynccl perf (\w.+)", capsys.readouterr().out)
    assert len(examples) >= 4
    for example in examples:
        parsed(*example.split(), ranks=2)


# -------------------------------------------------------------------------------------------------------- arithmetic


def test_a_known_row_reads_as_expected() -> None:
    row = case("all_reduce", "float", "sum", 0, 4, 1 << 20)
    side = Side([1e-3], 1e-3, 3, None)
    line = report.row_line(Row(row, [side, None]), False)
    assert line.split()[:8] == ["1048576", "262144", "float", "sum", "-1", "1000.0", "1.05", "1.57"]
    assert line.split()[8:] == ["3", "N/A", "N/A", "N/A", "N/A", "WRONG"]
