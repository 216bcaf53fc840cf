"""Runs what was drawn on ranks, in batches: what fails, hangs or ends a rank is found, and the others go on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ranks import RankError, RankPool

START_SECONDS = 300.0  # in which ranks start and load what takes seconds, on a busy machine too


def each(
    pool: RankPool,
    n: int,
    function: Callable[..., list[Any]],
    items: Sequence[Any],
    *,
    batch: int,
    timeout: float,
    load: Callable[..., object] | None = None,
) -> Iterator[tuple[Any, list[Any] | RankError]]:
    """(item, what function(comm, items) gives for it on each rank, or the error of a run of it alone).

    load  makes ranks ready, which start anew after a failure
    """
    for start in range(0, len(items), batch):
        some = items[start : start + batch]
        if load:
            pool.run(n, load, timeout=START_SECONDS)
        try:
            by_rank = pool.run(n, function, some, timeout=timeout)
        except RankError as error:
            if len(some) > 1:
                yield from each(pool, n, function, some, batch=1, timeout=timeout, load=load)
            else:
                yield some[0], error
        else:
            yield from zip(some, map(list, zip(*by_rank, strict=True)), strict=True)


def shortened(error: RankError, lines: int = 10) -> str:
    """Of each rank the end of its traceback; of one that hung where it stood, innermost first."""
    said = []
    for outcome in error.outcomes:
        head, *rows = [row for row in outcome.report.splitlines() if row.strip()] or [""]
        hung = [i for i, row in enumerate(rows) if row.startswith("Current thread")]
        said += [head, *(rows[hung[0] + 1 :][:lines] if hung else rows[-lines:])]
    return "\n".join(said)
