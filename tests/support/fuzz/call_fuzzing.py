"""Runs fuzzed calls on ranks and counts what came of them: what scripts/faults/fuzzer.py and its test share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ranks import RankError, RankPool

from .call_ranks import BAD, GOOD, Record, plan, run, text_of
from .launching import each, shortened


class Summary(NamedTuple):
    counts: Counter[str]
    bad: list[Record]  # one for each call that is neither right nor clearly refused


def fuzz(
    pool: RankPool,
    seeds: Sequence[int],
    n: int,
    *,
    timeout: float = 60.0,
    tell: Callable[[Record], object] = lambda record: None,
    done: Callable[[int], object] = lambda calls: None,
) -> Summary:
    """Make the calls of the seeds on n ranks.

    tell  gets what has failed, at once
    done  hears how many more calls have been made"""
    found = Summary(Counter(), [])
    for seed, by_rank in each(pool, n, run, seeds, batch=100, timeout=timeout):
        worst = _lost(seed, by_rank) if isinstance(by_rank, RankError) else _worst(by_rank)
        found.counts[worst.outcome] += 1
        if worst.outcome in BAD:
            found.bad.append(worst)
            tell(worst)
        done(1)
    return found


def _worst(records: Sequence[Record]) -> Record:
    """One call, as all ranks saw it."""
    order = [*GOOD, *BAD]
    kinds = {record.outcome for record in records}
    if len(kinds) > 1 and kinds <= set(GOOD):
        said = "; ".join(f"rank {r}: {record.outcome} {record.message}" for r, record in enumerate(records))
        return records[0]._replace(outcome="differs", message=said)
    return max(records, key=lambda record: order.index(record.outcome))


def _lost(seed: int, error: RankError) -> Record:
    """A call in which ranks raised, died or hung."""
    heads = [outcome.report.partition("\n")[0] for outcome in error.outcomes]
    kinds = {"crash": " died: ", "broken": " raised"}
    kind = next((kind for kind, words in kinds.items() if any(words in head for head in heads)), "hang")
    return Record(seed, text_of(plan(seed)), kind, shortened(error))
