"""What ranks tell each other: it arrives as it was, and nothing of it is run."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import RankPool

from pynccl import Communicator
from pynccl_autograd.agreement import broadcast_object, raise_alike

VALUES: list[Any] = [
    None,
    True,
    0,
    1 << 70,
    -1.5,
    float("inf"),
    "text, \0 and \u20ac",
    [],
    (),
    {},
    ["list", 1, "tuple"],
    ("dict", [("list",)]),
    {"betas": (0.9, 0.999), 3: None, ("a", 1): [{}], True: False},
    torch.bfloat16,
    [torch.float32, "float32", ("dtype", "float32")],
]
TENSORS = [
    torch.tensor(0.1),
    torch.tensor([[1, 2], [3, 4]]),
    torch.zeros(0, 3, dtype=torch.bfloat16),
    torch.tensor([True, False]),
]


class Bad:
    """What a pickle would run where it is read."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def told(comm: Communicator, root: int) -> tuple[Any, Any]:
    values, tensors = (VALUES, TENSORS) if comm.rank == root else (None, None)
    return broadcast_object(comm, values, root), broadcast_object(comm, tensors, root)


def test_values_arrive_as_they_were(ranks: RankPool) -> None:
    for values, tensors in ranks.run(3, told, 2):
        assert values == VALUES and repr(values) == repr(VALUES)
        for found, given in zip(tensors, TENSORS, strict=True):
            assert torch.equal(found, given) and found.dtype == given.dtype


def refused(comm: Communicator, path: str) -> tuple[str, int]:
    with pytest.raises(TypeError) as caught:
        broadcast_object(comm, {"a": [Bad(path)]} if comm.rank == 1 else None, 1)
    return str(caught.value), broadcast_object(comm, comm.rank, 1)  # the ranks are in step


def test_what_cannot_be_told_is_an_error_on_every_rank(ranks: RankPool, tmp_path: Path) -> None:
    for text, after in ranks.run(3, refused, str(tmp_path / "made")):
        assert "cannot be told to other ranks; expected numbers, strings" in text and text.endswith("(on rank 1)")
        assert after == 1
    assert not (tmp_path / "made").exists()


def poisoned(comm: Communicator, path: str) -> str:
    """Rank 0 is a poser, and sends a pickle where words are exchanged."""
    dumped = pickle.dumps(Bad(path))
    with pytest.MonkeyPatch.context() as patch:
        if comm.rank == 0:
            patch.setattr("torch.save", lambda value, file: file.write(dumped))
            patch.setattr("torch.load", lambda *_, **__: None)
        try:
            raise_alike(comm, ValueError("mine") if comm.rank == 0 else None)
        except (ValueError, RuntimeError, pickle.UnpicklingError) as error:
            return type(error).__name__
    return ""


def test_a_pickle_is_not_run(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(2, poisoned, str(tmp_path / "made")) == ["ValueError", "UnpicklingError"]
    assert not (tmp_path / "made").exists()
