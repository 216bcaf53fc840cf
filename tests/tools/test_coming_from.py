"""docs/coming_from.md: both sides of each row are equivalent, and its claims about gradients hold.

test_docs.py checks that its names exist and that its code blocks run.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from process_groups import gloo_group
from ranks import RankPool
from torch import Tensor

import pynccl
import pynccl_autograd as ad
from pynccl import Communicator
from pynccl.bindings.torch_names import CALLS, FUNCTIONS

PAGE = Path(__file__).parents[2] / "docs" / "coming_from.md"
TEXT = PAGE.read_text()


def table(title: str) -> list[list[str]]:
    """Return the rows of the first table of a section, without backticks."""
    section = TEXT.split(f"\n## {title}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return [[cell.strip(" |`") for cell in row] for row in rows[2:] if not row[0].startswith("---")]


# ------------------------------------------------------------------------------------------- torch.distributed's rows


def exchange(comm: Communicator, x: Tensor, y: Tensor) -> None:
    with pynccl.group():
        comm.send(x, 1 - comm.rank)
        comm.recv(y, 1 - comm.rank)


def variables_of(comm: Communicator) -> dict[str, Any]:
    """Return the variables of a row, with the same small integers for both sides, so that sums are exact."""
    n, rank = comm.size, comm.rank
    generator = torch.Generator().manual_seed(7 + rank)
    x = torch.randint(-9, 9, (2 * n, 3), generator=generator).double()
    rows = [2] * n
    memory = {"y": torch.zeros_like(x), "part": torch.zeros(2, 3).double(), "whole": torch.zeros(2 * n * n, 3).double()}
    sizes = {"rows": rows, "elements": [3 * count for count in rows], "n": n, "rank": rank}
    modules = {"dist": dist, "pynccl": pynccl}
    return {**modules, **sizes, **memory, "comm": comm, "exchange": exchange, "x": x, "side": pynccl.create_stream()}


def execute(text: str, names: dict[str, Any]) -> Any:
    return exec(text, names) if ";" in text else eval(text, names)


def differences(comm: Communicator, path: str, rows: list[list[str]]) -> list[str]:
    """Return the differences between the two sides of each row, in tensors or in returned numbers."""
    found = []
    warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 suggests all_gather_single and similar functions
    with gloo_group(comm, path):
        for theirs, ours, *_ in rows:
            left, right, before = variables_of(comm), variables_of(comm), variables_of(comm)
            try:
                first = execute(theirs, left)
            except RuntimeError as error:
                if "does not support" not in str(error):  # an operation that gloo has only in later versions of torch
                    raise
                continue
            second = execute(ours, right)
            if theirs.startswith("dist.get_"):
                found += [] if first == second else [f"{theirs}: {first}, ours {second}"]
                continue
            tensors = ("x", "y", "part", "whole")
            if not (theirs.startswith("dist.reduce(") and comm.rank != 0):  # undefined on other ranks
                found += [f"{theirs}: {name}" for name in tensors if not torch.equal(left[name], right[name])]
            idle = {"dist.broadcast": 1, "dist.gather": 0, "dist.reduce": 1, "dist.send": 0, "dist.barrier": comm.rank}
            sends_only = idle.get(theirs.partition("(")[0]) == comm.rank  # this rank receives nothing
            if not sends_only and all(torch.equal(right[name], before[name]) for name in tensors):
                found.append(f"{ours}: nothing moved")
    return found


def test_both_sides_of_the_torch_distributed_rows_are_equivalent(ranks: RankPool, tmp_path: Path) -> None:
    rows = table("torch.distributed")
    assert len(rows) > 18
    assert ranks.run(2, differences, str(tmp_path / "store"), rows) == [[], []]


def test_what_has_no_name_here_gets_a_hint_whose_names_exist() -> None:
    """Of torch.distributed's calls: those of a process group and those that make one, but not those that query it."""
    public = dist.distributed_c10d.__all__
    queries = ("get_", "is_", "supports_", "set_timeout", "record_", "new_subgroups_by_enumeration")
    calls = {name for name in public if type(getattr(dist.distributed_c10d, name)) is FunctionType}
    named = {name for name in calls if hasattr(Communicator, name)}
    assert {name for name in calls - named - set(CALLS) if not name.startswith(queries)} == set()
    owners = {"comm": Communicator, "ad": ad, "pynccl": pynccl}
    for name, hint in {*CALLS.items(), *FUNCTIONS.items()}:
        assert not (name in CALLS and hasattr(Communicator, name)), name
        used = re.findall(r"\b(comm|ad|pynccl)\.(\w+)", hint)
        instance = {("comm", "rank"), ("comm", "size")}
        assert [pair for pair in used if pair not in instance and not hasattr(owners[pair[0]], pair[1])] == [], hint


