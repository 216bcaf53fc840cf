"""Random programs of collectives give what one process finds. scripts/faults/fuzzer.py runs many more of them."""

from __future__ import annotations

import pytest
from fuzz.fuzzing import MODES, fuzz
from ranks import RankPool


@pytest.mark.parametrize("mode", [mode for mode in MODES if not mode.startswith("compile")])
def test_random_programs_give_what_one_process_finds(ranks: RankPool, mode: str) -> None:
    many = 4 if mode == "double list" else 12  # in 12 every collective is met
    found = fuzz(ranks, mode, range(many), (2, 3))
    assert found.programs == many and found.comparisons >= many
    assert not found.failures, "\n".join(str(failure) for failure in found.failures)


def test_a_random_program_is_compiled(ranks: RankPool) -> None:
    found = fuzz(ranks, "compile", range(1), (2,), timeout=90.0)
    assert found.programs == 1 and not found.failures, "\n".join(str(failure) for failure in found.failures)
