"""README, CONTRIBUTING and docs/: each block of Python runs, each command runs, each link and path leads somewhere."""

from __future__ import annotations

import contextlib
import os
import random
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pages
import pytest
import torch
import torch.distributed as dist
from pages import PAGES, ROOT, Block, Command
from ranks import RankPool

import pynccl
from pynccl import Communicator
from pynccl.__main__ import main

SECONDS = 110.0
ids = [page.stem for page in PAGES]
NEEDS_A_GPU = "# needs a GPU"

MACHINES = "tests/tools/test_examples_multi_node.py"
PATTERNS = "matmul_reduce_scatter column_backward"
EXPLAIN = "python -m pynccl explain"
EXAMPLES = "tests/tools/test_examples_folder.py"  # runs what docs/examples.md shows, and compares what it prints
# How each command of the pages is run here. True: as it stands. A dictionary: with these pieces replaced, to be short.
# A path: that file of tests runs it, with options of its own. "dry": make says what it would do. Another text: why not.
COMMANDS: dict[str, bool | str | dict[str, str]] = {
    "torchrun --standalone": "the begin of a command",
    "python -m pynccl doctor": True,
    "python -m pynccl hang": "tests/tools/test_hang.py",
    "python -m pynccl hang --list": "tests/tools/test_hang_runs.py",
    "python -m pynccl hang node0.json node1.json": "tests/tools/test_hang.py",
    "python -m pynccl hang node0 node1": "tests/tools/test_hang.py",
    "ssh node0 python -m pynccl hang --json > node0.json": "tests/tools/test_hang.py",
    "ssh node1 python -m pynccl hang --json > node1.json": "tests/tools/test_hang.py",
    "python -m pynccl perf": {"perf": "perf --help"},
    "python -m pynccl perf COLLECTIVE": {"COLLECTIVE": "broadcast -b 8 -e 8"},
    "torchrun --nproc-per-node 8 -m pynccl perf all_reduce -b 8 -e 128M -f 2 -n 20 -w 5 -c 1": {"128M": "1M"},
    "torchrun --nproc-per-node=2 scripts/recipes/ddp.py": True,
    "python scripts/bench/overhead.py": "tests/tools/test_bench_overhead.py",
    "torchrun --standalone --nproc-per-node 2 -m pynccl perf all_reduce -b 16 -e 64M -f 64 -n 50 --compare torch": {
        "64M -f 64 -n 50": "16 -n 2"
    },
    "python scripts/bench/overlap.py --markdown": "tests/tools/test_bench_overlap.py",
    "python scripts/bench/scale.py": "tests/tools/test_bench_scale.py",
    "torchrun --standalone --nproc-per-node=2 scripts/bench/parallelize.py --width 128 256 512 --rounds 9 "
    "--gather-logits": {"--width 128 256 512 --rounds 9": "--width 32 --rounds 1"},
    "scripts/bench/data_parallel.py --rounds 31 --bucket-mb 25 4": "tests/tools/test_bench_data_parallel.py",
    "scripts/train.py --model llama --check": "tests/tools/test_train_llama.py",
    "python scripts/faults/campaign.py --runs 500 --seed 16222083 --markdown": {"--runs 500": "--runs 1"},
    "python scripts/faults/campaign.py --runs 500 --markdown": {"--runs 500": "--runs 1"},
    "python scripts/faults/fuzzer.py models": {"models": "models --runs 2"},
    "python scripts/faults/campaign.py --replay 17": True,
    "python scripts/gpu/gpu_check.py probe": "tests/tools/test_gpu_check.py",
    "pip install .": "needs a package index",
    "pip install .[cu12]": "needs a package index",
    "srun --kill-on-bad-exit=0": "needs SLURM",
    "torchrun --standalone --local-addr=127.0.0.1": "the begin of a command",
    f"python scripts/timeline.py --pattern {PATTERNS} --out docs/overlap_timeline.png": "tests/tools/test_timeline.py",
    "torchrun --standalone --nproc-per-node=2 scripts/train.py --steps 5 --trace trace.json.gz": True,
    'python -c "from pynccl.bindings import abi; print(len(abi.FUNCTIONS), len(abi.DEVICE_FUNCTIONS))"': True,
    "python scripts/bench/overhead.py --wrappers": {"--wrappers": "--wrappers --rounds 1"},
    "scripts/examples/multi_node.sh torchrun node0 2 8 scripts/examples/hello.py": MACHINES,
    "sbatch --nodes=2 --ntasks-per-node=8 scripts/examples/multi_node.sh srun scripts/examples/hello.py": MACHINES,
    "scripts/examples/multi_node.sh mpirun node0:8,node1:8 scripts/examples/hello.py": MACHINES,
    "make": "dry",
    "make demo": "dry",
    "make demo N=4": "dry",
    "make demo N=4 DEMO_STEPS=20": "dry",
    "make test": "dry",
    'make test ARGS="-k all_reduce -x"': "dry",
    "make test PYTHON=python3.12 VENV=.venv312": "dry",
    "make lint": "dry",
    "make format": "dry",
    "make clean": "dry",
    "make semantics": "dry",
    "make api": "dry",
    "make collectives": "dry",
}


def how(text: str) -> bool | str | dict[str, str] | None:
    """Of COMMANDS, but that all of docs/examples.md stand in one test, and those of explain run in this process."""
    if text.startswith(EXPLAIN):
        return True
    return COMMANDS.get(text, EXAMPLES if re.search(r"torchrun .*scripts/examples/\w+\.py$", text) else None)


