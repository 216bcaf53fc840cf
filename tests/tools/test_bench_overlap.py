"""scripts/bench/overlap.py runs, its figures follow from the times, and its bounds from the figures."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import pynccl_autograd as ad
from pynccl.host.link import parse

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))

from bench import overlap as bench_overlap  # noqa: E402
from bench.overlap import BY_HAND, Case, Found, bound_lines, case_lines  # noqa: E402

pytestmark = pytest.mark.slow

TINY = ["--rows", "16", "--balance", "1", "none", "--width", "8", "--hidden", "12", "--rounds", "3"]


@pytest.mark.timeout(120)
def test_every_case_is_measured_in_every_way() -> None:
    command = [sys.executable, str(SCRIPTS / "bench" / "overlap.py"), *TINY, "--markdown"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    cases, bounds, where = done.stdout.split("\n\n")
    head, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in cases.splitlines()]
    ways = ["bulk", "slices 2", "slices 4", "slices 8", "ring", "plain", "auto/off"]
    assert head[5:12] == ways and all(float(cell) > 0 for row in rows for cell in row[5:12])
    assert [(*row[:3], row[3].partition(" ")[0]) for row in rows] == [
        (layer, passes, "16", balance)
        for layer in ("column", "row")
        for passes in ("forward", "+ backward")
        for balance in ("1", "none")
    ]
    assert len(bounds.splitlines()) == 2 + 6
    assert "2 ranks, width 8, hidden 12" in where


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
    (_, row) = case_lines([one])
    assert row[:5] == ["column", "forward", "1024", "1 (0.67)", "2000.0"] and row[-2:] == ["25", "slices 2"]


def failed(*found: Found) -> dict[str, str]:
    """What does not hold, and of which case."""
    return {line[0].partition(",")[0]: line[3] for line in bound_lines(found) if line[4] == "FAIL"}


HIDDEN = {"comm": [0.4] * 3, "mm": [0.4] * 3}  # an efficiency of 0.3 / 0.4
BADLY = {"comm": [0.4] * 3, "mm": [0.5] * 3, "off": [0.8] * 3}


@pytest.mark.parametrize(
    ("one", "whats"),
    [
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
    ],
)
def test_bounds_are_those_that_were_asked_for(one: Found, whats: list[str]) -> None:
    assert list(failed(found(**HIDDEN), one)) == whats


def test_a_bound_names_its_worst_case_or_says_that_there_is_none() -> None:
    worst = found(auto=1.2, case=Case(64, "column", False, None))
    assert failed(found(auto=1.1), worst, found())["auto / off"] == "column, forward, 64 rows, T_comm/T_mm none"
    assert [line[3] for line in bound_lines([worst])][3:5] == ["no case", "no case"]


@pytest.mark.parametrize(("after", "calls"), [((1, 1), 1), ((2, 7), 7), ((30, 1), 30), ((1, 99), 31)])
def test_a_step_is_decided_when_all_its_passes_are(
    after: tuple[int, int], calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[int] = []

    def step() -> tuple[Any, ...]:
        done.append(1)
        return ()

    monkeypatch.setattr(bench_overlap, "slowest", float)
    monkeypatch.setattr(
        ad.overlap, "decisions", lambda number: [SimpleNamespace(settled=len(done) >= number)], raising=False
    )
    assert bench_overlap.settled(step, after) == calls


# ---------------------------------------------------------------------------------------------------- the options


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--rounds", "0"], "argument --rounds: '0': expected a whole number, 1 or more"),
        (["--ranks", "1"], "argument --ranks: '1': expected a whole number from 2 to 64"),
        (["--rows", "64", "0"], "argument --rows: '0'"),
        (["--rows", "64", "7"], "--rows is 7, expected a multiple of 2 ranks"),
        (["--hidden", "13"], "--hidden is 13, expected a multiple of 2 ranks"),
        (["--balance", "some"], "argument --balance: 'some': expected \"none\" or a number, 0.01 or more"),
    ],
)
def test_options_that_mean_nothing_are_refused_in_a_line(
    options: list[str], text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["overlap.py", *options])
    with pytest.raises(SystemExit) as ended:
        bench_overlap.main()
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert text in said and len(said.splitlines()) == 1


def test_the_link_takes_as_long_as_the_matmuls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_overlap, "undisturbed", lambda call: 0.02)
    options = argparse.Namespace(ranks=4, width=512, hidden=2048)
    link = parse(bench_overlap._Measured(Case(1024, "column", True, 1.5), options)._link())
    assert link is not None  # two collectives of 2 MiB, of which 3/4 travel in 3 steps each
    assert link.seconds(6, 2 * 0.75 * 1024 * 512 * 4) == pytest.approx(0.03, rel=1e-4)
    assert bench_overlap._Measured(Case(1024, "column", True, None), options)._link() == ""
