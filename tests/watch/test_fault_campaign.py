"""A few runs of the fault campaign (scripts/faults/campaign.py): every end is right, told, and clean."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from faults import ranks as fault_ranks
from faults.campaign import campaign
from faults.judge import GOOD, blamed, judge, last_error, lines_named
from faults.programs import Fault, Program

# A run of each of none, kill, stop, exception, early-exit, count, left-out, ctrl-c and in-split.
SEEDS = (21, 1, 44, 66, 26, 92, 33, 77, 38)


@pytest.mark.slow
def test_every_end_is_right_told_and_clean(tmp_path: Path) -> None:
    for verdict in campaign(SEEDS, tmp_path):
        assert verdict.outcome in GOOD, verdict
        assert verdict.named_rank in (None, True) and verdict.named_line in (None, True), verdict


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


@pytest.mark.slow
def test_what_goes_wrong_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.closing(fault_ranks.Server()) as server:
        for outcome, text in WRONG.items():
            if "file  " in outcome and server.shared_memory is None:  # cannot have a /dev/shm apart here
                continue
            monkeypatch.setattr(fault_ranks, "DEADLINE", 1.0 if outcome == "hang" else 25.0)
            program = Program(0, 2, "file", Fault("none"), f"import os\nif os.environ['RANK'] == '1': {text}\n")
            program.text += "else: print('done')\n"
            verdict = judge(program, fault_ranks.run(program, tmp_path / outcome.replace(" ", "_"), server, None))
            assert verdict.outcome == outcome.strip(), verdict


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
