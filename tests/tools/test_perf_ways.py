"""perf: buffers that are registered, types that a library lacks, errors."""

from __future__ import annotations

import argparse
from types import SimpleNamespace
from typing import Any

import pytest
from ranks import RankPool

from pynccl import Communicator, NcclError
from pynccl.__main__ import main
from pynccl.tools import perf
from pynccl.tools.perf.cases import NEVER_IN_PLACE, case
from pynccl.tools.perf.measure import UnfitError, measured
from pynccl.tools.perf.options import COLLECTIVES, TYPES, configure, problem


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


def registered(comm: Communicator, way: str) -> list[Any]:
    """Every collective in buffers of that kind: what is wrong, and how many registrations were made and ended."""
    made: list[Any] = []
    window, register = Communicator.window, Communicator.register
    opened = [0, 0]

    def counted(which: int, original: Any) -> Any:
        def call(self: Communicator, buf: Any, **options: Any) -> Any:
            opened[which] += 1
            found = original(self, buf, **options)
            made.append(found)
            return found

        return call

    Communicator.window, Communicator.register = counted(0, window), counted(1, register)  # type: ignore[method-assign]
    bad = []
    try:
        for collective in COLLECTIVES:
            options = parsed(collective, "-R", way, "-n", "2", "-w", "0")
            for nbytes in (8, 30_000):
                found = measured(comm, case(collective, "float", "sum", 0, comm.size, nbytes), options, True)
                wrong = [side and side.wrong for side in found.sides]
                if wrong != [0, None if collective in NEVER_IN_PLACE else 0]:
                    bad.append((collective, nbytes, wrong))
    finally:
        Communicator.window, Communicator.register = window, register  # type: ignore[method-assign]
    return [bad, opened, [one._handle for one in made if one._handle is not None]]


@pytest.mark.parametrize(("way", "opened"), [("0", [0, 0]), ("1", [0, 36]), ("2", [36, 0])])
def test_buffers_are_registered_as_asked_and_given_back(ranks: RankPool, way: str, opened: list[int]) -> None:
    assert ranks.run(2, registered, way) == [[[], opened, []]] * 2


def declined(comm: Communicator) -> str:
    """What -R 2 says where rank 1's window is declined."""
    original = Communicator.window

    def refuse(self: Communicator, buf: Any, **options: Any) -> Any:
        if comm.rank == 1:
            raise ValueError("window: NCCL declined the buffer")
        return SimpleNamespace(close=lambda: None)

    Communicator.window = refuse  # type: ignore[method-assign]
    try:
        measured(comm, case("reduce", "float", "sum", 0, 2, 64), parsed("reduce", "-R", "2"), True)
    except UnfitError as error:
        return str(error)
    finally:
        Communicator.window = original  # type: ignore[method-assign]
    return ""


def test_a_window_that_one_rank_is_refused_ends_all(ranks: RankPool) -> None:
    said = ranks.run(2, declined)
    assert said[0] == "64 bytes of reduce: another rank has failed; pass -R 0"
    assert said[1] == "64 bytes of reduce: window: NCCL declined the buffer; pass -R 0"


@pytest.mark.parametrize(("version", "fewer"), [((2, 18, 1), 2), ((2, 24, 0), 0), ((2, 28, 3), 0)])
def test_all_types_are_those_that_the_library_has(version: tuple[int, int, int], fewer: int) -> None:
    library: Any = SimpleNamespace(version=version)
    every = perf._cases(parsed("reduce", "-d", "all", "-b", "64", "-e", "64"), 1, library)
    assert len(every) == len(TYPES) - fewer
    one = perf._cases(parsed("reduce", "-d", "f8e4m3", "-b", "64", "-e", "64"), 1, library)
    assert [row.type for row in one] == ["f8e4m3"]


def test_an_error_of_the_library_ends_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise NcclError("all_reduce: a peer is gone")

    monkeypatch.setattr(Communicator, "all_reduce", fails)
    assert main(["perf", "all_reduce", "-b", "8", "-e", "8"]) == 1
    assert capsys.readouterr().err == "python -m pynccl perf: all_reduce: a peer is gone\n"
