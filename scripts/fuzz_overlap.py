"""Random programs of overlapped matmuls and layers on ranks, compared with F.linear of the whole in float64.

Random method, shape, type, outputs and inputs changed in place, inference mode and back, gradients of inputs alone,
main_grad, checkpoints, exceptions within a pass, buffers of their own: tests/support/fuzz/overlap_programs.py. The seed
is printed, and for each failure the options that replay it. A rank that hangs or dies is a failure.

examples:
  python scripts/fuzz_overlap.py --seconds 5
  python scripts/fuzz_overlap.py --seed 17 --programs 1 --ranks 3
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

from pynccl.tools import command

os.environ.setdefault("PYNCCL_LIBRARY", "host")
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.append(str(Path(__file__).resolve().parent.parent / "tests" / "support"))


def numbers(text: str) -> list[int]:
    """Of ranks, with commas between them."""
    return [command.whole(2, 16)(one.strip()) for one in text.split(",")]


def main() -> int:
    import ranks  # type: ignore[import-not-found]
    from fuzz.overlap_fuzzing import fuzz  # type: ignore[import-not-found]

    parser = command.Parser(__doc__, failed="there was a failure")
    parser.add_argument(
        "--seconds", type=command.number(1, "seconds"), default=60.0, help="how long (default: 60); no new batch after"
    )
    parser.add_argument("--programs", type=command.whole(1), metavar="N", help="so many, in place of --seconds")
    parser.add_argument("--seed", type=command.whole(0), metavar="S", help="of the first program (default: by chance)")
    parser.add_argument("--ranks", type=numbers, default=[2, 3, 4], help="taken in turn (default: 2,3,4)")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(10**9) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    pool = ranks.RankPool()
    seconds = None if options.programs else options.seconds
    try:
        found = fuzz(
            pool,
            seed,
            options.ranks,
            seconds=seconds,
            programs=options.programs,
            tell=lambda text: print(text, flush=True),
        )
    finally:
        pool.close()
    print(f"{found.programs} programs, {found.passes} passes, {len(found.failures)} failures")
    return 1 if found.failures else 0


if __name__ == "__main__":
    command.run(main)
