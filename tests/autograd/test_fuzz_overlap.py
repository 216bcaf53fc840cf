"""Random programs of overlapped layers give what F.linear does; scripts/faults/fuzzer.py runs many more."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from fuzz import overlap_programs
from fuzz.overlap_fuzzing import fuzz
from ranks import RankError, RankPool

from pynccl import Communicator
from pynccl_autograd.overlap import unfused


def test_random_programs_give_what_plain_layers_do(ranks: RankPool) -> None:
    found = fuzz(ranks, 100, (2, 3, 4), programs=24)
    assert found.programs == 24 and found.passes > 50
    assert not found.failures, "\n".join(found.failures)


def careless(comm: Communicator, seeds: Sequence[int]) -> int:
    """With a main_grad that is added to whatever the pass was asked for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unfused, "accumulates", lambda leaf: True)
        return overlap_programs.run(comm, seeds)


def test_a_gradient_that_nobody_asked_for_is_found(ranks: RankPool) -> None:
    with pytest.raises(RankError, match="grad of"):
        ranks.run(2, careless, range(40))


def test_a_seed_stands_for_one_program() -> None:
    assert overlap_programs.draw(5, 3) == overlap_programs.draw(5, 3) != overlap_programs.draw(6, 3)
    kinds = [drawn for seed in range(40) for drawn in overlap_programs.draw(seed, 2)]
    assert {drawn.name for drawn in kinds} == set(overlap_programs.PATTERNS)
    assert {drawn.dtype for drawn in kinds} == {torch.float64, torch.float32, torch.bfloat16, torch.float16}
