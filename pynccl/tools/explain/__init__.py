"""`python -m pynccl explain`: a collective and its adjoint, run on a few ranks of this process and drawn."""

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
The numbers are what the collectives gave, on ranks inside this process: no GPU is needed.

examples:
  python -m pynccl explain                                  # what there is
  python -m pynccl explain reduce_scatter
  python -m pynccl explain all_gather --grad replicated     # all ranks go on alike with the output
  python -m pynccl explain all_reduce --ranks 3
  python -m pynccl explain reduce_scatter --html page.html  # every operation, to be moved by hand in a browser
"""


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("name", nargs="?", metavar="OPERATION", choices=OPERATIONS, help="such as reduce_scatter; left away: a list")
    add("--ranks", type=command.whole(2, 8), default=4, metavar="N", help="2 to 8 (%(default)s)")
    add(
        "--grad",
        choices=(SUM, REPLICATED),
        help="who goes on with the output: each rank in its own way, or all alike (sum)",
    )
    add("--html", type=command.output_file, metavar="FILE", help="write the page of all operations that moves them")


def run(options: argparse.Namespace) -> int:
    """Print the drawing, write the page. ValueError for options that do not fit together."""
    name = options.name
    if name is None:
        print("python -m pynccl explain OPERATION runs one of these on four ranks and draws it:\n")
        for one, row in OPERATIONS.items():
            print(f"  {one:<17}{row.shapes}")
        return command.GOOD
    grads = OPERATIONS[name].grads
    if options.grad not in (None, *grads):
        raise ValueError(f"--grad {options.grad!r}: {name} has one gradient only, leave it away")
    with ranks_of_this_process(options.ranks) as comms:
        print(drawing(run_operation(comms, name, options.grad or grads[0]), sys.stdout.encoding or "ascii"))
    if options.html:
        from .page import page

        options.html.write_text(page(), encoding="utf-8")
        print(f"\nwrote {options.html}")
    return command.GOOD
