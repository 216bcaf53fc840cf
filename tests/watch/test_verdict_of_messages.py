"""Real ranks whose messages, streams and splits do not fit: whom the errors of all name, and the report as well.

What is said of which records is tested in test_verdict.py and its neighbours."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from faults import ranks as fault_ranks
from faults.judge import last_error
from faults.programs import Fault, Program

from pynccl.tools.hang import jobs, report
from pynccl.watch.verdict import judge

HEAD = """\
import os, sys, torch, pynccl
R, N = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
comm = pynccl.init(timeout=5)
A, B = N - 2, N - 1
x, y = torch.ones(4), torch.empty(4)
comm.all_reduce(x)
"""

# Name -> (program, what its errors say). {A}, {B}: the last two ranks; {a}, {b}, {c}: the lines with these marks.
AT_ONCE = ("a send is left out", "behind it on a stream", "a split sends another size")
CASES = {
    "a send is left out": (
        """
if R == B: comm.recv(y, A)  # a
comm.barrier()  # b
""",
        "ranks wait for each other: rank {A} in barrier #2 of comm 'world' at {b}, "
        "rank {B} in recv from rank {A} of comm 'world' at {a}.",
    ),
    "both receive": (
        """
if R == A: comm.recv(y, B)  # a
if R == B: comm.recv(y, A)  # b
comm.barrier()
""",
        "ranks wait for each other: rank {A} in recv from rank {B} of comm 'world' at {a}, "
        "rank {B} in recv from rank {A} of comm 'world' at {b}.",
    ),
    "behind it on a stream": (
        """
stream = pynccl.create_stream()
if R == B: comm.recv(y, A, stream=stream)  # a
comm.all_reduce(x, stream=stream)  # b
stream.synchronize()
""",
        "ranks wait for each other: rank {A} in all_reduce #2 of comm 'world' at {b}, "
        "rank {B} in recv from rank {A} of comm 'world' at {a} before all_reduce #2 of comm 'world' at {b}.",
    ),
    "a signal is left out": (
        """
if R == B: comm.wait_signal(A, stream=0)  # a
comm.barrier()  # b
""",
        "ranks wait for each other: rank {A} in barrier #2 of comm 'world' at {b}, "
        "rank {B} in wait_signal from rank {A} of comm 'world' at {a}.",
    ),
    "a split disagrees": (
        """
child = comm.split(0 if R >= A else 1, -R)
if R == B: child.all_reduce(x, op="max")  # a
elif R == A: child.all_reduce(x)  # b
comm.barrier()
""",
        "the ranks disagree about call #1 (comm 'world.split1-0', 2 ranks): "
        "rank 1{of_A} calls all_reduce(count=4, FLOAT32, SUM) at {b}, "
        "rank 0 (rank {B} of the launch) calls all_reduce(count=4, FLOAT32, MAX) at {a}",
    ),
    "a split sends another size": (
        """
child = comm.split(0 if R >= A else 1, -R)
if R == B: child.send(x, 1)  # a
if R == A: child.recv(torch.empty(9), 0)  # b
comm.barrier()
""",
        "rank 0 (rank {B} of the launch) sends FLOAT32 x 4 at {a} to rank 1{of_A}, "
        "which expects FLOAT32 x 9 at {b} (comm 'world.split1-0').",
    ),
}


@pytest.fixture(scope="module")
def server() -> Iterator[fault_ranks.Server]:
    server = fault_ranks.Server()
    yield server
    server.close()


def expected(case: str, size: int) -> str:
    program, text = CASES[case]
    names = {"A": size - 2, "B": size - 1, "of_A": "" if size == 3 else f" (rank {size - 2} of the launch)"}
    lines = enumerate((HEAD + program).splitlines(), 1)
    marks = {line[-1]: f"program.py:{number}" for number, line in lines if line[-4:-1] == "  #" or line[-3:-1] == "# "}
    return text.format(**names, **marks)


@pytest.mark.parametrize(
    ("case", "size"),
    [
        pytest.param(case, size, marks=() if size == 3 and case in AT_ONCE else pytest.mark.slow)
        for case in CASES
        for size in (2, 3, 4)
    ],
)
def test_all_errors_and_the_report_name_both_ranks(
    server: fault_ranks.Server, tmp_path: Path, case: str, size: int
) -> None:
    program = Program(0, size, "environment", Fault("none"), HEAD + CASES[case][0])
    ended = fault_ranks.run(program, tmp_path, server, None)
    said, failed = expected(case, size), [rank for rank in ended.ranks if rank.status]
    assert failed and not ended.hung
    for rank in failed:
        lines = rank.err.splitlines()
        assert last_error(rank.err).startswith("pynccl.Nccl"), rank.err
        verdict = lines[lines.index(last_error(rank.err)) + 1].strip()
        assert verdict.startswith(said), rank.err
    job, _, _ = jobs.find([str(tmp_path / "watch" / "a")], None)
    found = judge(job.processes)
    assert found.sentence.replace(f"all {size} processes have ended: ", "").startswith(said)
    assert "threading.py" not in report.text(job, found).partition("\n\n")[0]
