"""Random programs of collectives give the results of one process. scripts/faults/fuzzer.py runs many more."""

from __future__ import annotations

import pytest
from fuzz.fuzzing import MODES, fuzz
from ranks import RankPool


@pytest.mark.parametrize("mode", [mode for mode in MODES if not mode.startswith("compile")])
def test_random_programs_equal_one_process(ranks: RankPool, mode: str) -> None:
    programs = 4 if mode == "double list" else 12  # 12 programs include every collective
    found = fuzz(ranks, mode, range(programs), (2, 3))
    assert found.programs == programs and found.comparisons >= programs
    assert not found.failures, "\n".join(str(failure) for failure in found.failures)


def test_a_compiled_random_program_equals_one_process(ranks: RankPool) -> None:
    found = fuzz(ranks, "compile", range(1), (2,), timeout=90.0)
    assert found.programs == 1 and not found.failures, "\n".join(str(failure) for failure in found.failures)