def test_hints_do_not_hide_the_error_of_a_property() -> None:
    class Mine(Communicator):
        @property
        def loss(self) -> Any:
            return self.losses  # type: ignore[attr-defined]

    with pytest.raises(AttributeError, match="'Mine' object has no attribute 'losses'"):
        Mine.__new__(Mine).loss  # noqa: B018


# ----------------------------------------------------------------------------------------------------- the gradients

# Pattern of a row's code -> the outputs of all ranks, computed from the stacked inputs of all ranks.
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


def expected_gradient(comm: Communicator, theirs: str) -> tuple[Tensor, Tensor]:
    xs = [data(rank).requires_grad_() for rank in range(comm.size)]
    ys = next(reference for key, reference in REFERENCES.items() if re.search(key, theirs))(torch.stack(xs))
    loss = sum((weight(rank, y) * y).sum() for rank, y in enumerate(ys))
    assert isinstance(loss, Tensor)
    gradients = torch.autograd.grad(loss, xs, allow_unused=True, materialize_grads=True)
    return ys[comm.rank].detach(), gradients[comm.rank]


def gradient(comm: Communicator, text: str, y_expected: Tensor) -> tuple[bool, Tensor]:
    """Return whether the output is right, and the gradient of this side."""
    import torch.distributed._functional_collectives as fc
    import torch.distributed.nn.functional as nn

    x = data(comm.rank).requires_grad_()
    n = comm.size
    modules = {"dist": dist, "nn": nn, "fc": fc, "ad": ad, "torch": torch}
    memory = {"part": torch.zeros(4 // n, 3).double(), "y": torch.zeros(4, 3).double()}
    names = {**modules, **memory, "comm": comm, "n": n, "x": x, "world": dist.group.WORLD}
    y = eval(text, names) + 0
    if not y_expected.numel():  # only the root has a defined output
        return True, torch.autograd.grad(y, x, torch.zeros_like(y), allow_unused=True, materialize_grads=True)[0]
    (found,) = torch.autograd.grad(y, x, weight(comm.rank, y), allow_unused=True, materialize_grads=True)
    return torch.allclose(y.detach(), y_expected), found


def verdicts(comm: Communicator, path: str, rows: list[list[str]]) -> list[tuple[str, bool]]:
    """Return for each row the verdict on torch's gradient, and whether ours is right."""
    results = []
    with gloo_group(comm, path), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for theirs, _, ours in rows:
            y, right = expected_gradient(comm, theirs)
            verdict = "raises"
            with contextlib.suppress(RuntimeError):
                same, found = gradient(comm, theirs, y)
                assert same, theirs
                verdict = "right" if torch.allclose(found, right) else "wrong"
            dist.barrier()
            same, found = gradient(comm, ours, y)
            results.append((verdict, same and torch.allclose(found, right)))
    return results


def test_our_gradients_are_right_and_torchs_are_as_the_page_claims(ranks: RankPool, tmp_path: Path) -> None:
    rows = table("torch.distributed.nn and the functional collectives")
    assert len(rows) > 20
    by_rank = ranks.run(2, verdicts, str(tmp_path / "store"), rows)
    for row, *outcomes in zip(rows, *by_rank, strict=True):
        assert all(ours for _, ours in outcomes), row
    if f"| torch | torch {torch.__version__.partition('+')[0]} | here |" not in TEXT:
        pytest.skip(f"the page has results of another version than torch {torch.__version__}")
    for (theirs, claim, _), *outcomes in zip(rows, *by_rank, strict=True):
        observed = {verdict for verdict, _ in outcomes}
        assert claim == ("raises" if "raises" in observed else "wrong" if "wrong" in observed else "right"), theirs
