"""README, CONTRIBUTING, docs/: Python runs and prints what is said, commands run, names, links and paths are there."""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import io
import os
import random
import re
import shlex
import socket
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pages
import pytest
import torch
import torch.distributed as dist
from pages import PAGES, ROOT, Command
from ranks import RankPool

import pynccl
import pynccl_autograd as ad
from pynccl import Communicator
from pynccl.__main__ import main

SECONDS = 110.0
NEEDS_A_GPU = "# needs a GPU"

# ------------------------------------------------------------------------------------------------------------- Python

# What rank 0 prints, program by program, where a page says or shows it.
PRINTS = {
    "README.md": [
        r"^<pynccl.Communicator rank 0 of 2 on cpu> \[1\.0, 1\.0, 1\.0, 1\.0, 1\.0, 1\.0, 1\.0, 1\.0\]$",
        r"^2676\.\d+ 25\.84\d+ (\d\.\d+e-1[5-9]|0\.0)$",
        r"^3\.3892\d* 4,293,376 bytes on this rank, 8,585,984 in the whole model$",
        r"^layer +pass +chosen.*\nRowParallelLinear\(256, 64\) #\d+ +forward   slices 4 .*\n.*backward  slices 4 +1",
    ],
}


def programs(page: Path) -> list[str]:
    """A block that imports pynccl begins a program, those that follow go on with it. Without those for a GPU only."""
    every: list[list[pages.Block]] = []
    for block in pages.blocks(page):
        if block.kind == "python":
            begins = "import pynccl" in block.text or ", pynccl" in block.text.splitlines()[0]
            if begins or not every:
                every.append([])
            every[-1].append(block)
    here = [one for one in every if torch.cuda.is_available() or not any(b.text.startswith(NEEDS_A_GPU) for b in one)]
    return [pages.program(page, one) for one in here]


def run_page(comm: Communicator, name: str, folder: str, port: int) -> list[str]:
    """What each program prints, run as torchrun would launch it; its pynccl.init() finds the ranks of `comm`."""
    place = {"RANK": comm.rank, "LOCAL_RANK": comm.rank, "WORLD_SIZE": comm.size, "MASTER_PORT": port}
    said = []
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("MASTER_ADDR", "127.0.0.1")
        for variable, value in place.items():
            patch.setenv(variable, str(value))
        patch.setattr(pynccl, "init", lambda **_: comm.split(0, comm.rank))
        for source in programs(Path(name)):
            names: dict[str, Any] = {"__name__": "__main__", "__file__": name}
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                try:
                    exec(compile(source, name, "exec"), names)
                finally:
                    if dist.is_initialized():
                        dist.destroy_process_group()
            said.append(printed.getvalue())
    return said


def two_free_ports() -> int:
    """One and the next, as the pages take them: below those that the kernel hands out to others meanwhile."""
    while True:
        port = random.randrange(20_000, 32_000)
        with contextlib.suppress(OSError), socket.socket() as one, socket.socket() as next_one:
            one.bind(("127.0.0.1", port))
            next_one.bind(("127.0.0.1", port + 1))
            return port


@pytest.mark.parametrize("page", [page for page in PAGES if programs(page)], ids=lambda page: page.stem)
def test_python_runs_as_it_stands(ranks: RankPool, page: Path, tmp_path: Path) -> None:
    said, _ = ranks.run(2, run_page, str(page), str(tmp_path), two_free_ports(), timeout=SECONDS)
    for printed, pattern in zip(said, PRINTS.get(page.name, [""] * len(said)), strict=True):
        assert re.search(pattern, printed.strip()), printed


# ---------------------------------------------------------------------------------------------------------- commands

