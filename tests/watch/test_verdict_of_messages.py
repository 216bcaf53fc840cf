"""Real ranks with mismatched messages and splits: all errors, and the report, name the same ranks.

test_verdict.py and test_verdict_of_calls.py test the verdicts on given records."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from faults import ranks as fault_ranks
from faults.judge import last_error
from faults.programs import Fault, Program

from pynccl.tools.hang import jobs
from pynccl.watch.verdict import judge

HEAD = """\
import os, sys, torch, pynccl
R = int(os.environ["RANK"])
comm = pynccl.init(timeout=5)
x, y = torch.ones(4), torch.empty(4)
comm.all_reduce(x)
"""

# Name -> (program, text of its errors). {a}, {b}: the lines with these markers.
CASES = {
    "a send is left out": (
        """
if R == 2: comm.recv(y, 1)  # a
comm.barrier()  # b
""",
        "ranks wait for each other: rank 1 in barrier #2 of comm 'world' at {b}, "
        "rank 2 in recv from rank 1 of comm 'world' at {a}.",
    ),
    "a split sends another size": (
        """
child = comm.split(0 if R else 1, -R)
if R == 2: child.send(x, 1)  # a
if R == 1: child.recv(torch.empty(9), 0)  # b
comm.barrier()
""",
        "rank 2 sends FLOAT32 x 4 at {a} to rank 1, which expects FLOAT32 x 9 at {b} (comm 'world.split1-0').",
    ),
}


@pytest.fixture(scope="module")
def server() -> Iterator[fault_ranks.Server]:
    server = fault_ranks.Server()
    yield server
    server.close()


@pytest.mark.parametrize("case", CASES)
def test_all_errors_and_the_report_name_both_ranks(server: fault_ranks.Server, tmp_path: Path, case: str) -> None:
    source = HEAD + CASES[case][0]
    lines = [(number, line) for number, line in enumerate(source.splitlines(), 1) if line[-3:-1] == "# "]
    expected = CASES[case][1].format(**{line[-1]: f"program.py:{number}" for number, line in lines})
    ended = fault_ranks.run(Program(0, 3, "environment", Fault("none"), source), tmp_path, server, None)
    failed = [rank for rank in ended.ranks if rank.status]
    assert failed and not ended.hung
    for rank in failed:
        lines_of = rank.err.splitlines()
        assert last_error(rank.err).startswith("pynccl.Nccl"), rank.err
        assert lines_of[lines_of.index(last_error(rank.err)) + 1].strip().startswith(expected), rank.err
    job, _, _ = jobs.find([str(tmp_path / "watch" / "a")], None)
    assert judge(job.processes).sentence.replace("all 3 processes have ended: ", "").startswith(expected)
