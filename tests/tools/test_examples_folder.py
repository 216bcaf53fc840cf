"""scripts/examples/ and scripts/recipes/: right on some ranks, printing what docs/examples.md shows."""

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


def verified(comm: Communicator, name: str) -> str:
    """What its main() returns, which raises where something is not as in a single process."""
    return str(importlib.import_module(name).main(comm))


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


@pytest.mark.parametrize("name", [name for name in NAMES if name != "dead_rank"])  # which ends a process
def test_it_is_right_and_prints_what_its_page_shows(ranks: RankPool, name: str) -> None:
    n, printed = on_the_page(name)
    lines = ranks.run(n, verified, name)
    assert all(line.startswith(f"{name}: ") for line in lines)
    if name != "hello":  # of which every rank prints a line
        assert len(set(lines)) == 1 or name == "errors"  # which names the rank itself first
        lines = lines[:1]
    if printed:
        assert steady("\n".join(lines).splitlines()) == steady(printed)
    else:
        assert f"`scripts/recipes/{name}.py`" in (ROOT / "docs" / "recipes.md").read_text()


# ---------------------------------------------------------------------------------------------- as a user starts them


def run(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
    own = {**os.environ, "PYNCCL_LIBRARY": "host", "OMP_NUM_THREADS": "1", **more}
    return subprocess.run(words, capture_output=True, text=True, timeout=100, env=own, cwd=ROOT, check=False)


# In place of SLURM: two ranks here, with its variables.
SRUN = """#!/usr/bin/env bash
shift
SLURM_PROCID=0 SLURM_NTASKS=2 SLURM_LOCALID=0 "$@" &
SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_LOCALID=1 "$@" || exit 1
wait $!
"""


@pytest.mark.slow
def test_every_launcher_starts_hello(tmp_path: Path) -> None:
    for name, text in {"srun": SRUN, "scontrol": "#!/bin/sh\necho 127.0.0.1\n"}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    own = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": sys.executable, "SLURM_JOB_NODELIST": "a"}
    hello, script = "scripts/examples/hello.py", "scripts/examples/multi_node.sh"
    for line in (
        [sys.executable, *TORCHRUN, "--nproc-per-node=2", hello],
        ["bash", script, "torchrun", "localhost", "1", "2", hello],
        ["bash", script, "srun", hello],
    ):
        done = run(*line, **own, PORT=str(20_000 + os.getpid() % 12_000))
        assert done.returncode == 0, (line, done.stderr)
        assert sorted(steady(done.stdout.splitlines())) == steady(on_the_page("hello")[1]), line
    done = run("bash", script, "ssh")
    assert (done.returncode, done.stdout) == (2, "") and "multi_node.sh torchrun HEAD" in done.stderr


@pytest.mark.slow
def test_the_ranks_go_on_without_the_one_that_dies() -> None:
    n, printed = on_the_page("dead_rank")
    done = run(sys.executable, *TORCHRUN, f"--nproc-per-node={n}", "scripts/examples/dead_rank.py")
    assert done.returncode == 0, done.stderr
    error, result = done.stdout.splitlines()
    for line in (error, printed[0]):  # the process and the seconds are not the same twice
        assert re.match(rf"NcclRemoteError in step 3: .*\brank {n - 1}\b", line)
    assert result == printed[1]


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
    resources = {"metadata": {"path": str(EXAMPLES)}}
    nbclient.NotebookClient(again, timeout=60, kernel_name="python3", resources=resources).execute()
    assert texts(again) == texts(stored)
