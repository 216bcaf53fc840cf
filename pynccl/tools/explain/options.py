"""What the command line of explain says, and what does not fit together."""

from __future__ import annotations

import argparse
import shutil

from .. import command
from .moves import Setup
from .operations import COUNTS, OPERATIONS, Operation

LEAST_RANKS, MOST_RANKS = 2, 8
MOST_ELEMENTS = 9
_DEFAULT_RANKS = 4
FAILED = "something failed"
EXAMPLES = """
The numbers are what the collectives gave, on ranks inside this process: no GPU is needed. Colours: on a terminal,
unless NO_COLOR is set.

examples:
  python -m pynccl explain                                  # what there is
  python -m pynccl explain reduce_scatter
  python -m pynccl explain all_gather --grad replicated     # all ranks go on alike with the output
  python -m pynccl explain all_reduce --op max --ranks 3
  python -m pynccl explain gather --root 2 --png gather.png
  python -m pynccl explain all_gather_v --counts 2,0,3
  python -m pynccl explain reduce_scatter --html page.html  # every operation, to be moved by hand in a browser
"""


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("name", nargs="?", metavar="OPERATION", help="such as reduce_scatter; left away: a list of all")
    add("--ranks", metavar="N", help=f"{LEAST_RANKS} to {MOST_RANKS} ({_DEFAULT_RANKS})")
    add("--op", help="operator of what reduces: sum, avg; of all_reduce also max, min, prod, premul")
    add("--grad", help="who goes on with the output how: sum, each rank in its own way; replicated, all alike (sum)")
    add("--root", metavar="RANK", help="of those with a root; of send_recv the sender (0)")
    add("--elements", metavar="S", help=f"of a block, 1 to {MOST_ELEMENTS}")
    add("--counts", metavar="C,C,..", help="of the operations that end in _v: elements of each rank")
    add("--png", metavar="FILE", help="draw it, too (matplotlib); .svg and .pdf are understood")
    add("--html", metavar="FILE", help="write a page on which the elements move, of all operations and 2 to 8 ranks")


class UsageError(ValueError):
    """Options that cannot work; the text is one line."""


def known(name: str) -> str:
    """The operation that a name means: reduce-scatter and ReduceScatter are reduce_scatter."""
    bare = {row.replace("_", ""): row for row in OPERATIONS}
    found = bare.get(name.lower().replace("_", "").replace("-", ""))
    if found is None:
        raise UsageError(f"{name!r} is no operation; there are {', '.join(OPERATIONS)}")
    return found


def setup_of(options: argparse.Namespace, name: str) -> tuple[str, str, Setup]:
    """Operator, convention and ranks that the options ask for. UsageError if they do not fit."""
    row = OPERATIONS[name]
    counts = _counts(options.counts, name, row)
    ranks = _whole("--ranks", options.ranks, LEAST_RANKS, MOST_RANKS, len(counts) if counts else _DEFAULT_RANKS)
    if counts and len(counts) != ranks:
        raise UsageError(f"--counts {options.counts} has {len(counts)} numbers, expected one for each of {ranks} ranks")
    if options.elements is not None and row.by_counts:
        raise UsageError(f"--elements: {name} has a number for each rank, pass --counts")
    if options.root is not None and not row.rooted:
        raise UsageError(f"--root: {name} has no root, leave it away")
    elements = _whole("--elements", options.elements, 1, MOST_ELEMENTS, row.elements)
    setup = Setup(
        ranks,
        (counts or COUNTS[:ranks]) if row.by_counts else (elements,) * ranks,
        _whole("--root", options.root, 0, ranks - 1, 0),
        row.by_counts,
    )
    op = _choice("--op", options.op, row.ops, f"{name} reduces nothing, leave it away")
    grad = _choice("--grad", options.grad, row.grads, f"{name} has one gradient only, leave it away")
    return op, grad, setup


def _counts(text: str | None, name: str, row: Operation) -> tuple[int, ...]:
    if text is None:
        return ()
    if not row.by_counts:
        beside = f"{name}_v" if f"{name}_v" in OPERATIONS else "one that ends in _v"
        raise UsageError(f"--counts: {name} has equal blocks, leave it away or ask for {beside}")
    parts = [part.strip() for part in text.split(",")]
    expected = f"2 to {MOST_RANKS} numbers of 0 to {MOST_ELEMENTS}, not all of them 0, such as 2,1,3"
    if not all(part.isdecimal() and part.isascii() and len(part) < 3 for part in parts):
        raise UsageError(f"--counts {text!r}: expected {expected}")
    found = tuple(int(part) for part in parts)
    if not LEAST_RANKS <= len(found) <= MOST_RANKS or max(found) > MOST_ELEMENTS or not any(found):
        raise UsageError(f"--counts {text!r}: expected {expected}")
    return found


def _whole(option: str, text: str | None, least: int, most: int, default: int) -> int:
    if text is None:
        return default
    value = int(text) if text.isdecimal() and text.isascii() and len(text) < 10 else -1
    if not least <= value <= most:
        raise UsageError(f"{option} {text!r}: expected a whole number, {least} to {most}")
    return value


def _choice(option: str, text: str | None, known: tuple[str, ...], none: str) -> str:
    if text is None:
        return known[0]
    if known == ("",):
        raise UsageError(f"{option} {text!r}: {none}")
    if text not in known:
        raise UsageError(f"{option} {text!r}: expected {', '.join(known[:-1])} or {known[-1]}")
    return text


def check_files(options: argparse.Namespace) -> None:
    """UsageError unless what is asked for can be drawn and written."""
    if options.png and (problem := command.undrawable("--png", options.png)):
        raise UsageError(problem)
    for option, file in (("--png", options.png), ("--html", options.html)):
        if file and (problem := command.unwritable(file)):
            raise UsageError(f"{option} {problem}")


def columns() -> int:
    """Of the terminal, or of COLUMNS; 80 where there is none. Not more than reads well."""
    return max(min(shutil.get_terminal_size((80, 24)).columns, 120), 60)
