"""The flight recorder's file: what was called is in it, whatever ends the process; a bad file is an error, no more."""

from __future__ import annotations

import os
import random
import signal
import struct
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import pynccl
from pynccl.watch import folder, layout, reader, recorder, watchdog
from pynccl.watch.reader import BadRecord, ranks, read_file, read_folder
from pynccl.watch.records import COMPLETED, DEAD, FAILED, INSIDE, ISSUED, STOPPED, CommRecord, ProcessRecord
from pynccl.watch.track import Identity, Track, uid_of

ROOT = Path(__file__).parents[2]
ALL_REDUCE = (0, 0, 4, 7, 0)  # as the C function takes them: addresses, count, FLOAT32, SUM


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[recorder.Recorder]:
    """A recorder of its own, whose file is in tmp_path."""
    monkeypatch.setenv("PYNCCL_WATCH_DIR", str(tmp_path))
    made = recorder.Recorder()
    monkeypatch.setattr(recorder, "_recorder", made)
    yield made


def track_of(own: recorder.Recorder) -> Track:
    return Track(own, Identity(uid_of(), "tp", ""), 1, 4)


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


def random_calls(track: Track, rng: random.Random, count: int) -> list[tuple[int, str]]:
    """Random calls of all kinds; (number among the collectives or 0, operation) of each."""
    kinds: dict[str, tuple[tuple[int, ...], int]] = {
        "all_reduce": (ALL_REDUCE, 1),
        "broadcast": ((0, 0, 4, 7, 1), 1),
        "recv": ((0, 4, 7, 2), 0),
        "send": ((0, 4, 7, 2), 0),
        "group plan": ((), 3),
        "barrier": ((), 1),
        "finalize": ((), 0),
    }
    made, number = [], 0
    for _ in range(count):
        name = rng.choice([*kinds])
        inputs, weight = kinds[name]
        track.enter(name, inputs, weight=weight if name in ("group plan", "finalize") else -1)
        number += weight
        made.append((number if weight else 0, name))
    return made


@pytest.mark.parametrize("count", [0, 1, 511, 512, 513, 2560, 2561, 7000])
def test_the_last_calls_are_there_in_order_and_numbered(own: recorder.Recorder, count: int) -> None:
    track = track_of(own)
    made = random_calls(track, random.Random(count), count)
    calls = read(own).calls
    assert min(count, layout.CALLS) <= len(calls) <= layout.CALLS
    assert [(c.number, c.operation) for c in calls] == made[len(made) - len(calls) :]
    assert [c.entry for c in calls] == list(range(count - len(calls) + 1, count + 1))
    assert track.head == count


def test_ten_million_calls_leave_the_file_as_large_as_it_was(own: recorder.Recorder) -> None:
    track, calls = track_of(own), 200_000  # of the ten million: nothing in the file or the track depends on how many
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


def test_off_records_nothing(tmp_path: Path) -> None:
    code = """
        import pynccl, os, torch
        comm, = pynccl.Communicator.init_all(1)
        comm.all_reduce(torch.ones(2))
        print(comm.recorded, os.listdir(os.environ["PYNCCL_WATCH_DIR"]))
    """
    assert run(tmp_path, code, PYNCCL_WATCH="off").stdout.strip() == "False []"


