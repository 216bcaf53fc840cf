"""Kill, stop and end ranks of elastic jobs at random points, and check how the others go on.

Each run is a training job of 2 to 6 ranks on the host library (elastic_job.py): over shared memory, over sockets, or on
two nodes. It loses ranks at random points: in a collective, in commit, while saving, while the others meet after an
earlier death. The outcome of a run is one of

    right              who was left has finished the job; the state equals, bit for bit, that of a single process that
                       is told who was a member in which step; all ranks agreed after each step
    lost for no fault  a rank is out that had no fault, and was not cut off from the store by the end of a link
    wrong name         the verdict does not name a rank that is lost
    stale write        a rank of an earlier generation moved its checkpoint into place after one of a later
    disagreement       ranks have committed different states, or a survivor has lost a step that it had committed
    hang, crash, wrong data, left-over process, left-over file

The second table says how long it took from a death to the first sum of those who were left, for ranks that were blocked
with the dead one and for others; "restart" is the same with torchrun --max-restarts.

examples:
  python scripts/faults/elastic.py --runs 3 --seed 4
  python scripts/faults/elastic.py --replay 7  # repeat that run and print what its ranks wrote
  python scripts/faults/elastic.py --runs 300 --markdown  # long
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.ranks import columns, surroundings
from faults import elastic_job
from faults.campaign import on_servers
from faults.elastic_job import Job, reference
from faults.judge import crashes
from faults.nodes import Nodes
from faults.programs import Fault, Program
from faults.ranks import RunResult, Server, run

from pynccl import progress
from pynccl.tools import command

KINDS = ("none", "kill", "os-exit", "exception", "exit", "stop", "impatient", "cut")
OUTCOMES = (
    *("right", "lost for no fault", "wrong name", "stale write", "disagreement"),
    *("hang", "crash", "wrong data", "left-over process", "left-over file"),
)
DEADLINE = 75.0  # seconds: a stop, and three times survivors, agree and sync_state
STARTS_SECONDS = 90.0  # for processes that all import torch, on a busy machine
STATUS = {"kill": -9, "os-exit": 3, "exception": 1, "exit": 0}


@dataclass
class Verdict:
    """The verdict on one run. seconds: from a death to the first sum, by where the rank was."""

    seed: int
    job: Job
    outcome: str = "right"
    why: str = ""
    seconds: dict[str, list[float]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        kinds = dict.fromkeys(fault.kind for fault in self.job.faults)
        return "none" if not kinds else "several" if len(self.job.faults) > 1 else next(iter(kinds))


def draw(seed: int, only: str = "", launcher: str = "") -> Job:
    """Return the job of this seed.   only, launcher: instead of those that it would draw"""
    rng = random.Random(seed)
    size, steps = rng.randint(2, 6), rng.randint(6, 12)
    launcher = launcher or rng.choices(("fork", "starter", "agents"), (20, 2, 1))[0]
    transport = rng.choice(("auto", "sockets", "nodes") if launcher == "fork" else ("auto", "sockets"))
    size = min(size, 3) if launcher == "agents" else size
    extras = [each for each in ("overlap", "plan", "chain", "groups", "save") if rng.random() < 0.5]
    possible = [place for place, extra in elastic_job.STEP_PLACES.items() if extra in ("", *extras)]
    several = rng.random() < 0.4
    victims = rng.sample(range(size), rng.randint(1, size - 1) if several else 1)
    faults = []
    for number, rank in enumerate(victims):
        kind = only or rng.choice(KINDS[1:-1] if number or rng.random() < 0.95 else KINDS[:1])
        place, visit = rng.choice(possible), rng.randint(1, steps - 1)
        if number and rng.random() < 0.6:  # while the first loss is handled
            place, visit = rng.choice(elastic_job.MEETING_PLACES), rng.randint(1, number)
        place = "commit" if kind == "impatient" else place
        visit = rng.randint(1, 2) if place in ("between", "save") else visit
        delay = rng.choice((0.0, 0.0, 0.002, 0.01, 0.03, 0.3)) if kind in ("kill", "stop", "os-exit") else 0.0
        delay = rng.choice((0.0, 0.1, 0.3, 0.6, 1.0)) if place == "survivors" and delay else delay
        pause = rng.choice((0.5, 2.0, 6.0, 12.0)) if kind == "stop" else 0.0
        if kind != "none":
            faults.append(elastic_job.Fault(rank, kind, place, visit, delay, pause))
    if only == "cut" or (not only and transport == "nodes" and rng.random() < 0.15):
        launcher, transport = "fork", "nodes"
        faults = [elastic_job.Fault(victims[0], "cut", rng.choice(possible), rng.randint(1, steps - 1))]
    elif launcher == "fork" and rng.random() < 0.1:
        faults.append(elastic_job.Fault(size, "stop", "store", 1, rng.uniform(0.5, 3.0), 3.0))
    separate, watch, destroy = transport == "nodes" and rng.random() < 0.7, rng.random() < 0.8, rng.random() < 0.5
    return Job(seed, size, steps, launcher, transport, separate, watch, destroy, extras, faults)


def execute(job: Job, folder: Path, server: Server, nodes: Nodes | None) -> RunResult:
    """Run a job, continue its stopped ranks, and end torchrun's agents, which otherwise wait for each other."""
    job.env = {"PYNCCL_WATCH": "on" if job.watch else "off"}
    if job.transport == "sockets":
        job.env["PYNCCL_HOST_TRANSPORT"] = "sockets"
    sides = tuple(tuple(range(side, job.size, 2)) for side in range(2))
    sides = ((*sides[0], job.size), sides[1])  # the last one serves the store
    processes = job.size + 1 if job.launcher in ("fork", "agents") else 1
    name = "link-cut" if any(fault.kind == "cut" for fault in job.faults) else "none"
    program = Program(job.seed, processes, "environment", Fault(name, nodes=sides if nodes else ()), job.text())

    def meanwhile() -> None:
        for path in folder.glob("stop-*"):
            with contextlib.suppress(ValueError, ProcessLookupError):
                pid, pause = path.read_text().split()
                if time.time() - path.stat().st_mtime > float(pause):
                    os.kill(int(pid), signal.SIGCONT)
                    path.unlink()
        if job.launcher == "agents" and elastic_job.ended(str(folder), "log-*", job.size):
            for path in folder.glob("agent-*"):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(path.read_text().split()[0]), signal.SIGKILL)

    return run(program, folder, server, nodes, DEADLINE + (job.launcher != "fork") * STARTS_SECONDS, meanwhile)


