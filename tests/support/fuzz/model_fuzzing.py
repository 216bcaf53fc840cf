"""Run random models on ranks, for scripts/faults/fuzzer.py and its test."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from ranks import RankError, RankPool

from . import model_ranks
from .launching import START_SECONDS
from .model_families import Trial, draw


class Failure(NamedTuple):
    trial: Trial
    text: str

    def __str__(self) -> str:
        again = f"--ranks {self.trial.ranks} --seed {self.trial.seed} --runs 1"
        return f"=== {self.trial.text()}\n    (replay: {again})\n{self.text}"


class Fuzzed(NamedTuple):
    outcomes: Counter[str]  # "equal", "rejected"; for plans with random changes also "failed" in the first forward pass
    comparisons: int
    failures: list[Failure]
    refusals: Counter[str]


def fuzz(pool: RankPool, seeds: Iterable[int], sizes: list[int], timeout: float = 60.0) -> Fuzzed:
    """Run a model for each seed, cycling through the world sizes."""
    outcomes: Counter[str] = Counter()
    refusals: Counter[str] = Counter()
    failures: list[Failure] = []
    comparisons = 0
    pool.run(max(sizes), model_ranks.load, timeout=START_SECONDS)
    for trial in (draw(seed, sizes[seed % len(sizes)]) for seed in seeds):
        try:
            found = pool.run(trial.ranks, model_ranks.run, trial, timeout=timeout)
        except RankError as error:
            failures.append(Failure(trial, str(error)))
            continue
        what = {result.what for result in found}
        late = what == {"failed"} and trial.changes
        if not late and (len(what) > 1 or not what <= {"equal", "rejected"}):
            texts = [f"rank {i}: {result.what} {result.text}" for i, result in enumerate(found)]
            failures.append(Failure(trial, "\n".join(texts)))
            continue
        outcomes[what.pop()] += 1
        if found[0].what != "equal":
            refusals[f"{found[0].text}   [{trial.family} {trial.changes}]"] += 1
        comparisons += sum(result.comparisons for result in found)
    return Fuzzed(outcomes, comparisons, failures, refusals)
