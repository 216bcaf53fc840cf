"""The flight recorder's file: what was called is in it, whatever ends the process; a bad file is an error, no more."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from forks import Forks
from recorded import ALL_REDUCE, random_calls, track_of

import pynccl
from pynccl.watch import folder, layout, recorder, watchdog
from pynccl.watch.reader import read_file, read_folder
from pynccl.watch.records import COMPLETED, DEAD, FAILED, INSIDE, ISSUED, STOPPED, CommRecord

ROOT = Path(__file__).parents[2]


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[recorder.Recorder]:
    """A recorder of its own, whose file is in tmp_path."""
    monkeypatch.setenv("PYNCCL_WATCH_DIR", str(tmp_path))
    made = recorder.Recorder()
    monkeypatch.setattr(recorder, "_recorder", made)
    yield made


def read(own: recorder.Recorder, number: int = 0) -> CommRecord:
    return read_file(own.path).comms[number]


def test_a_call_is_in_the_file_with_all_that_it_was_made_with(own: recorder.Recorder) -> None:
    track = track_of(own)
    before = time.time()
    track.leave(track.enter("all_reduce", ALL_REDUCE, 17))
    track.leave(track.enter("reduce", (0, 0, 9, 9, 3, 2)))
    track.leave(track.enter("send", (0, 5, 7, 3), site="here.py:3"))
    slot = track.enter("scatter_v", (), detail="scatter_v(counts=[1, 2])")
    comm = read(own)
    assert (comm.uid, comm.name, comm.rank, comm.size) == (track.uid, "tp", 1, 4)
    found = [
        (c.entry, c.number, c.operation, c.count, c.dtype, c.op, c.root, c.peer, c.stream, c.detail) for c in comm.calls
    ]
    assert found == [
        (1, 1, "all_reduce", 4, "FLOAT32", "SUM", -1, -1, 17, ""),
        (2, 2, "reduce", 9, "BFLOAT16", "MIN", 2, -1, 0, ""),
        (3, 0, "send", 5, "FLOAT32", "", -1, 3, 0, ""),
        (4, 3, "scatter_v", -1, "", "", -1, -1, 0, "scatter_v(counts=[1, 2])"),
    ]
    assert [c.state for c in comm.calls] == [ISSUED, ISSUED, ISSUED, INSIDE]
    assert all(before - 1 < c.issued <= c.returned < time.time() + 1 for c in comm.calls[:3])
    assert [Path(c.site).name.partition(":")[0] for c in comm.calls] == ["test_recorder.py"] * 2 + [
        "here.py",
        "test_recorder.py",
    ]
    track.failed(slot, ValueError("no\nsecond line"))
    assert (read(own).calls[3].state, read(own).calls[3].error) == (FAILED, "ValueError: no")


@pytest.mark.parametrize("count", [0, 1, 511, 512, 513, 2561])
def test_the_last_calls_are_there_in_order_and_numbered(own: recorder.Recorder, count: int) -> None:
    track = track_of(own)
    made = random_calls(track, random.Random(count), count)
    calls = read(own).calls
    assert min(count, layout.CALLS) <= len(calls) <= layout.CALLS
    assert [(c.number, c.operation) for c in calls] == made[len(made) - len(calls) :]
    assert [c.entry for c in calls] == list(range(count - len(calls) + 1, count + 1))
    assert track.head == count


def test_many_calls_leave_the_file_as_large_as_it_was(own: recorder.Recorder) -> None:
    track, calls = track_of(own), 20_000
    track.enter("all_reduce", ALL_REDUCE, site="train.py:1")
    size, strings = os.path.getsize(own.path), len(own.strings)
    for _ in range(calls):
        track.leave(track.enter("all_reduce", ALL_REDUCE, site="train.py:1"))
    assert (os.path.getsize(own.path), len(own.strings)) == (size, strings)
    assert read(own).entered == track.head == calls + 1


def test_communicators_that_have_ended_make_room(own: recorder.Recorder) -> None:
    for _ in range(30):
        track = track_of(own)
        track.enter("all_reduce", ALL_REDUCE)
        track.end("destroyed", "train.py:3")
    size = os.path.getsize(own.path)
    for _ in range(50):
        track = track_of(own)
        track.end("aborted")
    assert os.path.getsize(own.path) == size
    comms = read_file(own.path).comms
    assert len(comms) <= 10
    assert {comm.ended for comm in comms} <= {"destroyed", "aborted"}


def test_more_lines_than_there_is_room_for_are_left_out(own: recorder.Recorder) -> None:
    track = track_of(own)
    for number in range(layout.STRINGS + 100):
        track.leave(track.enter("all_reduce", ALL_REDUCE, site=f"train.py:{number}"))
    sites = [call.site for call in read(own).calls]
    assert sites[-1] == "(...)"
    assert f"train.py:{layout.STRINGS // 2 + 400}" in sites


# {how: what ends the process}; code: None for any but 0
ENDS = {
    "kill": "os.kill(os.getpid(), 9)",
    "_exit": "os._exit(3)",
    "crash": "ctypes.string_at(0)",
    "exception": "raise ValueError('no such file')",
    "well": "pass",
    "off": "print(comm.recorded, os.listdir(os.environ['PYNCCL_WATCH_DIR']))",
}
PROGRAM = """
import ctypes, os, sys, torch
import pynccl
comm, = pynccl.Communicator.init_all(1)
x = torch.ones(5)
for _ in range(7):
    comm.all_reduce(x, x, "max")
