"""The folder of a job's records: nobody else's, and bounded; who is waited for is told of it there, once."""

from __future__ import annotations

import os
import re
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pynccl.watch import folder, recorder
from pynccl.watch.reader import read_folder
from pynccl.watch.watchdog import Watchdog

SOMEBODY = 54321
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make what is another user's")


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder like /tmp, in which anybody may make files."""
    place = tmp_path / "shared"
    place.mkdir()
    place.chmod(0o1777)
    monkeypatch.setenv("PYNCCL_WATCH_DIR", str(place))
    return place


@pytest.fixture
def default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder where PYNCCL_WATCH_DIR is not set: in a folder in which anybody may make files."""
    monkeypatch.delenv("PYNCCL_WATCH_DIR", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return Path(folder.base())


def refused(place: Path) -> None:
    with pytest.warns(RuntimeWarning, match=re.escape(str(place)) + ".*: expected a folder of this user, no link"):
        own = recorder.Recorder()
    assert own.path == ""


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_folder_that_others_may_write_to_is_not_used(default: Path, mode: int) -> None:
    default.mkdir()
    default.chmod(mode)
    refused(default)
    assert list(default.iterdir()) == []


def test_a_folder_of_another_user_or_that_is_a_link_is_not_used(default: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir(0o700)
    default.symlink_to(target)
    refused(default)
    assert list(target.iterdir()) == []
    if os.geteuid() == 0:
        default.unlink()
        default.mkdir(0o700)
        os.chown(default, SOMEBODY, SOMEBODY)
        refused(default)
        assert list(default.iterdir()) == []


def test_the_users_own_folder_is_used_again(default: Path) -> None:
    first = recorder.Recorder()
    second = recorder.Recorder()
    assert Path(first.path).parent == Path(second.path).parent == default
    assert default.stat().st_mode & 0o777 == 0o700
    assert Path(second.path).stat().st_mode & 0o777 == 0o600


@needs_root
def test_records_of_another_user_are_not_read(shared: Path) -> None:
    own = recorder.Recorder()
    other = shared / "rank0-1-1.watch"
    other.write_bytes(Path(own.path).read_bytes())
    assert len(read_folder(str(shared))[0]) == 2
    os.chown(other, SOMEBODY, SOMEBODY)
    assert [one.path for one in read_folder(str(shared))[0]] == [own.path]


def test_the_temporary_folder_is_the_same_for_all_processes_whether_it_is_full_or_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYNCCL_WATCH_DIR", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    tmp_path.chmod(0o500)
    assert folder.base() == f"{tmp_path}/pynccl-watch-{os.geteuid()}"
    monkeypatch.setenv("TMPDIR", str(tmp_path / "nowhere"))
    monkeypatch.delenv("TEMP", raising=False)
    monkeypatch.delenv("TMP", raising=False)
    assert folder.base() == f"/tmp/pynccl-watch-{os.geteuid()}"


# What others have left for this process


HOSTILE = "a\x1b[31mb\x1b]0;title\x07c\x9b2Jd\u202ee\x1bP1;2\x1b\\f\r\x08g"


@pytest.fixture
def own(shared: Path, monkeypatch: pytest.MonkeyPatch) -> recorder.Recorder:
    made = recorder.Recorder()
    monkeypatch.setattr(recorder, "_recorder", made)
    return made


def test_it_is_printed_once_leaves_no_file_and_cannot_command_the_terminal(
    own: recorder.Recorder, capsys: pytest.CaptureFixture[str]
) -> None:
    watchdog = Watchdog(own)
    watchdog.stop()
    for seconds in (2, 3, 60):  # each of those who wait says so, and says it again
        folder.tell(own.path, f"rank 1 never entered all_reduce #3; rank 0 has waited {seconds} s there.\nmore")
        watchdog.look()
    said = capsys.readouterr().err
    assert said == (
        "pynccl watchdog: other ranks wait for this one\n"
        "  rank 1 never entered all_reduce #3; rank 0 has waited 2 s there.\n  more\n"
    )
    folder.tell(own.path, f"{HOSTILE}\n{HOSTILE}\n")
    watchdog.look()
    said = capsys.readouterr().err
    assert said.startswith("pynccl watchdog: other ranks wait for this one\n  a?[31mb?]0;title?c")
    assert all(line.isprintable() for line in said.split("\n"))
    assert list(Path(own.path).parent.iterdir()) == [Path(own.path)]
    folder.tell(str(Path(own.path).parent / "nowhere" / "x.watch"), "text")  # whose folder has gone meanwhile


# A bound


@pytest.fixture
def killed(own: recorder.Recorder) -> Iterator[Killed]:
    yield Killed(own)


class Killed:
    """Makes what processes that were killed have left."""

    def __init__(self, own: recorder.Recorder) -> None:
        self.data, self.base, self.number = Path(own.path).read_bytes(), Path(own.path).parent, 0

    def make(self, job: str, ago: float, *, pid: int = 0, start: int = 1) -> Path:
        """One whose last sign of life is so many seconds old."""
        self.number += 1
        path = self.base / f"{job}-{pid or 4_000_000 + self.number}-{start}.watch"
        path.write_bytes(self.data.ljust(1 << 20, b"\1"))
        os.utime(path, (time.time() - ago, time.time() - ago))
        return path


def test_of_two_hundred_killed_processes_the_oldest_go(killed: Killed) -> None:
    paths = [killed.make(f"job{n}", 100 * (n + 1)) for n in range(200)]
    folder.remove_old(str(killed.base))
    kept = [path for path in paths if path.exists()]
    assert kept == paths[: len(kept)]
    assert 63 <= len(kept) <= 64  # of 1 MiB each


def test_what_lives_stays_and_what_may_live_elsewhere_until_it_has_been_silent(killed: Killed) -> None:
    alive = killed.make("alive", 30 * 86400, pid=os.getpid(), start=folder.started())
    for number in range(80):
        killed.make(f"here{number}", 200 + number)
    there = [killed.make(f"there{ago}", ago) for ago in (30, 7200)]
    folder.remove_old(str(killed.base))
    assert [path.exists() for path in (alive, *there)] == [True, True, False]


def test_files_that_make_no_sense_go_as_others_do(killed: Killed) -> None:
    for number in range(80):
        killed.make("here", 200 + number)
    nonsense = killed.base / "rank0-4194303-1.watch"
    for data in (b"", b"\xff" * 5000, struct.pack("=d", float("nan")) * 600, struct.pack("=d", float("inf")) * 600):
        nonsense.write_bytes(data)
        os.utime(nonsense, (1, 1))
        folder.remove_old(str(killed.base))
        assert not nonsense.exists(), data[:8]


def test_a_process_that_only_waits_counts_as_living_to_its_last_look(own: recorder.Recorder) -> None:
    os.utime(own.path, (1, 1))
    own.look()
    assert os.stat(own.path).st_mtime > time.time() - 60


def test_a_new_recorder_sees_to_it(killed: Killed) -> None:
    paths = [killed.make(f"job{n}", 100 * (n + 1)) for n in range(80)]
    assert recorder.Recorder().path
    assert paths[0].exists() and not paths[79].exists()
