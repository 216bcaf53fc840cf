"""Objects exchanged between ranks arrive unchanged, and no code in them is executed."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import RankPool

from pynccl import Communicator
from pynccl_autograd.agreement import broadcast_object, raise_on_all_ranks

VALUES: list[Any] = [
    *(None, True, 1 << 70, float("inf"), "text, \0 and \u20ac", (), torch.bfloat16),
    {"betas": (0.9, 0.999), 3: None, ("a", 1): [{}], True: False},
]


class Bad:
    """An object whose pickle creates a folder when it is loaded."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def exchange_values(comm: Communicator, path: str) -> str:
    mine = comm.rank == 1
    found = broadcast_object(comm, VALUES if mine else None, 1)
    assert found == VALUES and repr(found) == repr(VALUES)
    with pytest.raises(TypeError, match=r"^cannot broadcast .* from rank 1 to the other ranks; expected numbers, "):
        broadcast_object(comm, {"a": [Bad(path)]} if mine else None, 1)
    # Rank 0 is malicious: it sends a pickle where an error message is expected.
    dumped = pickle.dumps(Bad(path))
    with pytest.MonkeyPatch.context() as patch:
        if comm.rank == 0:
            patch.setattr("torch.save", lambda value, file: file.write(dumped))
            patch.setattr("torch.load", lambda *_, **__: None)
        try:
            raise_on_all_ranks(comm, ValueError("mine") if comm.rank == 0 else None)
        except (ValueError, RuntimeError, pickle.UnpicklingError) as error:
            return type(error).__name__
    return ""


def test_exchanged_values_arrive_unchanged_and_pickles_are_rejected(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(2, exchange_values, str(tmp_path / "made")) == ["ValueError", "UnpicklingError"]
    assert not (tmp_path / "made").exists()
