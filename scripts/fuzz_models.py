"""Random small models of transformers made parallel by random plans, compared with the unsharded ones.

Families, heads, tied weights, exceptions from the plan, sequence parallelism, meshes and what is around the model are
drawn from the seed. Everything that the model gives and every gradient has to be equal, or every rank has to refuse the
plan before anything is changed. A failure prints what was drawn, and the options that replay it.

examples:
  python scripts/fuzz_models.py --models 3 --seed 1 --ranks 2
  python scripts/fuzz_models.py --seconds 600  # long
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

from pynccl.tools import command

os.environ.setdefault("PYNCCL_LIBRARY", "host")
os.environ.setdefault("OMP_NUM_THREADS", "1")
TESTS = Path(__file__).resolve().parent.parent / "tests"
sys.path += [str(TESTS / "support"), str(TESTS / "autograd")]


def numbers(text: str) -> list[int]:
    """Of ranks, with commas between them."""
    return [command.whole(1, 16)(one.strip()) for one in text.split(",")]


def main() -> int:
    import ranks  # type: ignore[import-not-found]
    from fuzz.model_fuzzing import fuzz  # type: ignore[import-not-found]

    parser = command.Parser(__doc__, failed="there was a failure")
    parser.add_argument("--seconds", type=command.number(1, "seconds"), default=60.0, help="how long (default: 60)")
    parser.add_argument("--models", type=command.whole(1), metavar="N", help="so many instead, however long it takes")
    parser.add_argument("--seed", type=command.whole(0), metavar="S", help="of the first; the next has S + 1")
    parser.add_argument(
        "--ranks", type=numbers, default=[2, 3, 4], help="numbers of ranks, taken in turn (default: 2,3,4)"
    )
    parser.add_argument("--refusals", action="store_true", help="print what was refused, and why")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    ranks._PRELOAD.append("transformers")
    pool = ranks.RankPool()
    try:
        seeds = range(seed, seed + (options.models or 10**6))
        found = fuzz(pool, seeds, options.ranks, None if options.models else options.seconds)
    finally:
        pool.close()
    for failure in found.failures:
        print(failure, end="\n\n")
    for text, count in found.refusals.most_common() if options.refusals else ():
        print(f"{count} x {text}")
    ways = found.ways
    print(
        f"{ways.total() + len(found.failures)} models: {ways['equal']} equal to the unsharded ones in "
        f"{found.comparisons} comparisons, {ways['refused']} refused, {ways['failed']} with exceptions that failed in "
        f"the first forward pass on all ranks, {len(found.failures)} failures"
    )
    return 1 if found.failures else 0


if __name__ == "__main__":
    command.run(main)
