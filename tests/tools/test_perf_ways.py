"""perf: memory that a rank lacks, errors."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
import torch
from ranks import RankPool

from pynccl import Communicator, NcclError
from pynccl.__main__ import main
from pynccl.tools.perf.cases import case
from pynccl.tools.perf.measure import UnfitError, measured
from pynccl.tools.perf.options import configure, problem


def parsed(*words: str, ranks: int = 1) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    configure(parser)
    options = parser.parse_args(list(words))
    assert problem(options, ranks) == ""
    return options


def test_checked_by_default_as_by_nccl_tests(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["perf", "all_reduce", "-b", "8", "-e", "8", "-n", "1"]) == 0
    said = capsys.readouterr().out
    assert "# data        -c 1: compared with a local reference" in said
    assert "# Out of bounds values : 0 OK" in said
    assert not [line for line in said.splitlines() if line.endswith(" ")]


def without_memory(comm: Communicator) -> str:
    """What is said where rank 1 has not the memory."""
    original = torch.zeros

    def refuse(*shape: Any, **options: Any) -> Any:
        raise RuntimeError("can't allocate memory")

    torch.zeros = refuse if comm.rank == 1 else original
    try:
        measured(comm, case("reduce", "float", "sum", 0, 2, 64), parsed("reduce"))
    except UnfitError as error:
        return str(error)
    finally:
        torch.zeros = original
    return ""


def test_memory_that_one_rank_lacks_ends_all(ranks: RankPool) -> None:
    said = ranks.run(2, without_memory)
    assert said[0] == "64 bytes of reduce: another rank has failed; pass a smaller -e"
    assert said[1] == "64 bytes of reduce: can't allocate memory; pass a smaller -e"


def test_an_error_of_the_library_ends_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise NcclError("all_reduce: a peer is gone")

    monkeypatch.setattr(Communicator, "all_reduce", fails)
    assert main(["perf", "all_reduce", "-b", "8", "-e", "8"]) == 1
    assert capsys.readouterr().err == "python -m pynccl perf: all_reduce: a peer is gone\n"
