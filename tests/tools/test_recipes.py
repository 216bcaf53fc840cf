"""The recipes: each is short, runs, and equals a single process."""

from __future__ import annotations

import ast
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import TORCHRUN, RankPool

import pynccl
import pynccl_autograd as ad
from pynccl import Communicator

FOLDER = Path(__file__).parents[2] / "scripts" / "recipes"
DOCS = Path(__file__).parents[2] / "docs"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))
sys.path.append(str(FOLDER))


def verified(comm: Communicator, name: str) -> str:
    """What main() returns, which raises where it is not as in a single process."""
    line: str = importlib.import_module(name).main(comm)
    return line


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_recipe_equals_a_single_process(ranks: RankPool, name: str, n: int) -> None:
    lines = ranks.run(n, verified, name)
    assert len(set(lines)) == 1 and lines[0].startswith(f"{name}: ") and "equal" in lines[0]


class Doubled:
    """pynccl_autograd, but for one collective, whose gradient is twice what it should be. Its values are right."""

    def __init__(self, name: str) -> None:
        right = getattr(ad, name)

        def wrong(*args: Any, **options: Any) -> torch.Tensor:
            y: torch.Tensor = right(*args, **options)
            return 2 * y - y.detach()

        setattr(self, name, wrong)

    def __getattr__(self, name: str) -> Any:
        return getattr(ad, name)


def summed(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """The sum where the gradients are averaged afterwards."""
    return (model(batch[0]) - batch[1]).square().sum()


def alone(*_: Any) -> None:
    """No average over ranks."""


SPOILED = {"average_gradients": alone, "loss_of": summed}


def spoiled(comm: Communicator, name: str, part: str) -> bool:
    """Whether this rank finds that something is wrong."""
    recipe = importlib.import_module(name)
    with pytest.MonkeyPatch.context() as patch:
        if hasattr(ad, part):
            patch.setattr(recipe, "ad", Doubled(part))
        else:
            patch.setattr(recipe, part, SPOILED[part])
        try:
            recipe.main(comm)
        except AssertionError:
            return True
        return False


@pytest.mark.parametrize(
    ("name", "part", "n"),
    [
        ("clip_loss", "all_gather", 2),
        ("clip_loss", "copy", 2),
        ("ddp", "average_gradients", 2),
        ("halo_convolution", "copy", 2),
        ("halo_convolution", "halo_exchange", 2),
        ("mesh_2d", "loss_of", 4),
        ("moe", "all_to_all", 2),
        ("moe", "copy", 2),
        ("ring_attention", "permute", 2),
    ],
)
def test_recipe_finds_a_gradient_that_is_wrong(ranks: RankPool, name: str, part: str, n: int) -> None:
    assert True in ranks.run(n, spoiled, name, part)  # rank 1 of the ring sends its keys to nobody who may see them


def test_recipes_are_short_and_say_how_they_are_run() -> None:
    known = "clip_loss ddp halo_convolution hugging_face mesh_2d moe pipeline ring_attention"
    assert known.split() == NAMES
    for name in NAMES:
        text = (FOLDER / f"{name}.py").read_text()
        assert len(text.splitlines()) < 60
        line = re.search(
            r"^  torchrun --nproc-per-node=\d (\S+)$", ast.get_docstring(ast.parse(text)) or "", re.MULTILINE
        )
        assert line and line[1] == f"scripts/recipes/{name}.py"
        assert f"`scripts/recipes/{name}.py`" in (DOCS / "recipes.md").read_text()


@pytest.mark.slow
def test_recipe_prints_one_line_under_torchrun() -> None:
    command = [sys.executable, *TORCHRUN, "--nproc-per-node=2", str(FOLDER / "pipeline.py")]
    environment = {**os.environ, "PYNCCL_LIBRARY": "host", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "pipeline: 2 stages, 4 microbatches: loss and gradients equal those of one process\n"


# The pages


def blocks_of(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


def run_blocks(comm: Communicator, page: str, blocks: list[str]) -> dict[str, Any]:
    """One after the other, as a reader's program would; the names that they leave."""
    names: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pynccl, "init", lambda: comm)  # ranks of the pool have met already
        for number, block in enumerate(blocks):
            exec(compile(block, f"{page}, block {number}", "exec"), names)
    return names


def run_page(comm: Communicator, page: str) -> dict[str, Any]:
    """All its blocks; what they leave of texts and tensors, which can travel."""
    names = run_blocks(comm, page, blocks_of(page))
    return {name: value for name, value in names.items() if type(value) in (str, torch.Tensor) and name[0] != "_"}


@pytest.mark.parametrize("n", [2, 4])
def test_the_page_of_the_conventions_runs_as_it_stands(ranks: RankPool, n: int) -> None:
    for rank, found in enumerate(ranks.run(n, run_page, "conventions.md")):
        assert found["wrong"].shape == found["expected"].shape == (3, 4), rank
        best = (found["wrong"] * found["expected"]).sum() / found["expected"].square().sum()
        assert (found["wrong"] - best * found["expected"]).norm() > 0.1 * found["wrong"].norm()  # no factor mends it
        assert f"factor: {n} times the gradient" in found["text"] and "columns: rank" in found["text"]


def check_of_cotangents(comm: Communicator) -> None:
    """What the page says of PYNCCL_CHECK=1."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYNCCL_CHECK", "1")
        checked = comm.split(0, comm.rank)  # it reads the environment now
        assert checked is not None
        with checked:
            names = run_blocks(checked, "conventions.md", blocks_of("conventions.md")[:1])
            with pytest.raises(pynccl.NcclInvalidUsage, match="every rank must do the same work on this output"):
                names["gradient"](gather="replicated")
            names["gradient"](reduce="sum")  # equal cotangents are no mistake that could be seen


def test_equal_cotangents_are_checked_as_the_page_says(ranks: RankPool) -> None:
    ranks.run(2, check_of_cotangents)


@pytest.mark.parametrize("n", [2, 4])
def test_the_page_of_the_recipes_runs_as_it_stands(ranks: RankPool, n: int) -> None:
    assert len(blocks_of("recipes.md")) == 1 + len(NAMES)
    for found in ranks.run(n, run_page, "recipes.md"):
        assert {"flat", "back", "gradient", "framed"} <= found.keys()  # all of them came to their end


def test_the_readme_has_the_rule() -> None:
    text = " ".join((DOCS.parent / "README.md").read_text().split())
    assert 'does every rank do the same work on it? Then "replicated"' in text
    assert "from which every rank computes the same loss" not in text
