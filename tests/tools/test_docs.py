"""README, CONTRIBUTING, docs/: Python runs and prints what is said; scripts, links and paths are there."""

from __future__ import annotations

import contextlib
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
from functools import partial
from pathlib import Path
from typing import Any

import pages
import pytest
import torch
import torch.distributed as dist
from pages import PAGES, ROOT
from ranks import RankPool

import pynccl
import pynccl_autograd as ad
from pynccl import Communicator
from pynccl.__main__ import COMMANDS as TOOLS, main

SECONDS = 110.0
NEEDS_A_GPU = "# needs a GPU"
STARTED = re.compile(r"# \w+\.py\n")  # a program with a name, which test_launching.py starts by a launcher


# What rank 0 prints, program by program, where a page says or shows it.
PRINTS = {
    "README.md": [
        r"^torch tensor\(\[1\., 1\.\]\) ours tensor\(\[0\.5000, 0\.5000\]\)$",
        r"^\[\[12\.0, 12\.0, 12\.0, 12\.0\]\]$",
        r"^loss 2757\.6\d, gradient norm 26\.66\d$",
    ],
}


ONE_PROCESS = ("elastic.md", "trace.md")  # they print in a program for one process


def programs(page: Path) -> list[str]:
    """A block that imports pynccl begins a program, those that follow go on with it. Without those for a GPU only."""
    every: list[list[pages.Block]] = []
    for block in pages.blocks(page):
        if block.kind == "python" and not STARTED.match(block.text):
            begins = "import pynccl" in block.text or ", pynccl" in block.text.splitlines()[0]
            if begins or not every:
                every.append([])
            every[-1].append(block)
    here = [one for one in every if torch.cuda.is_available() or not any(b.text.startswith(NEEDS_A_GPU) for b in one)]
    return [pages.program(page, one) for one in here]


UNRELATED = (ResourceWarning, FutureWarning)  # of files; of torch, whose function README compares


def run_page(comm: Communicator, name: str, folder: str, ports: list[int]) -> tuple[list[str], list[str]]:
    """What each program prints, and the warnings, run as torchrun would launch it; its pynccl.init() finds the ranks of
    `comm`. A port for each: the store of the one before may still be served."""
    place = {"RANK": comm.rank, "LOCAL_RANK": comm.rank, "WORLD_SIZE": comm.size}
    said = []
    with warnings.catch_warnings(record=True) as warned, pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("MASTER_ADDR", "127.0.0.1")
        for variable, value in place.items():
            patch.setenv(variable, str(value))
        warnings.simplefilter("always")
        patch.setattr(pynccl, "init", partial(again, comm, f"{folder}/store"))
        for source, port in zip(programs(Path(name)), ports, strict=True):
            patch.setenv("MASTER_PORT", str(port))
            names: dict[str, Any] = {"__name__": "__main__", "__file__": name}
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                try:
                    exec(compile(source, name, "exec"), names)
                finally:
                    if dist.is_initialized():
                        dist.destroy_process_group()
            said.append(printed.getvalue())
    return said, [str(each.message) for each in warned if not issubclass(each.category, UNRELATED)]


def again(comm: Communicator, store: str, elastic: bool = False, **_: Any) -> Communicator:
    """Return another communicator of the same ranks."""
    if elastic:
        return pynccl.from_store(dist.FileStore(store), comm.rank, comm.size, elastic=True)
    return comm.split(0, comm.rank)


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
    """It prints on rank 0 alone, and gives no reason to warn."""
    ports = [two_free_ports() for _ in programs(page)]
    (said, *warned), (others, *_) = ranks.run(2, run_page, str(page), str(tmp_path), ports, timeout=SECONDS)
    assert warned == [[]] and (page.name in ONE_PROCESS or not any(others)), (warned, others)
    for printed, pattern in zip(said, PRINTS.get(page.name, [""] * len(said)), strict=True):
        assert re.search(pattern, printed.strip()), printed


def test_scripts_and_modules_that_commands_name_are_there() -> None:
    """Those of docs/commands.md are run by test_commands.py, as those of each --help."""
    for page in PAGES:
        for number, text in pages.commands(page):
            for script in re.findall(r"\bscripts/\S+\.(?:py|sh)\b", text):
                assert (ROOT / script).is_file(), f"{page.name}:{number}: {text}"
            for module in re.findall(r"-m pynccl ([a-z]+)", text):
                assert module in TOOLS, f"{page.name}:{number}: {text}"


