"""The folder of a job's records: nobody else's, and bounded; who is waited for is told of it there, once."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest

from pynccl.watch import folder, recorder
from pynccl.watch.watchdog import Watchdog

SOMEBODY = 54321


@pytest.fixture
def default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder where PYNCCL_WATCH_DIR is not set: in a folder in which anybody may make files."""
    monkeypatch.delenv("PYNCCL_WATCH_DIR", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert folder.base() == f"{tmp_path}/pynccl-watch-{os.geteuid()}"
    return Path(folder.base())


@pytest.mark.parametrize("kind", ["0o777", "0o770", "0o702", "link", "another user's"])
def test_a_folder_that_others_may_write_to_is_not_used(default: Path, tmp_path: Path, kind: str) -> None:
    if kind == "link":
        (tmp_path / "target").mkdir(0o700)
        default.symlink_to(tmp_path / "target")
    elif kind.startswith("0o"):
        default.mkdir()
        default.chmod(int(kind, 8))
    elif os.geteuid() == 0:
        default.mkdir(0o700)
        os.chown(default, SOMEBODY, SOMEBODY)
    else:
        pytest.skip("only root can make what is another user's")
    with pytest.warns(RuntimeWarning, match=re.escape(str(default)) + ".*: expected a folder of this user, no link"):
        assert recorder.Recorder().path == ""
    assert list(default.iterdir()) == []


HOSTILE = "a\x1b[31mb\x1b]0;title\x07c\x9b2Jd\u202ee\x1bP1;2\x1b\\f\r\x08g"


def test_what_others_tell_is_printed_once_and_cannot_command_the_terminal(
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


def test_of_many_killed_processes_the_oldest_go_and_what_lives_stays(own: recorder.Recorder) -> None:
    base, data = Path(own.path).parent, Path(own.path).read_bytes()

    def left(name: str, ago: float, content: bytes = data.ljust(1 << 20, b"\1")) -> Path:
        """What a process has left whose last sign of life is so many seconds old."""
        path = base / f"{name}.watch"
        path.write_bytes(content)
        os.utime(path, (time.time() - ago, time.time() - ago))
        return path

    killed = [left(f"job{n}-{4_000_000 + n}-1", 100 * (n + 1)) for n in range(100)]
    alive = left(f"alive-{os.getpid()}-{folder.started()}", 30 * 86400)
    there = left("there-4999999-1", 30)  # another machine's may be alive
    nonsense = left("rank0-4194303-1", 10**6, b"\xff" * 5000)
    os.utime(own.path, (1, 1))
    own.look()  # a process that only waits counts as living to its last look
    assert recorder.Recorder().path  # sees to it
    kept = [path for path in killed if path.exists()]
    assert kept == killed[: len(kept)] and 63 <= len(kept) <= 64  # of 1 MiB each
    assert [path.exists() for path in (alive, there, nonsense)] == [True, True, False]
