"""Random programs of collectives give the results of one process. scripts/faults/fuzzer.py runs many more."""

from __future__ import annotations

import pytest
from fuzz.fuzzing import MODES, fuzz
from ranks import RankPool


@pytest.mark.parametrize("mode", [mode for mode in MODES if MODES[mode].compiler is None])
def test_random_programs_equal_one_process(ranks: RankPool, mode: str) -> None:
    programs = 4 if mode == "double list" else 12  # 12 programs include every collective
    found = fuzz(ranks, mode, range(programs), (2, 3))
    assert found.programs == programs and found.comparisons >= programs
    assert not found.failures, "\n".join(str(failure) for failure in found.failures)


def compiled_programs_equal_one_process(ranks: RankPool, mode: str, programs: int) -> None:
    found = fuzz(ranks, mode, range(programs), (2,), timeout=100.0)
    assert found.programs == programs and not found.failures, "\n".join(str(failure) for failure in found.failures)


@pytest.mark.parametrize("mode", ["compile", "inductor"])
def test_a_compiled_random_program_equals_one_process(ranks: RankPool, mode: str) -> None:
    compiled_programs_equal_one_process(ranks, mode, 1)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [mode for mode in MODES if MODES[mode].compiler is not None])
def test_compiled_random_programs_equal_one_process(ranks: RankPool, mode: str) -> None:
    compiled_programs_equal_one_process(ranks, mode, 3)
