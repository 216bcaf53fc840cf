"""Inject faults at random points of random programs on the host library, and check how every run ends.

Each run starts 2 to 4 rank processes. They execute a random program of collectives, groups, send and recv, splits,
plans and backward passes. A fault occurs at a random point; --only lists the faults. The outcome of a run is one of

    right result       all data is correct: there is no fault, or it came too late to matter
    right error        every rank that fails names the faulty rank, and its source line if known
    wrong name         some rank that fails names another rank, or none
    no error           no rank reports the fault
    false alarm        an error without a fault
    late               Ctrl-C took more than a second
    hang, crash, wrong data, left-over process, left-over file

Seeds S, S + 1, ... cycle through the faults. By default, S is random and printed: published figures then use seeds that
no fix was written for. The folders of failed runs stay in a temporary folder, which is printed. steps.py and
programs.py generate the programs, which use values.py; ranks.py and nodes.py run them; judge.py finds the outcome.

examples:
  python scripts/faults/campaign.py --runs 2 --seed 11
  python scripts/faults/campaign.py --replay 7  # repeat that run and print the output of its ranks
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
from typing import TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.ranks import columns, surroundings
from faults.judge import GOOD, OUTCOMES, Verdict, judge
from faults.nodes import Nodes, unavailable_reason
from faults.programs import FAULTS, make
from faults.ranks import Server, run

from pynccl import progress
from pynccl.tools import command

T = TypeVar("T")
V = TypeVar("V")


def on_servers(
    items: Iterable[T],
    at_once: int,
    run_one: Callable[[T, Server, Nodes | None], V | None],
    report: Callable[[V], None] | None = None,
) -> list[V]:
    """Return what run_one(item, server, nodes) returned for each item, but for None. Each of `at_once` threads has its
    own rank server and its own two nodes, None without the permission to create them.

    After an error or Ctrl-C, runs in progress complete and no further run starts."""
    without_nodes = bool(unavailable_reason())
    with contextlib.ExitStack() as stack:
        idle: queue.SimpleQueue[tuple[Server, Nodes | None]] = queue.SimpleQueue()
        for slot in range(at_once):
            server = stack.enter_context(contextlib.closing(Server()))
            nodes = None if without_nodes else stack.enter_context(contextlib.closing(Nodes(slot)))
            idle.put((server, nodes))

        def run(item: T) -> V | None:
            server, nodes = idle.get()
            try:
                return run_one(item, server, nodes)
            finally:
                idle.put((server, nodes))

        executor = ThreadPoolExecutor(at_once)
        stack.callback(executor.shutdown, cancel_futures=True)
        found = []
        for done in as_completed([executor.submit(run, item) for item in items]):
            if (value := done.result()) is not None:
                found.append(value)
                if report:
                    report(value)
    return found


def campaign(
    seeds: Iterable[int], folder: Path, jobs: int = 2, only: str = "", report: Callable[[Verdict], None] | None = None
) -> list[Verdict]:
    """Run all seeds on `jobs` threads.

    folder  keeps a folder of each run that failed
    only    the fault of all runs; "": each seed determines its own
    report  is called with each verdict

    Without the permission to create two nodes, all ranks run on one, and faults that need two nodes are skipped.
    """
    if reason := unavailable_reason():
        print(f"skipping link-cut and packet-loss, cannot create two nodes: {reason}", file=sys.stderr)

    def run_one(seed: int, server: Server, nodes: Nodes | None) -> Verdict | None:
        program = make(seed, only)
        if nodes is None:
            if program.fault.kind.nodes:
                return None
            program.fault.nodes = ()
        run_folder = folder / f"{seed}-{program.fault.name}"
        shutil.rmtree(run_folder, ignore_errors=True)
        verdict = judge(program, run(program, run_folder, server, nodes if program.fault.nodes else None))
        if verdict.outcome in GOOD:
            shutil.rmtree(run_folder)
        return verdict

    return sorted(on_servers(seeds, jobs, run_one, report), key=lambda verdict: verdict.seed)


def table(verdicts: list[Verdict]) -> str:
    """Return a Markdown table with one row per fault and one column per outcome."""
    lines = [["fault", "runs", *OUTCOMES, "rank named", "line named", "slowest s"]]
    for name in (*FAULTS, "all"):
        rows = [verdict for verdict in verdicts if name in (verdict.fault, "all")]
        if not rows:
            continue
        counts = Counter(verdict.outcome for verdict in rows)
        cells = [name, str(len(rows)), *(str(counts[outcome] or "") for outcome in OUTCOMES)]
        for named in ([verdict.named_rank for verdict in rows], [verdict.named_line for verdict in rows]):
            known = [value for value in named if value is not None]
            cells.append(f"{sum(known)} of {len(known)}" if known else "")
        lines.append([*cells, f"{max(verdict.seconds for verdict in rows):.1f}"])
    return columns(lines, markdown=True)


def replay(seed: int, only: str, folder: Path) -> list[Verdict]:
    """Repeat one run and print the output of its ranks."""
    program = make(seed, only)
    for number, line in enumerate(program.text.splitlines(), 1):
        print(f"{number:4} {line}")
    print(f"\n{program.fault}")
    verdicts = campaign([seed], folder, 1, only)
    for path in sorted(folder.glob("*/rank*.err")):
        print(f"\n--- {path.stem}\n{path.read_text()}")
    print(*verdicts)
    return verdicts


def run_all(first: int, runs: int, jobs: int, only: str, folder: Path) -> list[Verdict]:
    """Run all seeds. Print one line per failed run, then the table."""
    began = time.monotonic()
    print(f"seeds {first} to {first + runs - 1}", file=sys.stderr)
    with progress.Bar(runs, "running", "run") as bar:

        def report(verdict: Verdict) -> None:
            if verdict.outcome not in GOOD:
                option = f"--replay {verdict.seed}" + (f" --only {only}" if only else "")
                bar.line(f"{verdict.outcome}: {option} ({verdict.fault})  {verdict.why}", file=sys.stderr)
            bar.step()

        verdicts = campaign(range(first, first + runs), folder, jobs, only, report)
    nodes = sum(verdict.nodes > 1 for verdict in verdicts)
    print(table(verdicts))
    print(f"\nSeed {first}, {time.monotonic() - began:.0f} s, {nodes} of the runs on two nodes. {surroundings()}.")
    return verdicts


def main() -> int:
    parser = command.Parser(__doc__, failed="an outcome was neither a right result nor a right error")
    add = parser.add_argument
    add("--runs", type=command.integer(1), default=100, metavar="N", help="number of runs (default: 100)")
    add(
        "--seed",
        type=command.integer(0),
        metavar="S",
        help="seed of the first run, then S + 1, ... (default: random)",
    )
    add("--jobs", type=command.integer(1, 64), default=2, metavar="J", help="runs in parallel (default: 2)")
    add("--only", default="", metavar="FAULT", choices=FAULTS, help="inject only this fault: " + ", ".join(FAULTS))
    add("--replay", type=command.integer(0), metavar="SEED", help="repeat one run and print the output of its ranks")
    add("--markdown", action="store_true", help="print the table as Markdown (always on)")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="pynccl-campaign-")).resolve()
    if options.replay is not None:
        verdicts = replay(options.replay, options.only, folder)
    else:
        first = int.from_bytes(os.urandom(3), "big") if options.seed is None else options.seed
        verdicts = run_all(first, options.runs, options.jobs, options.only, folder)
    if any(folder.iterdir()):
        print(f"the folders of the failed runs are in {folder}", file=sys.stderr)
    else:
        folder.rmdir()
    return 0 if all(verdict.outcome in GOOD for verdict in verdicts) else 1


if __name__ == "__main__":
    command.run(main)
