"""Two runs with the same port or the same folder are separate jobs with separate verdicts."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from hung_jobs import Printed, printed, run, save_records

from pynccl.tools.hang.jobs import NothingFoundError, _chosen as chosen, group
from pynccl.watch import folder
from pynccl.watch.records import DEAD, RUNNING, UNKNOWN, CommRecord, ProcessRecord

__all__ = ["printed"]


def process(pid: int, rank: int = -1, born: float = 0.0, end: float = 0.0, uid: str = "", **more: Any) -> ProcessRecord:
    """Return a process of job "job", born 3 seconds before its first record and running unless it has an end."""
    comms = [CommRecord(uid, "world", max(rank, 0), 2)] if uid else []
    record = ProcessRecord(pid, "h", "m", "job", rank, born=born, started=born + 3, comms=comms)
    record.state, record.end_at, record.heartbeat = (DEAD, end, end) if end else (RUNNING, 0.0, born + 100)
    for name, value in more.items():
        setattr(record, name, value)
    return record


BEFORE = [process(1, 0, 10, 50), process(2, 1, 10, 50)]
JOINED_BEFORE = [process(1, 0, 10, 50, "a"), process(2, 1, 10, 50, "a")]
NOW = [process(3, 0, 60, uid="b"), process(4, 1, 60, uid="b")]
# Records -> the pids of each run
RUNS: dict[str, tuple[list[ProcessRecord], list[list[int]]]] = {
    "ranks that have met": ([*JOINED_BEFORE, *NOW], [[3, 4], [1, 2]]),
    "left over from an earlier run, and not dead": ([*NOW, process(5, 1, 10)], [[3, 4], [5]]),
    "not met yet": ([*BEFORE, process(4, 1, 60), process(3, 0, 61)], [[3, 4], [1, 2]]),
    "one has not come yet": ([*BEFORE, *NOW, process(5, 2, 60)], [[3, 4, 5], [1, 2]]),
    "failed before the other's first record": ([process(2, 1, 10, 13.5), process(1, 0, 10.2, started=20)], [[1, 2]]),
    "no rank, one after the other": ([process(1, born=10, end=50), process(2, born=60)], [[2], [1]]),
    "no rank, at once": ([process(1, born=10, end=50), process(2, born=40)], [[1, 2]]),
    "clocks of two machines": ([process(1, 0, 10, 50), process(2, 1, 60, machine="n", state=UNKNOWN)], [[1, 2]]),
}


@pytest.mark.parametrize("name", RUNS)
def test_records_are_grouped_into_runs(name: str) -> None:
    records, expected = RUNS[name]
    assert [sorted(process_record.pid for process_record in job.processes) for job in group(records)] == expected


def test_each_run_has_a_name_that_selects_it() -> None:
    found = group([process(1, 0, 10, 50), process(2, 0, 60, 90), process(3, 0, 100)])
    assert [job.name for job in found] == ["job", "job@2", "job@1"]
    for job in found:
        assert chosen(found, job.name) is job
    assert chosen(found, "job@3") is found[0]
    for name in ("job@4", "other"):
        with pytest.raises(NothingFoundError, match=f"{name}: no such job; expected one of\njob\njob@2"):
            chosen(found, name)


def test_the_list_has_a_row_for_each_run(tmp_path: Path, printed: Printed) -> None:
    now = time.time()
    before = [process(1, 0, now - 7300, now - 7200.5, command="/usr/bin/python /home/me/train.py --lr 3")]
    after = [process(2, 0, now - 60, command="python a\x1b[2J.py"), process(3, 1, now - 60, state=DEAD)]
    assert run("--list", save_records(tmp_path / "a.json", [*before, *after])) == 0
    head, first, second = printed()[0].splitlines()
    assert head.split() == ["job", "state", "processes", "started", "program"]
    assert "1 running" in first and " s ago" in first and first.endswith("python a [2J.py")
    assert second.startswith("job@1  seen 2 h 0 min ago") and second.endswith("python train.py --lr 3")


def test_this_process_was_started_before_now() -> None:
    assert time.time() - 86400 < folder.process_start_time() < time.time()
