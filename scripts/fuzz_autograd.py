"""Random programs of differentiable collectives, compared with a simulation of all ranks in one process.

Each program is some local operations and collectives (tests/support/fuzz); values and derivatives must be those
that torch finds for the same program written as plain operations on all ranks' tensors. A failure prints the program,
and the options that replay it. A rank that hangs is a failure.

examples:
  python scripts/fuzz_autograd.py --programs 2 --modes plain,vmap --ranks 2
  python scripts/fuzz_autograd.py --programs 1000 --seed 1  # long
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from pynccl.tools import command

os.environ.setdefault("PYNCCL_LIBRARY", "host")
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.append(str(Path(__file__).resolve().parent.parent / "tests" / "support"))


def numbers(text: str) -> list[int]:
    """Of ranks, with commas between them."""
    return [command.whole(1, 16)(one.strip()) for one in text.split(",")]


def main() -> int:
    import ranks  # type: ignore[import-not-found]
    from fuzz.fuzzing import MODES, fuzz  # type: ignore[import-not-found]

    parser = command.Parser(__doc__, failed="there was a failure")
    parser.add_argument(
        "--programs", type=command.whole(1), default=100, metavar="N", help="for each mode (default: 100)"
    )
    parser.add_argument(
        "--seed", type=command.whole(0), default=0, metavar="S", help="of the first program; the next has S + 1"
    )
    parser.add_argument(
        "--ranks", type=numbers, default=[2, 3, 4], help="numbers of ranks, taken in turn (default: 2,3,4)"
    )
    parser.add_argument("--modes", default=",".join(MODES), help=f"of {', '.join(MODES)} (default: all)")
    parser.add_argument(
        "--timeout",
        type=command.number(1, "seconds"),
        default=60.0,
        help="seconds after which ranks hang (default: 60); a hang counts if it does so again",
    )
    options = parser.parse_args()
    modes = options.modes.split(",")
    if unknown := [mode for mode in modes if mode not in MODES]:
        parser.error(f"--modes: {unknown[0]!r} is none, expected some of {', '.join(MODES)}")
    ranks._PRELOAD.append("torch._dynamo")  # once in the fork server, and not in every rank that is started anew
    pool = ranks.RankPool()
    failed = 0
    rows: list[tuple[str, int, int, int, float]] = []
    try:
        for mode in modes:
            start = time.monotonic()
            seeds = range(options.seed, options.seed + options.programs)
            found = fuzz(pool, mode, seeds, options.ranks, timeout=options.timeout)
            for failure in found.failures:
                print(failure, end="\n\n", flush=True)
            failed += len(found.failures)
            rows.append((mode, found.programs, found.comparisons, len(found.failures), time.monotonic() - start))
            name, programs, comparisons, failures, seconds = rows[-1]
            print(
                f"{name}: {programs} programs, {comparisons} comparisons, {failures} failures, {seconds:.1f} s",
                flush=True,
            )
    finally:
        pool.close()
    print("\nmode           programs  comparisons  failures")
    for row in rows:
        print(f"{row[0]:<14} {row[1]:8d}  {row[2]:11d}  {row[3]:8d}")
    return 1 if failed else 0


if __name__ == "__main__":
    command.run(main)
