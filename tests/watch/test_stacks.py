"""Where threads are: told by faulthandler when somebody needs it, and never looked at in a healthy program."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import traceback
from pathlib import Path

import pytest

from pynccl.watch import frames
from pynccl.watch.reader import ask, read_file

HEALTHY = """
import faulthandler, sys, threading, time
import torch
import pynccl
from pynccl.bootstrap import from_file

walked = []
real = sys._current_frames
sys._current_frames = lambda: walked.append("frames") or real()
faulthandler.dump_traceback = lambda *_, **__: walked.append("dump")
comm = from_file(sys.argv[1], int(sys.argv[2]), 2)
plan = comm.plan.all_reduce(torch.ones(3), torch.ones(3))
threads = [threading.Thread(target=lambda c=c: [c.all_reduce(torch.ones(9)) for _ in range(200)])
           for c in (comm, comm.split(0))]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
end = time.monotonic() + 2
while comm.all_reduce(torch.tensor(float(time.monotonic() < end)), op="min").item():  # many looks of the watchdog
    plan()
    comm.barrier()
    time.sleep(0.01)
from pynccl.watch import watchdog
assert watchdog._watchdog.looks > 4
comm.destroy()
print(walked)
"""


def test_nobody_looks_at_the_threads_of_a_healthy_job(tmp_path: Path) -> None:
    settings = {"PYNCCL_WATCH_TIMEOUT": "5", "PYNCCL_WATCH_DIR": str(tmp_path / "watch"), "PYNCCL_LIBRARY": "host"}
    command = [sys.executable, "-c", HEALTHY, str(tmp_path / "store")]
    ranks = [
        subprocess.Popen([*command, str(rank)], env={**os.environ, **settings}, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    assert [rank.communicate(timeout=60)[0] for rank in ranks] == ["[]\n"] * 2
    assert [rank.returncode for rank in ranks] == [0, 0]


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


def test_a_process_that_is_asked_says_where_it_is(tmp_path: Path) -> None:
    script = (
        "import pynccl, time\n(comm,) = pynccl.Communicator.init_all(1)\nprint('there', flush=True)\ntime.sleep(99)\n"
    )
    path = tmp_path / "train.py"
    path.write_text(script)
    environment = {**os.environ, "PYNCCL_WATCH_DIR": str(tmp_path), "PYNCCL_LIBRARY": "host"}
    with subprocess.Popen([sys.executable, str(path)], env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "there\n"
            (record,) = tmp_path.glob("*.watch")
            before = read_file(str(record))
            assert (before.where, before.stack) == ("", "")
            assert ask([before])
            after = read_file(str(record))
            assert after.where == f"{path}:4 <module>" == after.stack
            assert 0 <= after.now - after.where_at < 5
            assert not ask([after])  # it has just said so
        finally:
            process.kill()
    dead = read_file(str(record))
    assert not ask([dead])
