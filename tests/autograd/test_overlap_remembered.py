"""What is remembered of trials: saved and loaded, tried again, of layers that come and go."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import RankPool
from torch import nn
from tried import FUNCTIONS, MOST_CALLS, PATTERNS, Took, Ways, calling, settled, timed_by, tried_small

import pynccl_autograd as ad
from pynccl import Communicator
from pynccl.comm.observers import observing
from pynccl_autograd.overlap import routes


def decided(comm: Communicator, path: str) -> dict[str, str]:
    """A trial of all patterns, in which slices 2, 4, 8 win by turns; saved."""
    winner = {pattern: PATTERNS[pattern][-1 - at % 4] for at, pattern in enumerate(PATTERNS)}
    layer = nn.Identity()
    with timed_by(lambda decision, number: 0.5 if decision.way == winner[decision.pattern] else 1.0):
        for name in FUNCTIONS:
            call = calling(comm, name, layer)
            for _ in range(MOST_CALLS + 1):
                call()
        ad.overlap.save(path)
    assert settled(layer) == winner
    return winner


def loaded(comm: Communicator, paths: list[str]) -> tuple[list[Took], list[str]]:
    """The first calls of another layer on another communicator, after the file of this rank was loaded."""
    own = comm.split(0)
    assert own is not None
    layer, ways = nn.Identity(), Ways()
    with own, tried_small(), observing(ways):
        if paths[comm.rank]:
            ad.overlap.load(paths[comm.rank])
        for name in FUNCTIONS:
            call = calling(own, name, layer)
            for _ in range(2):
                call()
        return ways.took, [one.reason for one in ad.overlap.decisions(layer)]


def test_what_all_ranks_have_loaded_is_not_tried_again(ranks: RankPool, tmp_path: Path) -> None:
    path, other = tmp_path / "decisions.json", tmp_path / "other.json"
    winner = ranks.run(2, decided, str(path))[0]
    assert len(set(winner.values())) > 2 and os.listdir(tmp_path) == ["decisions.json"]
    for took, reasons in ranks.run(2, loaded, [str(path)] * 2):
        assert all(one.settled and one.way == winner[one.pattern] for one in took)
        assert {one.pattern for one in took} == set(PATTERNS)
        assert all(reason.startswith("loaded; tried: off 1e+03 ms") for reason in reasons)
    said = json.loads(path.read_text())
    for one in said["decisions"].values():
        one["way"] = "slices 8" if one["way"] != "slices 8" else "off"
    other.write_text(json.dumps(said))
    said["decisions"] = {name: {**one, "way": "slices 3"} for name, one in said["decisions"].items()}
    strange = tmp_path / "strange.json"  # the same on all ranks, and not a way that is ever taken
    strange.write_text(json.dumps(said))
    for paths in (["", str(path)], [str(path), ""], [str(path), str(other)], [str(strange)] * 2):
        (first, _), (second, _) = ranks.run(2, loaded, paths)
        assert first == second and {one.pattern for one in first} == set(PATTERNS), paths
        assert not any(one.settled for one in first), paths


FILES = (
    b"",
    b'{"version": 1, "decisions": {"a',
    b"\xff\xfe\x00\x01",
    b"[1, 2]",
    b'{"version": 1}',
    b'{"version": 1, "decisions": [1]}',
    b'{"version": 1, "decisions": {"a": "off"}}',
    b'{"version": 1, "decisions": {"a": {"tried": {}}}}',
    b'{"version": 1, "decisions": {"a": {"way": 5, "tried": {}}}}',
    b'{"version": 1, "decisions": {"a": {"way": "off", "tried": {"off": "long"}}}}',
    b'{"version": 1, "decisions": {"a": {"way": "off", "tried": [1.0]}}}',
)


def test_a_file_that_save_has_not_written(tmp_path: Path) -> None:
    path = tmp_path / "decisions.json"
    with tried_small():
        for content in FILES:
            path.write_bytes(content)
            with pytest.raises(ValueError, match=r"load: .*decisions\.json is no file that ad\.overlap\.save\(\) has"):
                ad.overlap.load(path)
            assert routes._loaded == {}, content
    path.write_text('{"version": 2, "decisions": {}}')
    with pytest.raises(ValueError, match=r"load: .*decisions\.json is of version 2, expected 1; try anew"):
        ad.overlap.load(path)
    with pytest.raises(FileNotFoundError, match=r"missing\.json"):
        ad.overlap.load(tmp_path / "missing.json")


def retried(comm: Communicator, path: str) -> None:
    """Of a layer, of all layers of a model, of a communicator, and of what was tried in this process."""
    own, other = comm.split(0), comm.split(0)
    assert own is not None and other is not None
    model = nn.Module()
    model.one, model.other = nn.Identity(), nn.Identity()
    with own, other, tried_small():
        ad.overlap.load(path)

        def on_trial(owner: Any, comm: Communicator = own) -> list[bool]:
            for name in FUNCTIONS:
                calling(comm, name, owner)()
            return [not one.settled for one in ad.overlap.decisions(comm if owner is None else owner)]

        for owner in (model.one, model.other, None):
            assert on_trial(owner) == [False] * 6
        ad.overlap.retry(model.one)
        assert ad.overlap.decisions(model.one) == ()
        assert on_trial(model.one) == [True] * 6
        assert on_trial(model.other) == on_trial(None) == [False] * 6
        ad.overlap.retry(model)
        assert on_trial(model.other) == [True] * 6 and on_trial(None) == [False] * 6
        ad.overlap.retry(own)
        assert on_trial(None) == [True] * 6
        # Another communicator of as many ranks, of which all know the same: no rank waits for what another has decided.
        states = comm.all_gather(torch.tensor(on_trial(nn.Identity(), other)).int())
        assert torch.equal(states[0], states[1])
        for _ in range(MOST_CALLS):
            on_trial(model.other)
        assert on_trial(model.other) == [False] * 6
        ad.overlap.retry(model.other)
        assert on_trial(model.other) == [True] * 6


def test_retry_tries_anew(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, decided, str(tmp_path / "decisions.json"))
    ranks.run(2, retried, str(tmp_path / "decisions.json"))