# How each command of the pages is run here. True: as it stands. A pair: with a piece replaced, to be short. A text: why
# it is not; a file of tests is one that runs it, with options of its own.
COMMANDS: dict[str, bool | str | tuple[str, str]] = {
    "python -m pynccl doctor": True,
    "python -m pynccl hang": "tests/tools/test_hang.py",
    "python -m pynccl hang --list": "tests/tools/test_hang_runs.py",
    "python -m pynccl perf": ("perf", "perf --help"),
    "python -m pynccl perf COLLECTIVE": ("COLLECTIVE", "broadcast -b 8 -e 8"),
    "torchrun --nproc-per-node 8 -m pynccl perf all_reduce -b 8 -e 128M -f 2 -n 20 -w 5 -c 1": ("128M", "1M"),
    "torchrun --standalone --nproc-per-node 2 -m pynccl perf all_reduce -b 16 -e 64M -f 64 -n 50 --compare torch": (
        "64M -f 64 -n 50",
        "16 -n 2",
    ),
    "torchrun --nproc-per-node=2 scripts/recipes/ddp.py": True,
    "torchrun --standalone --nproc-per-node=2 scripts/bench/parallelize.py --width 128 256 512 --rounds 9 "
    "--gather-logits": ("--width 128 256 512 --rounds 9", "--width 32 --rounds 1"),
    "torchrun --standalone --nproc-per-node=2 scripts/train.py --steps 5 --trace trace.json.gz": True,
    "python scripts/bench/overhead.py": "tests/tools/test_bench.py",
    "python scripts/bench/overhead.py --wrappers": ("--wrappers", "--wrappers --rounds 1"),
    "python scripts/bench/overlap.py --markdown": "tests/tools/test_bench.py",
    "python scripts/bench/scale.py": "tests/tools/test_bench.py",
    "scripts/bench/data_parallel.py --rounds 31 --bucket-mb 25 4": "tests/tools/test_bench.py",
    "scripts/train.py --model llama --check": "tests/tools/test_train.py",
    "python scripts/faults/campaign.py --runs 500 --seed 16222083 --markdown": ("--runs 500", "--runs 1"),
    "python scripts/faults/campaign.py --runs 500 --markdown": ("--runs 500", "--runs 1"),
    "python scripts/faults/campaign.py --replay 17": True,
    "python scripts/faults/fuzzer.py models": ("models", "models --runs 2"),
    "python scripts/gpu/gpu_check.py probe": "tests/tools/test_gpu_check.py",
    "python scripts/timeline.py --pattern matmul_reduce_scatter column_backward --out docs/overlap_timeline.png": (
        "tests/tools/test_timeline.py"
    ),
    'python -c "from pynccl.bindings import abi; print(len(abi.FUNCTIONS), len(abi.DEVICE_FUNCTIONS))"': True,
}
KINDS: dict[str, bool | str] = {  # of commands, by a pattern of all of them
    r"python -m pynccl explain.*": "in this process, below",
    r"make.*": True,  # says what it would do
    r"(.* )?python -m pynccl hang (node0|--json).*": "tests/tools/test_hang.py",
    r".*torchrun .*scripts/examples/\w+\.py": "tests/tools/test_examples_folder.py",
    r".*multi_node\.sh .*": "tests/tools/test_examples_multi_node.py",
    r"torchrun --standalone( --local-addr=127\.0\.0\.1)?": "the begin of a command",
    r"pip install .*": "needs a package index",
    r"srun .*": "needs SLURM",
}


def how(text: str) -> bool | str | tuple[str, str] | None:
    kind = next((way for pattern, way in KINDS.items() if re.fullmatch(pattern, text)), None)
    return COMMANDS.get(text, kind)


def found() -> dict[str, list[Command]]:
    """The commands of all pages. Those of docs/commands.md are run by test_commands.py, as those of each --help."""
    every: dict[str, list[Command]] = {}
    for page in PAGES:
        for command in pages.commands(page) if page.name != "commands.md" else ():
            every.setdefault(command.text, []).append(command)
    return every


def test_every_command_of_the_pages_is_run_here_or_where_the_table_says() -> None:
    texts = found()
    assert [text for text in texts if how(text) is None] == []
    assert [text for text in COMMANDS if text not in texts] == []
    files = {way for way in [*COMMANDS.values(), *KINDS.values()] if isinstance(way, str) and way.endswith(".py")}
    assert [file for file in files if not (ROOT / file).is_file()] == []


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that looks like the project's, with python and torchrun of this environment first on the path."""
    folder = tmp_path_factory.mktemp("docs")
    for entry in ROOT.iterdir():
        if entry.name not in (".git", "out", "build"):
            (folder / entry.name).symlink_to(entry)
    (folder / "bin").mkdir()
    python = shlex.quote(sys.executable)
    for name, text in {
        "python": python,
        "torchrun": f"{python} -m torch.distributed.run --local-addr=127.0.0.1",
    }.items():
        (folder / "bin" / name).write_text(f'#!/bin/sh\nexec {text} "$@"\n')
        (folder / "bin" / name).chmod(0o755)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("text", [text for text in found() if not isinstance(how(text), str)])
