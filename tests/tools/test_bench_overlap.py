"""scripts/bench/overlap.py runs, its figures follow from the times that it writes, and its bounds from the figures."""

from __future__ import annotations

import json
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
from bench.overlap_report import bounds, table  # noqa: E402

pytestmark = pytest.mark.slow

TINY = ["--rows", "16", "--balance", "1", "none", "--width", "8", "--hidden", "12", "--rounds", "3"]
BY_HAND = ["off", "bulk", "slices 2", "slices 4", "slices 8", "ring"]
Ran = tuple[dict[str, Any], str, int]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """What it wrote, what it printed, its exit code."""
    file = tmp_path_factory.mktemp("bench") / "folder" / "found.json"
    command = [sys.executable, str(SCRIPTS / "bench" / "overlap.py"), *TINY, "--json", str(file), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout, done.stderr
    found: dict[str, Any] = json.loads(file.read_text())
    return found, done.stdout, done.returncode


@pytest.mark.timeout(120)
def test_every_case_is_measured_in_every_way(ran: Ran) -> None:
    cases = [(row["layer"], row["passes"], row["rows"], row["balance"]) for row in ran[0]["cases"]]
    assert cases == [
        (layer, passes, 16, balance)
        for layer in ("column", "row")
        for passes in ("forward", "backward")
        for balance in (1, None)
    ]
    for row in ran[0]["cases"]:
        assert list(row["times"]) == [*BY_HAND, "plain", "auto", "comm", "mm"]
        assert all(len(values) == 3 and min(values) > 0 for values in row["times"].values())
        assert (row["link"] == "") is (row["balance"] is None)


def test_figures_follow_from_the_times(ran: Ran) -> None:
    for row in ran[0]["cases"]:
        times = row["times"]
        rounds = [{name: values[at] for name, values in times.items()} for at in range(3)]

        def middle(values: list[float]) -> Any:
            return pytest.approx(sorted(values)[1])

        for name in (*BY_HAND, "plain", "auto"):
            assert row["seconds"][name] == sorted(times[name])[1]
            assert row["ratio"][name] == middle([one[name] / one["off"] for one in rounds])
        assert row["ratio"][row["best"]] == min(row["ratio"][name] for name in BY_HAND)
        assert row["to_best"] == middle([one["auto"] / one[row["best"]] for one in rounds])
        assert row["to_plain"] == middle([one["auto"] / one["plain"] for one in rounds])
        hidden = [(one["off"] - one["auto"]) / min(one["comm"], one["mm"]) for one in rounds]
        assert row["efficiency"] == middle(hidden)


def test_verdicts_and_exit_code_fit_the_figures(ran: Ran) -> None:
    found, text, code = ran
    first = found["bounds"][0]
    assert first["found"] == max(row["ratio"]["auto"] for row in found["cases"])
    failed = [bound["what"] for bound in found["bounds"] if not bound["pass"]]
    assert code == (1 if failed else 0)
    lines = text.splitlines()
    assert [line.partition("  ")[0] for line in lines if line.endswith("FAIL")] == failed
    assert sum(line.endswith("PASS") for line in lines) == len(found["bounds"]) - len(failed)


def test_the_markdown_has_a_row_per_case(ran: Ran) -> None:
    lines = table(ran[0], markdown=True).splitlines()
    rows = lines[: lines.index("")]
    assert rows[0].startswith("| layer | pass | rows | comm/mm | off ms | bulk |")
    assert [row.split(" | ")[1] for row in rows[2:]] == ["forward"] * 2 + ["+ backward"] * 2 + [
        "forward",
        "forward",
        "+ backward",
        "+ backward",
    ]
    assert len({row.count("|") for row in rows}) == 1


# ---------------------------------------------------------------------------------------------------- the bounds


def case(auto: float = 0.7, **more: Any) -> dict[str, Any]:
    """A case of 1024 rows in which slices 2 take 0.7 of the time of off, and auto chose it; all bounds are met."""
    row = {"layer": "column", "passes": "forward", "rows": 1024, "balance": 1.0, "calls": 25, "efficiency": 0.75}
    ratio = {"off": 1.0, "slices 2": 0.7, "auto": auto}
    row |= {"ratio": ratio, "best": "slices 2", "to_best": auto / 0.7, "to_plain": auto}
    return {**row, "decisions": {"all_gather_matmul": {"way": "slices 2"}}, **more}


def failed(*rows: dict[str, Any]) -> dict[str, str]:
    """What does not hold, and of which case."""
    return {bound["what"].split(",")[0]: bound["case"] for bound in bounds(rows) if not bound["pass"]}


OFF = {"a": {"way": "off"}, "b": {"way": "off"}}
NOTHING_GAINED = {"off": 1.0, "slices 2": 0.93, "auto": 1.05}


@pytest.mark.parametrize(
    ("row", "whats"),
    [
        (case(), []),
        (case(auto=1.06), ["auto / off", "auto / best by hand"]),
        (case(auto=0.78), ["auto / best by hand"]),
        (case(auto=1.05, ratio=NOTHING_GAINED), []),  # the best gains less than 8%
        (case(efficiency=0.74), ["efficiency"]),
        (case(efficiency=0.79, passes="backward"), ["efficiency"]),
        (case(efficiency=0.8, passes="backward"), []),
        (case(efficiency=0.1, rows=256), []),
        (case(efficiency=0.1, balance=2.0), []),
        (case(calls=26), ["calls until decided"]),
        (case(decisions=OFF, to_plain=1.03), ["auto that chose off / F.linear and collective"]),
        (case(decisions={**OFF, "b": {"way": "ring"}}, to_plain=1.03), []),
    ],
)
def test_bounds_are_those_that_were_asked_for(row: dict[str, Any], whats: list[str]) -> None:
    assert list(failed(case(), row)) == whats


def test_a_bound_names_its_worst_case() -> None:
    worst = case(auto=1.2, rows=64, balance=None)
    assert failed(case(auto=1.1), worst, case())["auto / off"] == "column, forward, 64 rows, T_comm/T_mm none"
    lowest = case(efficiency=0.1, layer="row")
    assert failed(case(efficiency=0.2), lowest)["efficiency"] == "row, forward, 1024 rows, T_comm/T_mm 1"


def test_a_bound_without_a_case_says_so() -> None:
    assert [bound["case"] for bound in bounds([case(rows=64)])][2:4] == [None, None]


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


@pytest.mark.parametrize("check", [[], ["--check"]])
def test_a_bound_that_is_not_met_is_exit_code_1_with_check(check: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    times = {name: [1.0] for name in (*BY_HAND, "plain", "comm", "mm")} | {"auto": [2.0]}
    of_case = {"layer": "row", "passes": "forward", "rows": 64, "balance": None, "calls": 1, "decisions": OFF}
    found = {"cases": [{**of_case, "times": times}]}
    monkeypatch.setattr(bench_overlap, "run_ranks", lambda *_: [found])
    monkeypatch.setattr(sys, "argv", ["overlap.py", *check])
    assert bench_overlap.main() == len(check)


# ---------------------------------------------------------------------------------------------------- the options


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--rounds", "0"], "argument --rounds: '0': expected a whole number, 1 or more"),
        (["--ranks", "1"], "argument --ranks: '1': expected a whole number from 2 to 64"),
        (["--rows", "64", "0"], "argument --rows: '0'"),
        (["--rows", "64", "7"], "--rows is 7, expected a multiple of 2 ranks"),
        (["--hidden", "13"], "--hidden is 13, not divisible by 2 ranks"),
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


def test_the_link_takes_as_long_as_the_matmuls() -> None:
    options = bench_overlap.Options(4, "cpu", (), 1, width=512, hidden=2048)
    link = parse(options.link(1.5, 2, 1024, 0.02))
    assert link is not None  # two collectives of 2 MiB, of which 3/4 travel in 3 steps each
    assert link.seconds(6, 2 * 0.75 * 1024 * 512 * 4) == pytest.approx(0.03, rel=1e-4)
    assert options.link(None, 2, 1024, 0.02) == ""