# -------------------------------------------------------------------------------------------------------- the judgement


def judge(job: Job, folder: Path, ended: RunResult) -> Verdict:
    """Return the worst outcome that applies to a run."""
    logs = [_log(folder / f"log-{rank}") for rank in range(job.size)]
    verdict = Verdict(job.seed, job)
    checks: list[tuple[str, Callable[[], str]]] = [
        ("hang", lambda: f"{ended.hung} were still running" if ended.hung else ""),
        ("wrong data", lambda: next((x for r in ended.ranks for x in r.err.splitlines() if "WRONG DATA" in x), "")),
        ("crash", lambda: _crash(job, logs, ended)),
        ("disagreement", lambda: _disagreement(job, logs)),
        ("stale write", lambda: _stale(logs)),
        ("lost for no fault", lambda: _innocent(job, logs)),
        ("wrong name", lambda: _names(job, logs)),
        ("left-over process", lambda: ", ".join(ended.processes)),
        ("left-over file", lambda: ", ".join(_files(job, ended)[:5])),
    ]
    if job.launcher == "restart":  # which is only timed
        missing = [rank for rank, log in enumerate(logs) if not _of(log, "end")]
        checks = [*checks[:2], ("crash", lambda: f"ranks {missing} did not finish" if missing else "")]
    for outcome, check in checks:
        if why := check():
            verdict.outcome, verdict.why = outcome, why
            break
    verdict.seconds = _seconds(job, logs)
    return verdict


def _files(job: Job, ended: RunResult) -> list[str]:
    """Return unexpected files. torch leaves folders; other launchers do not say which ranks ended uncleanly."""
    return [x for x in ended.files if not x.startswith("tmp/torch") and (job.launcher == "fork" or "watch/" not in x)]


def _log(path: Path) -> list[dict[str, Any]]:
    return [json.loads(x) for x in path.read_text().splitlines() if x.startswith("{")] if path.exists() else []


def _of(log: list[dict[str, Any]], *events: str) -> list[dict[str, Any]]:
    return [line for line in log if line["event"] in events]


def _struck(log: list[dict[str, Any]]) -> set[str]:
    return {line["kind"] for line in _of(log, "fault")}


def _crash(job: Job, logs: list[list[dict[str, Any]]], ended: RunResult) -> str:
    for process in ended.ranks:
        if found := crashes(process.err):
            return f"rank {process.number}: {found}"
    for rank, log in enumerate(logs):
        if not _of(log, "end", "out") and not _struck(log) & {*STATUS}:
            return f"rank {rank} ended without a fault: {[line.get('text', '') for line in log[-1:]]}"
        if job.launcher != "fork":
            continue
        status = ended.ranks[rank].status
        usual = {0} if _of(log, "end") else {elastic_job.OUT} if _of(log, "out") else set()
        if status not in usual | {STATUS[kind] for kind in _struck(log) if kind in STATUS}:
            return f"rank {rank} exited with {status}"
    return ""


