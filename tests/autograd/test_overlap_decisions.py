"""Decisions of races: saving, loading and retrying."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from overlap_auto import (
    FUNCTIONS,
    MAX_CALLS,
    PATTERNS,
    ChosenSchedule,
    Schedules,
    chosen_by_races,
    make_call,
    tune_small_layers,
    tune_with_times,
)
from ranks import RankPool
from torch import nn

import pynccl_autograd as ad
from pynccl import Communicator
from pynccl_autograd.overlap import saved
from pynccl_autograd.overlap.lanes import observing


def try_and_save(comm: Communicator, path: str) -> dict[str, str]:
    """Run the races of all patterns with predetermined winners, and save the decisions."""
    winner = {pattern: PATTERNS[pattern][-1 - at % 4] for at, pattern in enumerate(PATTERNS)}
    layer = nn.Identity()
    with tune_with_times(lambda decision: 0.5 if decision.schedule == winner[decision.pattern] else 1.0):
        for name in FUNCTIONS:
            call = make_call(comm, name, layer)
            for _ in range(MAX_CALLS + 1):
                call()
        ad.overlap.save(path)
        assert chosen_by_races(layer) == winner
    return winner


def first_calls(comm: Communicator, paths: list[str]) -> tuple[list[ChosenSchedule], list[str]]:
    """Load this rank's file; return the first calls of another layer on another communicator."""
    child = comm.split(0)
    assert child is not None
    layer, schedules = nn.Identity(), Schedules()
    with child, tune_small_layers(), observing(schedules):
        if paths[comm.rank]:
            ad.overlap.load(paths[comm.rank])
        for name in FUNCTIONS:
            call = make_call(child, name, layer)
            for _ in range(2):
                call()
        return schedules.chosen, [decision.reason for decision in ad.overlap.decisions(layer)]


def test_loaded_decisions_are_used_without_new_races(ranks: RankPool, tmp_path: Path) -> None:
    path, other = tmp_path / "decisions.json", tmp_path / "other.json"
    winner = ranks.run(2, try_and_save, str(path))[0]
    assert len(set(winner.values())) > 2 and os.listdir(tmp_path) == ["decisions.json"]
    for took, reasons in ranks.run(2, first_calls, [str(path)] * 2):
        assert all(entry.settled and entry.schedule == winner[entry.pattern] for entry in took)
        assert {entry.pattern for entry in took} == set(PATTERNS)
        assert all(reason.startswith("loaded; tried: off 1e+03 ms") for reason in reasons)
    content = json.loads(path.read_text())
    for entry in content["decisions"].values():
        entry["schedule"] = "slices 8" if entry["schedule"] != "slices 8" else "off"
    other.write_text(json.dumps(content))
    content["decisions"] = {name: {**entry, "schedule": "slices 3"} for name, entry in content["decisions"].items()}
    unknown = tmp_path / "strange.json"  # the same on all ranks, but not a candidate
    unknown.write_text(json.dumps(content))
    for paths in (["", str(path)], [str(path), ""], [str(path), str(other)], [str(unknown)] * 2):
        (first, _), (second, _) = ranks.run(2, first_calls, paths)
        assert first == second and {entry.pattern for entry in first} == set(PATTERNS), paths
        assert not any(entry.settled for entry in first), paths


FILES = (
    b"",
    b'{"version": 3, "decisions": {"a',
    b"\xff\xfe\x00\x01",
    b"[1, 2]",
    b'{"version": 3}',
    b'{"version": 3, "decisions": [1]}',
    b'{"version": 3, "decisions": {"a": "off"}}',
    b'{"version": 3, "decisions": {"a": {"tried": {}}}}',
    b'{"version": 3, "decisions": {"a": {"schedule": 5, "tried": {}}}}',
    b'{"version": 3, "decisions": {"a": {"schedule": "off", "tried": {"off": "long"}}}}',
    b'{"version": 3, "decisions": {"a": {"schedule": "off", "tried": [1.0]}}}',
    b"[" * 100_000,
)


