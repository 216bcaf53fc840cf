"""A call that outlives its deadline is left behind in its thread; the end of the process waits for it, not for long."""

from __future__ import annotations

from pathlib import Path

from processes import A_FORK_WITH_THREADS, process

# Sleeps in Python where a call of NCCL would be in C, so that its return can be seen.
SLOW = """
import time
from pynccl.bindings import workers
from pynccl.comm import deadline
def slow(seconds=0.5):
    time.sleep(seconds)
    print("came back", flush=True)
def call(function=slow):
    try:
        deadline.call_with_deadline(0.05, function, library, "slow")
    except pynccl.NcclTimeout as error:
        print(str(error).splitlines()[0], flush=True)
"""
LATE = "slow did not return within 0 s (timeout=0.05)"


def test_a_call_that_was_left_behind_is_waited_for_at_the_end_but_not_in_a_fork(tmp_path: Path) -> None:
    fork = """
child = os.fork()
if not child:
    print("under way in the child:", len(workers._running), flush=True)
    sys.exit(0)
os.waitpid(child, 0)
"""
    ended = process(tmp_path, f"{SLOW}call()\n{fork}", *A_FORK_WITH_THREADS)
    assert (ended.code, ended.out) == (0, f"{LATE}\nunder way in the child: 0\ncame back\n")


def test_a_call_that_does_not_come_back_does_not_hold_up_the_end_for_long(tmp_path: Path) -> None:
    ended = process(tmp_path, f"{SLOW}workers.LEFT_BEHIND_SECONDS = 0.2\ncall(lambda: slow(60))\n")
    assert (ended.code, ended.out, ended.err) == (0, f"{LATE}\n", "")
    assert ended.seconds < 30
