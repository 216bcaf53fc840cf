"""Faults at random points of random programs on the host library: is every end right, told, and clean?

A run: 2 to 4 ranks, which are processes, run a random program of collectives, groups, send and recv, splits, plans and
backward passes. Something goes wrong at a random point: see FAULTS in programs.py. Every outcome is one of

    right result       all data is right, as there is no fault or it came too late to matter
    right error        the ranks that failed name the rank that is to blame, and its line if there is one to name
    wrong name         they do not                    no error           nobody said anything
    false alarm        somebody did without reason    late               Ctrl-C took more than a second
    hang, crash, wrong data, left-over process, left-over file

Seeds S, S + 1, ... take the faults in turn. S is drawn afresh, and printed, unless it is given: a figure that is quoted
is of seeds that nobody has mended against. The folders of runs that went wrong stay in --keep. Beside this file lie
steps.py and programs.py (the programs), ranks.py and values.py (what runs in a rank),
run.py and nodes.py (a run), judge.py (its outcome).

examples:
  python scripts/faults/campaign.py --runs 2 --seed 11
  python scripts/faults/campaign.py --replay 7  # that run again, and all that is said
  python scripts/faults/campaign.py --runs 500 --json out/faults.json --markdown  # long
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import queue
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from faults.judge import GOOD, OUTCOMES, Verdict, judge
from faults.nodes import Nodes, why_not
from faults.programs import FAULTS, NODES, Program, make
from faults.run import Server, run

from pynccl import progress
from pynccl.tools import command


class Worker:
    """What one run at a time needs: the process that forks ranks, and two nodes once a run asks for them."""

    def __init__(self, slot: int) -> None:
        self.slot, self.server = slot, Server()
        self._nodes: Nodes | None = None

    def nodes(self) -> Nodes:
        if self._nodes is None:
            self._nodes = Nodes(self.slot)
        return self._nodes

    def close(self) -> None:
        if self._nodes:
            self._nodes.close()
        self.server.close()


class Campaign:
    """Runs on several workers.

    watch          PYNCCL_WATCH of the ranks
    only           the fault of all runs; "": each seed has its own
    without_nodes  why there can be no two nodes here; "" if there can be
    """

    def __init__(self, folder: Path, watch: str = "on", only: str = "") -> None:
        self.folder, self.watch, self.only = folder, watch, only
        self.without_nodes = why_not()

    def of(self, seeds: Iterable[int], jobs: int, tell: Callable[[Verdict], None]) -> list[Verdict]:
        """Run all seeds; `tell` hears of each as it ends. After an error or Ctrl-C the runs under way are the last."""
        idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        workers = [Worker(slot) for slot in range(jobs)]
        for worker in workers:
            idle.put(worker)

        def run_one(seed: int) -> Verdict:
            worker = idle.get()
            try:
                return self._one(make(seed, self.only), worker)
            finally:
                idle.put(worker)

        verdicts: list[Verdict] = []
        executor = ThreadPoolExecutor(jobs)
        try:
            for done in as_completed([executor.submit(run_one, seed) for seed in seeds]):
                verdicts.append(done.result())
                tell(verdicts[-1])
        finally:
            executor.shutdown(cancel_futures=True)
            for worker in workers:
                worker.close()
        return sorted(verdicts, key=lambda verdict: verdict.seed)

    def _one(self, program: Program, worker: Worker) -> Verdict:
        seed, fault = program.seed, program.fault
        if self.without_nodes:
            if fault.name in NODES:
                return Verdict(seed, fault.name, "skipped", self.without_nodes)
            fault.nodes = ()
        folder = self.folder / f"{seed}-{fault.name}"
        shutil.rmtree(folder, ignore_errors=True)
        nodes = worker.nodes() if fault.nodes else None
        verdict = judge(program, run(program, folder, worker.server, nodes, self.watch))
        if verdict.outcome in GOOD:
            shutil.rmtree(folder)
        else:
            (folder / "verdict.json").write_text(json.dumps(dataclasses.asdict(verdict), indent=1))
        return verdict


def table(verdicts: list[Verdict]) -> str:
    """A row a fault, a column an outcome, in Markdown."""
    columns = [one for one in OUTCOMES if one != "skipped"]
    head = ["fault", "runs", *columns, "rank named", "line named", "slowest s"]
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    for name in (*FAULTS, "all"):
        mine = [one for one in verdicts if name in (one.fault, "all") and one.outcome != "skipped"]
        if not mine:
            continue
        counts = Counter(one.outcome for one in mine)
        cells = [name, str(len(mine)), *(str(counts[one]) if counts[one] else "" for one in columns)]
        cells += [_share([one.named_rank for one in mine]), _share([one.named_line for one in mine])]
        lines.append("| " + " | ".join([*cells, f"{max(one.seconds for one in mine):.1f}"]) + " |")
    return "\n".join(lines)


def _share(named: list[bool | None]) -> str:
    known = [one for one in named if one is not None]
    return f"{sum(known)} of {len(known)}" if known else ""


def footer(verdicts: list[Verdict], options: argparse.Namespace, seconds: float) -> str:
    """Where, when and how the table was made."""
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    cpu = next((line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")), "")
    nodes = sum(one.nodes > 1 for one in verdicts)
    given = {"runs": len(verdicts), "seed": verdicts[0].seed, "watch": options.watch, "only": options.only}
    words = " ".join(f"--{name} {value}" for name, value in given.items() if value not in ("", "on"))
    return (
        f"`python scripts/faults/campaign.py {words} --markdown` on {time.strftime('%Y-%m-%d')}, {seconds:.0f} s: "
        f"{nodes} of the runs on two nodes; "
        f"{os.cpu_count()} cores of {cpu or platform.machine()}, Python {platform.python_version()}, "
        f"torch {version('torch')}."
    )


def replay(seed: int, options: argparse.Namespace, folder: Path) -> int:
    """One run, and all that its ranks say."""
    campaign = Campaign(folder, options.watch, options.only)
    program = make(seed, options.only)
    for number, line in enumerate(program.text.splitlines(), 1):
        print(f"{number:4} {line}")
    print(f"\n{program.fault}")
    place = folder / f"{seed}-{program.fault.name}"
    (verdict,) = campaign.of([seed], 1, lambda verdict: None)
    for rank in range(program.size if place.exists() else 0):
        print(f"\n--- rank {rank}\n{(place / f'rank{rank}.err').read_text()}")
    print(verdict)
    return 0 if verdict.outcome in (*GOOD, "skipped") else 1


def main() -> int:
    parser = command.Parser(__doc__, failed="an outcome was none of the first two")
    parser.add_argument("--runs", type=command.whole(1), default=100, metavar="N", help="(default: 100)")
    parser.add_argument(
        "--seed",
        type=command.whole(0),
        metavar="S",
        help="of the first run; the next has S + 1 (default: drawn afresh)",
    )
    parser.add_argument("--jobs", type=command.whole(1, 64), default=2, metavar="J", help="runs at a time (default: 2)")
    parser.add_argument("--only", default="", metavar="FAULT", choices=FAULTS, help=", ".join(FAULTS))
    parser.add_argument("--watch", default="on", choices=("off", "on"), help="PYNCCL_WATCH of the ranks")
    parser.add_argument("--replay", type=command.whole(0), metavar="SEED", help="one run, with all that its ranks say")
    parser.add_argument(
        "--keep", type=command.output_folder, metavar="DIR", help="where the folders of runs that went wrong stay"
    )
    parser.add_argument(
        "--markdown", action="store_true", help="only the table of docs/reliability.md on standard output"
    )
    parser.add_argument("--json", type=command.output_file, metavar="FILE", help="where to write all verdicts")
    options = parser.parse_args()
    folder = options.keep or Path(tempfile.mkdtemp(prefix="pynccl-campaign-"))
    folder = folder.resolve()
    if options.seed is None:
        options.seed = int.from_bytes(os.urandom(3), "big")
    if options.replay is not None:
        return replay(options.replay, options, folder)
    return many(options, folder)


def many(options: argparse.Namespace, folder: Path) -> int:
    began = time.monotonic()
    print(f"seeds {options.seed} to {options.seed + options.runs - 1}", file=sys.stderr)
    campaign = Campaign(folder, options.watch, options.only)
    if campaign.without_nodes:
        print(f"{', '.join(NODES)} are skipped, there are no two nodes: {campaign.without_nodes}", file=sys.stderr)

    with progress.Bar(options.runs, "running", "run") as bar:

        def tell(verdict: Verdict) -> None:
            if verdict.outcome not in (*GOOD, "skipped"):
                only = f" --only {options.only}" if options.only else ""
                replay = f"--replay {verdict.seed}{only} ({verdict.fault})"
                bar.line(f"{verdict.outcome}: {replay}  {verdict.why}", file=sys.stderr)
            bar.step()

        verdicts = campaign.of(range(options.seed, options.seed + options.runs), options.jobs, tell)
    print(table(verdicts))
    print(f"\n{footer(verdicts, options, time.monotonic() - began)}")
    if any(folder.iterdir()):
        print(f"the folders of the runs that went wrong are in {folder}", file=sys.stderr)
    if options.json:
        options.json.write_text(json.dumps([dataclasses.asdict(one) for one in verdicts], indent=1))
    if not any(folder.iterdir()):
        folder.rmdir()
    return 0 if all(one.outcome in (*GOOD, "skipped") for one in verdicts) else 1


if __name__ == "__main__":
    command.run(main)
