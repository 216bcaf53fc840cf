"""`python -m pynccl explain`: a collective and its adjoint, run on a few ranks of this process and drawn."""

from __future__ import annotations

import argparse
import shutil
import sys

from .. import command
from ..command import whole
from .execute import ranks_of_this_process, run as run_operation
from .moves import Setup
from .operations import COUNTS, NONE, OPERATIONS, Operation
from .terminal import drawing, style_of

__all__ = ["EXAMPLES", "FAILED", "configure", "run"]

MOST_RANKS, MOST_ELEMENTS = 8, 9
FAILED = "something failed"
EXAMPLES = """
The numbers are what the collectives gave, on ranks inside this process: no GPU is needed. Colours: on a terminal,
unless NO_COLOR is set.

examples:
  python -m pynccl explain                                  # what there is
  python -m pynccl explain reduce_scatter
  python -m pynccl explain all_gather --grad replicated     # all ranks go on alike with the output
  python -m pynccl explain all_reduce --op max --ranks 3
  python -m pynccl explain gather --root 2
  python -m pynccl explain all_gather_v --counts 2,0,3
  python -m pynccl explain reduce_scatter --html page.html  # every operation, to be moved by hand in a browser
"""


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("name", nargs="?", metavar="OPERATION", help="such as reduce_scatter; left away: a list of all")
    add("--ranks", type=whole(2, MOST_RANKS), metavar="N", help=f"2 to {MOST_RANKS} (4)")
    add("--op", help="operator of what reduces: sum, avg; of all_reduce also max, min, prod, premul")
    add("--grad", help="who goes on with the output how: sum, each rank in its own way; replicated, all alike (sum)")
    add("--root", type=whole(0), metavar="RANK", help="of those with a root; of send_recv the sender (0)")
    add("--elements", type=whole(1, MOST_ELEMENTS), metavar="S", help=f"of a block, 1 to {MOST_ELEMENTS}")
    add("--counts", metavar="C,C,..", help="of the operations that end in _v: elements of each rank")
    add("--html", metavar="FILE", help="write a page on which the elements move, of all operations and 2 to 8 ranks")


class UsageError(ValueError):
    """Options that cannot work; the text is one line."""


def run(options: argparse.Namespace) -> int:
    """Print the drawing, write the page. Exit code: 0 good, 1 failed, 2 wrong options."""
    try:
        if options.name is None:
            return _list(options)
        name = _known(options.name)
        op, grad, setup = _setup(options, name)
        if options.html and (problem := command.unwritable(options.html)):
            raise UsageError(f"--html {problem}")
    except UsageError as error:
        command.say(f"python -m pynccl explain: error: {error}")
        return command.USAGE
    with ranks_of_this_process(setup.ranks) as comms:
        found = run_operation(comms, name, op, grad, setup)
    width = shutil.get_terminal_size((80, 24)).columns
    print(drawing(found, style_of(sys.stdout, max(min(width, 120), 60))))
    if options.html:
        from .page import page

        with open(options.html, "w", encoding="utf-8") as file:
            file.write(page(found))
        print(f"\nwrote {options.html}")
    return command.GOOD


def _list(options: argparse.Namespace) -> int:
    """What there is. UsageError if options came without a name."""
    if given := [option for option, value in vars(options).items() if value is not None]:
        raise UsageError(f"--{given[0]} needs an operation; there are {', '.join(OPERATIONS)}")
    print("python -m pynccl explain OPERATION runs one of these on four ranks and draws it:\n")
    for name, row in OPERATIONS.items():
        print(f"  {name:<17}{row.brief}" + (f"  --op {', '.join(row.ops)}" if row.ops != NONE else ""))
    print("\npython -m pynccl explain --help has options and examples.")
    return command.GOOD


def _known(name: str) -> str:
    """The operation that a name means: reduce-scatter and ReduceScatter are reduce_scatter."""
    bare = {row.replace("_", ""): row for row in OPERATIONS}
    found = bare.get(name.lower().replace("_", "").replace("-", ""))
    if found is None:
        raise UsageError(f"{name!r} is no operation; there are {', '.join(OPERATIONS)}")
    return found


def _setup(options: argparse.Namespace, name: str) -> tuple[str, str, Setup]:
    """Operator, convention and ranks that the options ask for. UsageError if they do not fit."""
    row = OPERATIONS[name]
    counts = _counts(options.counts, name, row)
    ranks, root = options.ranks or len(counts) or 4, options.root or 0
    if counts and len(counts) != ranks:
        raise UsageError(f"--counts {options.counts} has {len(counts)} numbers, expected one for each of {ranks} ranks")
    if options.elements is not None and row.by_counts:
        raise UsageError(f"--elements: {name} has a number for each rank, pass --counts")
    if options.root is not None and not row.rooted:
        raise UsageError(f"--root: {name} has no root, leave it away")
    if root >= ranks:
        raise UsageError(f"--root {root}: expected a rank in 0..{ranks - 1}")
    op = _choice("--op", options.op, row.ops, f"{name} reduces nothing, leave it away")
    grad = _choice("--grad", options.grad, row.grads, f"{name} has one gradient only, leave it away")
    equal = COUNTS[:ranks] if row.by_counts else (options.elements or row.elements,) * ranks
    return op, grad, Setup(ranks, counts or equal, root, row.by_counts)


def _counts(text: str | None, name: str, row: Operation) -> tuple[int, ...]:
    if text is None:
        return ()
    if not row.by_counts:
        other = f"{name}_v" if f"{name}_v" in OPERATIONS else "one that ends in _v"
        raise UsageError(f"--counts: {name} has equal blocks, leave it away or ask for {other}")
    parts = text.split(",")
    found = tuple(int(part) for part in parts if part.isdecimal() and part.isascii() and len(part) < 3)
    good = len(found) == len(parts) and 2 <= len(found) <= MOST_RANKS and any(found)
    if not good or max(found) > MOST_ELEMENTS:
        expected = f"2 to {MOST_RANKS} numbers from 0 to {MOST_ELEMENTS}, not all of them 0, such as 2,0,3"
        raise UsageError(f"--counts {text!r}: expected {expected}")
    return found


def _choice(option: str, text: str | None, known: tuple[str, ...], none: str) -> str:
    if text is None:
        return known[0]
    if known == NONE:
        raise UsageError(f"{option} {text!r}: {none}")
    if text not in known:
        raise UsageError(f"{option} {text!r}: expected {', '.join(known[:-1])} or {known[-1]}")
    return text
