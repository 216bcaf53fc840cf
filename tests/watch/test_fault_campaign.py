"""A few runs of the fault campaign (scripts/faults/campaign.py): every end is right, told, and clean."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from faults import ranks as fault_ranks
from faults.campaign import campaign, table
from faults.judge import GOOD, Verdict, blamed, judge, last_error, lines_named
from faults.programs import FAULTS, Fault, Program, fault_of, make

ROOT = Path(__file__).resolve().parents[2]

# A run of each of none, kill, stop, exception, early-exit, count, left-out, ctrl-c and in-split.
SEEDS = (21, 1, 44, 66, 26, 92, 33, 77, 38)
RECORDED = (ROOT / "pynccl" / "watch" / "recorder.py").exists()


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Verdict]:
    return {one.seed: one for one in campaign(SEEDS, tmp_path_factory.mktemp("campaign"))}


@pytest.mark.parametrize("seed", SEEDS, ids=fault_of)
def test_nothing_hangs_crashes_or_is_left_over(verdicts: dict[int, Verdict], seed: int) -> None:
    verdict = verdicts[seed]
    assert verdict.fault == fault_of(seed)
    assert verdict.outcome in (*GOOD, "wrong name"), verdict


@pytest.mark.parametrize("seed", SEEDS, ids=fault_of)
def test_who_is_to_blame_is_named(verdicts: dict[int, Verdict], seed: int) -> None:
    assert verdicts[seed].named_rank in (None, True), verdicts[seed]


@pytest.mark.skipif(not RECORDED, reason="needs the flight recorder")
@pytest.mark.parametrize("seed", SEEDS, ids=fault_of)
def test_the_line_is_named_where_there_is_one(verdicts: dict[int, Verdict], seed: int) -> None:
    assert verdicts[seed].named_line in (None, True), verdicts[seed]


# The campaign itself

WRONG = {
    "crash": "import os; os.abort()",
    "crash ": "raise AttributeError('of ours')",
    "wrong data": "import sys; print('WRONG DATA: y', file=sys.stderr); print('done')",
    "left-over file": "import tempfile; tempfile.mkstemp(); print('done')",
    "left-over file ": "import os; open(os.environ['PYNCCL_WATCH_DIR'] + '/x', 'w'); print('done')",
    "left-over file  ": "open('/dev/shm/x', 'w'); print('done')",
    "left-over process": "import subprocess; subprocess.Popen(['sleep', '3']); print('done')",
    "false alarm": "import sys; print('rank 1 is missing', file=sys.stderr); print('done')",
    "hang": "import time; time.sleep(60)",
    "right result": "print('done')",
}


@pytest.fixture(scope="module")
def server() -> Iterator[fault_ranks.Server]:
    server = fault_ranks.Server()
    yield server
    server.close()


@pytest.mark.parametrize("outcome", WRONG)
def test_what_goes_wrong_is_seen(
    server: fault_ranks.Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outcome: str
) -> None:
    if outcome == "hang":  # the others end when they end
        monkeypatch.setattr(fault_ranks, "DEADLINE", 1.0)
    if "file  " in outcome and server.shared_memory is None:
        pytest.skip("cannot have a /dev/shm apart here")
    program = Program(0, 2, "file", Fault("none"), f"import os\nif os.environ['RANK'] == '1': {WRONG[outcome]}\n")
    program.text += "else: print('done')\n"
    verdict = judge(program, fault_ranks.run(program, tmp_path, server, None))
    assert verdict.outcome == outcome.strip(), verdict


@pytest.mark.parametrize("seed", range(2 * len(FAULTS)))
def test_a_seed_stands_for_one_program(seed: int) -> None:
    program, again = make(seed), make(seed)
    assert (program.text, program.fault) == (again.text, again.fault)
    compile(program.text, "program.py", "exec")


def test_a_wrong_call_is_on_a_line_of_its_own() -> None:
    for seed in range(8, 300, len(FAULTS)):  # of the fault "count"
        program = make(seed)
        lines = program.text.splitlines()
        above = "\n".join(lines[: min(program.fault.lines)])
        assert above.rpartition("else:")[0].rstrip() and f"if RANK != {program.fault.rank}:" in above, program.text


TRACEBACK = """\
Traceback (most recent call last):
  File "/tmp/program.py", line 7, in <module>
    comm.all_reduce(x)  # rank 5
    ^^^^^^^^^^^^^^^^^^
pynccl.NcclRemoteError: all_reduce failed on rank 0 of 3
  rank 2 left by ValueError at program.py:31
  rank 1 waits
  this rank's stack, innermost line last:
  /tmp/program.py:9 <module>
  rank 1 is at program.py:12
"""


def test_a_report_is_read_without_its_traceback() -> None:
    assert blamed(TRACEBACK) == {2}
    assert lines_named(TRACEBACK) == {31, 12}
    assert last_error(TRACEBACK).startswith("pynccl.NcclRemoteError: all_reduce failed")
    assert blamed("lost rank 2: it aborted (says rank 1); rank 0 last waited") == {2}
    assert blamed("ranks 1 and 3 are missing") == blamed("ranks [1, 3] are missing") == {1, 3}


def test_the_table_counts_outcomes() -> None:
    found = [
        Verdict(0, "kill", "right error", named_rank=True, seconds=1.0),
        Verdict(1, "kill", "hang", named_rank=False, seconds=21.0),
    ]
    (row,) = [line for line in table(found).splitlines() if line.startswith("| kill")]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[1] == "2" and cells.count("1") == 2
    assert cells[-3:] == ["1 of 2", "", "21.0"]
