"""Runs random programs of overlapped layers on ranks, for scripts/faults/fuzzer.py and its test."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ranks import RankError, RankPool

from . import overlap_programs

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
    seconds: float | None = None,
    programs: int | None = None,
    timeout: float = 60.0,
    tell: Callable[[str], object] = lambda text: None,
) -> Summary:
    """Programs from this seed on, for some seconds or so many; a batch that fails is run one by one."""
    end = time.monotonic() + (seconds or float("inf"))
    done = passes = 0
    failures: list[str] = []
    for first in itertools.count(seed, BATCH):
        if time.monotonic() >= end or (programs is not None and done >= programs):
            return Summary(done, passes, failures)
        seeds = range(first, first + min(BATCH, programs - done if programs else BATCH))
        n = sizes[(first - seed) // BATCH % len(sizes)]
        done += len(seeds)
        try:
            passes += pool.run(n, overlap_programs.run, seeds, timeout=timeout)[0]
            continue
        except RankError:
            pass
        for one in seeds:
            try:
                passes += pool.run(n, overlap_programs.run, [one], timeout=timeout)[0]
            except RankError as error:
                failures.append(f"--seed {one} --runs 1 --ranks {n}\n{error}")
                tell(failures[-1])
    raise AssertionError
