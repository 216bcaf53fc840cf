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


def through_a_module(comm: Communicator, x: Tensor) -> Any:
    return Block(comm)(x)


def through_a_module_of_ours(comm: Communicator, x: Tensor) -> Any:
    model = torch.nn.Sequential(torch.nn.Sequential(ad.nn.AllReduce(comm, grad="sum")))
    return model(x)  # line of through_a_module_of_ours


def through_start(comm: Communicator, x: Tensor) -> Any:
    return ad.start(ad.all_reduce, x, comm, grad="sum").wait()  # line of through_start


def through_a_checkpoint(comm: Communicator, x: Tensor) -> Any:
    return checkpoint(Block(comm), x, use_reentrant=False)


def through_torch_func(comm: Communicator, x: Tensor) -> Any:
    return torch.func.jvp(lambda t: ad.all_reduce(t, comm, grad="sum"), (x,), (x,))  # line of through_torch_func


def through_a_compiled_function(comm: Communicator, x: Tensor) -> Any:
    def f(x: Tensor) -> Tensor:
        return ad.all_reduce(x * 2, comm, grad="sum") + 1

    torch._dynamo.reset()
    return torch.compile(f, fullgraph=True, backend="aot_eager")(x)


WAYS: dict[str, tuple[Callable[[Communicator, Tensor], Any], str | None]] = {
    "module": (through_a_module, "Block"),
    "module of ours": (through_a_module_of_ours, "through_a_module_of_ours"),
    "start": (through_start, "through_start"),
    "checkpoint": (through_a_checkpoint, "Block"),
    "torch.func": (through_torch_func, "through_torch_func"),
    "torch.compile": (through_a_compiled_function, None),
}


def disagree(comm: Communicator) -> dict[str, str]:
    own = checked(comm)
    x = torch.ones(3 + own.rank)
    found = {}
    with own:
        for way, (call, _) in WAYS.items():
            with pytest.raises(pynccl.NcclInvalidUsage) as caught:
                call(own, x)
            found[way] = str(caught.value)
    return found


def test_the_line_is_the_users(ranks: RankPool) -> None:
    here = Path(__file__)
    numbered = list(enumerate(here.read_text().splitlines(), 1))
    for messages in ranks.run(2, disagree):
        for way, (call, marker) in WAYS.items():
            sites = re.findall(r"at (\S+):(\d+)$", messages[way], re.MULTILINE)
            assert len(sites) == 2 and {site for site, _ in sites} == {str(here)}, messages[way]
            if marker is None:  # compiled: a line of the function that was compiled, or of the call of it
                start = next(at for at, line in numbered if line.startswith(f"def {call.__name__}("))
                assert all(start <= int(line) <= start + 6 for _, line in sites), way
            else:
                expected = next(at for at, line in numbered if line.endswith(f"# line of {marker}"))
                assert {int(line) for _, line in sites} == {expected}, way


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


def split_or_reduce(comm: Communicator) -> list[str]:
    """A collective against what creates a communicator, and against what cannot be compared."""
    own = checked(comm)
    with pytest.raises(pynccl.NcclInvalidUsage) as caught:
        own.split(0) if own.rank == 0 else own.all_reduce(torch.ones(3))
    compared = str(caught.value)
    with pytest.raises(pynccl.NcclInvalidUsage) as caught:
        own.library.check(
            own.library.ncclAllReduce(*[own.scratch(8).address] * 2, 1, 7, 0, own.handle, own.scratch(8).stream), "raw"
        ) if own.rank == 0 else own.all_reduce(torch.ones(3))
    own.abort()
    return [compared, str(caught.value)]


def test_a_split_against_a_collective_is_told_as_that(ranks: RankPool) -> None:
    first, second = ranks.run(2, split_or_reduce)
    for compared, _ in (first, second):
        assert "split() at " in compared and "all_reduce(count=3, FLOAT32, SUM) at " in compared
        assert "all_gather" not in compared
    for _, uncompared in (first, second):
        assert "run with PYNCCL_CHECK=1" not in uncompared
    assert "rank 1: all_reduce(count=3, FLOAT32, SUM) at " in second[1] and "not compared" in second[1]


SPECIAL = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf"), "1": 1.0}
PAIRS = [("nan", "1"), ("1", "nan"), ("inf", "-inf"), ("nan", "inf"), ("1", "inf")]
ALIKE = [("nan", "nan"), ("inf", "inf"), ("-inf", "-inf")]


def special_cotangents(comm: Communicator) -> list[str]:
    """What is said of cotangents that have these values in one place, "" for nothing."""
    own = checked(comm)
    found = []
    with own:
        for values in PAIRS + ALIKE:
            y = ad.all_reduce(torch.ones(3, requires_grad=True), own, grad="replicated")
            try:
                y.backward(torch.tensor([2.0, SPECIAL[values[own.rank]], 1e30]))
                found.append("")
            except pynccl.NcclInvalidUsage as error:
                found.append(str(error))
    return found


def test_nan_and_infinities_differ_from_all_but_their_like(ranks: RankPool) -> None:
    for found in ranks.run(2, special_cotangents):
        for (first, second), message in zip(PAIRS + ALIKE, found, strict=True):
            if first == second:
                assert message == ""
            else:
                assert f"at index (1,) rank 0 has {first}, rank 1 has {second}" in message