def _disagreement(job: Job, logs: list[list[dict[str, Any]]]) -> str:
    """Compare what the ranks have committed with each other and with one process."""
    ends = [(rank, _of(log, "end")[0]) for rank, log in enumerate(logs) if _of(log, "end")]
    if not ends:
        return "nobody finished"
    histories = {json.dumps(end["history"]): rank for rank, end in ends}
    if len(histories) > 1:
        return f"ranks {list(histories.values())} finished with different histories: {list(histories)}"
    chain = [(row[0], [i for i, has in enumerate(row[1:]) if has]) for row in ends[0][1]["history"]]
    if len(chain) != job.steps or any(generation < 0 for generation, _ in chain):
        return f"steps are missing: {chain}"
    states = reference(job, chain)
    if wrong := [rank for rank, end in ends if end["state"] != states[-1]]:
        return f"the state of ranks {wrong} is not that of one process"
    anew = max((line["at"] for log in logs for line in _of(log, "anew")), default=0.0)
    for rank, log in enumerate(logs):
        steps = [line for line in _of(log, "step") if line["at"] > anew]
        for line in steps:
            own = line["generation"], line["members"]
            if own == chain[line["step"]]:
                if line["state"] != states[line["step"]]:
                    return f"the state of rank {rank} after step {line['step']} is not that of one process"
            elif _of(log, "end") or line is not steps[-1]:
                return f"rank {rank} committed step {line['step']} in {own}, but the others in {chain[line['step']]}"
            elif line["state"] != reference(job, [*chain[: line["step"]], own])[-1]:
                return f"the state of rank {rank} after its last step {line['step']} is wrong"
        for line in _of(log, "synced"):
            if line["at"] > anew and line["step"] and line["state"] != states[line["step"] - 1] and _of(log, "end"):
                return f"the state of rank {rank} after sync_state at step {line['step']} is wrong"
    return ""


def _stale(logs: list[list[dict[str, Any]]]) -> str:
    saves = sorted(
        (line["moving"], line["generation"], rank) for rank, x in enumerate(logs) for line in _of(x, "saved")
    )
    for (_, first, one), (_, second, other) in itertools.pairwise(saves):
        if second < first:
            return f"rank {other} of generation {second} saved after rank {one} of generation {first}"
    return ""


def _innocent(job: Job, logs: list[list[dict[str, Any]]]) -> str:
    """Return which rank that had no fault is out, or that the others have gone on without; or who met for no loss."""
    kinds = set[str]().union(*map(_struck, logs))
    struck = {rank for rank, log in enumerate(logs) if _struck(log) - {"impatient", "cut"}}
    if "cut" in kinds:
        struck |= {*range(1, job.size, 2)}  # those on the node without the store
    for rank, log in enumerate(logs):
        before = set(range(job.size))
        for line in _of(log, "first", "out"):
            members = before - {rank} if line["event"] == "out" else {*line["members"]}
            if lost := before - members - struck:
                return f"rank {rank}: {line['event']} without ranks {sorted(lost)}: {line.get('text', '')}"
            if members == before and not kinds & {"impatient", "stop"} and all(x.kind != "stop" for x in job.faults):
                return f"rank {rank}: generation {line['generation']} has the members of the one before"
            before = members
    return ""


def _names(job: Job, logs: list[list[dict[str, Any]]]) -> str:
    """Return whom a verdict does not name. One that waits no longer for a slow exit does not know the exception."""
    for rank, log in enumerate(logs):
        before, verdict = set(range(job.size)), ""
        for line in _of(log, "survivors", "first"):
            verdict += line.get("verdict", "")
            if line["event"] == "survivors":
                continue
            for lost in before - {*line["members"]}:
                raised = job.watch and job.transport != "nodes" and _struck(logs[lost]) == {"exception"}
                known = "ValueError" in verdict or f"rank {lost} has not come" in verdict
                if f"rank {lost}" not in verdict or (raised and not known):
                    return f"rank {rank}: the verdict does not say how rank {lost} was lost: {verdict[:400]!r}"
            before, verdict = {*line["members"]}, ""
    return ""


