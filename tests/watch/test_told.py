"""A rank that others wait for hears of it: its watchdog prints what they have left for it, once."""

from __future__ import annotations

from pathlib import Path

import pytest

from pynccl.watch import folder, recorder
from pynccl.watch.watchdog import Watchdog


def test_it_is_printed_once_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYNCCL_WATCH_DIR", str(tmp_path))
    own = recorder.Recorder()
    monkeypatch.setattr(recorder, "_recorder", own)
    watchdog = Watchdog(own)
    watchdog.stop()
    for seconds in (2, 3, 60):  # each of those who wait says so, and says it again
        folder.tell(own.path, f"rank 1 never entered all_reduce #3; rank 0 has waited {seconds} s there.\nmore")
        watchdog.look()
    folder.tell(own.path, "rank 1 never entered all_reduce #4; rank 0 has waited 2 s there.")
    watchdog.look()
    said = capsys.readouterr().err
    assert said.count("other ranks wait for this one") == 2
    assert said.count("all_reduce #3; rank 0 has waited 2 s there.\n  more\n") == 1
    assert list(Path(own.path).parent.iterdir()) == [Path(own.path)]


def test_who_has_gone_meanwhile_is_told_nothing(tmp_path: Path) -> None:
    folder.tell(str(tmp_path / "nowhere" / "x.watch"), "text")  # its folder has gone meanwhile
