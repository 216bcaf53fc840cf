"""scripts/examples/ on a GPU: on the ranks of this launch, and as separate processes that share a GPU."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
from gpu.launches import run_ranks

import pynccl

FOLDER = Path(__file__).parents[2] / "scripts" / "examples"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))
sys.path.append(str(FOLDER))


@pytest.mark.parametrize("name", [name for name in NAMES if name != "dead_rank"])
def test_example_on_the_ranks_of_this_launch(comm: pynccl.Communicator, name: str) -> None:
    if name == "checkpoint" and comm.size > 8:
        pytest.skip(f"{name} is for up to 8 ranks; these are {comm.size}")
    try:
        line = importlib.import_module(name).main(comm)
    except pynccl.NcclVersionError as error:  # on all ranks
        pytest.skip(str(error))
    except ValueError as error:
        if "NCCL declined the buffer" not in str(error):
            raise
        pytest.skip(str(error))
    assert line.startswith(f"{name}: ")
    if name == "raw_pointers":
        assert "cuda.core is right" in line and "numpy skipped: the communicator is on cuda:" in line
    if name == "cuda_graph":
        assert "a captured graph was replayed" in line
    if name == "hello":
        assert f" on {comm.device} of " in line


@pytest.mark.usefixtures("own_launch")
def test_hello_as_processes_that_share_a_gpu() -> None:
    for rank, done in enumerate(run_ranks([str(FOLDER / "hello.py")], 2)):
        assert done.code == 0, done.err
        assert done.out.startswith(f"hello: rank {rank} of 2 on cuda:0 of ")


@pytest.mark.usefixtures("own_launch")
def test_the_ranks_continue_without_a_dead_rank() -> None:
    """Without an agent, rank 0 hosts the store, so the rank that dies must be another one."""
    first, second, _ = run_ranks([str(FOLDER / "dead_rank.py")], 3)
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert first.out.splitlines()[-1] == "dead_rank: 3 steps on 3 ranks, 3 on 2: all sums are right"
