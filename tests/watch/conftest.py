"""A recorder of its own for a test."""

from __future__ import annotations

from pathlib import Path

import pytest

from pynccl.watch import recorder


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> recorder.Recorder:
    """The recorder of this process, whose file is in tmp_path."""
    monkeypatch.setenv("PYNCCL_WATCH_DIR", str(tmp_path))
    made = recorder.Recorder()
    monkeypatch.setattr(recorder, "_recorder", made)
    return made
