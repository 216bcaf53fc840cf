"""`python -m pynccl explain`: run a collective and its adjoint on a few ranks inside this process and draw them."""

from __future__ import annotations

import argparse
import sys

from .. import command
from .execute import ranks_of_this_process, run as run_operation
from .operations import OPERATIONS, REPLICATED, SUM
from .terminal import drawing

__all__ = ["EXAMPLES", "FAILED", "configure", "run"]

FAILED = "something failed"
EXAMPLES = """
The numbers are computed by the collectives, on ranks inside this process; no GPU is needed. The adjoint is the
gradient: how gradients of the output flow back to the inputs.

examples:
  python -m pynccl explain                                  # list them
  python -m pynccl explain reduce_scatter
  python -m pynccl explain all_gather --grad replicated
  python -m pynccl explain all_reduce --ranks 3
  python -m pynccl explain reduce_scatter --html page.html  # for a browser
"""


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    kind = command.name_in(OPERATIONS)
    listing = "such as reduce_scatter; omit it to list all"
    add("name", nargs="?", type=kind, metavar="OPERATION", choices=OPERATIONS, help=listing)
    add("--ranks", type=command.integer(2, 8), default=4, metavar="N", help="number of ranks, 2 to 8 (%(default)s)")
    add(
        "--grad",
        choices=(SUM, REPLICATED),
        help="of all_reduce, all_gather and broadcast. sum (default): each rank does different work with the output; "
        "replicated: all do the same",
    )
    add("--html", type=command.output_file, metavar="FILE", help="also write an interactive page of all operations")


def run(options: argparse.Namespace) -> int:
    """Print the drawing and write the page. Raises ValueError if the operation does not take --grad."""
    name = options.name
    if name is None:
        print("python -m pynccl explain OPERATION runs one of these on four ranks and draws it:\n")
        for operation, row in OPERATIONS.items():
            print(f"  {operation:<17}{row.shapes}")
        return command.SUCCESS
    grads = OPERATIONS[name].grads
    if options.grad not in (None, *grads):
        raise ValueError(f"--grad {options.grad!r}: {name} has only one gradient; omit --grad")
    with ranks_of_this_process(options.ranks) as comms:
        print(drawing(run_operation(comms, name, options.grad or grads[0]), sys.stdout.encoding or "ascii"))
    if options.html:
        from .page import page

        options.html.write_text(page(), encoding="utf-8")
        print(f"\nwrote {options.html}")
    return command.SUCCESS
