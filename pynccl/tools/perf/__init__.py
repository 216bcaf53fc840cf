"""`python -m pynccl perf`: measure time and bandwidth of a collective over sizes, in the columns of nccl-tests."""

from __future__ import annotations

import argparse
import os

from ...bootstrap import from_env
from ...comm.communicator import Communicator
from ...progress import Bar
from .. import command
from . import report
from .cases import Case, case
from .measure import connect_torch, disconnect_torch, measure_case
from .options import EXAMPLES, FAILED, configure, problem, sizes

__all__ = ["EXAMPLES", "FAILED", "configure", "run"]


def run(options: argparse.Namespace) -> int:
    """Print the table on rank 0. Return 0 (good), 1 (wrong or too slow) or 2 (bad options), equal on all ranks."""
    launched = "RANK" in os.environ or "WORLD_SIZE" in os.environ
    ranks = os.environ.get("WORLD_SIZE", "1")
    error = problem(options, int(ranks) if ranks.isdecimal() and launched else 1)
    if error:
        command.print_error(f"python -m pynccl perf: error: {error}")
        return command.USAGE
    with from_env() if launched else Communicator.init_all(1)[0] as comm:
        return run_on(comm, options)


def run_on(comm: Communicator, options: argparse.Namespace) -> int:
    """Do the same on an existing communicator. All its ranks pass equal options that `problem` has checked."""
    if not comm.library.is_host:
        import torch

        torch.cuda.set_device(comm.device)
    backend = connect_torch(comm) if options.compare else ""
    results = report.Results(report.head(comm, options, backend))
    _print(comm, [*report.head_lines(results.head), *report.column_lines(bool(backend))])
    rows = _cases(options, comm.size)
    with Bar(len(rows), "measuring", "size", own=comm.rank == 0) as bar:
        for row in rows:
            bar.step(0, f"{row.nbytes} B of {row.type}")
            results.rows.append(measure_case(comm, row, options))
            if comm.rank == 0:
                bar.line(report.row_line(results.rows[-1], bool(backend)))
            bar.step(1, f"{row.nbytes} B of {row.type}")
    if backend:
        disconnect_torch()
    slow = options.min_busbw is not None and results.average < options.min_busbw
    code = command.FAILED if results.wrong or slow else command.SUCCESS
    _print(comm, report.foot_lines(results, options))
    if comm.rank == 0 and options.json:
        options.json.write_text(report.as_json(results, code))
    return code


def _cases(options: argparse.Namespace, ranks: int) -> list[Case]:
    """Return the rows without duplicates: with many ranks, several small sizes round up to one element."""
    steps = sizes(options.minbytes, options.maxbytes, options.stepfactor)
    cases = (case(options.collective, options.datatype, options.op, options.root, ranks, nbytes) for nbytes in steps)
    return list(dict.fromkeys(cases))


def _print(comm: Communicator, lines: list[str]) -> None:
    if comm.rank == 0:
        print("\n".join(lines), flush=True)
