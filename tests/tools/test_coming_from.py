"""docs/coming_from.md: both sides of a row do the same; torch's gradients are right or wrong as it says, ours right.

That its names are there and its blocks run is tested with those of the other pages.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from process_groups import gloo
from ranks import RankPool
from torch import Tensor

import pynccl
import pynccl_autograd as ad
from pynccl import Communicator

PAGE = Path(__file__).parents[2] / "docs" / "coming_from.md"
TEXT = PAGE.read_text()


def table(title: str) -> list[list[str]]:
    """The rows of the first table of a section, cells without their backticks."""
    section = TEXT.split(f"\n## {title}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return [[cell.strip(" |`") for cell in row] for row in rows[2:] if not row[0].startswith("---")]


# ------------------------------------------------------------------------------------------- torch.distributed's rows


def exchange(comm: Communicator, x: Tensor, y: Tensor) -> None:
    with pynccl.group():
        comm.send(x, 1 - comm.rank)
        comm.recv(y, 1 - comm.rank)


def names_of(comm: Communicator) -> dict[str, Any]:
    """The same numbers for either side of a row: small integers, whose sums are exact."""
    n, rank = comm.size, comm.rank
    made = torch.Generator().manual_seed(7 + rank)
    x = torch.randint(-9, 9, (2 * n, 3), generator=made).double()
    rows = [2] * n
    memory = {"y": torch.zeros_like(x), "part": torch.zeros(2, 3).double(), "whole": torch.zeros(2 * n * n, 3).double()}
    sizes = {"rows": rows, "elements": [3 * one for one in rows], "n": n, "rank": rank}
    modules = {"dist": dist, "pynccl": pynccl}
    return {**modules, **sizes, **memory, "comm": comm, "exchange": exchange, "x": x, "side": pynccl.create_stream()}


def carried_out(text: str, names: dict[str, Any]) -> Any:
    return exec(text, names) if ";" in text else eval(text, names)


def sides(comm: Communicator, path: str, rows: list[list[str]]) -> list[str]:
    """What differs between the two sides of each row: in the tensors afterwards, or in a number that they return."""
    said = []
    warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 would have all_gather_single and its like
    with gloo(comm, path):
        for there, here, *_ in rows:
            left, right, before = names_of(comm), names_of(comm), names_of(comm)
            first, second = carried_out(there, left), carried_out(here, right)
            if there.startswith("dist.get_"):
                said += [] if first == second else [f"{there}: {first}, here {second}"]
                continue
            tensors = ("x", "y", "part", "whole")
            if not (there.startswith("dist.reduce(") and comm.rank != 0):  # theirs is undefined elsewhere
                said += [f"{there}: {name}" for name in tensors if not torch.equal(left[name], right[name])]
            gives = {"dist.broadcast": 1, "dist.gather": 0, "dist.reduce": 1, "dist.send": 0, "dist.barrier": comm.rank}
            silent = gives.get(there.partition("(")[0]) == comm.rank  # this rank receives nothing
            if not silent and all(torch.equal(right[name], before[name]) for name in tensors):
                said.append(f"{here}: nothing moved")
    return said


def test_both_sides_of_torch_distributed_s_rows_give_the_same(ranks: RankPool, tmp_path: Path) -> None:
    rows = table("torch.distributed")
    assert len(rows) > 18
    assert ranks.run(2, sides, str(tmp_path / "store"), rows) == [[], []]


# ----------------------------------------------------------------------------------------------------- the gradients

# What each row computes, of all ranks' inputs stacked: (a pattern of its code, the outputs of all ranks).
REFERENCES: dict[str, Any] = {
    'reduce_scatter.*(AVG|"avg")|(AVG|"avg").*reduce_scatter': lambda x: x.mean(0).chunk(len(x)),
    "reduce_scatter": lambda x: x.sum(0).chunk(len(x)),
    "all_gather": lambda x: [x.flatten(0, 1)] * len(x),
    "broadcast": lambda x: [x[0]] * len(x),
    r"nn\.reduce\(": lambda x: [x.sum(0), *[x[:0]] * (len(x) - 1)],
    r"nn\.gather\(": lambda x: [x.flatten(0, 1), *[x[:0]] * (len(x) - 1)],
    r"nn\.scatter\(": lambda x: x[0].chunk(len(x)),
    "all_to_all": lambda x: x.unflatten(1, (len(x), -1)).transpose(0, 1).flatten(1, 2),
    "permute": lambda x: [x[1], x[0]],
    'MAX|"max"': lambda x: [x.amax(0)] * len(x),
    "MIN": lambda x: [x.amin(0)] * len(x),
    "PRODUCT": lambda x: [x.prod(0)] * len(x),
    'AVG|"avg"': lambda x: [x.mean(0)] * len(x),
    "all_reduce": lambda x: [x.sum(0)] * len(x),
}


def data(rank: int) -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def weight(rank: int, like: Tensor) -> Tensor:
    return (rank + 1) * torch.arange(1.0, like.numel() + 1, dtype=torch.float64).reshape(like.shape)


def right_gradient(comm: Communicator, there: str) -> tuple[Tensor, Tensor]:
    xs = [data(rank).requires_grad_() for rank in range(comm.size)]
    ys = next(reference for key, reference in REFERENCES.items() if re.search(key, there))(torch.stack(xs))
    loss = sum((weight(rank, y) * y).sum() for rank, y in enumerate(ys))
    assert isinstance(loss, Tensor)
    gradients = torch.autograd.grad(loss, xs, allow_unused=True, materialize_grads=True)
    return ys[comm.rank].detach(), gradients[comm.rank]


def gradient(comm: Communicator, text: str, y_expected: Tensor) -> tuple[bool, Tensor]:
    """(whether the output is right, the gradient that this side gives)."""
    import torch.distributed._functional_collectives as fc
    import torch.distributed.nn.functional as nn

    x = data(comm.rank).requires_grad_()
    n = comm.size
    modules = {"dist": dist, "nn": nn, "fc": fc, "ad": ad, "torch": torch}
    memory = {"part": torch.zeros(4 // n, 3).double(), "y": torch.zeros(4, 3).double()}
    names = {**modules, **memory, "comm": comm, "n": n, "x": x, "world": dist.group.WORLD}
    y = eval(text, names) + 0
    if not y_expected.numel():  # the outputs of ranks that are not the root say nothing
        return True, torch.autograd.grad(y, x, torch.zeros_like(y), allow_unused=True, materialize_grads=True)[0]
    (found,) = torch.autograd.grad(y, x, weight(comm.rank, y), allow_unused=True, materialize_grads=True)
    return torch.allclose(y.detach(), y_expected), found


def verdicts(comm: Communicator, path: str, rows: list[list[str]]) -> list[tuple[str, bool]]:
    """(what torch's gradient is here, whether ours is right) for each row."""
    said = []
    with gloo(comm, path), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for there, _, here in rows:
            y, right = right_gradient(comm, there)
            verdict = "raises"
            with contextlib.suppress(RuntimeError):
                same, found = gradient(comm, there, y)
                assert same, there
                verdict = "right" if torch.allclose(found, right) else "wrong"
            dist.barrier()
            same, found = gradient(comm, here, y)
            said.append((verdict, same and torch.allclose(found, right)))
    return said


def test_gradients_are_right_here_and_torch_s_are_as_the_page_says(ranks: RankPool, tmp_path: Path) -> None:
    rows = table("torch.distributed.nn and the functional collectives")
    assert len(rows) > 20
    by_rank = ranks.run(2, verdicts, str(tmp_path / "store"), rows)
    for row, *outcomes in zip(rows, *by_rank, strict=True):
        assert all(ours for _, ours in outcomes), row
    if f"torch {torch.__version__.partition('+')[0]} gave" not in TEXT:
        pytest.skip(f"the page is of another torch than {torch.__version__}")
    for (there, claimed, _), *outcomes in zip(rows, *by_rank, strict=True):
        seen = {verdict for verdict, _ in outcomes}
        assert claimed == ("raises" if "raises" in seen else "wrong" if "wrong" in seen else "right"), there
