"""What the flight recorder cannot have - room, a folder, a descriptor - it does without, with one warning: the job goes
on and its results are right, and a process that waits still hears of one that fails."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from forks import Forks

from pynccl.watch import layout, recorder
from pynccl.watch.reader import read_file
from pynccl.watch.track import Identity, Track, uid_of

WARNING = "the flight recorder goes on in memory alone"

# Ten splits, each with a result that is compared, where files may have 1 MiB; then rank 1 fails.
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


def test_a_job_goes_on_without_room_and_hears_of_an_error_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    variables = {"PYNCCL_LIBRARY": "host", "PYNCCL_WATCH_DIR": str(tmp_path / "watch")}
    with Forks() as forks:
        ended = forks.run((str(tmp_path / "program.py"),), 2, tmp_path, variables)
    for one in ended:
        assert (one.code, one.out) == (1, "done\n"), one.err
        assert one.err.count(WARNING) == 1, one.err
        assert str(tmp_path / "watch") in one.err and "PYNCCL_WATCH_DIR" in one.err, one.err
    waiting, failed = ended
    assert "ValueError: no such file" in failed.err
    assert "NcclRemoteError" in waiting.err and "rank 1 left by ValueError at program.py:" in waiting.err, waiting.err


def track(own: recorder.Recorder) -> Track:
    """With one call that was recorded."""
    made = Track(own, Identity(uid_of(), "tp", ""), 1, 4)
    made.leave(made.enter("all_reduce", (0, 0, 4, 7, 0)))
    assert made.head == 1
    return made


def no_room(*_: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("path", ["/proc/nowhere", "/etc/hostname", "/dev/null/x"])
def test_a_folder_that_cannot_be_had(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYNCCL_WATCH_DIR", path)
    with pytest.warns(RuntimeWarning, match=f"(?s){re.escape(path)}.*{WARNING}.*PYNCCL_WATCH_DIR") as said:
        own = recorder.Recorder()
    assert len(said) == 1 and own.path == ""
    track(own)


def test_what_was_made_before_stays_in_the_file_and_later_ones_return_to_it(
    own: recorder.Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    track(own)
    with monkeypatch.context() as patch, pytest.warns(RuntimeWarning, match=re.escape(own.path)) as said:
        patch.setattr(os, "posix_fallocate", no_room)
        for _ in range(3):
            track(own)
    assert len(said) == 1
    track(own)
    assert len(read_file(own.path).comms) == 2
    assert os.path.getsize(own.path) == layout.REGIONS_AT + 2 * layout.REGION_BYTES
