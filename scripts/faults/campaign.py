"""Faults at random points of random programs on the host library: is every end right, told, and clean?

A run: 2 to 4 ranks, which are processes, run a random program of collectives, groups, send and recv, splits, plans and
backward passes. Something goes wrong at a random point: see FAULTS in programs.py. Every outcome is one of

    right result       all data is right, as there is no fault or it came too late to matter
    right error        the ranks that failed name the rank that is to blame, and its line if there is one to name
    wrong name         they do not                    no error           nobody said anything
    false alarm        somebody did without reason    late               Ctrl-C took more than a second
    hang, crash, wrong data, left-over process, left-over file

Seeds S, S + 1, ... go through the faults. S is drawn, and printed, unless it is given: a figure that is quoted is of
seeds that nobody has mended against. The folders of runs that went wrong stay in a temporary folder, which is printed.
steps.py and programs.py draw programs, which use values.py; ranks.py and nodes.py run them, judge.py finds the outcome.

examples:
  python scripts/faults/campaign.py --runs 2 --seed 11
  python scripts/faults/campaign.py --replay 7  # that run again, and all that is said
  python scripts/faults/campaign.py --runs 500 --markdown  # long
"""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.ranks import columns, surroundings
from faults.judge import GOOD, OUTCOMES, Verdict, judge
from faults.nodes import Nodes, why_not
from faults.programs import FAULTS, make
from faults.ranks import Server, run

from pynccl import progress
from pynccl.tools import command


def campaign(
    seeds: Iterable[int], folder: Path, jobs: int = 2, only: str = "", report: Callable[[Verdict], None] | None = None
) -> list[Verdict]:
    """Run all seeds, on `jobs` threads, each with its process that forks ranks and its two nodes.

    folder  keeps a folder of each run that went wrong
    only    the fault of all runs; "": each seed has its own
    report  gets each verdict. After an error or Ctrl-C the runs under way are the last

    Without rights to make two nodes all ranks are on one, and the faults that need two are left out.
    """
    without_nodes = why_not()
    if without_nodes:
        print(f"no link-cut and no packet-loss, there are no two nodes: {without_nodes}", file=sys.stderr)
    with contextlib.ExitStack() as stack:
        idle: queue.SimpleQueue[tuple[Server, Nodes | None]] = queue.SimpleQueue()
        for slot in range(jobs):
            server = stack.enter_context(contextlib.closing(Server()))
            nodes = None if without_nodes else stack.enter_context(contextlib.closing(Nodes(slot)))
            idle.put((server, nodes))

        def run_one(seed: int) -> Verdict | None:
            program = make(seed, only)
            if without_nodes:
                if program.fault.kind.nodes:
                    return None
                program.fault.nodes = ()
            server, nodes = idle.get()
            own = folder / f"{seed}-{program.fault.name}"
            shutil.rmtree(own, ignore_errors=True)
            try:
                verdict = judge(program, run(program, own, server, nodes if program.fault.nodes else None))
            finally:
                idle.put((server, nodes))
            if verdict.outcome in GOOD:
                shutil.rmtree(own)
            return verdict

        executor = ThreadPoolExecutor(jobs)
        stack.callback(executor.shutdown, cancel_futures=True)
        verdicts = []
        for done in as_completed([executor.submit(run_one, seed) for seed in seeds]):
            if verdict := done.result():
                verdicts.append(verdict)
                if report:
                    report(verdict)
    return sorted(verdicts, key=lambda verdict: verdict.seed)


def table(verdicts: list[Verdict]) -> str:
    """A row a fault, a column an outcome, in Markdown."""
    lines = [["fault", "runs", *OUTCOMES, "rank named", "line named", "slowest s"]]
    for name in (*FAULTS, "all"):
        mine = [one for one in verdicts if name in (one.fault, "all")]
        if not mine:
            continue
        counts = Counter(one.outcome for one in mine)
        cells = [name, str(len(mine)), *(str(counts[one] or "") for one in OUTCOMES)]
        for named in ([one.named_rank for one in mine], [one.named_line for one in mine]):
            known = [one for one in named if one is not None]
            cells.append(f"{sum(known)} of {len(known)}" if known else "")
        lines.append([*cells, f"{max(one.seconds for one in mine):.1f}"])
    return columns(lines, markdown=True)


def replay(seed: int, only: str, folder: Path) -> list[Verdict]:
    """One run, and all that its ranks say."""
    program = make(seed, only)
    for number, line in enumerate(program.text.splitlines(), 1):
        print(f"{number:4} {line}")
    print(f"\n{program.fault}")
    verdicts = campaign([seed], folder, 1, only)
    for path in sorted(folder.glob("*/rank*.err")):
        print(f"\n--- {path.stem}\n{path.read_text()}")
    print(*verdicts)
    return verdicts


def many(first: int, runs: int, jobs: int, only: str, folder: Path) -> list[Verdict]:
    """All runs, a line for each that went wrong, and the table."""
    began = time.monotonic()
    print(f"seeds {first} to {first + runs - 1}", file=sys.stderr)
    with progress.Bar(runs, "running", "run") as bar:

        def report(verdict: Verdict) -> None:
            if verdict.outcome not in GOOD:
                again = f"--replay {verdict.seed}" + (f" --only {only}" if only else "")
                bar.line(f"{verdict.outcome}: {again} ({verdict.fault})  {verdict.why}", file=sys.stderr)
            bar.step()

        verdicts = campaign(range(first, first + runs), folder, jobs, only, report)
    nodes = sum(one.nodes > 1 for one in verdicts)
    print(table(verdicts))
    print(f"\nSeed {first}, {time.monotonic() - began:.0f} s, {nodes} of the runs on two nodes. {surroundings()}.")
    return verdicts


def main() -> int:
    parser = command.Parser(__doc__, failed="an outcome was none of the first two")
    add = parser.add_argument
    add("--runs", type=command.whole(1), default=100, metavar="N", help="(default: 100)")
    add("--seed", type=command.whole(0), metavar="S", help="of the first run; the next has S + 1 (drawn afresh)")
    add("--jobs", type=command.whole(1, 64), default=2, metavar="J", help="runs at a time (default: 2)")
    add("--only", default="", metavar="FAULT", choices=FAULTS, help=", ".join(FAULTS))
    add("--replay", type=command.whole(0), metavar="SEED", help="one run, with all that its ranks say")
    add("--markdown", action="store_true", help="the table is that of docs/reliability.md, as it is without")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="pynccl-campaign-")).resolve()
    if options.replay is not None:
        verdicts = replay(options.replay, options.only, folder)
    else:
        first = int.from_bytes(os.urandom(3), "big") if options.seed is None else options.seed
        verdicts = many(first, options.runs, options.jobs, options.only, folder)
    if any(folder.iterdir()):
        print(f"the folders of the runs that went wrong are in {folder}", file=sys.stderr)
    else:
        folder.rmdir()
    return 0 if all(one.outcome in GOOD for one in verdicts) else 1


if __name__ == "__main__":
    command.run(main)
