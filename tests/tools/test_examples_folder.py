"""scripts/examples/ and scripts/recipes/ run correctly and print what docs/examples.md shows."""

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

from pynccl import Communicator

ROOT = Path(__file__).parents[2]
EXAMPLES, RECIPES = ROOT / "scripts" / "examples", ROOT / "scripts" / "recipes"
PAGE = (ROOT / "docs" / "examples.md").read_text()
NAMES = [*sorted(path.stem for folder in (EXAMPLES, RECIPES) for path in folder.glob("*.py"))]
sys.path += [str(EXAMPLES), str(RECIPES)]


def run_main(comm: Communicator, name: str) -> str:
    """Return the result of its main(), which raises if results differ from a single process."""
    return str(importlib.import_module(name).main(comm))


def expected_output(name: str) -> tuple[int, list[str]]:
    """Return the number of ranks and the output on the page; recipes have no output there."""
    starts = (
        rf"^    (?:PYNCCL_HOST_LINK=\S+ )?torchrun --standalone --nproc-per-node=(\d) scripts/examples/{name}\.py\n"
    )
    for ranks, output in re.findall(starts + r"((?:    .+\n)+)", PAGE, re.MULTILINE):
        return int(ranks), [line.strip() for line in output.splitlines()]
    assert (RECIPES / f"{name}.py").exists(), f"docs/examples.md has no command with {name}.py and its output"
    return 2, []


def normalize(lines: list[str]) -> list[str]:
    """Replace everything that varies between machines and runs: host names, paths and times."""
    without_hosts = [re.sub(r"( of )[\w.-]+(: the sum)", r"\1HOST\2", line.strip()) for line in lines]
    return [re.sub(r"\d+\.\d (m?s)\b", r"-- \1", re.sub(r" at \S+/", " at ", line)) for line in without_hosts]


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("dead_rank", "elastic_start", "ray_actors")])
def test_examples_and_recipes_run_and_print_what_the_page_shows(ranks: RankPool, name: str) -> None:
    n, printed = expected_output(name)
    lines = ranks.run(n, run_main, name)
    assert all(line.startswith(f"{name}: ") for line in lines)
    if name != "hello":  # every rank prints a line
        assert len(set(lines)) == 1 or name == "errors"  # it names the calling rank first
        lines = lines[:1]
    if printed:
        assert normalize("\n".join(lines).splitlines()) == normalize(printed)
    else:
        assert f"`scripts/recipes/{name}.py`" in (ROOT / "docs" / "recipes.md").read_text()


# ---------------------------------------------------------------------------------------------- as a user starts them


def run(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYNCCL_LIBRARY": "host", "OMP_NUM_THREADS": "1", **more}
    return subprocess.run(words, capture_output=True, text=True, timeout=300, env=environment, cwd=ROOT, check=False)


@pytest.mark.slow
def test_torchrun_and_multi_node_start_hello() -> None:
    """test_launching.py has the other launchers."""
    hello, script = "scripts/examples/hello.py", "scripts/examples/multi_node.sh"
    for line in (
        [sys.executable, *TORCHRUN, "--nproc-per-node=2", hello],
        ["bash", script, "torchrun", "localhost", "1", "2", hello],
    ):
        done = run(*line, PYTHON=sys.executable, PORT=str(20_000 + os.getpid() % 12_000))
        assert done.returncode == 0, (line, done.stderr)
        assert sorted(normalize(done.stdout.splitlines())) == normalize(expected_output("hello")[1]), line
    done = run("bash", script, "ssh")
    assert (done.returncode, done.stdout) == (2, "") and "multi_node.sh torchrun HEAD" in done.stderr


@pytest.mark.slow
def test_the_remaining_ranks_continue_after_a_rank_dies() -> None:
    n, printed = expected_output("dead_rank")
    done = run(sys.executable, *TORCHRUN, f"--nproc-per-node={n}", "scripts/examples/dead_rank.py")
    assert done.returncode == 0, done.stderr
    error, result = done.stdout.splitlines()
    for line in (error, printed[0]):  # process ids and seconds vary
        assert re.match(rf"NcclRemoteError in step 3: .*\brank {n - 1}\b", line)
    assert result == printed[1]


def cell_outputs(notebook: Any) -> list[list[str]]:
    """Return the outputs of each code cell as text: printed lines, values, errors, sizes of figures."""
    return [
        [output.get("text") or output.get("data", {}).get("text/plain") or output["ename"] for output in cell.outputs]
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


@pytest.mark.slow
def test_the_notebook_reproduces_its_stored_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    hint = "needs nbclient, ipykernel and matplotlib (pip install nbclient ipykernel matplotlib)"
    nbformat, nbclient, *_ = (pytest.importorskip(name, reason=hint) for name in ("nbformat", "nbclient", "ipykernel"))
    pytest.importorskip("matplotlib", reason=hint)
    monkeypatch.setenv("PYNCCL_LIBRARY", "host")
    stored, executed = (nbformat.read(EXAMPLES / "notebook.ipynb", 4) for _ in range(2))
    resources = {"metadata": {"path": str(EXAMPLES)}}
    nbclient.NotebookClient(executed, timeout=60, kernel_name="python3", resources=resources).execute()
    assert cell_outputs(executed) == cell_outputs(stored)