def run(folder: Path, code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The code in a process of its own, on the host library."""
    variables = {**os.environ, "PYNCCL_LIBRARY": "host", "PYNCCL_WATCH_DIR": str(folder), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env={**variables, **environment}
    )


ENDS = {
    "kill": "os.kill(os.getpid(), 9)",
    "_exit": "os._exit(3)",
    "crash": "ctypes.string_at(0)",
    "exception": "raise ValueError('no such file')",
}


@pytest.mark.parametrize("how", ENDS)
def test_the_calls_outlive_the_process(tmp_path: Path, how: str) -> None:
    code = f"""
        import ctypes, os, pynccl, torch
        comm, = pynccl.Communicator.init_all(1)
        x = torch.ones(5)
        for _ in range(7):
            comm.all_reduce(x, x, "max")
        comm.broadcast(x, x)
        {ENDS[how]}
    """
    done = run(tmp_path, code)
    assert done.returncode
    (record,), problems = read_folder(str(tmp_path))
    assert not problems
    assert record.state == DEAD
    assert [call.operation for call in record.comms[0].calls] == ["all_reduce"] * 7 + ["broadcast"]
    assert record.comms[0].entered == 8
    assert record.end == ("ValueError: no such file" if how == "exception" else "")
    assert record.end_site == ("<string>:8" if how == "exception" else "")


def test_a_clean_end_leaves_nothing(tmp_path: Path) -> None:
    code = "import pynccl, torch\ncomm, = pynccl.Communicator.init_all(1)\ncomm.all_reduce(torch.ones(2))"
    assert run(tmp_path, code).returncode == 0
    assert list(tmp_path.iterdir()) == []


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


# Files of others


def bad(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    with pytest.raises(BadRecord) as caught:
        read_file(str(path))
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_files_that_are_none_say_so(own: recorder.Recorder, tmp_path: Path) -> None:
    track_of(own).enter("all_reduce", ALL_REDUCE)
    good, path = Path(own.path).read_bytes(), tmp_path / "x.watch"
    assert "cut short" in bad(path, b"")
    assert "cut short" in bad(path, good[:5000])
    assert "no flight recorder" in bad(path, os.urandom(len(good)))
    assert "no flight recorder" in bad(path, bytes(len(good)))
    assert "version 99" in bad(path, good[:24] + struct.pack("=I", 99) + good[28:])
    rank = layout.REGIONS_AT + layout.CommHead.rank.offset
    path.write_bytes(good[:rank] + struct.pack("=i", 7) + good[rank + 4 :])
    assert read_file(str(path)).comms == []  # as of a region that is being reused: what else there is counts
    path.unlink()
    path.mkdir()
    with pytest.raises(IsADirectoryError):
        read_file(str(path))


def test_damage_anywhere_is_an_error_or_a_record_and_never_more(own: recorder.Recorder, tmp_path: Path) -> None:
    track = track_of(own)
    random_calls(track, random.Random(0), 3000)
    good, path, rng = Path(own.path).read_bytes(), tmp_path / "damaged.watch", random.Random(1)
    interesting = [*range(layout.STRINGS_AT), *range(layout.REGIONS_AT, layout.REGIONS_AT + 60_000)]
    read_well = 0
    for _ in range(150):
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
        assert isinstance(found, ProcessRecord)
        assert not any("\x1b" in call.site + call.operation for comm in found.comms for call in comm.calls)
    assert read_well > 20


def test_texts_cannot_command_the_terminal(own: recorder.Recorder) -> None:
    track = track_of(own)
    track.leave(track.enter("all_reduce", ALL_REDUCE, site="\x1b[2J evil\x07.py:3"))
    assert read(own).calls[0].site == "?[2J evil?.py:3"


def test_the_reader_keeps_up_with_a_writer_that_never_stops(own: recorder.Recorder) -> None:
    code = f"""
        from pynccl.watch import recorder
        from pynccl.watch.track import Identity, Track
        own = recorder.Recorder()
        track = Track(own, Identity("u", "busy", ""), 0, 2)
        print(own.path, flush=True)
        while True:
            for _ in range(3):
                track.leave(track.enter("all_reduce", {ALL_REDUCE}))
            track.leave(track.enter("send", (0, 4, 7, 1)))
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    writer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert writer.stdout is not None
        path, entered = writer.stdout.readline().strip(), 0
        for _ in range(40):
            (comm,) = read_file(path).comms
            entries = [call.entry for call in comm.calls]
            assert entries == list(range(entries[0], entries[-1] + 1)) if entries else True
            for call in comm.calls:  # every fourth one is a send
                assert (call.operation == "send") == (call.entry % 4 == 0)
                assert call.number == (0 if call.entry % 4 == 0 else call.entry - call.entry // 4)
            assert comm.entered >= entered
            entered = comm.entered
        assert entered > 0
    finally:
        writer.kill()
        writer.wait()


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


def test_whose_records_are_on_this_machine_is_told_from_the_heads_of_the_files(own: recorder.Recorder) -> None:
    uid = uid_of("a")
    for rank in (0, 2):
        Track(own, Identity(uid, "a", ""), rank, 4)
    Track(own, Identity(uid_of("c"), "c", ""), 1, 4).end("destroyed")
    base = str(Path(own.path).parent)
    assert ranks(base, uid) == {0, 2}
    assert ranks(base, uid_of("c")) == {1}
    assert ranks(base, uid_of("d")) == set()


def test_who_shares_another_communicator_with_those_asked_for_is_read_too() -> None:
    """Rank 1 waits in a split for rank 0, which has given up in a communicator with rank 3."""
    inside = {"rank0": ["split", "world"], "rank1": ["split", "world"], "rank3": ["world"], "other": ["elsewhere"]}
    records = [
        ProcessRecord(1, "h", path=name, comms=[CommRecord(uid, uid, 0, 2) for uid in uids])
        for name, uids in inside.items()
    ]
    assert [one.path for one in reader._related(records, "split")] == ["rank0", "rank1", "rank3"]
