"""Run random programs of overlapped layers on ranks, for scripts/faults/fuzzer.py and its test."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ranks import RankError, RankPool

from . import overlap_programs
from .launching import run_batches

BATCH = 8  # programs per call of the ranks


class Summary(NamedTuple):
    programs: int
    passes: int
    failures: list[str]


def fuzz(
    pool: RankPool,
    seed: int,
    sizes: Sequence[int],
    *,
    programs: int,
    timeout: float = 60.0,
    on_failure: Callable[[str], object] = lambda text: None,
) -> Summary:
    """Run `programs` programs, with seeds from `seed` on."""
    passes = 0
    failures: list[str] = []
    for first in range(0, programs, BATCH):
        seeds = range(seed + first, seed + min(first + BATCH, programs))
        n = sizes[first // BATCH % len(sizes)]
        for program_seed, by_rank in run_batches(pool, n, overlap_programs.run, seeds, batch=BATCH, timeout=timeout):
            if isinstance(by_rank, RankError):
                failures.append(f"--seed {program_seed} --runs 1 --ranks {n}\n{by_rank}")
                on_failure(failures[-1])
            else:
                passes += by_rank[0]
    return Summary(programs, passes, failures)
