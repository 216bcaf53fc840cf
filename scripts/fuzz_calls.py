"""Random nonsense as arguments of every public call, on all ranks alike: each must be right, or refused clearly.

What came of a call is one of: right (it did what it says), clear (TypeError, ValueError, NotImplementedError or
NcclError, raised by a check, that names the argument or the operation and what was expected); and, which all fail:
unclear (any other error), accepted (nonsense was taken for something), wrong (wrong data), differs (by rank), slow,
broken (the communicator is not usable any more), crash, hang. A failure has the seed that replays it, with --calls 1.

examples:
  python scripts/fuzz_calls.py --calls 20 --ranks 2
  python scripts/fuzz_calls.py --calls 5000 --seed 1  # long
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path

from pynccl import progress
from pynccl.tools import command

os.environ.setdefault("PYNCCL_LIBRARY", "host")
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.append(str(Path(__file__).resolve().parent.parent / "tests" / "support"))


def main() -> int:
    from fuzz.call_fuzzing import fuzz  # type: ignore[import-not-found]
    from fuzz.call_ranks import BAD, GOOD, Record  # type: ignore[import-not-found]
    from ranks import RankPool  # type: ignore[import-not-found]

    parser = command.Parser(__doc__, failed="a call failed")
    parser.add_argument("--calls", type=command.whole(1), default=1000, metavar="N", help="(default: 1000)")
    parser.add_argument(
        "--seed", type=command.whole(0), default=0, metavar="S", help="of the first call; the next has S + 1"
    )
    parser.add_argument("--ranks", type=command.whole(1, 16), default=2, metavar="N", help="(default: 2)")
    parser.add_argument(
        "--examples", type=command.whole(0), default=3, metavar="N", help="of each kind of failure (default: 3)"
    )
    parser.add_argument(
        "--timeout",
        type=command.number(1, "seconds"),
        default=60.0,
        help="seconds after which ranks hang (default: 60)",
    )
    options = parser.parse_args()
    shown: Counter[tuple[str, str]] = Counter()

    bar = progress.Bar(options.calls, "calling", "call")

    def tell(record: Record) -> None:
        place = record.message.rpartition("raised at ")[2] if "raised at " in record.message else record.text[:12]
        shown[record.outcome, place] += 1
        if shown[record.outcome, place] <= options.examples:
            bar.line(f"{record.outcome}: {record.text}   (--seed {record.seed})\n      {record.message}")

    pool = RankPool()
    try:
        seeds = range(options.seed, options.seed + options.calls)
        found = fuzz(pool, seeds, options.ranks, timeout=options.timeout, tell=tell, done=bar.step)
    finally:
        bar.close()
        pool.close()
    for (outcome, place), count in shown.most_common():
        print(f"{count:5d} x {outcome}: {place}")
    print("\noutcome     calls")
    for outcome in (*GOOD, *BAD):
        print(f"{outcome:10s} {found.counts[outcome]:6d}")
    return 1 if found.bad else 0


if __name__ == "__main__":
    command.run(main)