def test_files_not_written_by_save_raise(tmp_path: Path) -> None:
    path = tmp_path / "decisions.json"
    with tune_small_layers():
        for content in FILES:
            path.write_bytes(content)
            with pytest.raises(ValueError, match=r"overlap\.load: .*decisions\.json is not a file of ad"):
                ad.overlap.load(path)
            assert saved.from_files == {}, content
    path.write_text('{"version": 1, "decisions": {}}')
    with pytest.raises(ValueError, match=r"overlap\.load: .*decisions\.json has version 1, expected 3; run"):
        ad.overlap.load(path)
    with pytest.raises(FileNotFoundError, match=r"missing\.json"):
        ad.overlap.load(tmp_path / "missing.json")


def test_a_failed_save_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "decisions.json"
    ad.overlap.save(path)
    old = path.read_text()
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(saved.won, "a pass", {"schedule": "off", "tried": {}})
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(old), limit[1]))  # Python ignores the signal SIGXFSZ
        try:
            with pytest.raises(OSError, match="too large"):
                ad.overlap.save(path)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert path.read_text() == old and os.listdir(tmp_path) == ["decisions.json"]
    with pytest.raises(FileNotFoundError, match=r"missing/decisions\.json"):
        ad.overlap.save(tmp_path / "missing" / "decisions.json")


def test_a_saved_file_has_the_default_mode_and_may_be_compressed(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(saved.won, "a pass", {"schedule": "off", "tried": {"off": 0.25}})
        before = os.umask(0o027)
        try:
            for name in ("decisions.json", "decisions.json.gz"):
                ad.overlap.save(tmp_path / name)
        finally:
            os.umask(before)
    for path in tmp_path.iterdir():
        assert path.stat().st_mode & 0o777 == 0o640
        with tune_small_layers():
            ad.overlap.load(path)
            assert saved.from_files == {"a pass": {"schedule": "off", "tried": {"off": 0.25}}}


def test_a_replaced_file_keeps_its_mode_and_no_save_changes_the_umask(tmp_path: Path) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.touch()
    old.chmod(0o600)
    masks: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "umask", masks.append)  # it belongs to all threads, which may create files meanwhile
        for path in (old, new):
            ad.overlap.save(path)
    assert old.stat().st_mode & 0o777 == 0o600 and old.read_text() == new.read_text() and masks == []


def check_retry(comm: Communicator, path: str) -> None:
    """Retry a layer, all layers of a model and a communicator; the file does not bring the decisions back."""
    child, other = comm.split(0), comm.split(0)
    assert child is not None and other is not None
    model = nn.Module()
    model.one, model.other = nn.Identity(), nn.Identity()
    with child, other, tune_small_layers():
        ad.overlap.load(path)

        def racing(owner: Any, comm: Communicator = child) -> list[bool]:
            for name in FUNCTIONS:
                make_call(comm, name, owner)()
            return [not decision.settled for decision in ad.overlap.decisions(comm if owner is None else owner)]

        for owner in (model.one, model.other, None):
            assert racing(owner) == [False] * 6
        ad.overlap.retry(model.one)
        assert ad.overlap.decisions(model.one) == ()
        assert racing(model.one) == racing(model.other) == racing(None) == [True] * 6  # they share the races
        # Another communicator of the same size: all ranks know the same, so none waits for another's decision.
        states = comm.all_gather(torch.tensor(racing(nn.Identity(), other)).int())
        assert torch.equal(states[0], states[1])
        for _ in range(MAX_CALLS):
            racing(model.other)
        for owner, all_of in ((model.other, model.other), (model.one, model), (None, child)):
            assert racing(owner) == [False] * 6
            ad.overlap.retry(all_of)
            assert racing(owner) == [True] * 6
            for _ in range(MAX_CALLS):
                racing(owner)


def test_retry_starts_new_races(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, try_and_save, str(tmp_path / "decisions.json"))
    ranks.run(2, check_retry, str(tmp_path / "decisions.json"))
