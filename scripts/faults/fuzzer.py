"""Run random programs, calls and models on ranks, and compare the results with those of a single process.

autograd  programs of differentiable collectives, in every mode of torch: values and derivatives must equal those of the
          same program written as plain operations on all ranks' tensors
calls     every public call with invalid arguments, the same on all ranks: each call must return the right result, or
          raise an error that names the argument and the expected value, and leave the communicator usable
arguments every public function with one argument of a valid call replaced by nonsense, a random sample of all pairs of
          argument and value: it must raise an error that names the function and the argument, or accept the value
models    transformers models parallelized by random plans: outputs and gradients must equal those of the unsharded
          model, or every rank must reject the plan before it changes the model
overlap   overlapped matmuls and layers in typical programs: results must equal those of F.linear

The generators are in tests/support/fuzz. A failure prints the generated case and the seed that repeats it with
--runs 1. A rank that hangs or dies is a failure.

examples:
  python scripts/faults/fuzzer.py autograd --runs 2 --modes plain,vmap --ranks 2
  python scripts/faults/fuzzer.py calls --runs 20 --ranks 2
  python scripts/faults/fuzzer.py arguments --runs 100 --ranks 1,2
  python scripts/faults/fuzzer.py models --runs 3 --seed 1 --ranks 2
  python scripts/faults/fuzzer.py overlap --runs 2 --ranks 3
  python scripts/faults/fuzzer.py models --runs 500  # long
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from pynccl import progress
from pynccl.tools import command

os.environ.setdefault("PYNCCL_LIBRARY", "host")
os.environ.setdefault("OMP_NUM_THREADS", "1")
TESTS = Path(__file__).resolve().parents[2] / "tests"
sys.path[:0] = [str(TESTS / "support"), str(TESTS / "autograd")]  # before this folder, which also has a ranks.py

EXAMPLES = 3  # failing calls to print per kind of failure
PRELOADED = {
    "autograd": "torch._dynamo",
    "models": "transformers",
}  # imported once, before forking ranks


def fuzz_autograd(pool: Any, options: argparse.Namespace) -> bool:
    from fuzz.fuzzing import MODES, fuzz  # type: ignore[import-not-found]

    modes = options.modes.split(",") if options.modes else MODES
    if unknown := [mode for mode in modes if mode not in MODES]:
        raise ValueError(f"--modes: unknown mode {unknown[0]!r}; expected some of {', '.join(MODES)}")
    failed = False
    for mode in modes:
        some = seeds(options)
        if MODES[mode].compiler is not None and not options.modes:
            some = some[: max(1, options.runs // 10)]  # compiling takes seconds for each program
        found = fuzz(pool, mode, some, options.ranks, timeout=options.timeout)
        for failure in found.failures:
            print(failure, end="\n\n")
        failures = len(found.failures)
        print(f"{mode}: {found.programs} programs, {found.comparisons} comparisons, {failures} failures", flush=True)
        failed = failed or bool(failures)
    return failed


def fuzz_calls(pool: Any, options: argparse.Namespace) -> bool:
    from fuzz import call_ranks  # type: ignore[import-not-found]

    return _fuzz_calls(pool, options, call_ranks, [(seeds(options), options.ranks[0])])


def fuzz_arguments(pool: Any, options: argparse.Namespace) -> bool:
    from fuzz import argument_ranks

    if any(4 % n for n in options.ranks):
        raise ValueError(
            "--ranks: arguments needs 1, 2 or 4 ranks, by which the sizes of its valid calls are divisible"
        )
    step, cases = len(options.ranks), len(argument_ranks.cases())  # sizes alternate, also from round to round
    turns = {seed: (seed + seed // cases) % step for seed in seeds(options)}
    by_size = [([seed for seed, turn in turns.items() if turn == at], n) for at, n in enumerate(options.ranks)]
    return _fuzz_calls(pool, options, argument_ranks, by_size)


def _fuzz_calls(pool: Any, options: argparse.Namespace, kind: Any, by_size: list[tuple[Any, int]]) -> bool:
    from fuzz.call_fuzzing import fuzz  # type: ignore[import-not-found]
    from fuzz.call_ranks import BAD, GOOD, Record  # type: ignore[import-not-found]

    shown: Counter[tuple[str, str]] = Counter()
    with progress.Bar(options.runs, "calling", "call") as bar:

        def report(record: Record) -> None:
            place = record.message.rpartition("raised at ")[2] if "raised at " in record.message else record.text[:12]
            shown[record.outcome, place] += 1
            if shown[record.outcome, place] <= EXAMPLES:
                bar.line(f"{record.outcome}: {record.text}   (--seed {record.seed})\n      {record.message}")

        counts: Counter[str] = Counter()
        for some, n in by_size:
            how = {"timeout": options.timeout, "on_failure": report, "on_done": bar.step}
            counts += fuzz(pool, some, n, kind=kind, **how).counts
    for outcome in (*GOOD, *BAD):
        print(f"{outcome:10s} {counts[outcome]:6d}")
    return any(counts[outcome] for outcome in BAD)


def fuzz_models(pool: Any, options: argparse.Namespace) -> bool:
    from fuzz.model_fuzzing import fuzz  # type: ignore[import-not-found]

    found = fuzz(pool, seeds(options), options.ranks)
    for failure in found.failures:
        print(failure, end="\n\n")
    for text, count in found.refusals.most_common():
        print(f"rejected {count} x {text}")
    outcomes = found.outcomes
    print(
        f"{outcomes.total() + len(found.failures)} models: {outcomes['equal']} equal to the unsharded ones in "
        f"{found.comparisons} comparisons, {outcomes['rejected']} rejected, {outcomes['failed']} failed in the first "
        f"forward pass on all ranks, {len(found.failures)} failures"
    )
    return bool(found.failures)


def fuzz_overlap(pool: Any, options: argparse.Namespace) -> bool:
    from fuzz.overlap_fuzzing import fuzz  # type: ignore[import-not-found]

    if min(options.ranks) < 2:
        raise ValueError("--ranks: overlap needs 2 or more")
    found = fuzz(pool, options.seed, options.ranks, programs=options.runs, on_failure=print)
    print(f"{found.programs} programs, {found.passes} passes, {len(found.failures)} failures")
    return bool(found.failures)


KINDS = {
    "autograd": fuzz_autograd,
    "calls": fuzz_calls,
    "arguments": fuzz_arguments,
    "models": fuzz_models,
    "overlap": fuzz_overlap,
}


def seeds(options: argparse.Namespace) -> range:
    return range(options.seed, options.seed + options.runs)


def world_sizes(text: str) -> list[int]:
    """Parse world sizes separated by commas."""
    return [command.integer(1, 16)(size.strip()) for size in text.split(",")]


def main() -> int:
    import ranks  # type: ignore[import-not-found]

    parser = command.Parser(__doc__, failed="there was a failure")
    parser.add_argument("kind", choices=KINDS, help="what to generate")
    parser.add_argument("--runs", type=command.integer(1), default=100, help="programs, calls or models (%(default)s)")
    parser.add_argument("--seed", type=command.integer(0), help="of the first run; the next adds 1 (random)")
    parser.add_argument("--ranks", type=world_sizes, help="world sizes, used alternately (2,3,4; arguments: 1,2)")
    parser.add_argument("--modes", help="modes of autograd: plain,vmap,... (all)")
    parser.add_argument(
        "--timeout",
        type=command.number(1, "seconds"),
        default=60.0,
        help="timeout that counts as a hang (%(default)s s)",
    )
    options = parser.parse_args()
    if options.seed is None:
        options.seed = random.SystemRandom().randrange(10**6)
    options.ranks = options.ranks or ([1, 2] if options.kind == "arguments" else [2, 3, 4])
    print(f"seed {options.seed}", flush=True)
    if options.kind in PRELOADED:
        ranks._PRELOAD.append(PRELOADED[options.kind])
    pool = ranks.RankPool()
    try:
        return int(KINDS[options.kind](pool, options))
    finally:
        pool.close()


if __name__ == "__main__":
    command.run(main)
