"""A call that outlives its deadline is left behind in its thread; the end of the process waits for it, not for long."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import A_FORK_WITH_THREADS, process

# Sleeps in Python where a call of NCCL would be in C, so that its return can be seen.
SLOW = """
import time
from pynccl.bindings import workers
from pynccl.comm import deadline
def slow(seconds=0.5):
    time.sleep(seconds)
    print("came back", flush=True)
"""
BY_DEADLINE = """
try:
    deadline.call_with_deadline(0.05, slow, library, "slow")
except pynccl.NcclTimeout as error:
    print(str(error).splitlines()[0], flush=True)
"""
BY_INTERRUPT = """
threading.Timer(0.1, lambda: os.kill(os.getpid(), 2)).start()
try:
    deadline.call_with_deadline(30.0, slow, library, "slow")
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@pytest.mark.parametrize(
    ("source", "says"),
    [(BY_DEADLINE, "slow did not return within 0 s (timeout=0.05)"), (BY_INTERRUPT, "interrupted")],
    ids=["deadline", "interrupt"],
)
def test_a_call_that_was_left_behind_is_waited_for_at_the_end(tmp_path: Path, source: str, says: str) -> None:
    ended = process(tmp_path, SLOW + source)
    assert (ended.code, ended.out, ended.err) == (0, f"{says}\ncame back\n", "")


def test_a_call_that_does_not_come_back_does_not_hold_up_the_end_for_long(tmp_path: Path) -> None:
    source = "workers.LEFT_BEHIND_SECONDS = 0.2\ndef stuck():\n    slow(60)\n"
    ended = process(tmp_path, SLOW + source + BY_DEADLINE.replace("slow,", "stuck,"))
    assert (ended.code, ended.err) == (0, "") and "came back" not in ended.out
    assert ended.seconds < 30


def test_a_forked_child_waits_for_no_call_of_its_parent(tmp_path: Path) -> None:
    source = """
child = os.fork()
if not child:
    print("under way in the child:", len(workers._running), flush=True)
    sys.exit(0)
os.waitpid(child, 0)
"""
    ended = process(tmp_path, SLOW + BY_DEADLINE + source, *A_FORK_WITH_THREADS)
    assert ended.code == 0 and ended.out.splitlines()[1:] == ["under way in the child: 0", "came back"]
