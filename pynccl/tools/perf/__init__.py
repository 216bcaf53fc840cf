"""`python -m pynccl perf`: time and bandwidth of a collective over sizes, in the columns of nccl-tests."""

from __future__ import annotations

import argparse
import os

from ...bindings.library import Library, load
from ...bootstrap import from_env
from ...comm.communicator import Communicator
from ...progress import Bar
from .. import command
from . import beside_torch, report
from .head import head
from .measure import measured
from .operations import Case, case
from .options import EXAMPLES, FAILED, OPERATORS, TYPES, configure, problem, sizes
from .timing import across

__all__ = ["EXAMPLES", "FAILED", "configure", "run"]

_FP8, _FP8_SINCE = ("f8e4m3", "f8e5m2"), (2, 24, 0)  # NCCL has them from this version on


def run(options: argparse.Namespace) -> int:
    """Print the table on rank 0. Exit code, equal on all ranks: 0 good, 1 wrong or too slow, 2 wrong options."""
    launched = "RANK" in os.environ or "WORLD_SIZE" in os.environ
    ranks = os.environ.get("WORLD_SIZE", "1")
    if wrong := problem(options, int(ranks) if ranks.isdecimal() and launched else 1):
        return _refused(wrong)
    if options.graph and load().is_host:
        return _refused("-G needs a GPU: the host library runs on the CPU, which has no CUDA graphs; leave it away")
    with from_env() if launched else Communicator.init_all(1)[0] as comm:
        return run_on(comm, options)


def run_on(comm: Communicator, options: argparse.Namespace) -> int:
    """The same on a communicator that is there: all its ranks call it with equal options, checked by `problem`."""
    if wrong := _unwritable(comm, options):
        return command.USAGE if comm.rank else _refused(wrong)
    if not comm.library.is_host:
        import torch

        torch.cuda.set_device(comm.device)
    backend = beside_torch.connect(comm) if options.compare else ""
    whole = report.Whole(head(comm, options, backend))
    _print(comm, [*report.head_lines(whole.head), *report.column_lines(bool(backend))])
    rows = _cases(options, comm.size, comm.library)
    with Bar(len(rows), "measuring", "size", own=comm.rank == 0) as bar:
        for row in rows:
            bar.note(f"{row.nbytes} B of {row.type}")
            whole.rows.append(measured(comm, row, options, one_clock=whole.head["nodes"] == 1))
            if comm.rank == 0:
                bar.line(report.row_line(whole.rows[-1], bool(backend)))
            bar.step()
    if backend:
        beside_torch.leave()
    slow = options.min_busbw is not None and whole.average < options.min_busbw
    code = command.FAILED if whole.wrong or slow else command.GOOD
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
    operators = OPERATORS if options.op == "all" else [options.op]
    steps = sizes(options.minbytes, options.maxbytes, options.stepbytes, options.stepfactor)
    every = (
        case(options.collective, kind, op, options.root, ranks, nbytes)
        for kind in _types(options, library)
        for op in operators
        for nbytes in steps
    )
    return list(dict.fromkeys(every))


def _types(options: argparse.Namespace, library: Library) -> list[str]:
    """-d all leaves out what this NCCL does not know; asked for by name, it is NCCL's to refuse."""
    if options.datatype != "all":
        return [options.datatype]
    return [name for name in TYPES if library.version >= _FP8_SINCE or name not in _FP8]


def _unwritable(comm: Communicator, options: argparse.Namespace) -> str:
    """What is wrong with the files that rank 0 is to write, said before anything is measured; equal on all ranks."""
    wrong = ""
    if comm.rank == 0:
        files = (("--json", options.json), ("--plot", options.plot))
        found = [f"{option} {why}" for option, file in files if file and (why := command.unwritable(file))]
        found += [why for why in [command.undrawable("--plot", options.plot) if options.plot else ""] if why]
        wrong = found[0] if found else ""
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