def _seconds(job: Job, logs: list[list[dict[str, Any]]]) -> dict[str, list[float]]:
    """Return the times from the only kill to the first sum without the dead rank."""
    found: dict[str, list[float]] = {}
    faults = [(rank, line) for rank, log in enumerate(logs) for line in _of(log, "fault")]
    if len(faults) != 1 or faults[0][1]["kind"] not in ("kill", "os-exit"):
        return found
    dead, fault = faults[0]
    for rank, log in enumerate(logs):
        sums = [line["at"] for line in _of(log, "first") if line["at"] > fault["at"]]
        if not sums or (rank == dead and job.launcher != "restart"):
            continue
        errors = [line for line in _of(log, "error") if fault["at"] < line["at"] < sums[0]]
        where = "with it" if any(dead in line["peers"] for line in errors[:1]) else "elsewhere"
        where += ", on two machines" if job.separate else ""
        found.setdefault("restart" if job.launcher == "restart" else where, []).append(sums[0] - fault["at"])
    return found


# --------------------------------------------------------------------------------------------------------- the campaign


def campaign(
    jobs: Iterable[Job], folder: Path, at_once: int = 2, report: Callable[[Verdict], None] | None = None
) -> list[Verdict]:
    """Run all jobs, `at_once` at a time. `folder` keeps a folder of each run that failed."""

    def run_one(job: Job, server: Server, nodes: Nodes | None) -> Verdict:
        own = folder / f"{job.seed}-{job.launcher}"
        verdict = judge(job, own, execute(job, own, server, nodes if job.transport == "nodes" else None))
        if verdict.outcome == "right":
            shutil.rmtree(own)
        return verdict

    return on_servers(jobs, at_once, run_one, report)


def tables(verdicts: list[Verdict], markdown: bool) -> str:
    lines = [["fault", "runs", *OUTCOMES]]
    for name in (*KINDS, "several", "all"):
        if rows := [verdict for verdict in verdicts if name in (verdict.name, "all")]:
            counts = Counter(verdict.outcome for verdict in rows)
            lines.append([name, str(len(rows)), *(str(counts[outcome] or "") for outcome in OUTCOMES)])
    times = [["from a death to the first sum", "ranks", "median s", "slowest s"]]
    for where in dict.fromkeys(where for verdict in verdicts for where in verdict.seconds):
        found = [value for verdict in verdicts for value in verdict.seconds.get(where, [])]
        times.append([where, str(len(found)), f"{statistics.median(found):.2f}", f"{max(found):.2f}"])
    return f"{columns(lines, markdown)}\n\n{columns(times, markdown)}"


def main() -> int:
    parser = command.Parser(__doc__, failed="an outcome was not right")
    add = parser.add_argument
    add("--runs", type=command.integer(1), default=60, metavar="N", help="number of runs (default: 60)")
    add("--seed", type=command.integer(0), metavar="S", help="of the first run, then S + 1, ... (default: random)")
    add("--jobs", type=command.integer(1, 64), default=2, metavar="J", help="runs in parallel (default: 2)")
    add("--only", default="", metavar="KIND", choices=KINDS, help="only this fault: " + ", ".join(KINDS))
    add("--launcher", default="", choices=("fork", "starter", "agents", "restart"), help="start all ranks this way")
    add("--replay", type=command.integer(0), metavar="SEED", help="repeat one run and print what its ranks wrote")
    add("--markdown", action="store_true", help="print the tables as Markdown")
    options = parser.parse_args()
    first = int.from_bytes(os.urandom(3), "big") if options.seed is None else options.seed
    seeds = range(first, first + options.runs) if options.replay is None else [options.replay]
    folder = Path(tempfile.mkdtemp(prefix="pynccl-elastic-")).resolve()
    print(f"seeds {seeds[0]} to {seeds[-1]}", file=sys.stderr)
    jobs = [draw(seed, options.only, options.launcher) for seed in seeds]
    with progress.Bar(len(jobs), "running", "run") as bar:

        def report(verdict: Verdict) -> None:
            if verdict.outcome != "right" or options.replay is not None:
                bar.line(f"{verdict.outcome}: --replay {verdict.seed}: {verdict.why}\n  {verdict.job}", file=sys.stderr)
            bar.step()

        verdicts = campaign(jobs, folder, min(options.jobs, len(jobs)), report)
    print(tables(verdicts, options.markdown), f"\n\nSeeds {seeds[0]} to {seeds[-1]}. {surroundings()}.")
    for path in sorted(folder.glob("*/*")) if options.replay is not None else ():
        if path.name.startswith("log-") or path.suffix == ".err":
            print(f"\n--- {path.name}\n{path.read_text()}")
    if any(folder.iterdir()):
        print(f"the folders of the failed runs are in {folder}", file=sys.stderr)
    else:
        folder.rmdir()
    return 0 if all(verdict.outcome == "right" for verdict in verdicts) else 1


if __name__ == "__main__":
    command.run(main)
