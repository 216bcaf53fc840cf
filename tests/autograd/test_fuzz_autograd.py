"""Random programs of collectives give what one process finds; and the fuzzer does find what is wrong.

scripts/faults/fuzzer.py runs many more of them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fuzz import rank_side
from fuzz.fuzzing import MODES, compare, fuzz, trial
from fuzz.rank_side import Found, Job
from ranks import RankPool

import pynccl_autograd as ad
from pynccl import Communicator

MANY, FEW = 4, 2  # programs a mode


@pytest.mark.parametrize("mode", [mode for mode in MODES if not mode.startswith("compile")])
def test_random_programs_give_what_one_process_finds(ranks: RankPool, mode: str) -> None:
    found = fuzz(ranks, mode, range(MANY), (2, 3))
    assert found.programs == MANY and found.comparisons >= MANY
    assert not found.failures, "\n".join(str(failure) for failure in found.failures)


def test_a_random_program_is_compiled(ranks: RankPool) -> None:
    found = fuzz(ranks, "compile", range(1), (2,), timeout=90.0)
    assert found.programs == 1 and not found.failures, "\n".join(str(failure) for failure in found.failures)


def forgetful(comm: Communicator, jobs: list[Job]) -> list[Found]:
    """The jobs, with an all_reduce whose adjoint forgets the other ranks."""

    def adjoint(g: Any, comm: Any, shape: Any, op: str, *params: Any) -> Any:
        return ad.collective.Call(ad.Copy, g / comm.size if op == "avg" else g, (None,))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ad.AllReduce, "adjoint", staticmethod(adjoint))
        return rank_side.run(comm, jobs)


def test_a_wrong_adjoint_is_found(ranks: RankPool) -> None:
    trials = [trial("plain", seed, 2) for seed in range(30)]
    told = [one for one in trials if "'sum', grad='sum'" in one.job.source]
    assert len(told) >= FEW
    found = ranks.run(2, forgetful, [one.job for one in told])
    wrong = [compare(one, 0, found[0][i])[1] for i, one in enumerate(told)]
    assert sum("derivative of" in " ".join(texts) for texts in wrong) >= FEW


def test_a_seed_stands_for_one_program() -> None:
    first, second = trial("plain", 11, 3), trial("plain", 11, 3)
    assert first.text() == second.text()
    assert all(torch.equal(a, b) for a, b in zip(first.job.leaves[0], second.job.leaves[0], strict=True))
    assert first.text() != trial("plain", 12, 3).text()
