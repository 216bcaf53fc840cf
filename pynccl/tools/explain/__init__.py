"""`python -m pynccl explain`: a collective and its adjoint, run on a few ranks of this process and drawn."""

from __future__ import annotations

import argparse
import sys

from .. import command
from .execute import ranks_of_this_process
from .execute import run as run_operation
from .operations import NONE, OPERATIONS
from .options import EXAMPLES, FAILED, UsageError, check_files, columns, configure, known, setup_of
from .terminal import drawing, style_of
from .words import BRIEF

__all__ = ["EXAMPLES", "FAILED", "configure", "run"]


def run(arguments: argparse.Namespace) -> int:
    """Print the drawing, write the files that were asked for. Exit code: 0 good, 1 failed, 2 wrong options."""
    try:
        if arguments.name is None:
            return _list(arguments)
        name = known(arguments.name)
        op, grad, setup = setup_of(arguments, name)
        check_files(arguments)
    except UsageError as error:
        command.say(f"python -m pynccl explain: error: {error}")
        return command.USAGE
    with ranks_of_this_process(setup.ranks) as comms:
        found = run_operation(comms, name, op, grad, setup)
    print(drawing(found, style_of(sys.stdout, columns())))
    if arguments.png:
        from .picture import draw

        draw(found, arguments.png)
        print(f"\nwrote {arguments.png}")
    if arguments.html:
        from .page import page

        with open(arguments.html, "w", encoding="utf-8") as file:
            file.write(page(found))
        print(f"\nwrote {arguments.html}")
    return command.GOOD


def _list(arguments: argparse.Namespace) -> int:
    """What there is. UsageError if options came without a name."""
    given = [option for option, value in vars(arguments).items() if value is not None]
    if given:
        raise UsageError(f"--{given[0]} needs an operation; there are {', '.join(OPERATIONS)}")
    print("python -m pynccl explain OPERATION runs one of these on four ranks and draws it:\n")
    for name, row in OPERATIONS.items():
        operators = f"  --op {', '.join(row.ops)}" if row.ops != NONE else ""
        print(f"  {name:<17}{BRIEF[name]}{operators}")
    print("\npython -m pynccl explain --help has options and examples.")
    return 0
