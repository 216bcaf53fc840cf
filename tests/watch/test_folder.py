"""The folder of a job's records: private, of bounded size, and with messages to ranks for which others wait."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest

from pynccl.watch import folder, recorder
from pynccl.watch.watchdog import Watchdog

OTHER_USER = 54321


@pytest.fixture
def default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder if PYNCCL_WATCH_DIR is not set, in a folder where any user may create files."""
    monkeypatch.delenv("PYNCCL_WATCH_DIR", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert folder.base() == f"{tmp_path}/pynccl-watch-{os.geteuid()}"
    return Path(folder.base())


@pytest.mark.parametrize("kind", ["0o777", "0o770", "0o702", "link", "another user's"])
def test_a_folder_writable_by_others_is_not_used(default: Path, tmp_path: Path, kind: str) -> None:
    if kind == "link":
        (tmp_path / "target").mkdir(0o700)
        default.symlink_to(tmp_path / "target")
    elif kind.startswith("0o"):
        default.mkdir()
        default.chmod(int(kind, 8))
    elif os.geteuid() == 0:
        default.mkdir(0o700)
        os.chown(default, OTHER_USER, OTHER_USER)
    else:
        pytest.skip("only root can create a folder of another user")
    with pytest.warns(
        RuntimeWarning, match=re.escape(str(default)) + ".*: expected a folder .not a link. of this user"
    ):
        assert recorder.Recorder().path == ""
    assert list(default.iterdir()) == []


HOSTILE = "a\x1b[31mb\x1b]0;title\x07c\x9b2Jd\u202ee\x1bP1;2\x1b\\f\r\x08g"


def test_messages_of_other_ranks_are_printed_once_without_control_characters(
    own: recorder.Recorder, capsys: pytest.CaptureFixture[str]
) -> None:
    watchdog = Watchdog(own)
    watchdog.stop()
    for seconds in (2, 3, 60):  # each waiting rank sends the message, and sends it again
        folder.leave_message(
            own.path, f"rank 1 never entered all_reduce #3; rank 0 has waited {seconds} s there.\nmore"
        )
        watchdog.poll()
    printed = capsys.readouterr().err
    assert printed == (
        "pynccl watchdog: other ranks wait for this rank\n"
        "  rank 1 never entered all_reduce #3; rank 0 has waited 2 s there.\n  more\n"
    )
    folder.leave_message(own.path, f"{HOSTILE}\n{HOSTILE}\n")
    watchdog.poll()
    printed = capsys.readouterr().err
    assert printed.startswith("pynccl watchdog: other ranks wait for this rank\n  a?[31mb?]0;title?c")
    assert all(line.isprintable() for line in printed.split("\n"))
    assert list(Path(own.path).parent.iterdir()) == [Path(own.path)]


def test_the_oldest_files_of_killed_processes_are_removed(own: recorder.Recorder) -> None:
    base, data = Path(own.path).parent, Path(own.path).read_bytes()

    def leave_file(name: str, ago: float, content: bytes = data.ljust(1 << 20, b"\1")) -> Path:
        """Create the file of a process that was last alive `ago` seconds ago."""
        path = base / f"{name}.watch"
        path.write_bytes(content)
        os.utime(path, (time.time() - ago, time.time() - ago))
        return path

    killed = [leave_file(f"job{n}-{4_000_000 + n}-1", 100 * (n + 1)) for n in range(100)]
    alive = leave_file(f"alive-{os.getpid()}-{folder.start_ticks()}", 30 * 86400)
    remote = leave_file("there-4999999-1", 30)  # a process of another node may be alive
    invalid = leave_file("rank0-4194303-1", 10**6, b"\xff" * 5000)
    os.utime(own.path, (1, 1))
    own.beat()  # a waiting process counts as alive until its last heartbeat
    assert recorder.Recorder().path  # removes old files
    kept = [path for path in killed if path.exists()]
    assert kept == killed[: len(kept)] and 63 <= len(kept) <= 64  # 1 MiB each
    assert [path.exists() for path in (alive, remote, invalid)] == [True, True, False]
