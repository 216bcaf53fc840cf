"""Invalid arguments of any public call raise clear errors on all ranks, and the communicator stays usable.

scripts/faults/fuzzer.py makes many more calls.
"""

from __future__ import annotations

from fuzz.call_fuzzing import fuzz
from ranks import RankPool

CALLS = 300


def test_random_invalid_arguments_raise_clear_errors(ranks: RankPool) -> None:
    found = fuzz(ranks, range(CALLS), 2)
    assert sum(found.counts.values()) == CALLS
    assert found.counts["clear"] > CALLS / 3 and found.counts["right"] > 0
    lines = [f"{record.outcome}: {record.text} (seed {record.seed}): {record.message}" for record in found.bad]
    assert not lines, "\n".join(lines)
