"""The flight recorder's file has the last calls however the process ends. A damaged file raises BadRecord."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from forks import Forks

from pynccl import NcclTimeout
from pynccl.tools.hang import jobs
from pynccl.watch import layout, recorder
from pynccl.watch.layout import CommEnd
from pynccl.watch.reader import BadRecord, read_file, read_folder
from pynccl.watch.records import COMPLETED, DEAD, FAILED, INSIDE, ISSUED, CommRecord
from pynccl.watch.track import Identity, Track, uid_of

ROOT = Path(__file__).parents[2]
ALL_REDUCE = (0, 0, 4, 7, 0)  # arguments of the C function: addresses, count, FLOAT32, SUM


def track_of(own: recorder.Recorder) -> Track:
    return Track(own, Identity(uid_of(), "tp", ""), 1, 4)


def read(own: recorder.Recorder) -> CommRecord:
    return read_file(own.path).comms[0]


def test_a_call_is_recorded_with_its_arguments(own: recorder.Recorder) -> None:
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
    files = [Path(c.site).name.partition(":")[0] for c in comm.calls]
    assert files == ["test_recorder.py", "test_recorder.py", "here.py", "test_recorder.py"]
    track.failed(slot, ValueError("no\nsecond line"))
    assert (read(own).calls[3].state, read(own).calls[3].error) == (FAILED, "ValueError: no")


# Name -> (arguments of the C function, number of collective calls it counts as)
KINDS: dict[str, tuple[tuple[int, ...], int]] = {
    "all_reduce": (ALL_REDUCE, 1),
    "broadcast": ((0, 0, 4, 7, 1), 1),
    "recv": ((0, 4, 7, 2), 0),
    "send": ((0, 4, 7, 2), 0),
    "group plan": ((), 3),
    "barrier": ((), 1),
    "finalize": ((), 0),
}


def random_calls(track: Track, seed: int, count: int) -> list[tuple[int, str]]:
    """Make random calls of all kinds. Return (number among the collectives or 0, operation) of each."""
    rng, made, number = random.Random(seed), [], 0
    for _ in range(count):
        name = rng.choice([*KINDS])
        inputs, weight = KINDS[name]
        track.enter(name, inputs, weight=weight if name in ("group plan", "finalize") else -1)
        number += weight
        made.append((number if weight else 0, name))
    return made


@pytest.mark.parametrize("count", [0, 1, 511, 512, 513, 2561])
def test_the_last_calls_are_recorded_in_order_with_numbers(own: recorder.Recorder, count: int) -> None:
    track = track_of(own)
    made = random_calls(track, count, count)
    calls = read(own).calls
    assert min(count, layout.CALLS) <= len(calls) <= layout.CALLS
    assert [(c.number, c.operation) for c in calls] == made[len(made) - len(calls) :]
    assert [c.entry for c in calls] == list(range(count - len(calls) + 1, count + 1))
    assert track.head == count


def test_pending_calls_are_marked_as_given_up_when_the_watchdog_aborts(
    own: recorder.Recorder,
) -> None:
    track = track_of(own)
    track.library = SimpleNamespace(is_host=True)
    track.leave(track.enter("all_reduce", ALL_REDUCE))  # synchronous: it has completed
    track.leave(track.enter("all_reduce", ALL_REDUCE, 17))  # on a stream
    track.enter("all_reduce", ALL_REDUCE)
    track.aborted_by_watchdog(NcclTimeout("rank 1 waited"))
    first, *others = read(own).calls
    assert first.state != FAILED and not first.error
    assert [(call.state, call.gave_up) for call in others] == [(FAILED, True)] * 2


def test_the_file_does_not_grow(own: recorder.Recorder) -> None:
    """For any number of calls, of their lines, and of destroyed communicators."""
    track = track_of(own)
    for number in range(layout.STRINGS + 100):
        track.leave(track.enter("all_reduce", ALL_REDUCE, site=f"train.py:{number}"))
    found = read(own)
    assert found.entered == track.head == layout.STRINGS + 100
    assert found.calls[-1].site == "(...)"  # the table of strings is full
    assert f"train.py:{layout.STRINGS // 2 + 400}" in [call.site for call in found.calls]
    sizes = set()
    for number in range(80):
        track = track_of(own)
        track.enter("all_reduce", ALL_REDUCE)
        track.end(CommEnd.DESTROYED, "train.py:3")
        sizes |= {os.path.getsize(own.path)} if number > 30 else set()
    assert len(sizes) == 1
    comms = read_file(own.path).comms
    assert len(comms) <= 10 and {comm.ended for comm in comms} == {CommEnd.LIVE, CommEnd.DESTROYED}


# How the process ends -> its last statement
ENDS = {
    "kill": "os.kill(os.getpid(), 9)",
    "_exit": "os._exit(3)",
    "crash": "ctypes.string_at(0)",
    "exception": "raise ValueError('no such file')",
    "clean": "pass",
    "off": "print(comm._is_recorded, os.listdir(os.environ['PYNCCL_WATCH_DIR']))",
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


def test_the_record_remains_unless_the_process_exits_cleanly(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    with Forks() as forks:
        for how, end in ENDS.items():
            folder = tmp_path / how
            folder.mkdir()
            variables = {"PYNCCL_LIBRARY": "host", "PYNCCL_WATCH_DIR": str(folder)}
            variables["PYNCCL_WATCH"] = "off" if how == "off" else "on"
            (done,) = forks.run((str(program), end), 0, tmp_path, variables)
            found, problems = read_folder(str(folder))
            if how in ("clean", "off"):
                left = [path.name for path in folder.iterdir()]  # hang says from it that the job has ended
                assert done.code == 0 and left == ([f"{os.geteuid()}.ended"] if how == "clean" else []), (how, done)
                assert all(
                    job.exited and job.known_ranks == "1 rank" for job in (jobs.read([str(folder)])[0] if left else [])
                )
                assert done.out.strip() == ("" if how == "clean" else "False []")
                continue
            assert done.code and not problems, (how, done)
            (record,) = found
            calls = record.comms[0].calls
            assert (record.state, record.comms[0].entered) == (DEAD, 8)
            assert [call.operation for call in calls] == ["all_reduce"] * 7 + ["broadcast"]
            assert {call.state for call in calls} == {COMPLETED}
            assert [call.site for call in calls] == [f"{program}:7"] * 7 + [f"{program}:8"]
            expected = ("ValueError: no such file", f"{program}:9") if how == "exception" else ("", "")
            assert (record.end, record.end_site) == expected, how


# Files of other processes


def test_a_damaged_file_raises_or_is_read(own: recorder.Recorder, tmp_path: Path) -> None:
    random_calls(track_of(own), 0, 3000)
    good, path, rng = Path(own.path).read_bytes(), tmp_path / "damaged.watch", random.Random(1)
    interesting = [*range(layout.STRINGS_AT), *range(layout.REGIONS_AT, layout.REGIONS_AT + 60_000)]
    read_well = 0
    for _ in range(60):
        data = bytearray(good)
        for _ in range(rng.choice([1, 5, 200])):
            data[rng.choice(interesting)] = rng.randrange(256)
        if rng.random() < 0.2:
            del data[rng.randrange(len(data)) :]
        path.write_bytes(data)
        try:
            found = read_file(str(path))
        except BadRecord as error:
            assert str(path) in str(error)
            continue
        read_well += 1
        assert not any("\x1b" in call.site + call.operation for comm in found.comms for call in comm.calls)
    assert read_well > 5
