"""docs/coming_from.md: what it names is there and takes such arguments; both sides of a row do the same; blocks run."""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import itertools
import os
import re
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from process_groups import gloo
from ranks import TORCHRUN, RankPool
from torch import Tensor

import pynccl
import pynccl_autograd as ad
from pynccl import Communicator

PAGE = Path(__file__).parents[2] / "docs" / "coming_from.md"
TEXT = PAGE.read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
ROOTS: dict[str, Any] = {"comm": Communicator, "pynccl": pynccl, "ad": ad}


def table(title: str) -> list[list[str]]:
    """The rows of the first table of a section, cells without their backticks."""
    section = TEXT.split(f"\n## {title}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return [[cell.strip(" |`") for cell in row] for row in rows[2:] if not row[0].startswith("---")]


def code() -> list[str]:
    """Everything in backticks, and the lines of the blocks."""
    return [*re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", TEXT, flags=re.DOTALL)), *BLOCKS]


def chain(node: ast.AST) -> list[str]:
    """comm.plan.all_reduce -> [comm, plan, all_reduce]; [] for anything else."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute) and (before := chain(node.value)):
        return [*before, node.attr]
    return []


def found(names: list[str]) -> Any:
    value = ROOTS[names[0]]
    for number, name in enumerate(names[1:], 2):
        module = ".".join([value.__name__, name]) if inspect.ismodule(value) else ""
        if module and not hasattr(value, name):
            value = importlib.import_module(module)
        elif value is Communicator and number == 2 and name in ("rank", "size", "device", "library"):
            return None  # set by its init
        else:
            value = getattr(value, name)
    return value


def bind(call: ast.Call, function: Any) -> None:
    """TypeError unless the function takes such arguments."""
    method = inspect.isfunction(function) and "." in function.__qualname__  # of a class, without its instance
    positional = [None] * (len(call.args) + method)
    inspect.signature(function).bind(*positional, **{word.arg: None for word in call.keywords if word.arg})


def complaints(text: str) -> list[str]:
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return []  # of another language, or an ellipsis of a signature
    said = []
    for node in ast.walk(tree):
        names = chain(node)
        if len(names) < 2 or names[0] not in ROOTS:
            continue
        try:
            found(names)
        except (AttributeError, ImportError) as error:
            said.append(f"{text}: {error}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and len(names := chain(node.func)) > 1 and names[0] in ROOTS and not said:
            try:
                bind(node, found(names))
            except TypeError as error:
                said.append(f"{text}: {error}")
    return said


def test_what_the_page_names_is_there_and_takes_those_arguments() -> None:
    texts = code()
    assert sum(bool(re.match(r"(comm|pynccl|ad)\.", text)) for text in texts) > 100
    assert [line for text in texts for line in complaints(text)] == []


@pytest.mark.slow
def test_the_blocks_run_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(
        "".join(f"def block_{number}():\n" + textwrap.indent(text, "    ") for number, text in enumerate(BLOCKS))
    )
    with script.open("a") as out:
        out.write("".join(f"block_{number}()\n" for number in range(len(BLOCKS))))
    environment = {**os.environ, "PYNCCL_LIBRARY": "host", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *TORCHRUN, "--nproc-per-node=2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, env=environment, check=False)
    assert done.returncode == 0, done.stderr


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
            left, right = names_of(comm), names_of(comm)
            first, second = carried_out(there, left), carried_out(here, right)
            for name in ("x", "y", "part", "whole"):
                rooted = there.startswith("dist.reduce(") and comm.rank != 0  # theirs is undefined elsewhere
                if not torch.equal(left[name], right[name]) and not rooted:
                    said.append(f"{there}: {name} is {left[name].tolist()}, here {right[name].tolist()}")
            number = there.startswith("dist.get_")
            if number and first != second:
                said.append(f"{there}: {first}, here {second}")
            unchanged = names_of(comm)
            moved = any(not torch.equal(right[name], unchanged[name]) for name in ("x", "y", "part", "whole"))
            if not moved and not number and "barrier" not in there:
                gives = {"dist.broadcast": 1, "dist.gather": 0, "dist.reduce": 1, "dist.send": 0}
                silent = gives.get(there.partition("(")[0]) == comm.rank  # this rank receives nothing
                said += [] if silent else [f"{here}: nothing moved"]
    return said


def test_both_sides_of_torch_distributed_s_rows_give_the_same(ranks: RankPool, tmp_path: Path) -> None:
    rows = table("torch.distributed")
    assert len(rows) > 18
    assert ranks.run(2, sides, str(tmp_path / "store"), rows) == [[], []]


# ----------------------------------------------------------------------------------------------------- the gradients

# What each row computes, of all ranks' inputs: (name in its code, the outputs of all ranks).
REFERENCES: dict[str, Any] = {
    "ReduceOp.AVG, reduce_scatter": lambda xs: list(torch.stack(xs).mean(0).chunk(len(xs))),
    "reduce_scatter": lambda xs: list(torch.stack(xs).sum(0).chunk(len(xs))),
    "all_gather": lambda xs: [torch.cat(xs)] * len(xs),
    "broadcast": lambda xs: [xs[0]] * len(xs),
    "nn.reduce(": lambda xs: [torch.stack(xs).sum(0), *[torch.zeros(0)] * (len(xs) - 1)],
    "nn.gather(": lambda xs: [torch.cat(xs), *[torch.zeros(0)] * (len(xs) - 1)],
    "nn.scatter(": lambda xs: list(xs[0].chunk(len(xs))),
    "all_to_all": lambda xs: [torch.cat([x.chunk(len(xs))[r] for x in xs]) for r in range(len(xs))],
    "permute": lambda xs: [xs[1], xs[0]],
    "MAX": lambda xs: [torch.stack(xs).amax(0)] * len(xs),
    '"max"': lambda xs: [torch.stack(xs).amax(0)] * len(xs),
    "MIN": lambda xs: [torch.stack(xs).amin(0)] * len(xs),
    "PRODUCT": lambda xs: [torch.stack(xs).prod(0)] * len(xs),
    "AVG": lambda xs: [torch.stack(xs).mean(0)] * len(xs),
    '"avg"': lambda xs: [torch.stack(xs).mean(0)] * len(xs),
    "all_reduce": lambda xs: [torch.stack(xs).sum(0)] * len(xs),
}


def reference_of(there: str) -> Any:
    if "reduce_scatter" in there and re.search(r'AVG|"avg"', there):
        return REFERENCES["ReduceOp.AVG, reduce_scatter"]
    return next(function for key, function in REFERENCES.items() if key in there)


def data(rank: int) -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def weight(rank: int, like: Tensor) -> Tensor:
    return (rank + 1) * torch.arange(1.0, like.numel() + 1, dtype=torch.float64).reshape(like.shape)


def right_gradient(comm: Communicator, there: str) -> tuple[Tensor, Tensor]:
    xs = [data(rank).requires_grad_() for rank in range(comm.size)]
    ys = reference_of(there)(xs)
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


def test_the_imports_of_the_vllm_table_are_there() -> None:
    imports = [here for _, here, *_ in table("vLLM and SGLang") if here.startswith("from ")]
    assert len(imports) == 4
    for line in imports:
        names: dict[str, Any] = {}
        exec(line, names)
        assert set(line.partition(" import ")[2].split(", ")) <= names.keys()


@pytest.mark.parametrize("page", ["coming_from.md", "comparison.md"])
def test_every_row_has_as_many_cells_as_its_table(page: str) -> None:
    lines = PAGE.with_name(page).read_text().splitlines()
    for above, line in itertools.pairwise(lines):
        if above.startswith("|") and line.startswith("|"):
            assert line.count("|") == above.count("|"), line
