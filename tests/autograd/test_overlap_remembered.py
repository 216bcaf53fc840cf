"""What is remembered of trials: saved and loaded, tried again, of layers that come and go."""

from __future__ import annotations

import copy
import errno
import gc
import json
import os
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import RankPool
from torch import nn
from tried import (
    FUNCTIONS,
    IN,
    OUT,
    PATTERNS,
    ROWS,
    Took,
    Ways,
    calling,
    mlp,
    settled,
    timed_by,
    tried_small,
)

import pynccl_autograd as ad
from pynccl import Communicator
from pynccl.comm.observing import observing
from pynccl_autograd.overlap import routes

MOST_CALLS = 24


# ---------------------------------------------------------------------------------------------- from run to run


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


def test_what_was_saved_is_not_tried_again(ranks: RankPool, doomed: RankPool, tmp_path: Path) -> None:
    path = str(tmp_path / "decisions.json")
    winner = ranks.run(2, decided, path)[0]
    assert len(set(winner.values())) > 2
    for pool in (ranks, doomed):  # the other pool has processes of its own
        for took, reasons in pool.run(2, loaded, [path, path]):
            assert took and all(one.settled and one.way == winner[one.pattern] for one in took)
            assert {one.pattern for one in took} == set(PATTERNS)
            assert all(reason.startswith("loaded; tried: off 1e+03 ms") for reason in reasons)
    assert os.listdir(tmp_path) == ["decisions.json"]


def test_what_not_all_ranks_have_loaded_is_tried(ranks: RankPool, tmp_path: Path) -> None:
    path, other = tmp_path / "decisions.json", tmp_path / "other.json"
    ranks.run(2, decided, str(path))
    said = json.loads(path.read_text())
    for one in said["decisions"].values():
        one["way"] = "slices 8" if one["way"] != "slices 8" else "off"
    other.write_text(json.dumps(said))
    for paths in (["", str(path)], [str(path), ""], [str(path), str(other)]):
        (first, _), (second, _) = ranks.run(2, loaded, paths)
        assert first == second and {one.pattern for one in first} == set(PATTERNS)
        assert not any(one.settled for one in first)
    said["decisions"] = {name: {**one, "way": "slices 3"} for name, one in said["decisions"].items()}
    other.write_text(json.dumps(said))  # on all ranks, and not a way that is ever taken
    (first, _), (second, _) = ranks.run(2, loaded, [str(other)] * 2)
    assert first == second and first and not any(one.settled for one in first)


FILES = {
    "empty": b"",
    "broken": b'{"version": 1, "decisions": {"a',
    "binary": b"\xff\xfe\x00\x01",
    "a list": b"[1, 2]",
    "nothing": b"null",
    "without": b'{"version": 1}',
    "decisions a list": b'{"version": 1, "decisions": [1]}',
    "a decision is text": b'{"version": 1, "decisions": {"a": "off"}}',
    "no way": b'{"version": 1, "decisions": {"a": {"tried": {}}}}',
    "way is a number": b'{"version": 1, "decisions": {"a": {"way": 5, "tried": {}}}}',
    "way is nothing": b'{"version": 1, "decisions": {"a": {"way": null, "tried": {}}}}',
    "times are text": b'{"version": 1, "decisions": {"a": {"way": "off", "tried": {"off": "long"}}}}',
    "times are a list": b'{"version": 1, "decisions": {"a": {"way": "off", "tried": [1.0]}}}',
}


def test_a_file_that_save_has_not_written(tmp_path: Path) -> None:
    path = tmp_path / "decisions.json"
    with tried_small():
        for name, content in FILES.items():
            path.write_bytes(content)
            with pytest.raises(ValueError, match=r"load: .*decisions\.json is no file that ad\.overlap\.save\(\) has"):
                ad.overlap.load(path)
            assert routes._loaded == {}, name
    path.write_text('{"version": 2, "decisions": {}}')
    with pytest.raises(ValueError, match=r"load: .*decisions\.json is of version 2, expected 1; try anew"):
        ad.overlap.load(path)
    with pytest.raises(FileNotFoundError, match=r"missing\.json"):
        ad.overlap.load(tmp_path / "missing.json")
    with pytest.raises(FileNotFoundError):
        ad.overlap.save(tmp_path / "missing" / "decisions.json")


