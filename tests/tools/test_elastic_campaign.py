"""A few jobs of the elastic campaign (scripts/faults/elastic.py), and its starter (recipes/elastic_start.py)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from faults.elastic import campaign
from faults.elastic_job import Fault, Job

ROOT = Path(__file__).resolve().parents[2]


def job(number: int, size: int, transport: str, extras: list[str], *faults: Fault) -> Job:
    nodes = transport == "nodes"
    return Job(number, size, 8, "fork", transport, nodes, watch=True, destroy=True, extras=extras, faults=list(faults))


JOBS = [
    job(1, 3, "auto", ["save"], Fault(1, "stop", "save", 1, pause=12)),  # comes back when the others have gone on
    job(2, 4, "sockets", ["overlap", "chain", "groups"], Fault(2, "kill", "all_reduce", 5)),
    job(3, 4, "auto", ["overlap", "plan"], Fault(1, "exception", "compute", 3), Fault(2, "kill", "survivors", 1, 0.05)),
    job(4, 3, "auto", [], Fault(2, "impatient", "commit", 3), Fault(0, "kill", "syncing", 1)),  # the source is lost
    job(5, 3, "nodes", ["overlap"], Fault(0, "exit", "committed", 2), Fault(1, "os-exit", "committed", 4)),
]


def test_who_is_left_finishes_with_the_state_of_a_single_process(tmp_path: Path) -> None:
    verdicts = campaign(JOBS, tmp_path, at_once=2)
    assert [(verdict.seed, verdict.outcome, verdict.why) for verdict in verdicts if verdict.outcome != "right"] == []
    assert len(verdicts) == len(JOBS) and any(verdict.seconds.get("with it") for verdict in verdicts)


@pytest.mark.parametrize(("codes", "expected"), [("0 3", 0), ("3 -9", 1)])
def test_the_starter_says_how_ranks_ended_and_exits_with_0_if_one_has_finished(
    tmp_path: Path, codes: str, expected: int
) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys\n"
        "code = int(sys.argv[1:][int(os.environ['RANK'])])\n"
        "os.kill(os.getpid(), -code) if code < 0 else sys.exit(code)\n"
    )
    words = [sys.executable, str(ROOT / "scripts/recipes/elastic_start.py"), "2", str(program), *codes.split()]
    done = subprocess.run(words, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == expected
    lines = ["rank 1 exited with 3"] if expected == 0 else ["rank 0 exited with 3", "rank 1 was killed by signal 9"]
    assert sorted(done.stderr.splitlines()) == [f"elastic_start.py: {line}" for line in lines]  # they end in any order
