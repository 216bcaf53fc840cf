"""`python -m pynccl perf`: time and bandwidth of a collective over sizes, in the columns of nccl-tests."""

from __future__ import annotations

import argparse
import os
import platform
from typing import Any

from ... import __version__
from ...bindings.library import Library, load
from ...bootstrap import from_env
from ...comm.communicator import Communicator
from ...progress import Bar
from .. import command
from . import beside_torch, report
from .measure import measured
from .operations import Case, case
from .options import EXAMPLES, FAILED, FP8, FP8_SINCE, configure, problem, sizes
from .surroundings import Listening, everybody, transport
from .timing import across

__all__ = ["EXAMPLES", "FAILED", "configure", "run"]

_RULES = {
    "max": "the slowest rank counts (-a 3)",
    "min": "the fastest rank counts (-a 2)",
    "avg": "the average of the ranks (-a 1)",
    "rank0": "rank 0 counts (-a 0)",
}


_BUFFERS = ("of torch's memory", "of torch's memory, registered (-R 1)", "of NCCL's memory, symmetric windows (-R 2)")


def run(arguments: argparse.Namespace) -> int:
    """Print the table on rank 0. Exit code, equal on all ranks: 0 good, 1 wrong or too slow, 2 wrong options."""
    launched = "RANK" in os.environ or "WORLD_SIZE" in os.environ
    ranks = os.environ.get("WORLD_SIZE", "1")
    if wrong := problem(arguments, int(ranks) if ranks.isdecimal() and launched else 1):
        return _refused(wrong)
    library = load()
    if arguments.graph and library.is_host:
        return _refused("-G needs a GPU: the host library runs on the CPU, which has no CUDA graphs; leave it away")
    listening = Listening(library)
    try:
        with from_env() if launched else Communicator.init_all(1)[0] as comm:
            return run_on(comm, arguments, listening)
    finally:
        listening.taken()


def run_on(comm: Communicator, options: argparse.Namespace, listening: Listening) -> int:
    """The same on a communicator that is there: all its ranks call it with equal options, checked by `problem`."""
    if problems := _files(comm, options):
        return command.USAGE if comm.rank else _refused(problems)
    if not comm.library.is_host:
        import torch

        torch.cuda.set_device(comm.device)
    backend = beside_torch.connect(comm) if options.compare else ""
    people = everybody(comm)
    whole = report.Whole(_head(comm, options, people, backend))
    one_clock = whole.head["nodes"] == 1
    _print(comm, [*report.head_lines(whole.head), *report.column_lines(bool(backend))])
    rows = _cases(options, comm.size, comm.library)
    with Bar(len(rows), "measuring", "size", own=comm.rank == 0) as bar:
        for row in rows:
            bar.note(f"{row.nbytes} B of {row.type}")
            found = measured(comm, row, options, one_clock)
            whole.rows.append(found)
            if comm.rank == 0:
                bar.line(report.row_line(found, bool(backend)))
            bar.step()
    if backend:
        beside_torch.leave()
    whole.head["taken"] = listening.taken()
    slow = options.min_busbw is not None and whole.average < options.min_busbw
    code = 1 if whole.wrong or slow else 0
    stats = report.stats_lines(whole.rows) if options.stats else []
    _print(comm, [*stats, *report.foot_lines(whole, options)])
    if comm.rank == 0 and options.json:
        with open(options.json, "w") as file:
            file.write(report.as_json(whole, code))
    if comm.rank == 0 and options.plot:
        report.plot(whole, options.plot)
    return code


def _cases(options: argparse.Namespace, ranks: int, library: Library) -> list[Case]:
    """The rows, each once: small sizes of many ranks come to one element alike."""
    found: dict[Case, None] = {}
    for kind in _types(options, library):
        for op in options.op:
            for nbytes in sizes(options.minbytes, options.maxbytes, options.stepbytes, options.stepfactor):
                found[case(options.collective, kind, op, options.root, ranks, nbytes)] = None
    return list(found)


def _types(options: argparse.Namespace, library: Library) -> list[str]:
    """-d all leaves out what this NCCL does not know; asked for by name, it is NCCL's to refuse."""
    every: list[str] = options.datatype
    return [name for name in every if library.version >= FP8_SINCE or len(every) == 1 or name not in FP8]


def _head(
    comm: Communicator, options: argparse.Namespace, people: list[dict[str, Any]], backend: str
) -> dict[str, Any]:
    import torch

    library: Library = comm.library
    clock = "CUDA events" if not library.is_host else "perf_counter from a moment at which all ranks begin"
    calls = "prepared calls" if options.plan else "plain calls"
    if options.graph:
        calls = f"{options.graph} replays of a CUDA graph of all {options.iters}"
    return {
        "collective": options.collective,
        "library": "host library" if library.is_host else "NCCL",
        "version": ".".join(map(str, library.version)),
        "path": library.path,
        "origin": library.origin,
        "pynccl": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "nodes": len({one["machine"] for one in people}),
        "ranks": people,
        "transport": transport(comm),
        "iterations": options.iters,
        "warm_up": options.warmup_iters,
        "clock": clock,
        "calls": calls,
        "rule": _RULES[options.average],
        "buffers": _BUFFERS[options.local_register],
        "data": f"-c {options.check}: compared with a local reference" if options.check else "not checked (-c 0)",
        "checked": bool(options.check),
        "backend": backend,
        "taken": "",
    }


def _files(comm: Communicator, options: argparse.Namespace) -> str:
    """What is wrong with the files that rank 0 is to write, said before anything is measured; equal on all ranks."""
    wrong = ""
    for option, file in (("--json", options.json), ("--plot", options.plot)):
        if file is not None and comm.rank == 0 and not wrong and (problem := command.unwritable(file)):
            wrong = f"{option} {problem}"
    if options.plot is not None and comm.rank == 0 and not wrong:
        wrong = command.undrawable("--plot", options.plot)
    if not across(comm, [float(bool(wrong))], "max")[0]:
        return ""
    return wrong or "rank 0 cannot write what it was asked for"


def _refused(text: str) -> int:
    """Exit code 2, as from argparse; on all ranks alike, and said once on each machine."""
    command.say(f"python -m pynccl perf: error: {text}")
    return command.USAGE


def _print(comm: Communicator, lines: list[str]) -> None:
    if comm.rank == 0:
        print("\n".join(lines), flush=True)