# Not run below: what needs a GPU, a package index, Ray, SLURM or another machine; what other files here run; reports.
ELSEWHERE = (
    r"make|pip |srun|sbatch|ssh |torchrun --standalone( --local-addr\S+)?$|scripts/|.*scripts/(examples|gpu|timeline)"
    r"|.*-m pynccl (explain|hang)|.*elastic_start|.*ray_actors|.*ended without|.* (example|overlap).py$"
    r"|.*bench/(overhead.py|overlap.py|scale.py)"
)
SHORTER = {
    "perf$": "perf --help",
    "perf COLLECTIVE": "perf broadcast -b 8 -e 8",
    "-e 128M": "-e 1M",
    "-e 64M -f 64 -n 50": "-e 16 -n 2",
    "--width 128 256 512 --rounds 9": "--width 32 --rounds 1",
    "--wrappers": "--wrappers --rounds 1",
    "--runs (500|60|6)\\b": "--runs 1",
    r"(torch_backend\.py).*": r"\1 --rounds 1 --sizes 16 --only collectives",
    "fuzzer.py models": "fuzzer.py models --runs 2",
    "--nproc-per-node 8": "--nproc-per-node 2",
    "^torchrun": "python -m torch.distributed.run --local-addr=127.0.0.1",
    "^python": shlex.quote(sys.executable),
}


@pytest.mark.slow
@pytest.mark.timeout(1200)  # alone it takes five minutes
def test_commands_of_the_pages_run(tmp_path: Path) -> None:
    """In a folder that looks like the project's, shortened."""
    for entry in ROOT.iterdir():
        if entry.name not in (".git", "out", "build"):
            (tmp_path / entry.name).symlink_to(entry)
    some = [page for page in PAGES if page.name not in ("commands.md", "launching.md")]  # which have their own tests
    texts = {re.sub(r"\s+# .*$", "", text) for page in some for _, text in pages.commands(page)}
    texts = {text for text in texts if not re.match(ELSEWHERE, text)}
    failed, environment = [], {**os.environ, "PYNCCL_LIBRARY": "host", "OMP_NUM_THREADS": "1"}
    for text in sorted(texts):
        line = text
        for long, short in SHORTER.items():
            line = re.sub(long, short, line)
        options: Any = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True, "timeout": SECONDS}
        done = subprocess.run(["bash", "-c", line], check=False, **options)
        if done.returncode:
            failed.append(f"{text}: {done.stdout}{done.stderr}")
    assert len(texts) > 10 and not failed, "\n".join(failed)


def test_explain_runs_and_draws_what_its_page_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    page = (ROOT / "docs" / "explain.md").read_text()
    shown = re.findall(r"```sh\n(python -m pynccl explain .*)\n```\n\n```text\n((?:.*\n)*?)```", page)
    assert shown
    for text, drawn in shown:
        assert main(shlex.split(text)[3:]) == 0
        assert capsys.readouterr().out == drawn, text


def test_the_table_of_operations_has_their_arguments() -> None:
    """The public functions of autograd/ops/, as `inspect` says them."""
    rows = re.findall(r"^\| `((\w+)\(.*?\))` \|", (ROOT / "docs" / "operations.md").read_text(), re.MULTILINE)
    for call, name in rows:
        parameters = inspect.signature(getattr(ad, name)).parameters.values()
        bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in parameters]
        assert call == f"{name}{inspect.Signature(bare)}".replace("'", '"')
    public = {name for name in ad.__all__ if inspect.isfunction(getattr(ad, name))}
    assert {name for _, name in rows} == {name for name in public if ".ops." in getattr(ad, name).__module__}


def test_figures_of_the_torch_backend_are_rows_of_the_results() -> None:
    measured = (ROOT / "docs" / "torch_backend.md").read_text().partition("\n## Measured\n")[2]
    rows = re.findall(r"^\| .*\d \|$", measured, re.MULTILINE)
    results = (ROOT / "docs" / "results" / "cpu.md").read_text()
    assert len(rows) > 10 and [row for row in rows if f"\n{row}" not in results] == []


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
