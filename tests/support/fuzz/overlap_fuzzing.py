"""Runs random programs of overlapped layers on ranks, for scripts/faults/fuzzer.py and its test."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ranks import RankError, RankPool

from . import overlap_programs
from .launching import each

BATCH = 8  # programs that run before the ranks are asked


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
    tell: Callable[[str], object] = lambda text: None,
) -> Summary:
    """So many programs, from this seed on."""
    passes = 0
    failures: list[str] = []
    for done in range(0, programs, BATCH):
        seeds = range(seed + done, seed + min(done + BATCH, programs))
        n = sizes[done // BATCH % len(sizes)]
        for one, by_rank in each(pool, n, overlap_programs.run, seeds, batch=BATCH, timeout=timeout):
            if isinstance(by_rank, RankError):
                failures.append(f"--seed {one} --runs 1 --ranks {n}\n{by_rank}")
                tell(failures[-1])
            else:
                passes += by_rank[0]
    return Summary(programs, passes, failures)
