"""scripts/examples/: each is short, runs on any number of ranks, notices mistakes, and prints what its page says."""

from __future__ import annotations

import ast
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import TORCHRUN, RankPool
from stub_driver import over_driver

import pynccl
from pynccl import Communicator

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "scripts" / "examples"
PAGE = (ROOT / "docs" / "examples.md").read_text()
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))
IN_THE_POOL = [name for name in NAMES if name != "dead_rank"]  # which ends a process
ENVIRONMENT = {**os.environ, "PYNCCL_LIBRARY": "host", "OMP_NUM_THREADS": "1"}
sys.path.append(str(FOLDER))


def verified(comm: Communicator, name: str) -> str:
    """What main() returns, which raises where something is not as it should be."""
    line: str = importlib.import_module(name).main(comm)
    return line


def on_the_page(name: str) -> tuple[int, list[str]]:
    """How many ranks the command of the page starts, and what it prints there."""
    starts = (
        rf"^    (?:PYNCCL_HOST_LINK=\S+ )?torchrun --standalone --nproc-per-node=(\d) scripts/examples/{name}\.py\n"
    )
    found = re.findall(starts + r"((?:    .+\n)+)", PAGE, re.MULTILINE)
    assert len(found) == 1, f"docs/examples.md has {len(found)} commands with {name}.py, each followed by its output"
    ranks, output = found[0]
    return int(ranks), [line.strip() for line in output.splitlines()]


def steady(lines: list[str]) -> list[str]:
    """Without what is of one machine or one run: names of hosts, where the repository lies, milliseconds."""
    bare = [re.sub(r"( of )[\w.-]+(: the sum)", r"\1HOST\2", line.strip()) for line in lines]
    return [re.sub(r"\d+\.\d ms", "-- ms", re.sub(r" at \S+/", " at ", line)) for line in bare]


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("name", IN_THE_POOL)
def test_example_is_right_on_any_number_of_ranks(ranks: RankPool, name: str, n: int) -> None:
    lines = ranks.run(n, verified, name)
    assert all(line.startswith(f"{name}: ") for line in lines)
    if name != "hello":
        assert len(set(lines)) == 1 or name == "errors"  # which names the rank itself first
        lines = lines[:1]
    shown, printed = on_the_page(name)
    if n == shown:
        assert steady("\n".join(lines).splitlines()) == steady(printed)


def test_examples_are_short_say_how_they_are_run_and_start_alike() -> None:
    for name in NAMES:
        text = (FOLDER / f"{name}.py").read_text()
        assert len(text.splitlines()) < 80, name
        docstring = ast.get_docstring(ast.parse(text)) or ""
        command = re.search(
            r"^ {4}torchrun --standalone --nproc-per-node=(\d) (\S+)\n {4}(.+)", docstring, re.MULTILINE
        )
        assert command and command[2] == f"scripts/examples/{name}.py", name
        ranks, printed = on_the_page(name)
        assert int(command[1]) == ranks
        assert any(line.startswith(command[3].removesuffix(" ...")) for line in printed), command[3]
        assert "comm.device" in text, name
    one_line = "        verified = main(world)\n        if world.rank == 0:\n            print(verified)\n"
    ends = {(FOLDER / f"{name}.py").read_text().partition("__main__")[2] for name in NAMES}
    assert f'":\n    with pynccl.init() as world:\n{one_line}' in ends
    assert len(ends) == 3  # those of hello and dead_rank, which are run below


# As a user starts them


def run(*command: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, *command]
    return subprocess.run(words, capture_output=True, text=True, timeout=100, env=ENVIRONMENT, cwd=ROOT, check=False)


@pytest.mark.slow
def test_hello_prints_a_line_per_rank_under_torchrun() -> None:
    n, printed = on_the_page("hello")
    done = run(*TORCHRUN, f"--nproc-per-node={n}", "scripts/examples/hello.py")
    assert done.returncode == 0, done.stderr
    assert sorted(steady(done.stdout.splitlines())) == steady(printed)


@pytest.mark.slow
def test_the_ranks_go_on_without_the_one_that_dies_under_torchrun() -> None:
    n, printed = on_the_page("dead_rank")
    done = run(*TORCHRUN, f"--nproc-per-node={n}", "scripts/examples/dead_rank.py")
    assert done.returncode == 0, done.stderr
    error, result = done.stdout.splitlines()
    for line in (error, printed[0]):  # the process and the seconds are not the same twice
        assert re.match(rf"NcclRemoteError in step 3: .*\brank {n - 1}\b", line)
    assert result == printed[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ring"])
def test_example_without_torchrun_says_how_it_is_started(name: str) -> None:
    done = run(f"scripts/examples/{name}.py")
    assert done.returncode == 1 and done.stdout == ""
    message = done.stderr.partition("pynccl.NcclInvalidUsage: ")[2]
    assert "was not started by torchrun. Start it with\n" in message
    assert f"  torchrun --standalone --nproc-per-node=2 scripts/examples/{name}.py\n" in message
    assert "pynccl.init_all()" in message


# Memory of a GPU, as far as there is none


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
        str(FOLDER),
    )
    assert printed.split() == ["True", "ncclAllReduce", "True", "10", str(int(pynccl.DataType.FLOAT32)), "True"]
