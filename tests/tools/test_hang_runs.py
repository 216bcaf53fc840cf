"""Two runs with the same port or the same folder are separate jobs with separate verdicts."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from hung_jobs import Printed, printed, run, save_records

from pynccl.tools.hang.jobs import NothingFoundError, _chosen as chosen, group
from pynccl.watch import folder
from pynccl.watch.layout import ProcessEnd
from pynccl.watch.records import DEAD, RUNNING, UNKNOWN, CallRecord, CommRecord, ProcessRecord

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
        with pytest.raises(NothingFoundError, match=f"{name}: no such job; --list shows all, such as\njob\njob@2"):
            chosen(found, name)


def test_the_list_has_a_row_for_each_run(tmp_path: Path, printed: Printed) -> None:
    now = time.time()
    before = [process(1, 0, now - 7300, now - 7200.5, command="/usr/bin/python /home/me/train.py --lr 3")]
    after = [process(2, 0, now - 60, command="python a\x1b[2J.py"), process(3, 1, now - 60, state=DEAD)]
    assert run("--list", save_records(tmp_path / "a.json", [*before, *after])) == 0
    head, first, second = printed()[0].splitlines()
    assert head.split() == ["job", "state", "processes", "started", "program"]
    assert "1 running" in first and " s ago" in first and first.endswith("python a [2J.py")
    assert second.startswith("job@1  failed 2 h 0 min ago") and second.endswith("python train.py --lr 3")


def program(name: str, pid: int, state: str, ended: float = 0.0, rank: int = 0, **more: Any) -> list[ProcessRecord]:
    """Return one of two ranks of train_NAME.py, of a launch that torchrun named."""
    now = time.time()
    more |= {"job": f"{name * 8}-9b08-4e43-0-host-43307", "command": f"python train_{name}.py", "uid": name}
    return [process(pid, rank, now - 600 + pid, now - ended if ended else 0.0, **{"state": state, **more})]


CLEAN = {"ending": ProcessEnd.CLEAN}
WAITS = CallRecord(5, 5, "all_reduce", state="inside", issued=time.time() - 60)
HANGS = [CommRecord("c", "world", 0, 2, entered=5, calls=[WAITS])]
# What there is -> the job that is shown, and the exit code
SHOWN: dict[str, tuple[list[ProcessRecord], str, int]] = {
    "a good run after a failed one": (program("a", 1, DEAD, 90) + program("b", 2, DEAD, 60, **CLEAN), "b", 0),
    "a failed run after a good one": (program("a", 1, DEAD, 30) + program("b", 2, DEAD, 60, **CLEAN), "a", 1),
    "it began later, and failed before": (program("a", 9, DEAD, 70) + program("b", 2, DEAD, 60, **CLEAN), "b", 0),
    "a good run, and one that runs": (program("a", 1, RUNNING) + program("b", 2, DEAD, 60, **CLEAN), "a", 0),
    "of two that run: the newer one": (program("a", 1, RUNNING) + program("b", 2, RUNNING), "b", 0),
    "two that run, of which the older one hangs": (
        program("b", 2, RUNNING) + program("c", 1, RUNNING, comms=HANGS, now=time.time() + 60),
        "c",
        1,
    ),
}


@pytest.mark.parametrize("case", SHOWN)
def test_the_job_that_is_shown_without_a_choice(case: str, tmp_path: Path, printed: Printed) -> None:
    records, shown, code = SHOWN[case]
    place = save_records(tmp_path / "a.json", records)
    assert run(place) == code
    text = printed()[0]
    assert f"train_{shown}.py (" in text, text
    for other in {record.job[0] for record in records} - {shown}:  # it can be chosen by what is printed
        assert f"1 other job; --job {other * 8} shows it:" in text
        assert f"    {other * 8}  " in text and f"python train_{other}.py" in text
        run(place, "--job", other * 8)
        assert f"train_{other}.py (" in printed()[0]
    assert ("(rank 0 of 2) ended without an exception" in text) == (code == 0 and "that run" not in case)


def test_names_are_shortened_to_what_no_other_job_begins_with(tmp_path: Path, printed: Printed) -> None:
    alike = [*program("a", 1, DEAD, 60), *program("b", 2, DEAD, 90)]
    alike[1].job = alike[0].job.replace("host", "other")
    place = save_records(tmp_path / "a.json", alike)
    assert run(place, "--list") == 0
    rows = printed()[0].splitlines()[1:]
    assert [row.split()[0] for row in rows] == ["aaaaaaaa-9b08-4e43-0-h", "aaaaaaaa-9b08-4e43-0-o"]
    assert run(place, "--job", "aaaaaaaa") == 2
    assert "several jobs begin with this; --list shows all, such as" in printed()[1]


def test_this_process_was_started_before_now() -> None:
    assert time.time() - 86400 < folder.process_start_time() < time.time()
