"""`python -m pynccl hang`: for jobs that hang or have died, which rank is missing and what each rank is doing."""

from __future__ import annotations

import argparse
import json
import sys

from ...watch.layout import printable
from ...watch.records import to_json
from .. import command
from . import jobs, report, timeline

FAILED = "a rank is missing, dead, or made a different call"
UNUSABLE = f"no job was found, or {command.UNUSABLE}"
EXAMPLES = """
Run it in another terminal, on the node of the job, as the same user. It shows a
job that hangs, else the newest one that runs, else the one that ended last. For
several nodes, run it on each with --json > NAME.json, or copy the folders, and
pass all.

examples:
  python -m pynccl hang                         # the job that hangs
  python -m pynccl hang --list                  # all jobs
  python -m pynccl hang --stacks --calls 5      # more of each rank
  python -m pynccl hang --timeline trace.json   # for ui.perfetto.dev
  python -m pynccl hang /tmp/nccl_trace_rank_*  # dumps of torch's own NCCL
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "dir", nargs="*", metavar="DIR", help="folders of records, record files, saved --json output, or dumps of torch"
    )
    parser.add_argument("--list", action="store_true", help="list the jobs: state, age, program")
    parser.add_argument("--job", metavar="ID", help="show this job: its name in the list, or the beginning of it")
    parser.add_argument("--json", action="store_true", help="print one JSON object with the verdict and all records")
    parser.add_argument(
        "--calls", type=command.integer(1), default=0, metavar="N", help="also print the last N calls of each rank"
    )
    parser.add_argument("--stacks", action="store_true", help="print the Python stacks of all ranks")
    parser.add_argument("--all", action="store_true", help="print one row per rank, even with many ranks")
    parser.add_argument("--timeline", metavar="FILE", help="write the last calls as a trace for ui.perfetto.dev")


def run(arguments: argparse.Namespace) -> int:
    """Print the report. Exit code: 0 nothing is wrong, 1 something is wrong, 2 no job was found."""
    if arguments.list and (arguments.job or arguments.timeline):
        raise ValueError("--list lists all jobs: omit --job and --timeline")
    return _list(arguments) if arguments.list else _show_job(arguments)


def _show_job(arguments: argparse.Namespace) -> int:
    job, others, problems = jobs.find(arguments.dir, arguments.job)
    verdict = job.verdict
    if arguments.timeline:
        timeline.write(arguments.timeline, job.processes)
    if arguments.json:
        found = {
            "ok": not verdict.wrong,
            "job": job.name,
            "verdict": verdict.to_json(),
            "processes": [to_json(process) for process in job.processes],  # input of `jobs.read`
            "problems": problems,
            "other_jobs": [jobs.to_json(other) for other in others],
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
        print(json.dumps({"jobs": [jobs.to_json(job) for job in found], "problems": problems}, indent=1))
    else:
        _print("\n".join([*report.listed(found), *report.unread(problems)]))
    return command.SUCCESS


def _print(text: str) -> None:
    """Print text without control characters; escape characters that the terminal's encoding lacks."""
    encoding = sys.stdout.encoding or "utf-8"
    print(printable(text, lines=True).encode(encoding, "backslashreplace").decode(encoding))
