"""What the flight recorder cannot have - room, a folder, a descriptor - it does without, with one warning: the job goes
on and its results are right, and a process that waits still hears of one that fails."""

from __future__ import annotations

import gc
import mmap
import os
import re
import resource
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from forks import Ended, Forks

from pynccl.watch import folder, layout, recorder
from pynccl.watch.reader import read_file
from pynccl.watch.records import UNKNOWN
from pynccl.watch.track import Identity, Track, uid_of

WARNING = "the flight recorder goes on in memory alone"
OTHERS = Path("/proc") if os.geteuid() == 0 else Path("/usr")  # where even this user cannot make a folder

# Ten splits, each with a result that is compared, after what the arguments say has been done.
PROGRAM = """
import os, resource, sys
import torch
import pynccl

def at_most(which, number):
    resource.setrlimit(which, (number, number))

do = sys.argv[1]
if do == "fsize":
    at_most(resource.RLIMIT_FSIZE, 1 << 20)
comm = pynccl.init()
made = [comm]
for number in range(10):
    made.append(made[-1].split(0) if number % 2 else comm.split(0, -comm.rank))
    total = made[-1].all_reduce(torch.full((5,), float(made[-1].rank + number)))
    expected = sum(rank + number for rank in range(comm.size))
    assert total.tolist() == [expected] * 5, total
if do == "fails" and comm.rank == 1:
    raise ValueError("no such file")
if do == "fails":
    comm.barrier()
print("done")
"""


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with Forks() as server:
        yield server


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MB."""
    place = tmp_path / "small"
    place.mkdir()
    command = ["sh", "-c", f"mount -t tmpfs -o size=1m tmpfs {place}"]
    tried = subprocess.run(command, capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"cannot mount a file system here: {tried.stderr.strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def run(forks: Forks, folder: Path, do: str, ranks: int, **environment: str) -> list[Ended]:
    (folder / "program.py").write_text(PROGRAM)
    own = {"PYNCCL_LIBRARY": "host", "PYNCCL_WATCH_DIR": "", **environment}
    return forks.run((str(folder / "program.py"), do), ranks, folder, own)


def check(ended: list[Ended], path: str) -> None:
    """All went on, and each said so once, naming the path."""
    for one in ended:
        assert (one.code, one.out) == (0, "done\n"), one.err
        assert one.err.count(WARNING) == 1, one.err
        assert path in one.err and "PYNCCL_WATCH_DIR" in one.err, one.err


def test_a_file_system_that_fills_up_and_a_limit_on_the_size_of_files(
    forks: Forks, tmp_path: Path, small: Path
) -> None:
    check(run(forks, tmp_path, "", 3, TMPDIR=str(small)), str(small))
    assert [path for path in small.rglob("*") if path.is_file()] == []
    check(run(forks, tmp_path, "fsize", 2, PYNCCL_WATCH_DIR=str(tmp_path / "watch")), str(tmp_path / "watch"))


def test_a_file_system_that_is_full_or_read_only_and_a_folder_that_cannot_be_made(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (small / "full").open("wb", buffering=0) as file:
        os.posix_fallocate(file.fileno(), 0, os.statvfs(small).f_bavail * os.statvfs(small).f_bsize)
    for path in (small, small, OTHERS / "nowhere", Path("/etc/hostname"), Path("/dev/null/x")):
        monkeypatch.setenv("PYNCCL_WATCH_DIR", str(path))
        with pytest.warns(RuntimeWarning, match=f"(?s){re.escape(str(path))}.*{WARNING}.*PYNCCL_WATCH_DIR") as said:
            own = recorder.Recorder()
        assert len(said) == 1 and own.path == ""
        one = track(own)
        one.leave(one.enter("all_reduce", (0, 0, 4, 7, 0)))
        assert one.head == 1
        if path == small:
            subprocess.run(["mount", "-o", "remount,ro", str(small)], check=True)


def test_the_others_hear_of_an_error_all_the_same(forks: Forks, tmp_path: Path, small: Path) -> None:
    waiting, failed = run(forks, tmp_path, "fails", 2, TMPDIR=str(small))
    assert failed.code == 1 and "ValueError: no such file" in failed.err
    assert waiting.code == 1 and "NcclRemoteError" in waiting.err, waiting.err
    assert "rank 1 left by ValueError at program.py:" in waiting.err, waiting.err


# In this process


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> recorder.Recorder:
    monkeypatch.setenv("PYNCCL_WATCH_DIR", str(tmp_path))
    made = recorder.Recorder()
    monkeypatch.setattr(recorder, "_recorder", made)
    return made


def track(own: recorder.Recorder) -> Track:
    return Track(own, Identity(uid_of(), "tp", ""), 1, 4)


def no_room(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_what_was_made_before_stays_in_the_file_and_later_ones_return_to_it(
    own: recorder.Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    track(own)
    with monkeypatch.context() as patch, pytest.warns(RuntimeWarning, match=re.escape(own.path)) as said:
        patch.setattr(os, "posix_fallocate", no_room)
        for _ in range(3):
            one = track(own)
            one.leave(one.enter("all_reduce", (0, 0, 4, 7, 0)))
    assert len(said) == 1
    track(own)
    assert len(read_file(own.path).comms) == 2
    assert os.path.getsize(own.path) == layout.REGIONS_AT + 2 * layout.REGION_BYTES


def test_a_warning_that_is_made_an_error_ends_nothing(
    own: recorder.Recorder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", no_room)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        track(own)
    assert WARNING in capsys.readouterr().err


@pytest.fixture
def no_descriptors() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    gc.collect()  # which would give some back meanwhile
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_without_descriptors_all_is_recorded_in_memory_and_no_process_is_taken_for_dead(
    own: recorder.Recorder, tmp_path: Path, no_descriptors: None
) -> None:
    with pytest.warns(RuntimeWarning, match="Too many open files"):
        one = track(own)
    one.leave(one.enter("all_reduce", (0, 0, 4, 7, 0)))
    assert one.head == 1 and not one.kept
    with pytest.warns(RuntimeWarning, match=f"{tmp_path}.*Too many open files"):
        other = recorder.Recorder()
    assert other.path == ""
    assert track(other).memory.nbytes == layout.REGION_BYTES
    assert folder.state_of(os.getpid(), 7) == UNKNOWN
    assert folder.alive(own.path)


def test_one_descriptor_for_the_file_and_none_for_its_map_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYNCCL_WATCH_DIR", str(tmp_path))
    real = mmap.mmap

    def mapped(file: int, *rest: int, **more: int) -> object:
        if file >= 0:
            raise OSError(24, "Too many open files")
        return real(file, *rest, **more)

    monkeypatch.setattr(mmap, "mmap", mapped)
    with pytest.warns(RuntimeWarning, match="Too many open files"):
        own = recorder.Recorder()
    assert own.path == "" and not any(path.is_file() for path in tmp_path.rglob("*"))


def test_a_text_for_another_process_needs_no_room(own: recorder.Recorder) -> None:
    folder.tell(own.path, "text \udc80")
    assert (own.told(), own.told()) == ("text ?", "")
    folder.tell(own.path, "é" * 10_000)
    assert own.told() == "é" * 2047
    assert os.listdir(os.path.dirname(own.path)) == [os.path.basename(own.path)]
