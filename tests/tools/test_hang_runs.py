"""Two runs that used the same port, or the same folder, are two jobs: one is not blamed for the other."""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pynccl.tools import command, hang
from pynccl.tools.hang.jobs import NothingFoundError, _chosen as chosen, group
from pynccl.watch import folder
from pynccl.watch.records import DEAD, RUNNING, UNKNOWN, CommRecord, ProcessRecord

ROOT = Path(__file__).parents[2]
PATIENCE = 60.0

PROGRAM = """
import os, sys, torch, pynccl
what = sys.argv[1]
last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
comm = pynccl.init(timeout=60)
comm.all_reduce(torch.ones(4))
if last and what == "fails":
    raise ValueError("of the first run")
if last:
    input()
comm.all_reduce(torch.ones(4))
"""


class Launches:
    """Of PROGRAM, all with the same MASTER_ADDR and MASTER_PORT, and without a launcher of their own."""

    def __init__(self, place: Path) -> None:
        (place / "train.py").write_text(PROGRAM)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        self.place, self.running = place, list[subprocess.Popen[bytes]]()
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "PMI", "OMPI_"))},
            "PYTHONPATH": str(ROOT),
            "PYNCCL_LIBRARY": "host",
            "OMP_NUM_THREADS": "1",
            "PYNCCL_WATCH_DIR": str(place),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }

    def start(self, what: str, ranks: int) -> list[subprocess.Popen[bytes]]:
        own = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        command = [sys.executable, str(self.place / "train.py"), what]
        log = (self.place / "log").open("ab")
        made = [
            subprocess.Popen(
                command,
                env={**self.environment, **own, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
            )
            for rank in range(ranks)
        ]
        self.running += made
        return made

    def fail(self, ranks: int) -> None:
        """A run that has gone wrong, of which nobody lives any more."""
        made = self.start("fails", ranks)
        assert made[-1].wait(PATIENCE) == 1
        assert all(one.wait(PATIENCE) for one in made)

    def close(self) -> None:
        for one in self.running:
            one.kill()
            one.wait()


@pytest.fixture
def launches(tmp_path: Path) -> Iterator[Launches]:
    made = Launches(tmp_path)
    yield made
    made.close()


def look(place: Path, capsys: pytest.CaptureFixture[str], *options: str) -> Any:
    parser = argparse.ArgumentParser()
    hang.configure(parser)
    arguments = parser.parse_args(["--json", *options])
    command.ended(lambda: hang.run(arguments), "hang")
    out = capsys.readouterr().out
    return json.loads(out) if out else {}


def wait_until(found: Callable[[], Any], good: Callable[[Any], bool]) -> Any:
    end = time.monotonic() + PATIENCE
    while not good(said := found()):
        assert time.monotonic() < end, said
        time.sleep(0.1)
    return said


@pytest.mark.slow
def test_a_run_that_hangs_is_not_told_of_the_one_before_it_at_the_same_port(
    launches: Launches, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    place, ranks = launches.place, 2
    monkeypatch.setenv("PYNCCL_WATCH_DIR", str(place))
    launches.fail(ranks)
    launches.start("hangs", ranks)
    said = wait_until(
        lambda: look(place, capsys), lambda said: said and said["verdict"]["sentence"].startswith(f"rank {ranks - 1} n")
    )
    assert said["verdict"]["sentence"].startswith(f"rank {ranks - 1} never entered all_reduce #2"), said["verdict"]
    assert "of the first run" not in json.dumps(said["verdict"])
    pids = [one.pid for one in launches.running[ranks:]]
    assert sorted(one["pid"] for one in said["processes"]) == sorted(pids)
    # The one before is still there to be looked at.
    [other] = said["other_jobs"]
    before = look(place, capsys, "--job", other["job"])
    assert "of the first run" in before["verdict"]["sentence"]
    assert len(before["processes"]) == ranks
    # A folder that was copied is as good.
    assert look(place, capsys, str(place))["verdict"]["sentence"].startswith(f"rank {ranks - 1} never entered")
    listed = look(place, capsys, "--list")["jobs"]
    assert [(one["living"], one["processes"]) for one in listed] == [(ranks, ranks), (0, ranks)]
    assert all("train.py" in one["program"] for one in listed)
    assert listed[0]["program"].endswith("hangs") and listed[1]["program"].endswith("fails")
    assert time.time() - 2 * PATIENCE < listed[1]["started"] < listed[1]["last_seen"] <= listed[0]["last_seen"]


# By hand: processes of a job of one name


def process(pid: int, rank: int = -1, born: float = 0.0, end: float = 0.0, uid: str = "", **more: Any) -> ProcessRecord:
    comms = [CommRecord(uid, "world", max(rank, 0), 2)] if uid else []
    one = ProcessRecord(pid, "h", "m", "job", rank, born=born, started=born + 3, comms=comms)
    one.state, one.end_at, one.heartbeat = (DEAD, end, end) if end else (RUNNING, 0.0, born + 100)
    for name, value in more.items():
        setattr(one, name, value)
    return one


def pids(*processes: ProcessRecord) -> list[list[int]]:
    return [sorted(one.pid for one in job.processes) for job in group(processes)]


def test_ranks_that_have_met_are_one_run_and_others_with_their_rank_are_another() -> None:
    before = [process(1, 0, 10, 50, "a"), process(2, 1, 10, 50, "a")]
    now = [process(3, 0, 60, uid="b"), process(4, 1, 60, uid="b")]
    assert pids(*before, *now) == [[3, 4], [1, 2]]
    assert pids(*now, process(5, 1, 10)) == [[3, 4], [5]]  # left over from an earlier run, and not dead


def test_a_rank_that_has_not_come_yet_is_of_the_run_that_lives() -> None:
    before = [process(1, 0, 10, 50), process(2, 1, 10, 50)]
    assert pids(*before, process(3, 0, 60), process(4, 1, 61)) == [[3, 4], [1, 2]]
    assert pids(*before, process(4, 1, 60), process(3, 0, 61)) == [[3, 4], [1, 2]]
    assert pids(*before, process(3, 0, 60, uid="b"), process(4, 1, 60, uid="b"), process(5, 2, 60)) == [
        [3, 4, 5],
        [1, 2],
    ]


def test_a_rank_that_failed_before_the_others_wrote_their_first_record_is_of_their_run() -> None:
    failed = process(2, 1, born=10, end=13.5)
    late = process(1, 0, born=10.2, started=20)
    assert pids(failed, late) == [[1, 2]]


def test_without_a_rank_those_are_of_one_run_that_lived_at_the_same_time() -> None:
    assert pids(process(1, born=10, end=50), process(2, born=60)) == [[2], [1]]
    assert pids(process(1, born=10, end=50), process(2, born=40)) == [[1, 2]]
    assert pids(process(1, born=10, end=50), process(2, born=0.0, started=60)) == [[1, 2]]  # not known: as it was


def test_clocks_of_two_machines_are_not_compared() -> None:
    here, there = process(1, 0, 10, 50), process(2, 1, 60, machine="n", state=UNKNOWN)
    assert pids(here, there) == [[1, 2]]


def test_each_run_has_a_name_by_which_it_is_chosen() -> None:
    found = group([process(1, 0, 10, 50), process(2, 0, 60, 90), process(3, 0, 100)])
    assert [job.name for job in found] == ["job", "job@2", "job@1"]
    for job in found:
        assert chosen(found, job.name) is job
    assert chosen(found, "job@3") is found[0]
    for name in ("job@4", "other"):
        with pytest.raises(NothingFoundError, match=f"{name}: no job of that name; there are\njob\njob@2"):
            chosen(found, name)


def test_the_list_has_a_row_for_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from pynccl.watch.records import to_json

    now = time.time()
    before = [process(1, 0, now - 7300, now - 7200.5, command="/usr/bin/python /home/me/train.py --lr 3")]
    after = [process(2, 0, now - 60, command="python a\x1b[2J.py"), process(3, 1, now - 60, state=DEAD)]
    (tmp_path / "a.json").write_text(json.dumps({"processes": [to_json(one) for one in before + after]}))
    parser = argparse.ArgumentParser()
    hang.configure(parser)
    assert hang.run(parser.parse_args(["--list", str(tmp_path)])) == 0
    head, first, second = capsys.readouterr().out.splitlines()
    assert head.split() == ["job", "state", "processes", "started", "program"]
    assert "1 running" in first and "60.0 s ago" in first and first.endswith("python a [2J.py")
    assert second.startswith("job@1  seen 2 h 0 min ago") and second.endswith("python train.py --lr 3")


def test_this_process_was_started_before_now() -> None:
    assert time.time() - 86400 < folder.born() < time.time()
    child = subprocess.run(
        [sys.executable, "-c", "from pynccl.watch import folder; print(folder.born())"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert -1 < time.time() - float(child.stdout) < 30
