"""`python -m pynccl hang`: which rank is missing, what each one does, and where, of jobs that hang or have ended."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from typing import Any

from ...bindings.errors import NcclInvalidUsage
from ...watch.layout import printable
from ...watch.records import RUNNING, STOPPED, to_json
from ...watch.verdict import judge
from .. import command
from . import jobs, ras, timeline
from .report import Report, unread

WATCH_SECONDS = 2.0
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
    parser.add_argument(
        "dir", nargs="*", metavar="DIR", help="a job's folder, a folder of jobs, files, or saved --json"
    )
    parser.add_argument("--list", action="store_true", help="the jobs that there are: state, age, size, program")
    parser.add_argument("--job", metavar="ID", help="the job, where there are several")
    parser.add_argument("--json", action="store_true", help="print one JSON object: the verdict, and all records")
    parser.add_argument("--calls", type=_positive, default=0, metavar="N", help="also the last N calls of each rank")
    parser.add_argument("--stacks", action="store_true", help="the Python stacks of all ranks")
    parser.add_argument("--all", action="store_true", help="a row for each rank, also of many")
    parser.add_argument("--timeline", metavar="FILE", help="write the last calls as a trace for ui.perfetto.dev")
    parser.add_argument(
        "--watch",
        type=_seconds,
        nargs="?",
        const=WATCH_SECONDS,
        metavar="SECONDS",
        help="look again every SECONDS (%(const)s) while the job lives, without RAS",
    )
    parser.add_argument("--no-ras", action="store_true", help="do not ask NCCL's RAS service")


def run(arguments: argparse.Namespace) -> int:
    """Print what was found. Exit code: 0 nothing is wrong, 1 something is, 2 there was nothing to look at."""
    if arguments.watch is not None and arguments.json:
        return _refused("--watch prints for people: leave --json away, or call it again and again")
    if arguments.list and (arguments.watch is not None or arguments.job or arguments.timeline):
        return _refused("--list says which jobs there are: leave --watch, --job and --timeline away")
    try:
        with contextlib.suppress(KeyboardInterrupt):  # while watching, the way to end it
            if arguments.list:
                return _list(arguments)
            if arguments.watch is not None:
                return _watched(arguments)
            return _look(arguments, ask_ras=not arguments.no_ras)[0]
    except (jobs.NothingFoundError, NcclInvalidUsage) as error:  # the latter: a variable that makes no sense
        return _refused(str(error))
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            raise
        return _refused(f"{error.filename or 'a file'}: {error.strerror or error}")
    return command.INTERRUPTED


def _look(arguments: argparse.Namespace, ask_ras: bool) -> tuple[int, jobs.Job]:
    job, others, problems = jobs.find(arguments.dir, arguments.job)
    running = any(one.state == RUNNING for one in job.processes)
    found = Report(
        job,
        judge(job.processes, patience=PATIENCE if running else 0.0),
        others,
        problems,
        ras.ask() if ask_ras and _lives_here(job) else None,
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
    return (1 if found.verdict.wrong else 0), job


def _list(arguments: argparse.Namespace) -> int:
    found, problems = jobs.read(arguments.dir)
    if arguments.json:
        print(json.dumps({"jobs": jobs.as_json(found), "problems": problems}, indent=1))
    else:
        _print("\n".join([*jobs.listed(found), *unread(problems)]))
    return command.GOOD


def _lives_here(job: jobs.Job) -> bool:
    """If not, the RAS service that listens on this machine would speak of another job."""
    here = os.uname().nodename
    return any(one.host == here and one.state in (RUNNING, STOPPED) for one in job.processes)


def _watched(arguments: argparse.Namespace) -> int:
    """Look again and again at the job of the first look, until none of its processes lives."""
    while True:
        sys.stdout.write("\x1b[H\x1b[2J" if sys.stdout.isatty() else time.strftime("---- %H:%M:%S\n"))
        code, job = _look(arguments, ask_ras=False)
        if not job.living:
            _print("\nnone of its processes lives any more")
            return code
        sys.stdout.flush()
        arguments.job = f"{job.processes[0].job}@{job.processes[0].pid}"
        time.sleep(arguments.watch)


def as_json(found: Report) -> dict[str, Any]:
    """All that the report is made of. The processes are those of `watch.records.to_json`: it can be read again."""
    return {
        "ok": not found.verdict.wrong,
        "job": found.job.name,
        "verdict": found.verdict.to_json(),
        "processes": [to_json(one) for one in found.job.processes],
        "problems": found.problems,
        "other_jobs": [{"job": job.name, "state": jobs.summary(job)} for job in found.others],
        "ras": found.ras and found.ras._asdict(),
    }


def _print(text: str) -> None:
    """Without what a terminal obeys, and also on one that does not know all letters."""
    encoding = sys.stdout.encoding or "utf-8"
    print(printable(text, lines=True).encode(encoding, "backslashreplace").decode(encoding))


def _refused(text: str) -> int:
    first, *rest = printable(text, lines=True).splitlines()
    command.say("\n".join([f"python -m pynccl hang: error: {first}", *("  " + one.strip() for one in rest)]))
    return command.USAGE


def _positive(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number of calls, 1 or more")
    return value


def _seconds(text: str) -> float:
    value = float(text) if text.replace(".", "", 1).isdecimal() else 0.0
    if not 0.1 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r}: expected seconds, 0.1 to 3600")
    return value
