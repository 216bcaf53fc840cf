"""The line that PYNCCL_CHECK=1 names is the user's, whatever lies between it and the call."""

from __future__ import annotations

import importlib.util
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
from pynccl.watch.frames import call_site


def checked(comm: Communicator) -> Communicator:
    os.environ["PYNCCL_CHECK"] = "1"
    own = comm.split(0)
    assert own is not None and own.checking
    return own


class Block(torch.nn.Module):
    """A user's module."""

    def __init__(self, comm: Communicator) -> None:
        super().__init__()
        self.comm = comm

    def forward(self, x: Tensor) -> Tensor:
        return ad.all_reduce(x, self.comm, grad="sum")  # line of Block


def through_a_module_of_ours(comm: Communicator, x: Tensor) -> Any:
    model = torch.nn.Sequential(torch.nn.Sequential(ad.nn.AllReduce(comm, grad="sum")))
    return model(x)  # line of through_a_module_of_ours


def through_start(comm: Communicator, x: Tensor) -> Any:
    return ad.start(ad.all_reduce, x, comm, grad="sum").wait()  # line of through_start


def through_a_checkpoint(comm: Communicator, x: Tensor) -> Any:
    return checkpoint(Block(comm), x, use_reentrant=False)


def through_torch_func(comm: Communicator, x: Tensor) -> Any:
    return torch.func.jvp(lambda t: ad.all_reduce(t, comm, grad="sum"), (x,), (x,))  # line of through_torch_func


WAYS: dict[str, Callable[[Communicator, Tensor], Any]] = {
    "through_a_module_of_ours": through_a_module_of_ours,
    "through_start": through_start,
    "Block": through_a_checkpoint,
    "through_torch_func": through_torch_func,
}


def disagree(comm: Communicator) -> dict[str, str]:
    found = {}
    with checked(comm) as own:
        x = torch.ones(3 + own.rank)
        for marker, call in WAYS.items():
            with pytest.raises(pynccl.NcclInvalidUsage) as caught:
                call(own, x)
            found[marker] = str(caught.value)
    return found


def test_the_line_is_the_users(ranks: RankPool) -> None:
    here = Path(__file__)
    numbered = list(enumerate(here.read_text().splitlines(), 1))
    for messages in ranks.run(2, disagree):
        for marker, message in messages.items():
            expected = next(at for at, line in numbered if line.endswith(f"# line of {marker}"))
            sites = re.findall(r"at (\S+:\d+)$", message, re.MULTILINE)
            assert sites == [f"{here}:{expected}"] * 2, message


@pytest.mark.parametrize("place", ["torch_stuff/pynccl_train.py", "torch/train.py", "pynccl/functools_of_mine.py"])
def test_a_users_file_is_found_whatever_it_is_called(tmp_path: Path, place: str) -> None:
    path = tmp_path / place
    path.parent.mkdir()
    path.write_text("def f(call_site):\n    return call_site()\n")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.f(call_site) == f"{path}:2"


NAN, INF = float("nan"), float("inf")
# Cotangents of two ranks, and what is said of them: NaN and infinities differ from all but their like.
COTANGENTS = [
    ((NAN, 1.0), "rank 0 has nan, rank 1 has 1"),
    ((INF, -INF), "rank 0 has inf, rank 1 has -inf"),
    ((NAN, INF), "rank 0 has nan, rank 1 has inf"),
    ((NAN, NAN), ""),
    ((INF, INF), ""),
]


def split_or_reduce_and_cotangents(comm: Communicator) -> tuple[str, list[str]]:
    found = []
    with checked(comm) as own:
        for values, _ in COTANGENTS:
            y = ad.all_reduce(torch.ones(3, requires_grad=True), own, grad="replicated")
            try:
                y.backward(torch.tensor([2.0, values[own.rank], 1e30]))
                found.append("")
            except pynccl.NcclInvalidUsage as error:
                found.append(str(error))
        with pytest.raises(pynccl.NcclInvalidUsage) as caught:
            own.split(0) if own.rank == 0 else own.all_reduce(torch.ones(3))
    return str(caught.value), found


def test_a_split_against_a_collective_and_cotangents_that_differ_are_told(ranks: RankPool) -> None:
    for compared, found in ranks.run(2, split_or_reduce_and_cotangents):
        assert "split() at " in compared and "all_reduce(count=3, FLOAT32, SUM) at " in compared
        for message, (values, says) in zip(found, COTANGENTS, strict=True):
            assert (f"at index (1,) {says}" in message) if says else message == "", values
