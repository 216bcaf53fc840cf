"""Random programs of overlapped layers give what F.linear does; scripts/faults/fuzzer.py runs many more."""

from __future__ import annotations

import torch
from fuzz import overlap_programs
from fuzz.overlap_fuzzing import fuzz
from ranks import RankPool


def test_random_programs_give_what_plain_layers_do(ranks: RankPool) -> None:
    found = fuzz(ranks, 100, (2, 3, 4), programs=8)
    assert found.programs == 8 and found.passes > 16
    assert not found.failures, "\n".join(found.failures)


def test_a_seed_stands_for_one_program() -> None:
    assert overlap_programs.draw(5, 3) == overlap_programs.draw(5, 3) != overlap_programs.draw(6, 3)
    kinds = [drawn for seed in range(40) for drawn in overlap_programs.draw(seed, 2)]
    assert {drawn.name for drawn in kinds} == set(overlap_programs.PATTERNS)
    assert {drawn.dtype for drawn in kinds} == {torch.float64, torch.float32, torch.bfloat16, torch.float16}
