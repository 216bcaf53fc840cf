"""The text of `python -m pynccl hang`: the verdict first, equal ranks grouped, stacks of the relevant ranks."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from hung_jobs import NOW, missing

from pynccl.tools.hang import jobs, report, table
from pynccl.watch import formatting
from pynccl.watch.records import (
    DEAD,
    STOPPED,
    ProcessRecord,
)
from pynccl.watch.verdict import judge


def report_of(processes: list[ProcessRecord], **more: Any) -> str:
    return report.text(jobs.Job("train", processes), judge(processes), **more)


def test_the_report_has_the_verdict_a_row_for_each_rank_and_stacks_of_a_missing_and_a_waiting_rank() -> None:
    lines = report_of(missing(4)).splitlines()
    assert lines[0].startswith(
        "rank 3 never entered all_reduce #41 (comm 'tp', 4 ranks, BFLOAT16 x 33,554,432, model.py:88"
    )
    head = next(number for number, line in enumerate(lines) if line.startswith("rank  pid"))
    assert [line.split()[0] for line in lines[head + 1 : head + 5]] == ["0", "1", "2", "3"]
    assert "inside all_reduce #41" in lines[head + 1] and "12.3 s" in lines[head + 1]
    assert lines[head + 4].split()[3:6] == ["40", "40", "done"] and lines[head + 4].endswith("data.py:41 next_batch")
    stacks = [line for line in lines if line.startswith("rank ") and line.endswith("ago:")]
    assert [line.split(",")[0] for line in stacks] == ["rank 3 (pid 4003 on node0)", "rank 0 (pid 4000 on node0)"]
    assert "waiting" in stacks[1]
    assert lines[lines.index(stacks[0]) + 3].strip() == "/home/me/data.py:41 next_batch"


def test_the_report_fits_a_screen_for_any_number_of_equal_ranks() -> None:
    for size, hosts, behind in ((2, 1, (1,)), (16, 2, (3,)), (1024, 128, (77, 500, 501))):
        lines = report_of(missing(size, behind, hosts)).splitlines()
        assert len(lines) < 25
        assert max(map(len, lines)) <= 120
    found = table.rows(missing(1024, (77, 500, 501), 128))
    assert [formatting.numbers(row.ranks, 3) for row in found] == ["0-76, 78-499, 502-1023", "77, 500-501"]
    apart = table.rows(missing(1024, (77, 500, 501), 128), (), True)
    assert [row.ranks for row in apart] == [[rank] for rank in range(1024)]


def test_an_ended_process_is_reported_with_its_end_and_its_last_call() -> None:
    processes = missing(4, ())
    processes[2].state, processes[2].end, processes[2].end_at = DEAD, "killed or crashed", NOW - 5
    processes[3].end, processes[3].end_at = "ValueError: no such file", NOW - 3.1
    processes[1].state, processes[1].where = STOPPED, ""
    rows = {row.ranks[0]: row for row in table.rows(processes)}
    text = "\n".join(table.text(list(rows.values())))
    assert (rows[2].state, rows[2].doing) == ("dead", "was inside all_reduce #41")
    assert rows[2].since == pytest.approx(7.3)  # time since it entered the call, when it ended
    assert "killed or crashed, 5.0 s ago" in text
    assert "ValueError: no such file, 3.1 s ago" in text
    assert (rows[1].state, rows[1].where) == ("stopped", "stopped by a signal or a debugger")


def test_equal_stacks_are_printed_once_and_deep_stacks_keep_their_innermost_frames() -> None:
    text = report_of(missing(1024, (3,)), stacks=True)
    assert text.count("/home/me/train.py:20 main") == 2
    assert "rank 0 (pid 4000 on node0), and the same on ranks 1-2, 4-1023" in text
    processes = missing(2, (1,))
    processes[1].stack = "\n".join(f"File a.py:{number} f" for number in range(500))
    text = report_of(processes)
    assert "... 476 outer frames" in text and "a.py:499 f" in text and "a.py:475 f" not in text


def test_formatting_of_times_and_ranks() -> None:
    assert [formatting.seconds(value) for value in (-1, 0.04, 12.34, 250, 11_100, 200_000)] == [
        "0.0 s", "0.0 s", "12.3 s", "4 min 10 s", "3 h 5 min", "2 days"]  # fmt: skip
    assert formatting.numbers([3, 1, 2, 7], 3) == "1-3, 7"
    assert formatting.numbers(range(0, 1000, 2), 3) == "0, 2, 4, ... (500)"


def test_the_page_shows_the_printed_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    try:
        processes = missing(4)
        text = report.text(jobs.Job("train", processes), judge(processes))
    finally:
        monkeypatch.undo()
        time.tzset()
    page = (Path(__file__).resolve().parents[2] / "docs" / "hang.md").read_text()
    assert "\n".join("    " + line if line else "" for line in text.splitlines()) in page
