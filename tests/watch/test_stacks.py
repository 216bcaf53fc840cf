"""Where threads are: told by faulthandler when somebody needs it, and never looked at in a healthy program."""

from __future__ import annotations

import faulthandler
import os
import re
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from hanging import place_of
from ranks import HOST, RankPool

from pynccl.watch import frames
from pynccl.watch.reader import ask, read_file, read_folder


def healthy(comm: Any) -> tuple[list[str], int]:
    """What is asked of the threads while many calls are made, in three threads; looks of the watchdog meanwhile."""
    from pynccl.watch import watchdog

    walked: list[str] = []
    real = sys._current_frames
    sys._current_frames = lambda: walked.append("frames") or real()  # type: ignore[func-returns-value]
    dump, faulthandler.dump_traceback = faulthandler.dump_traceback, lambda *_, **__: walked.append("dump")
    try:
        plan = comm.plan.all_reduce(torch.ones(3), torch.ones(3))
        comms = (comm, comm.split(0))
        threads = [
            threading.Thread(target=lambda c=c: [c.all_reduce(torch.ones(9)) for _ in range(200)]) for c in comms
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        dog = watchdog._watchdog
        assert dog is not None
        first = dog.looks
        while comm.all_reduce(torch.tensor(float(dog.looks < first + 5)), op="max").item():
            plan()
            comm.barrier()
            time.sleep(0.01)
        return walked, dog.looks - first
    finally:
        sys._current_frames, faulthandler.dump_traceback = real, dump


def sleeps(comm: Any, folder: str) -> tuple[str, str] | None:
    """Rank 0 asks rank 1, which does something else, where it is: before and after."""
    there = Path(folder, "asked")
    if comm.rank == 1:
        comm.barrier()
        while not there.exists():
            time.sleep(0.01)  # elsewhere
        return None
    comm.barrier()
    (record,) = [one for one in read_folder(watched_folder())[0] if one.pid != os.getpid()]
    before = read_file(record.path)
    assert (before.where, before.stack) == ("", "")
    assert ask([before])
    after = read_file(record.path)
    assert 0 <= after.now - after.where_at < 20
    assert not ask([after])  # it has just said so
    there.touch()
    return after.where, after.stack


def watched_folder() -> str:
    return os.environ["PYNCCL_WATCH_DIR"]


def test_nobody_looks_at_the_threads_of_a_healthy_job_and_who_is_asked_says_where_it_is(tmp_path: Path) -> None:
    pool = RankPool({**HOST, "PYNCCL_WATCH_TIMEOUT": "30", "PYNCCL_WATCH_DIR": str(tmp_path / "watch")})
    for walked, looks in pool.run(2, healthy):
        assert walked == [] and looks >= 5
    (where, stack), _ = pool.run(2, sleeps, str(tmp_path))
    pool.close()
    assert where == f"{__file__}:{place_of('elsewhere', __file__).partition(':')[2]} sleeps"
    assert stack.endswith(where)


def test_the_stacks_are_those_that_the_threads_see_themselves() -> None:
    seen: dict[int, list[str]] = {}
    here, leave = threading.Barrier(4), threading.Event()

    def deep(levels: int) -> None:
        if levels:
            return deep(levels - 1)
        found = traceback.extract_stack()
        seen[threading.get_ident()] = [f"{one.filename}:{one.name}" for one in reversed(found)]
        here.wait(20)
        leave.wait(20)

    def déjà_vu_Ω() -> None:
        deep(3)

    threads = [threading.Thread(target=run) for run in (déjà_vu_Ω, lambda: deep(0), lambda: deep(40))]
    for thread in threads:
        thread.start()
    here.wait(20)
    found = frames.take()
    leave.set()
    for ident, lines in seen.items():
        # Python's own frames below bootstrap are the same; at the top each thread has gone on into wait().
        told = [re.sub(r":\d+ ", ":", one) for one in found[ident]]
        assert told[-len(lines) :] == lines
    assert {thread.ident for thread in threads} | {threading.get_ident()} <= found.keys()
    for thread in threads:
        thread.join(20)


def test_without_a_descriptor_there_are_no_stacks_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(name: str) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", none_left)
    assert frames.take() == {}
    assert frames.users_line(frames.of_main({})) == "" == frames.users_line(frames.of_call({}, 0))


def test_what_is_not_a_frame_is_left_out() -> None:
    text = (
        "Thread 0x00007f01 (most recent call first):\n  <no Python frame>\n\n"
        'Thread 0x00007f02 [worker] (most recent call first):\n  Garbage-collecting\n  File "/a, b.py", line 3 in f\n'
        '  File "a\\xe4\\u03a9.py", line ??? in g\n  ...\n\n'
        'Current thread 0x00007f03 (most recent call first):\n  File "'
    )
    found = frames.parsed(text)
    assert found == {
        0x7F01: [],
        0x7F02: ["/a, b.py:3 f", "aäΩ.py:??? g"],
        0x7F03: [],
    }
