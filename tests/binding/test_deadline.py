"""A call that exceeds its deadline is abandoned in its thread; the process waits for it at exit, but not for long."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from processes import IGNORE_FORK_WARNING, process, wait_for

from pynccl.bindings import workers
from pynccl.bindings.library import load
from pynccl.comm import deadline

# A call that sleeps in Python instead of in NCCL, so that it can print when it returns.
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
    ("source", "output"),
    [(BY_DEADLINE, "slow did not return within 0.05 s (timeout=0.05)"), (BY_INTERRUPT, "interrupted")],
    ids=["deadline", "interrupt"],
)
def test_exit_waits_for_abandoned_call(tmp_path: Path, source: str, output: str) -> None:
    ended = process(tmp_path, SLOW + source)
    assert (ended.code, ended.out, ended.err) == (0, f"{output}\ncame back\n", "")


def test_exit_wait_for_abandoned_call_is_limited(tmp_path: Path) -> None:
    source = "workers.LEFT_BEHIND_SECONDS = 0.2\ndef stuck():\n    slow(60)\n"
    ended = process(tmp_path, SLOW + source + BY_DEADLINE.replace("slow,", "stuck,"))
    assert (ended.code, ended.err) == (0, "") and "came back" not in ended.out
    assert ended.seconds < 30


def test_all_waits_at_exit_share_one_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_exit", workers.Clock(0.2))
    never, started = threading.Event(), time.monotonic()
    assert not workers.wait_at_exit([never.wait] * 5, 600)
    assert workers.exit_left() == 0
    with pytest.raises(workers.NoAnswer):
        workers.QueryWorker().query(never.wait, 600)
    never.set()
    assert time.monotonic() - started < 60


def test_workers_that_are_not_needed_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_IDLE_SECONDS", 0.05)
    go = threading.Event()
    calls = [workers.WorkerCall(go.wait, "together") for _ in range(5)]
    assert len(workers._workers) > 5
    go.set()
    assert all(call.done.wait(30) for call in calls)
    wait_for(lambda: len(workers._workers) == 1)


def test_forked_child_does_not_wait_for_parent_calls(tmp_path: Path) -> None:
    source = """
child = os.fork()
if not child:
    print("under way in the child:", len(workers._running), flush=True)
    sys.exit(0)
os.waitpid(child, 0)
"""
    ended = process(tmp_path, SLOW + BY_DEADLINE + source, *IGNORE_FORK_WARNING)
    assert ended.code == 0 and ended.out.splitlines()[1:] == ["under way in the child: 0", "came back"]


@pytest.mark.parametrize("returns_first", [True, False])
def test_a_result_that_nobody_receives_is_undone_once(monkeypatch: pytest.MonkeyPatch, returns_first: bool) -> None:
    """Ctrl-C arrives just after the call has returned, or before."""
    go, undone = threading.Event(), threading.Semaphore(0)
    calls: list[workers.WorkerCall[Any]] = []

    def interrupted(call: workers.WorkerCall[Any], *_: Any) -> Any:
        calls.append(call)
        if returns_first:
            go.set()
            call.done.wait()
        raise KeyboardInterrupt

    monkeypatch.setattr(workers.WorkerCall, "result", interrupted)
    with pytest.raises(KeyboardInterrupt):
        deadline.call_with_deadline(None, go.wait, load("host"), "init", undone.release)
    go.set()
    assert undone.acquire(timeout=30)
    calls[0].done.wait()
    assert not undone.acquire(blocking=False)
