"""scripts/bench_overlap.py runs, its figures follow from the times that it writes, and its lanes do what they say."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import RankPool

from pynccl import Communicator
from pynccl.host.link import parse
from pynccl_autograd import OverlapConfig
from pynccl_autograd.overlap.trace import Interval, recording

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))

import bench_overlap  # noqa: E402
import bench_overlap_lanes as kinds  # noqa: E402
from bench_overlap_cases import BY_NAME, CASES, Shape, step_of, tensors_of  # noqa: E402
from bench_overlap_report import bounds, markdown  # noqa: E402
from bench_overlap_run import Options, link_for  # noqa: E402

TINY = ["--tokens", "16", "--width", "8", "--hidden", "12", "--rounds", "3", "--chunks", "2"]
TINY += ["--link", "latency=20us,bandwidth=1GB/s"]


def run(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPTS / "bench_overlap.py"), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str, int]:
    """What it wrote, what it printed, its exit code."""
    file = tmp_path_factory.mktemp("bench") / "folder" / "found.json"
    done = run(*TINY, "--methods", "slices", "ring", "--json", str(file), "--check")
    assert done.stdout, done.stderr
    found: dict[str, Any] = json.loads(file.read_text())
    return found, done.stdout, done.returncode


def test_every_pass_is_measured_in_every_way(ran: tuple[dict[str, Any], str, int]) -> None:
    found = ran[0]
    assert [row["name"] for row in found["patterns"]] == [case.name for case in CASES]
    for row in found["patterns"]:
        assert [way["way"] for way in row["ways"]] == ["auto", "slices 2", "ring"]
        assert [control["way"] for control in row["controls"]] == ["one stream", "apart"]
        ways = {"auto", "slices 2", "ring", "mm auto", "mm slices 2", "mm ring"}
        assert row["times"].keys() == ways | {"comm", "mm", "seq", "off", "one stream", "apart", "torch", "torch, link"}
        assert all(len(values) == 3 and min(values) > 0 for values in row["times"].values())


def test_figures_follow_from_the_times(ran: tuple[dict[str, Any], str, int]) -> None:
    for row in ran[0]["patterns"]:
        times, median = row["times"], {name: sorted(values)[1] for name, values in row["times"].items()}
        assert (row["t_comm"], row["t_mm"]) == (median["comm"], median["mm"])
        assert (row["t_seq"], row["t_off"], row["t_torch"]) == (median["seq"], median["off"], median["torch"])
        for way in [*row["ways"], *row["controls"]]:
            of_rounds = []
            for number in range(3):
                seq, own, comm, mm = (times[name][number] for name in ("seq", way["way"], "comm", "mm"))
                of_rounds.append((seq - own) / min(comm, mm))
            assert way["efficiency"] == pytest.approx(sorted(of_rounds)[1])
            assert way["seconds"] == median[way["way"]]
        for way in row["ways"]:
            name = way["way"]
            assert way["exposed"] == pytest.approx(middle_difference(times[name], times["mm"]))
            assert way["tax"] == pytest.approx(middle_difference(times[f"mm {name}"], times["mm"]))


def middle_difference(ones: list[float], others: list[float]) -> float:
    return sorted(one - other for one, other in zip(ones, others, strict=True))[1]


def test_the_mlp_beside_dtensor(ran: tuple[dict[str, Any], str, int]) -> None:
    mlp = ran[0]["mlp"]
    assert mlp["seconds"].keys() == {"auto", "off", "slices 2", "ring", "DTensor", "DTensor, link"}
    rounds = zip(mlp["times"]["DTensor, link"], mlp["times"]["auto"], strict=True)
    assert mlp["ratio"]["auto"] == pytest.approx(statistics.median(theirs / ours for theirs, ours in rounds))
    assert mlp["ratio"]["DTensor, link"] == 1
    # Every collective of a step goes over the modelled link: forward and backward, of each layer one.
    assert mlp["collectives"] == {"all_gather_into_tensor": 2, "reduce_scatter_tensor": 2}


def test_small_shapes_are_declined(ran: tuple[dict[str, Any], str, int]) -> None:
    small = ran[0]["small"]
    assert len(small) == 4
    assert all(row["declined"] and row["ratio"] > 0 for row in small)


def test_verdicts_and_exit_code_fit_the_figures(ran: tuple[dict[str, Any], str, int]) -> None:
    found, text, code = ran
    for bound in found["bounds"]:
        least, most = bound["at_least"], bound["at_most"]
        assert bound["pass"] is (bound["found"] >= least if most is None else bound["found"] <= most)
    failed = [bound["what"] for bound in found["bounds"] if not bound["pass"]]
    assert code == (1 if failed else 0)
    assert [line[5:].partition(": ")[0] for line in text.splitlines() if line.startswith("FAIL ")] == [
        what.partition(": ")[0] for what in failed
    ]


def test_bounds_are_those_that_were_asked_for() -> None:
    way = {"way": "auto", "efficiency": 0.8, "model": 0.9}
    controls = [{"way": "one stream", "efficiency": -0.05}, {"way": "apart", "efficiency": 0.06}]
    forward = {"name": "f", "pattern": "all_gather_matmul", "ways": [way], "controls": controls}
    backward = {**forward, "name": "b", "pattern": "row_backward"}
    small = [{"shape": [1, 2, 3], "ratio": 0.98, "declined": False}]
    found = {"patterns": [forward, backward], "small": small, "mlp": {"ratio": {"auto": 1.2}}}
    assert {bound["what"]: bound["pass"] for bound in bounds(found)} == {
        "f: efficiency of auto": True,
        "f: efficiency of auto / the model's": False,  # 0.8 of 0.9 is 0.889
        "f: |efficiency|, one stream": True,
        "f: |efficiency|, apart": False,
        "b: efficiency of auto": False,
        "b: |efficiency|, one stream": True,
        "b: |efficiency|, apart": False,
        "small 1 x 2 x 3: off / auto": True,
        "small 1 x 2 x 3: auto declines": False,
        "mlp: DTensor / auto": True,
    }


def test_the_tables_fit_a_terminal_and_name_the_machine(ran: tuple[dict[str, Any], str, int]) -> None:
    found, text, _ = ran
    tables, _, rest = text.partition("\nPASS small")
    assert max(len(line) for line in tables.splitlines()) <= 120
    assert found["command"] in rest and f"torch {torch.__version__}" in rest
    assert found["device"] == "cpu" and found["shape"]["tokens"] == 16


def test_the_markdown_has_the_same_rows(ran: tuple[dict[str, Any], str, int]) -> None:
    lines = markdown(ran[0]).splitlines()
    assert lines[0].startswith("| pass | way |") and lines[2].startswith("| all_gather_matmul | auto")
    rows = lines[: lines.index("")]
    assert len(rows) == 2 + len(CASES) * 8 and all(line.count("|") == 11 for line in rows)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--rounds", "0"], "argument --rounds: '0': expected a whole number, 1 or more"),
        (["--ranks", "1"], "argument --ranks: '1': expected a whole number from 2 to 64"),
        (["--chunks", "4", "0"], "argument --chunks: '0'"),
        (["--hidden", "13"], "--hidden is 13, not divisible by 2 ranks"),
        (["--tokens", "7"], "--tokens is 7, expected a multiple of 2 ranks"),
        (["--link", "speed=1"], "cannot read 'speed=1'"),
    ],
)
def test_options_that_mean_nothing_are_refused_in_a_line(
    options: list[str], text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_overlap.py", *options])
    with pytest.raises(SystemExit) as ended:
        bench_overlap.main()
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert text in said and len(said.splitlines()) == 1


def test_the_link_takes_as_long_as_the_matmuls() -> None:
    options = Options(2, "cpu", (), (4,), ("slices",), 1, 1024, 512, 2048, 40.0, balance=1.5)
    for case in CASES:
        steps, nbytes = case.wire(Shape(1024, 512, 2048), 2)
        link = parse(link_for(options, steps, nbytes, 0.02))
        assert link is not None
        assert link.seconds(steps, nbytes) == pytest.approx(0.03, rel=1e-4)


def test_what_a_pass_moves_and_computes() -> None:
    shape = Shape(24, 5, 8)  # V = 24 * 5 * 4 = 480 bytes; on 4 ranks 3/4 of it for a gather, in 3 steps
    assert BY_NAME["all_gather_matmul"].wire(shape, 4) == (3, 360)
    assert BY_NAME["matmul_all_reduce"].wire(shape, 4) == (6, 720)
    assert BY_NAME["column_backward_regather"].wire(shape, 4) == (6, 720)
    assert BY_NAME["column_backward"].sizes(shape, 4) == (24, 2, 5)
    assert BY_NAME["row_backward"].sizes(shape, 4) == (24, 5, 2)
    assert BY_NAME["row_backward"].flop(shape, 4) == 2 * 2 * 24 * 5 * 2


# ------------------------------------------------------------------------------------------------ the lanes


def intervals_on(comm: Communicator, name: str, kind: str, method: str, chunks: int | None) -> list[Interval]:
    case, shape = BY_NAME[name], Shape(24, 8, 12)
    tensors = tensors_of(case, shape, comm.rank, comm.size, torch.device("cpu"))
    step = step_of(case, tensors, comm, OverlapConfig(method, chunks=chunks, save_gathered=case.save_gathered))
    expected = step()
    with kinds.passes_on(getattr(kinds, kind)), recording() as trace:
        found = step()
    if kind in ("OneStream", "Apart"):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)
    (operation,) = trace.operations()
    return list(operation.intervals)


NAMES = [case.name for case in CASES]


def communicates(intervals: list[Interval]) -> list[bool]:
    return [one.lane == "comm" for one in intervals]


@pytest.mark.parametrize("name", NAMES)
def test_nothing_overlaps_on_one_stream(ranks: RankPool, name: str) -> None:
    for intervals in ranks.run(2, intervals_on, name, "OneStream", "slices", 3):
        assert set(communicates(intervals)) == {False, True}
        assert all(one.end <= other.begin for one, other in pairwise(intervals))


SUMS = [case.name for case in CASES if "all_gather" not in case.operations]  # which alone can be exchanged


@pytest.mark.parametrize(
    ("name", "method"), [*((name, "slices") for name in NAMES), *((name, "exchange") for name in SUMS)]
)
def test_apart_matmuls_wait_for_gathers_and_sums_for_matmuls(ranks: RankPool, name: str, method: str) -> None:
    for intervals in ranks.run(2, intervals_on, name, "Apart", method, 3):
        matmuls = [one for one in intervals if one.lane != "comm" and one.what != "copy"]
        sums = [one for one in intervals if one.lane == "comm" and one.what != "all_gather"]
        gathers = [one for one in intervals if one.what == "all_gather" and (not sums or one.end < sums[0].begin)]
        assert len(gathers) + len(sums) >= len(BY_NAME[name].operations)
        assert all(gather.end <= matmul.begin for gather in gathers for matmul in matmuls)
        assert all(matmul.end <= one.begin for one in sums for matmul in matmuls)


@pytest.mark.parametrize("name", NAMES)
def test_parts_alone_are_the_pieces_of_the_whole(ranks: RankPool, name: str) -> None:
    whole = ranks.run(2, intervals_on, name, "OneStream", "slices", 3)[0]
    for kind, wanted in (("MatmulsAlone", False), ("CommunicationAlone", True)):
        alone = ranks.run(2, intervals_on, name, kind, "slices", 3)[0]
        pieces = [(one.what, one.shape) for one in whole if (one.lane == "comm") is wanted]
        assert pieces and [(one.what, one.shape) for one in alone] == pieces
