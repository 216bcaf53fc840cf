"""The tangent of a function of ours beside that of torch's functional collectives, which drop it.

tests/tools/test_coming_from.py holds the gradients of both side by side.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from process_groups import gloo
from ranks import RankPool

import pynccl_autograd as ad
from pynccl import Communicator

INPUTS = ((1.0, 5.0), (3.0, 2.0))


def tangents(comm: Communicator, folder: str) -> tuple[list[float], list[float]]:
    x, t = torch.tensor(INPUTS[comm.rank]), torch.full((2,), comm.rank + 1.0)
    ours = torch.func.jvp(lambda x: x * ad.all_reduce(x, comm, grad="sum"), (x,), (t,))[1]
    with gloo(comm, f"{folder}/store"):
        theirs = torch.func.jvp(lambda x: x * functional.all_reduce(x, "sum", dist.group.WORLD), (x,), (t,))[1]
    return ours.tolist(), theirs.tolist()


def test_the_tangent_that_the_functional_collectives_drop_is_kept_here(ranks: RankPool, tmp_path: Path) -> None:
    """d(x * S) = dx * S + x * dS with S = (4, 7), dS = (3, 3)."""
    (ours0, theirs0), (ours1, theirs1) = ranks.run(2, tangents, str(tmp_path))
    assert ours0 == [1 * 4 + 1 * 3.0, 1 * 7 + 5 * 3.0] and ours1 == [2 * 4 + 3 * 3.0, 2 * 7 + 2 * 3.0]
    if (theirs0, theirs1) == (ours0, ours1):
        pytest.skip(f"torch {torch.__version__} keeps it too")
    assert theirs0 == [4.0, 7.0]  # dS is gone, and nothing said so
