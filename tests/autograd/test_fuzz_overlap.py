"""Random programs of overlapped layers give the results of F.linear, also with passes that are interrupted.

scripts/faults/fuzzer.py runs many more."""

from __future__ import annotations

from fuzz.overlap_fuzzing import fuzz
from ranks import RankPool


def test_random_programs_equal_plain_layers(ranks: RankPool) -> None:
    found = fuzz(ranks, 100, (2, 3, 4), programs=24)
    assert found.programs == 24 and found.passes > 48
    assert not found.failures, "\n".join(found.failures)
