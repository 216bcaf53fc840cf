"""Run drawn items on ranks in batches. If a batch fails, hangs or kills a rank, its items run one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ranks import RankError, RankPool

START_SECONDS = 300.0  # timeout to start ranks and load slow modules, also on a busy machine


def run_batches(
    pool: RankPool,
    n: int,
    function: Callable[..., list[Any]],
    items: Sequence[Any],
    *,
    batch: int,
    timeout: float,
    load: Callable[..., object] | None = None,
) -> Iterator[tuple[Any, list[Any] | RankError]]:
    """Yield (item, results of function(comm, items) for it by rank), or (item, the error of running it alone).

    load  prepares the ranks; called before each batch, since ranks are restarted after a failure
    """
    for start in range(0, len(items), batch):
        items_in_batch = items[start : start + batch]
        if load:
            pool.run(n, load, timeout=START_SECONDS)
        try:
            by_rank = pool.run(n, function, items_in_batch, timeout=timeout)
        except RankError as error:
            if len(items_in_batch) > 1:
                yield from run_batches(pool, n, function, items_in_batch, batch=1, timeout=timeout, load=load)
            else:
                yield items_in_batch[0], error
        else:
            yield from zip(items_in_batch, map(list, zip(*by_rank, strict=True)), strict=True)


def shortened(error: RankError, lines: int = 10) -> str:
    """Return the end of each rank's traceback; for a rank that hung, its stack, innermost frame first."""
    text = []
    for outcome in error.outcomes:
        head, *rows = [row for row in outcome.report.splitlines() if row.strip()] or [""]
        hung = [i for i, row in enumerate(rows) if row.startswith("Current thread")]
        text += [head, *(rows[hung[0] + 1 :][:lines] if hung else rows[-lines:])]
    return "\n".join(text)
