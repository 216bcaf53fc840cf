"""`python -m pynccl hang`: which rank is missing, what each one does, and where, of jobs that hang or have ended."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from ...watch.layout import printable
from ...watch.records import RUNNING, to_json
from ...watch.verdict import judge
from .. import command
from . import jobs, timeline
from .report import Report, unread

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
    found = Report(
        job,
        judge(job.processes, patience=PATIENCE if running else 0.0),
        others,
        problems,
        calls=arguments.calls,
        stacks=arguments.stacks,
        all_apart=arguments.all,
    )
    if arguments.timeline:
        timeline.write(arguments.timeline, job.processes)
    if arguments.json:
        print(json.dumps(as_json(found), indent=1))
    else:
        _print(found.text())
        if arguments.timeline:
            _print(f"\nwrote {arguments.timeline}: open it at ui.perfetto.dev")
    return 1 if found.verdict.wrong else 0


def _list(arguments: argparse.Namespace) -> int:
    found, problems = jobs.read(arguments.dir)
    if arguments.json:
        print(json.dumps({"jobs": jobs.as_json(found), "problems": problems}, indent=1))
    else:
        _print("\n".join([*jobs.listed(found), *unread(problems)]))
    return command.GOOD


def as_json(found: Report) -> dict[str, Any]:
    """All that the report is made of. The processes are those of `watch.records.to_json`: it can be read again."""
    return {
        "ok": not found.verdict.wrong,
        "job": found.job.name,
        "verdict": found.verdict.to_json(),
        "processes": [to_json(one) for one in found.job.processes],
        "problems": found.problems,
        "other_jobs": [{"job": job.name, "state": jobs.summary(job)} for job in found.others],
    }


def _print(text: str) -> None:
    """Without what a terminal obeys, and also on one that does not know all letters."""
    encoding = sys.stdout.encoding or "utf-8"
    print(printable(text, lines=True).encode(encoding, "backslashreplace").decode(encoding))
