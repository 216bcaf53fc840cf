"""The recipes: each is short, runs, and equals a single process."""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ranks import TORCHRUN, RankPool

from pynccl import Communicator

FOLDER = Path(__file__).parents[2] / "scripts" / "recipes"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))
sys.path.insert(0, str(FOLDER))


def verified(comm: Communicator, name: str) -> str:
    """What main() returns, which raises where it is not as in a single process."""
    line: str = importlib.import_module(name).main(comm)
    return line


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_recipe_equals_a_single_process(ranks: RankPool, name: str, n: int) -> None:
    lines = ranks.run(n, verified, name)
    assert len(set(lines)) == 1 and lines[0].startswith(f"{name}: ") and "equal" in lines[0]
