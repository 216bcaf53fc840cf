"""PYNCCL_CHECK=1 names the user's line, also through checkpoints and torch.func."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import RankPool
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import pynccl
import pynccl_autograd as ad
from pynccl import Communicator


def split_with_check(comm: Communicator) -> Communicator:
    os.environ["PYNCCL_CHECK"] = "1"
    child = comm.split(0)
    assert child is not None and child.checking
    return child


class Block(torch.nn.Module):
    """A user's module."""

    def __init__(self, comm: Communicator) -> None:
        super().__init__()
        self.comm = comm

    def forward(self, x: Tensor) -> Tensor:
        return ad.all_reduce(x, self.comm, grad="sum")  # line of Block


def through_a_checkpoint(comm: Communicator, x: Tensor) -> Any:
    return checkpoint(Block(comm), x, use_reentrant=False)


def through_torch_func(comm: Communicator, x: Tensor) -> Any:
    return torch.func.jvp(lambda t: ad.all_reduce(t, comm, grad="sum"), (x,), (x,))  # line of through_torch_func


CALLS: dict[str, Callable[[Communicator, Tensor], Any]] = {
    "Block": through_a_checkpoint,
    "through_torch_func": through_torch_func,
}


def mismatched_calls(comm: Communicator) -> dict[str, str]:
    found = {}
    with split_with_check(comm) as child:
        x = torch.ones(3 + child.rank)
        for marker, call in CALLS.items():
            with pytest.raises(pynccl.NcclInvalidUsage) as caught:
                call(child, x)
            found[marker] = str(caught.value)
    return found


def test_mismatch_names_user_line(ranks: RankPool) -> None:
    here = Path(__file__)
    numbered = list(enumerate(here.read_text().splitlines(), 1))
    for messages in ranks.run(2, mismatched_calls):
        for marker, message in messages.items():
            expected = next(at for at, line in numbered if line.endswith(f"# line of {marker}"))
            sites = re.findall(r"at (\S+:\d+)$", message, re.MULTILINE)
            assert sites == [f"{here}:{expected}"] * 2, message
