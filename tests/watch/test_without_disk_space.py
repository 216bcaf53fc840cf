"""Without disk space or a usable folder, the flight recorder warns once and uses memory only: the job continues with
right results, and a waiting process still learns that another one failed."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from forks import Forks

from pynccl.watch import layout, recorder
from pynccl.watch.reader import read_file
from pynccl.watch.track import Identity, Track, uid_of

WARNING = "the flight recorder uses memory only"

# Ten splits with checked results, while files may have at most 1 MiB; then rank 1 fails.
PROGRAM = """
import os, resource, sys
import torch
import pynccl

resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
comm = pynccl.init()
made = [comm]
for number in range(10):
    made.append(made[-1].split(0) if number % 2 else comm.split(0, -comm.rank))
    total = made[-1].all_reduce(torch.full((5,), float(made[-1].rank + number)))
    expected = sum(rank + number for rank in range(comm.size))
    assert total.tolist() == [expected] * 5, total
print("done")
if comm.rank == 1:
    raise ValueError("no such file")
comm.barrier()
"""


def test_a_job_continues_without_disk_space_and_still_reports_an_error(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    variables = {"PYNCCL_LIBRARY": "host", "PYNCCL_WATCH_DIR": str(tmp_path / "watch")}
    with Forks() as forks:
        ended = forks.run((str(tmp_path / "program.py"),), 2, tmp_path, variables)
    for rank in ended:
        assert (rank.code, rank.out) == (1, "done\n"), rank.err
        assert rank.err.count(WARNING) == 1, rank.err
        assert str(tmp_path / "watch") in rank.err and "PYNCCL_WATCH_DIR" in rank.err, rank.err
    waiting, failed = ended
    assert "ValueError: no such file" in failed.err
    assert "NcclRemoteError" in waiting.err and "rank 1 exited with ValueError at program.py:" in waiting.err, (
        waiting.err
    )


def record_call(own: recorder.Recorder) -> Track:
    """Return a track with one recorded call."""
    track = Track(own, Identity(uid_of(), "tp", ""), 1, 4)
    track.leave(track.enter("all_reduce", (0, 0, 4, 7, 0)))
    assert track.head == 1
    return track


def raise_disk_full(*_: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("path", ["/proc/nowhere", "/etc/hostname", "/dev/null/x"])
def test_an_unusable_folder_warns_once(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYNCCL_WATCH_DIR", path)
    with pytest.warns(RuntimeWarning, match=f"(?s){re.escape(path)}.*{WARNING}.*PYNCCL_WATCH_DIR") as warned:
        own = recorder.Recorder()
    assert len(warned) == 1 and own.path == ""
    record_call(own)


def test_recording_returns_to_the_file_once_there_is_space(
    own: recorder.Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    record_call(own)
    with monkeypatch.context() as patch, pytest.warns(RuntimeWarning, match=re.escape(own.path)) as warned:
        patch.setattr(os, "posix_fallocate", raise_disk_full)
        for _ in range(3):
            record_call(own)
    assert len(warned) == 1
    record_call(own)
    assert len(read_file(own.path).comms) == 2
    assert os.path.getsize(own.path) == layout.REGIONS_AT + 2 * layout.REGION_BYTES
