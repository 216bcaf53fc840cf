"""`python -m pynccl hang`: which rank is missing, what each one does, and where, of jobs that hang or have ended."""

from __future__ import annotations

import argparse
import json
import sys

from ...watch.layout import printable
from ...watch.records import RUNNING, to_json
from ...watch.verdict import judge
from .. import command
from . import jobs, report, timeline

PATIENCE = 2.0  # seconds that a rank of a running job may wait for another
FAILED = "something is wrong"
EXAMPLES = """
Without arguments: the newest job of this user on this machine that has living processes, else the newest. Exit code 2,
too, where there was nothing to look at. Several machines: run it on each with --json > NAME.json, or copy the folders,
and pass all of them at once.

examples:
  python -m pynccl hang                         # the newest job
  python -m pynccl hang --list                  # which jobs there are
  python -m pynccl hang --stacks --calls 5      # with the Python stacks, and the last calls of each rank
  python -m pynccl hang --json                  # for programs
  python -m pynccl hang --timeline trace.json   # its last calls, for ui.perfetto.dev
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dir", nargs="*", metavar="DIR", help="folders of records, files, or saved --json")
    parser.add_argument("--list", action="store_true", help="the jobs that there are: state, age, program")
    parser.add_argument("--job", metavar="ID", help="the job, where there are several")
    parser.add_argument("--json", action="store_true", help="print one JSON object: the verdict, and all records")
    parser.add_argument(
        "--calls", type=command.whole(1), default=0, metavar="N", help="also the last N calls of each rank"
    )
    parser.add_argument("--stacks", action="store_true", help="the Python stacks of all ranks")
    parser.add_argument("--all", action="store_true", help="a row for each rank, also of many")
    parser.add_argument("--timeline", metavar="FILE", help="write the last calls as a trace for ui.perfetto.dev")


def run(arguments: argparse.Namespace) -> int:
    """Print what was found. Exit code: 0 nothing is wrong, 1 something is, 2 there was nothing to look at."""
    if arguments.list and (arguments.job or arguments.timeline):
        raise ValueError("--list says which jobs there are: leave --job and --timeline away")
    return _list(arguments) if arguments.list else _look(arguments)


def _look(arguments: argparse.Namespace) -> int:
    job, others, problems = jobs.find(arguments.dir, arguments.job)
    running = any(one.state == RUNNING for one in job.processes)
    verdict = judge(job.processes, patience=PATIENCE if running else 0.0)
    if arguments.timeline:
        timeline.write(arguments.timeline, job.processes)
    if arguments.json:
        found = {
            "ok": not verdict.wrong,
            "job": job.name,
            "verdict": verdict.to_json(),
            "processes": [to_json(one) for one in job.processes],  # which `jobs.read` reads again
            "problems": problems,
            "other_jobs": [jobs.to_json(one) for one in others],
        }
        print(json.dumps(found, indent=1))
    else:
        _print(report.text(job, verdict, others, problems, arguments.calls, arguments.stacks, arguments.all))
        if arguments.timeline:
            _print(f"\nwrote {arguments.timeline}: open it at ui.perfetto.dev")
    return 1 if verdict.wrong else 0


def _list(arguments: argparse.Namespace) -> int:
    found, problems = jobs.read(arguments.dir)
    if arguments.json:
        print(json.dumps({"jobs": [jobs.to_json(one) for one in found], "problems": problems}, indent=1))
    else:
        _print("\n".join([*report.listed(found), *report.unread(problems)]))
    return command.GOOD


def _print(text: str) -> None:
    """Without what a terminal obeys, and also on one that does not know all letters."""
    encoding = sys.stdout.encoding or "utf-8"
    print(printable(text, lines=True).encode(encoding, "backslashreplace").decode(encoding))
