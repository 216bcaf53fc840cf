"""The file of a trace: exact times, and a broken write leaves the old file."""

from __future__ import annotations

from pathlib import Path

import pytest

from pynccl import chrome_trace as chrome


def test_times_are_exact_to_the_nanosecond_and_a_broken_write_leaves_the_old_file(tmp_path: Path) -> None:
    first = chrome.piece("a", "comm", 0, 1, 3600.0000001, 3600.0000002)
    assert (first["ts"], first["dur"]) == (3600000000.1, 0.1)
    path = tmp_path / "trace.json"
    path.write_text("old")

    def broken() -> object:
        yield first
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        chrome.write(path, broken())  # type: ignore[arg-type]
    assert path.read_text() == "old" and [one.name for one in tmp_path.iterdir()] == ["trace.json"]