comm.broadcast(x, x)
exec(sys.argv[1])
"""


def test_the_calls_outlive_the_process_unless_it_ends_well(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    with Forks() as forks:
        for how, end in ENDS.items():
            place = tmp_path / how
            place.mkdir()
            variables = {"PYNCCL_LIBRARY": "host", "PYNCCL_WATCH_DIR": str(place)}
            variables["PYNCCL_WATCH"] = "off" if how == "off" else "on"
            (done,) = forks.run((str(program), end), 0, tmp_path, variables)
            found, problems = read_folder(str(place))
            if how in ("well", "off"):
                assert done.code == 0 and list(place.iterdir()) == [], (how, done)
                assert done.out.strip() == ("" if how == "well" else "False []")
                continue
            assert done.code and not problems, (how, done)
            (record,) = found
            assert record.state == DEAD
            assert [call.operation for call in record.comms[0].calls] == ["all_reduce"] * 7 + ["broadcast"]
            assert record.comms[0].entered == 8
            assert record.end == ("ValueError: no such file" if how == "exception" else ""), how
            assert record.end_site == ("<string>:1" if how == "exception" else ""), how


def test_a_forked_child_does_not_write_into_its_parents_file(own: recorder.Recorder) -> None:
    track = track_of(own)
    track.enter("all_reduce", ALL_REDUCE)
    before = Path(own.path).read_bytes()
    pid = os.fork()
    if not pid:
        os._exit(0 if recorder.started() is None and not own.mine else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert Path(own.path).read_bytes() == before


def test_the_state_of_a_process_is_told_from_that_of_another_with_its_number() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    start = folder.started(child.pid)
    child.send_signal(signal.SIGSTOP)
    os.waitpid(child.pid, os.WUNTRACED)
    assert folder.state_of(child.pid, start) == STOPPED
    assert folder.state_of(child.pid, start + 1) == DEAD
    child.kill()
    child.wait()
    assert folder.state_of(child.pid, start) == DEAD


def test_lines_and_times_of_real_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (comm,) = pynccl.Communicator.init_all(1)
    x = torch.ones(3)
    for _ in range(4):
        comm.all_reduce(x, x)  # this line
    line = Path(__file__).read_text().splitlines().index("        comm.all_reduce(x, x)  # this line") + 1
    own = recorder.started()
    assert own is not None
    record = next(one for one in read_file(own.path).comms if comm._track is not None and one.uid == comm._track.uid)
    assert [call.site for call in record.calls] == [f"{__file__}:{line}"] * 4
    assert {call.state for call in record.calls} == {COMPLETED}
    comm.destroy()


def test_threads_that_make_communicators_at_once_share_one_watchdog(own: recorder.Recorder) -> None:
    gate, before = threading.Barrier(16), set(threading.enumerate())

    def prepare() -> None:
        gate.wait()
        watchdog.prepare()

    threads = [threading.Thread(target=prepare) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    try:
        new = [one.name for one in threading.enumerate() if one not in before]
        assert new == ["pynccl watchdog"]
    finally:
        watchdog.stop()
