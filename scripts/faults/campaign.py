"""Faults at random points of random programs on the host library: is every end right, told, and clean?

A run: 2 to 4 ranks, which are processes, run a random program of collectives, groups, send and recv, splits, plans and
backward passes. Something goes wrong at a random point: see FAULTS in programs.py. Every outcome is one of

    right result       all data is right, as there is no fault or it came too late to matter
    right error        the ranks that failed name the rank that is to blame, and its line if there is one to name
    wrong name         they do not                    no error           nobody said anything
    false alarm        somebody did without reason    late               Ctrl-C took more than a second
    hang, crash, wrong data, left-over process, left-over file

Seeds S, S + 1, ... go through the faults. S is drawn, and printed, unless it is given: a figure that is quoted is of
seeds that nobody has mended against. The folders of runs that went wrong stay in --keep. steps.py and programs.py draw
the programs, ranks.py and values.py run in a rank, run.py and nodes.py make a run, judge.py finds its outcome.

examples:
  python scripts/faults/campaign.py --runs 2 --seed 11
  python scripts/faults/campaign.py --replay 7  # that run again, and all that is said
  python scripts/faults/campaign.py --runs 500 --json out/faults.json --markdown  # long
"""

from __future__ import annotations

import argparse
import contextlib
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
from faults.programs import FAULTS, Program, make
from faults.run import Server, run

from pynccl import progress
from pynccl.tools import command

ENDED_WELL = (*GOOD, "skipped")


class Campaign:
    """Runs on several threads, each with its process that forks ranks, and its two nodes.

    watch          PYNCCL_WATCH of the ranks
    only           the fault of all runs; "": each seed has its own
    without_nodes  why there can be no two nodes here; "" if there can be
    """

    def __init__(self, folder: Path, watch: str = "on", only: str = "") -> None:
        self.folder, self.watch, self.only = folder, watch, only
        self.without_nodes = why_not()

    def of(self, seeds: Iterable[int], jobs: int, report: Callable[[Verdict], None]) -> list[Verdict]:
        """Run all seeds; `report` gets each verdict. After an error or Ctrl-C the runs under way are the last."""
        with contextlib.ExitStack() as stack:
            idle: queue.SimpleQueue[tuple[Server, Nodes | None]] = queue.SimpleQueue()
            for slot in range(jobs):
                server = stack.enter_context(contextlib.closing(Server()))
                nodes = None if self.without_nodes else stack.enter_context(contextlib.closing(Nodes(slot)))
                idle.put((server, nodes))

            def run_one(seed: int) -> Verdict:
                server, nodes = idle.get()
                try:
                    return self._one(make(seed, self.only), server, nodes)
                finally:
                    idle.put((server, nodes))

            executor = ThreadPoolExecutor(jobs)
            stack.callback(executor.shutdown, cancel_futures=True)
            verdicts = []
            for done in as_completed([executor.submit(run_one, seed) for seed in seeds]):
                verdicts.append(done.result())
                report(verdicts[-1])
        return sorted(verdicts, key=lambda verdict: verdict.seed)

    def _one(self, program: Program, server: Server, nodes: Nodes | None) -> Verdict:
        fault = program.fault
        if self.without_nodes:
            if fault.kind.nodes:
                return Verdict(program.seed, fault.name, "skipped", self.without_nodes)
            fault.nodes = ()
        folder = self.folder / f"{program.seed}-{fault.name}"
        shutil.rmtree(folder, ignore_errors=True)
        verdict = judge(program, run(program, folder, server, nodes if fault.nodes else None, self.watch))
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
    ran = [one for one in verdicts if one.outcome != "skipped"]
    for name in (*FAULTS, "all"):
        mine = [one for one in ran if name in (one.fault, "all")]
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


def replay(seed: int, campaign: Campaign) -> int:
    """One run, and all that its ranks say."""
    program = make(seed, campaign.only)
    for number, line in enumerate(program.text.splitlines(), 1):
        print(f"{number:4} {line}")
    print(f"\n{program.fault}")
    kept = campaign.folder / f"{seed}-{program.fault.name}"
    (verdict,) = campaign.of([seed], 1, lambda verdict: None)
    for path in sorted(kept.glob("rank*.err")):
        print(f"\n--- {path.stem}\n{path.read_text()}")
    print(verdict)
    return 0 if verdict.outcome in ENDED_WELL else 1


def many(options: argparse.Namespace, campaign: Campaign) -> int:
    began, seeds = time.monotonic(), range(options.seed, options.seed + options.runs)
    print(f"seeds {seeds[0]} to {seeds[-1]}", file=sys.stderr)
    if campaign.without_nodes:
        print(
            f"link-cut and packet-loss are skipped, there are no two nodes: {campaign.without_nodes}", file=sys.stderr
        )
    with progress.Bar(options.runs, "running", "run") as bar:

        def report(verdict: Verdict) -> None:
            if verdict.outcome not in ENDED_WELL:
                again = f"--replay {verdict.seed}" + (f" --only {options.only}" if options.only else "")
                bar.line(f"{verdict.outcome}: {again} ({verdict.fault})  {verdict.why}", file=sys.stderr)
            bar.step()

        verdicts = campaign.of(seeds, options.jobs, report)
    print(table(verdicts))
    print(f"\n{footer(verdicts, options, time.monotonic() - began)}")
    if options.json:
        options.json.write_text(json.dumps([dataclasses.asdict(one) for one in verdicts], indent=1))
    if any(campaign.folder.iterdir()):
        print(f"the folders of the runs that went wrong are in {campaign.folder}", file=sys.stderr)
    else:
        campaign.folder.rmdir()
    return 0 if all(one.outcome in ENDED_WELL for one in verdicts) else 1


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
    if options.seed is None:
        options.seed = int.from_bytes(os.urandom(3), "big")
    folder = options.keep or Path(tempfile.mkdtemp(prefix="pynccl-campaign-"))
    campaign = Campaign(folder.resolve(), options.watch, options.only)
    return many(options, campaign) if options.replay is None else replay(options.replay, campaign)


if __name__ == "__main__":
    command.run(main)
