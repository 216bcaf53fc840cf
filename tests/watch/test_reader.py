"""Files of other processes: what is in them is read while it is written, and a bad one is an error and no more."""

from __future__ import annotations

import os
import random
import struct
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from recorded import ALL_REDUCE, random_calls, track_of

from pynccl.watch import layout, reader, recorder
from pynccl.watch.reader import BadRecord, ranks, read_file
from pynccl.watch.records import CommRecord, ProcessRecord
from pynccl.watch.track import Identity, Track, uid_of

ROOT = Path(__file__).parents[2]


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[recorder.Recorder]:
    """A recorder of its own, whose file is in tmp_path."""
    monkeypatch.setenv("PYNCCL_WATCH_DIR", str(tmp_path))
    made = recorder.Recorder()
    monkeypatch.setattr(recorder, "_recorder", made)
    yield made


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
        assert isinstance(found, ProcessRecord)
        assert not any("\x1b" in call.site + call.operation for comm in found.comms for call in comm.calls)
    assert read_well > 5


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
