"""scripts/examples/ and scripts/recipes/: right on any number of ranks, printing what docs/examples.md shows."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ranks import TORCHRUN, RankPool
from stub_driver import over_driver

import pynccl
from pynccl import Communicator

ROOT = Path(__file__).parents[2]
EXAMPLES, RECIPES = ROOT / "scripts" / "examples", ROOT / "scripts" / "recipes"
PAGE = (ROOT / "docs" / "examples.md").read_text()
NAMES = [*sorted(path.stem for folder in (EXAMPLES, RECIPES) for path in folder.glob("*.py"))]
IN_THE_POOL = [name for name in NAMES if name != "dead_rank"]  # which ends a process
sys.path += [str(EXAMPLES), str(RECIPES)]


def verified(comm: Communicator, names: list[str]) -> list[str]:
    """What each main() returns, which raises where something is not as in a single process."""
    lines = []
    for name in names:
        try:
            lines.append(importlib.import_module(name).main(comm))
        except Exception as error:
            raise AssertionError(f"{name}: {error}") from error
    return lines


def on_the_page(name: str) -> tuple[int, list[str]]:
    """How many ranks the command of the page starts, and what it prints there; of a recipe, nothing."""
    starts = (
        rf"^    (?:PYNCCL_HOST_LINK=\S+ )?torchrun --standalone --nproc-per-node=(\d) scripts/examples/{name}\.py\n"
    )
    for ranks, output in re.findall(starts + r"((?:    .+\n)+)", PAGE, re.MULTILINE):
        return int(ranks), [line.strip() for line in output.splitlines()]
    assert (RECIPES / f"{name}.py").exists(), f"docs/examples.md has no command with {name}.py and its output"
    return 2, []


def steady(lines: list[str]) -> list[str]:
    """Without what is of one machine or one run: names of hosts, where the repository lies, milliseconds."""
    bare = [re.sub(r"( of )[\w.-]+(: the sum)", r"\1HOST\2", line.strip()) for line in lines]
    return [re.sub(r"\d+\.\d ms", "-- ms", re.sub(r" at \S+/", " at ", line)) for line in bare]


@pytest.mark.parametrize("name", IN_THE_POOL)
def test_it_is_right_and_prints_what_its_page_shows(ranks: RankPool, name: str) -> None:
    n, printed = on_the_page(name)
    lines = [own for (own,) in ranks.run(n, verified, [name])]
    assert all(line.startswith(f"{name}: ") for line in lines)
    if name != "hello":  # of which every rank prints a line
        assert len(set(lines)) == 1 or name == "errors"  # which names the rank itself first
        lines = lines[:1]
    if printed:
        assert steady("\n".join(lines).splitlines()) == steady(printed)
    else:
        assert f"`scripts/recipes/{name}.py`" in (ROOT / "docs" / "recipes.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 4])
def test_they_are_right_on_any_number_of_ranks(ranks: RankPool, n: int) -> None:
    names = [name for name in IN_THE_POOL if n > 1 or (EXAMPLES / f"{name}.py").exists()]
    ranks.run(n, verified, names)


# ---------------------------------------------------------------------------------------------- as a user starts them


def run(*command: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, *command]
    own = {**os.environ, "PYNCCL_LIBRARY": "host", "OMP_NUM_THREADS": "1"}
    return subprocess.run(words, capture_output=True, text=True, timeout=100, env=own, cwd=ROOT, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("script", ["examples/hello.py", "recipes/pipeline.py"])
def test_rank_0_prints_a_line_under_torchrun_or_every_rank(script: str) -> None:
    n, printed = on_the_page(Path(script).stem)
    done = run(*TORCHRUN, f"--nproc-per-node={n}", f"scripts/{script}")
    assert done.returncode == 0, done.stderr
    expected = printed or ["pipeline: 2 stages, 4 microbatches: loss and gradients equal those of one process"]
    assert sorted(steady(done.stdout.splitlines())) == steady(expected)


@pytest.mark.slow
def test_the_ranks_go_on_without_the_one_that_dies() -> None:
    n, printed = on_the_page("dead_rank")
    done = run(*TORCHRUN, f"--nproc-per-node={n}", "scripts/examples/dead_rank.py")
    assert done.returncode == 0, done.stderr
    error, result = done.stdout.splitlines()
    for line in (error, printed[0]):  # the process and the seconds are not the same twice
        assert re.match(rf"NcclRemoteError in step 3: .*\brank {n - 1}\b", line)
    assert result == printed[1]


@pytest.mark.slow
def test_without_torchrun_it_says_how_it_is_started() -> None:
    done = run("scripts/examples/ring.py")
    assert done.returncode == 1 and done.stdout == ""
    message = done.stderr.partition("pynccl.NcclInvalidUsage: ")[2]
    assert "was not started by torchrun. Start it with\n" in message
    assert "  torchrun --standalone --nproc-per-node=2 scripts/examples/ring.py\n" in message
    assert "pynccl.init_all()" in message


@pytest.mark.slow
def test_memory_of_cuda_core_is_handed_over_with_its_stream() -> None:
    """cuda.core itself, over a driver and a libnccl that compute nothing: what is copied there comes back."""
    printed = over_driver(
        """
import numpy as np
import raw_pointers
values = np.arange(10, dtype=np.float32)
found = raw_pointers.with_cuda_core(stub.comm(), values)
(call,) = stub.calls()
print(found.tolist() == values.tolist(), call.name, call.args["send"] == call.args["recv"] > 0, call.args["count"])
print(call.args["dtype"], call.args["stream"] > 2)
""",
        str(EXAMPLES),
    )
    assert printed.split() == ["True", "ncclAllReduce", "True", "10", str(int(pynccl.DataType.FLOAT32)), "True"]


def texts(notebook: Any) -> list[list[str]]:
    """Of each cell of code, the texts that are below it: printed, values, errors. A figure has one, with its size."""
    return [
        [output.get("text") or output.get("data", {}).get("text/plain") or output["ename"] for output in cell.outputs]
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


@pytest.mark.slow
def test_the_notebook_prints_what_is_stored_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    why = "needs nbclient, ipykernel and matplotlib (pip install nbclient ipykernel matplotlib)"
    nbformat, nbclient, *_ = (pytest.importorskip(name, reason=why) for name in ("nbformat", "nbclient", "ipykernel"))
    pytest.importorskip("matplotlib", reason=why)
    monkeypatch.setenv("PYNCCL_LIBRARY", "host")
    stored, again = (nbformat.read(EXAMPLES / "notebook.ipynb", 4) for _ in range(2))
    nbformat.validate(stored)
    for cell in again.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    resources = {"metadata": {"path": str(EXAMPLES)}}
    nbclient.NotebookClient(again, timeout=60, kernel_name="python3", resources=resources).execute()
    assert texts(again) == texts(stored)
    assert "comms = pynccl.init_all()" in "".join(text for cell in texts(stored) for text in cell)  # to who calls init