def found() -> dict[str, list[tuple[Path, Command]]]:
    """The commands of all pages, and where they stand. Those of docs/commands.md are run by test_commands.py, which
    also holds them against each --help."""
    every: dict[str, list[tuple[Path, Command]]] = {}
    for page in PAGES:
        for command in pages.commands(page) if page.name != "commands.md" else ():
            every.setdefault(command.text, []).append((page, command))
    return every


# ------------------------------------------------------------------------------------------------------------- Python


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_blocks_are_of_known_kinds(page: Path) -> None:
    unknown = [
        f"{page.name}:{block.line} {block.kind}" for block in pages.blocks(page) if block.kind not in pages.KINDS
    ]
    assert unknown == []


def programs(page: Path) -> list[list[Block]]:
    """A block that imports pynccl begins a program, those that follow go on with it."""
    every: list[list[Block]] = []
    for block in pages.blocks(page):
        if block.kind == "python":
            begins = "import pynccl" in block.text or ", pynccl" in block.text.splitlines()[0]
            if begins or not every:
                every.append([])
            every[-1].append(block)
    return every


PROGRAMS = [(page, blocks) for page in PAGES for blocks in programs(page)]


def run_program(comm: Communicator, name: str, source: str, folder: str, port: int) -> None:
    """As a program of its own would run that torchrun has launched; its pynccl.init() finds the ranks of `comm`."""
    place = {"RANK": comm.rank, "LOCAL_RANK": comm.rank, "WORLD_SIZE": comm.size, "MASTER_PORT": port}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("MASTER_ADDR", "127.0.0.1")
        for variable, value in place.items():
            patch.setenv(variable, str(value))
        patch.setattr(pynccl, "init", lambda **_: comm.split(0, comm.rank))
        names: dict[str, Any] = {"__name__": "__main__", "__file__": name}
        try:
            exec(compile(source, name, "exec"), names)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


def free_port() -> int:
    """Below those that the kernel hands out, one of which another test may get meanwhile."""
    while True:
        with contextlib.suppress(OSError), socket.socket() as free:
            free.bind(("127.0.0.1", random.randrange(20_000, 32_000)))
            return int(free.getsockname()[1])


@pytest.mark.parametrize(
    ("page", "blocks"), PROGRAMS, ids=[f"{page.stem}-{blocks[0].line}" for page, blocks in PROGRAMS]
)
def test_python_runs_as_it_stands(ranks: RankPool, page: Path, blocks: list[Block], tmp_path: Path) -> None:
    if any(block.text.startswith(NEEDS_A_GPU) for block in blocks) and not torch.cuda.is_available():
        pytest.skip("needs a GPU, as it says")
    ranks.run(2, run_program, str(page), pages.program(page, blocks), str(tmp_path), free_port())


# ----------------------------------------------------------------------------------------------------------- commands


def test_every_command_of_the_pages_is_in_the_table() -> None:
    where = {text: f"{spots[0][0].name}:{spots[0][1].line}" for text, spots in found().items()}
    assert {text: spot for text, spot in where.items() if how(text) is None} == {}
    assert [text for text in COMMANDS if text not in where] == []


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that looks like the project's, with python and torchrun of this environment first on the path."""
    folder = tmp_path_factory.mktemp("docs")
    for entry in ROOT.iterdir():
        if entry.name not in (".git", "out", "build"):
            (folder / entry.name).symlink_to(entry)
    programs = folder / "bin"
    programs.mkdir()
    python = shlex.quote(sys.executable)
    for name, text in {
        "python": f"exec {python}",
        "torchrun": f"exec {python} -m torch.distributed.run --local-addr=127.0.0.1",
    }.items():
        (programs / name).write_text(f'#!/bin/sh\n{text} "$@"\n')
        (programs / name).chmod(0o755)
    return folder


RUN = [text for text, way in COMMANDS.items() if way is True or isinstance(way, dict) or way == "dry"]


@pytest.mark.slow
@pytest.mark.parametrize("text", RUN)
def test_command_runs(text: str, workplace: Path) -> None:
    way = COMMANDS[text]
    line = text.replace("make", "make -n", 1) if way == "dry" else text
    for piece, instead in way.items() if isinstance(way, dict) else ():
        assert piece in line
        line = line.replace(piece, instead)
    line = line.replace("--nproc-per-node 8", "--nproc-per-node 2")
    environment = {
        **os.environ,
        "PATH": f"{workplace / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / ".packages"),
        "PYNCCL_LIBRARY": "host",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        ["bash", "-c", line],
        cwd=workplace,
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for page, command in found().get(text, []):
        if command.output:
            assert [one.rstrip() for one in done.stdout.splitlines()] == command.output.splitlines(), page.name


@pytest.mark.parametrize("text", sorted(text for text in found() if text.startswith(EXPLAIN)))
def test_explain_runs(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(text)[3:]) == 0
    assert {path.name for path in tmp_path.iterdir()} == set(re.findall(r"\S+\.(?:png|html)", text))


# -------------------------------------------------------------------------------------------------------------- links


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_links_lead_somewhere(page: Path) -> None:
    dead = []
    for number, target in pages.links(page):
        file, _, anchor = target.partition("#")
        there = (page.parent / file).resolve() if file else page
        if not there.exists() or (anchor and there.suffix == ".md" and anchor not in pages.anchors(there)):
            dead.append(f"{page.name}:{number} {target}")
    assert dead == []


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_paths_are_there(page: Path) -> None:
    missing = [
        f"{page.name}:{number} {path}"
        for number, path in pages.paths(page)
        if not any((start / path).exists() for start in pages.STARTS)
    ]
    assert missing == []
