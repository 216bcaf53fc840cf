"""Run fuzzed calls on ranks and count the outcomes, for scripts/faults/fuzzer.py and its test."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ranks import RankError, RankPool

from . import call_ranks
from .call_ranks import BAD, GOOD, Record
from .launching import run_batches, shortened


class Summary(NamedTuple):
    counts: Counter[str]
    bad: list[Record]  # one for each call that neither returned the right result nor raised a clear error


def fuzz(
    pool: RankPool,
    seeds: Sequence[int],
    n: int,
    *,
    kind: Any = call_ranks,
    timeout: float = 60.0,
    on_failure: Callable[[Record], object] = lambda record: None,
    on_done: Callable[[int], object] = lambda calls: None,
) -> Summary:
    """Make the calls of the seeds on n ranks.

    kind  the module that makes them: call_ranks, or argument_ranks
    on_failure  called with the record of each failed call
    on_done  called with the number of calls made since the last time"""
    found = Summary(Counter(), [])
    for seed, by_rank in run_batches(pool, n, kind.run, seeds, batch=100, timeout=timeout, load=kind.load):
        worst = _lost(seed, kind.text_of(seed), by_rank) if isinstance(by_rank, RankError) else _worst(by_rank)
        found.counts[worst.outcome] += 1
        if worst.outcome in BAD:
            found.bad.append(worst)
            on_failure(worst)
        on_done(1)
    return found


def _worst(records: Sequence[Record]) -> Record:
    """Return the worst outcome of one call; "differs" if the ranks' good outcomes differ."""
    order = [*GOOD, *BAD]
    kinds = {record.outcome for record in records}
    if len(kinds) > 1 and kinds <= set(GOOD):
        messages = "; ".join(f"rank {r}: {record.outcome} {record.message}" for r, record in enumerate(records))
        return records[0]._replace(outcome="differs", message=messages)
    return max(records, key=lambda record: order.index(record.outcome))


def _lost(seed: int, text: str, error: RankError) -> Record:
    """Return the record of a call in which ranks raised unexpectedly, died or hung."""
    first_lines = [outcome.report.partition("\n")[0] for outcome in error.outcomes]
    kinds = {"crash": " died: ", "broken": " raised"}
    kind = next((kind for kind, words in kinds.items() if any(words in head for head in first_lines)), "hang")
    return Record(seed, text, kind, shortened(error))