@pytest.mark.parametrize("where", ["os.replace", "os.fdopen", "json.dumps"])
def test_a_file_that_cannot_be_written_leaves_the_old_one(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "decisions.json"
    with tried_small():
        ad.overlap.save(path)
        before = path.read_text()
        assert json.loads(before) == {"version": 1, "decisions": {}}

        def full(*args: Any, **options: Any) -> Any:
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(f"pynccl_autograd.overlap.routes.{where}", full)
            with pytest.raises(OSError, match="No space left on device"):
                ad.overlap.save(path)
        assert path.read_text() == before and os.listdir(tmp_path) == ["decisions.json"]


def retried(comm: Communicator, path: str) -> None:
    own = comm.split(0)
    assert own is not None
    model = nn.Module()
    model.one, model.other = nn.Identity(), nn.Identity()
    with own, tried_small():
        ad.overlap.load(path)

        def on_trial(owner: Any) -> list[bool]:
            for name in FUNCTIONS:
                calling(own, name, owner)()
            return [not one.settled for one in ad.overlap.decisions(own if owner is None else owner)]

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
        for _ in range(MOST_CALLS):
            on_trial(model.other)
        assert on_trial(model.other) == [False] * 6
        ad.overlap.retry(model.other)
        assert on_trial(model.other) == [True] * 6


def test_retry_tries_anew(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, decided, str(tmp_path / "decisions.json"))
    ranks.run(2, retried, str(tmp_path / "decisions.json"))


def retried_elsewhere(comm: Communicator, path: str) -> list[bool]:
    """What was loaded is forgotten by a layer of one communicator, when another one of as many ranks knows of it."""
    one, other = comm.split(0), comm.split(0)
    assert one is not None and other is not None
    layer = nn.Identity()
    with one, other, tried_small():
        ad.overlap.load(path)
        for own, owner in ((one, layer), (other, nn.Identity())):
            calling(own, "all_gather_matmul", owner)()
        ad.overlap.retry(layer)
        new = nn.Identity()
        calling(other, "all_gather_matmul", new)()
        return [decision.settled for decision in ad.overlap.decisions(new)]


def test_retry_on_one_communicator_does_not_break_another(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, decided, str(tmp_path / "decisions.json"))
    first, second = ranks.run(2, retried_elsewhere, str(tmp_path / "decisions.json"))
    assert first == second and len(first) == 2


# ---------------------------------------------------------------------------------------------- layers come and go


def copies(comm: Communicator) -> None:
    """A copy begins a trial of its own; the layer goes on with its."""
    with tried_small():
        layer = ad.RowParallelLinear(OUT, IN, comm, sequence_parallel=True, dtype=torch.float64)
        x = torch.randn(ROWS, OUT // comm.size, dtype=torch.float64)

        def call(layer: nn.Module) -> torch.Tensor:
            with torch.no_grad():
                y: torch.Tensor = layer(x)
            return y

        for _ in range(7):
            y = call(layer)
        again = copy.deepcopy(layer)
        assert ad.overlap.decisions(again) == ()
        torch.testing.assert_close(call(again), y, rtol=1e-12, atol=1e-12)
        (decision,) = ad.overlap.decisions(again)
        assert (decision.reason, decision.settled) == ("on trial, call 1 of 20", False)
        call(layer)
        (decision,) = ad.overlap.decisions(layer)
        assert decision.reason == "on trial, call 8 of 20"
        for _ in range(13):
            call(layer)
        assert [one.settled for one in ad.overlap.decisions(layer)] == [True]
        assert [one.settled for one in ad.overlap.decisions(again)] == [False]


def test_copies_of_a_layer_on_trial_try_for_themselves(ranks: RankPool) -> None:
    ranks.run(2, copies)


def other_communicator(comm: Communicator) -> None:
    """What was tried with other ranks is not known of these."""
    layer = nn.Identity()
    with tried_small():
        call = calling(comm, "matmul_reduce_scatter", layer)
        for _ in range(MOST_CALLS + 1):
            call()
        assert all(one.settled for one in ad.overlap.decisions(layer))
        own = comm.split(0)
        assert own is not None
        with own:
            call = calling(own, "matmul_reduce_scatter", layer)
            call()
            found = ad.overlap.decisions(layer)
            assert [one.reason for one in found[2:]] == ["on trial, call 1 of 20", "on trial, call 1 of 24"]
            assert all(one.settled for one in found[:2])
            for _ in range(MOST_CALLS):
                call()
            assert all(one.settled for one in ad.overlap.decisions(layer))


def test_a_layer_on_another_communicator_tries_anew(ranks: RankPool) -> None:
    ranks.run(2, other_communicator)


def dropped(comm: Communicator) -> list[int]:
    """What is remembered of layers, before them, with them and without."""
    gc.collect()
    sizes = [len(routes._passes)]
    with tried_small():
        model = mlp(comm, True)
        x = torch.randn(ROWS // comm.size, IN, dtype=torch.float64)
        for _ in range(3):
            torch.utils.checkpoint.checkpoint(model, x.requires_grad_(), use_reentrant=True).sum().backward()
            torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False).sum().backward()
        sizes.append(len(routes._passes))
        gone = weakref.ref(model)
        del model
        gc.collect()
        assert gone() is None
        sizes.append(len(routes._passes))
    return sizes


def test_layers_that_are_dropped_leave_nothing_behind(ranks: RankPool) -> None:
    for before, during, after in ranks.run(2, dropped):
        assert during == before + 3 and after == before
