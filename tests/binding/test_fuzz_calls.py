"""Nonsense as an argument of any public call is refused clearly on all ranks, and nothing is launched or broken.

scripts/faults/fuzzer.py makes many more calls.
"""

from __future__ import annotations

from fuzz.call_fuzzing import fuzz
from ranks import RankPool

CALLS = 300


def test_nonsense_is_refused_clearly(ranks: RankPool) -> None:
    found = fuzz(ranks, range(CALLS), 2)
    assert sum(found.counts.values()) == CALLS
    assert found.counts["clear"] > CALLS / 3 and found.counts["right"] > 0
    lines = [f"{one.outcome}: {one.text} (seed {one.seed}): {one.message}" for one in found.bad]
    assert not lines, "\n".join(lines)