def test_command_runs(text: str, workplace: Path) -> None:
    way = how(text)
    line = text.replace(*way) if isinstance(way, tuple) else re.sub(r"^make", "make -n", text)
    line = line.replace("--nproc-per-node 8", "--nproc-per-node 2")
    own = {"PATH": f"{workplace / 'bin'}:{os.environ['PATH']}", "PYNCCL_LIBRARY": "host", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["bash", "-c", line],
        cwd=workplace,
        env={**os.environ, **own},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for command in found()[text]:
        if command.output:
            assert [one.rstrip() for one in done.stdout.splitlines()] == command.output.splitlines(), command


def test_explain_runs_and_draws_what_its_page_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    page = (ROOT / "docs" / "explain.md").read_text()
    shown = dict(re.findall(r"```sh\n(python -m pynccl explain .*)\n```\n\n```text\n((?:.*\n)*?)```", page))
    for text in [text for text in found() if text.startswith("python -m pynccl explain")]:
        assert main(shlex.split(text)[3:]) == 0
        assert shown.pop(text, out := capsys.readouterr().out) == out
        assert all((tmp_path / file).exists() for file in re.findall(r"\S+\.html", text))
    assert shown == {}


# --------------------------------------------------------------------------------------------- names, links and paths

ROOTS: dict[str, Any] = {"comm": Communicator, "pynccl": pynccl, "ad": ad}
SET_BY_INIT = {"rank", "size", "device", "library"}


def chain(node: ast.AST) -> list[str]:
    """comm.plan.all_reduce -> [comm, plan, all_reduce]; [] for anything else."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute) and (before := chain(node.value)):
        return [*before, node.attr]
    return []


def value_of(names: list[str]) -> Any:
    """AttributeError or ImportError if it is not there; None where only an instance has it."""
    value = ROOTS[names[0]]
    for name in names[1:]:
        if value is Communicator and name in SET_BY_INIT:
            return None
        if inspect.ismodule(value) and not hasattr(value, name):
            value = importlib.import_module(f"{value.__name__}.{name}")
        else:
            value = getattr(value, name)
        if isinstance(value, property):
            return None
    return value


def complaints(text: str) -> list[str]:
    """Of names that are not there, and of calls of them with arguments that they do not take."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes, in what is no Python
            nodes = list(ast.walk(ast.parse(text)))
    except SyntaxError:
        return []  # of another language, or an ellipsis of a signature
    said = []
    for node in nodes:
        names = chain(node.func if isinstance(node, ast.Call) else node)
        if len(names) < 2 or names[0] not in ROOTS or names[-1] == "py":
            continue
        try:
            function = value_of(names)
            if isinstance(node, ast.Call) and function:
                method = (
                    inspect.isfunction(function) and "." in function.__qualname__
                )  # of a class, without its instance
                words = {word.arg: None for word in node.keywords if word.arg}
                inspect.signature(function).bind(*[None] * (len(node.args) + method), **words)
        except (AttributeError, ImportError, TypeError) as error:
            said.append(f"{text}: {error}")
    return said


def test_names_of_the_packages_are_there_and_take_those_arguments() -> None:
    said = []
    for page in PAGES:
        texts = [text for _, line in pages.prose(page) for text in re.findall(r"`([^`]+)`", line)]
        texts += [block.text for block in pages.blocks(page) if block.kind == "python"]
        said += [f"{page.name}: {one}" for text in texts for one in complaints(text)]
    assert said == []
    assert complaints("ad.all_reduce(x, comm, grade='sum')") and complaints("pynccl.initialise()")


def test_links_and_paths_lead_somewhere() -> None:
    dead = []
    for page in PAGES:
        for number, target in pages.links(page):
            file, _, anchor = target.partition("#")
            there = (page.parent / file).resolve() if file else page
            if not there.exists() or (anchor and there.suffix == ".md" and anchor not in pages.anchors(there)):
                dead.append(f"{page.name}:{number} {target}")
        for number, path in pages.paths(page):
            if not any((start / path).exists() for start in pages.STARTS):
                dead.append(f"{page.name}:{number} {path}")
        for block in pages.blocks(page):
            if block.kind not in pages.KINDS:
                dead.append(f"{page.name}:{block.line}: a block of {block.kind}, which nothing runs")
    assert dead == []
