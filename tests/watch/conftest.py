"""A fixture with a separate flight recorder for a test."""

from __future__ import annotations

from pathlib import Path

import pytest

from pynccl.watch import recorder


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> recorder.Recorder:
    """The flight recorder of this process, with its file in tmp_path."""
    monkeypatch.setenv("PYNCCL_WATCH_DIR", str(tmp_path))
    own = recorder.Recorder()
    monkeypatch.setattr(recorder, "_recorder", own)
    return own
