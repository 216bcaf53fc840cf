"""`python -m pynccl explain`: a collective and its adjoint, run on a few ranks of this process and drawn."""

from __future__ import annotations

import argparse
import shutil
import sys

from .. import command
from .execute import ranks_of_this_process, run as run_operation
from .moves import Setup
from .operations import CONVENTIONS, COUNTED, NONE, OPERATIONS, example, words_of
from .terminal import drawing, style_of

__all__ = ["EXAMPLES", "FAILED", "configure", "run"]

MOST_RANKS = 8
FAILED = "something failed"
EXAMPLES = """
The numbers are what the collectives gave, on ranks inside this process: no GPU is needed. Colours: on a terminal,
unless NO_COLOR is set.

examples:
  python -m pynccl explain                                  # what there is
  python -m pynccl explain reduce_scatter
  python -m pynccl explain all_gather --grad replicated     # all ranks go on alike with the output
  python -m pynccl explain all_reduce --op avg --ranks 3
  python -m pynccl explain gather --root 2
  python -m pynccl explain all_gather --elements 2,0,3
  python -m pynccl explain reduce_scatter --html page.html  # every operation, to be moved by hand in a browser
"""


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("name", nargs="?", metavar="OPERATION", choices=OPERATIONS, help="such as reduce_scatter; left away: a list")
    add("--ranks", type=command.whole(2, MOST_RANKS), metavar="N", help=f"2 to {MOST_RANKS} (4)")
    add("--op", help="operator of what reduces: sum or avg (sum)")
    add("--grad", choices=CONVENTIONS, help="who goes on with the output: each rank in its own way, or all alike (sum)")
    add("--root", type=command.whole(0), metavar="RANK", help="of those with a root; of send_recv the sender (0)")
    add(
        "--elements",
        type=_sizes,
        metavar="S",
        help="of a block, 1 to 9; or S,S,.. of the block of each rank",
    )
    add("--html", type=command.output_file, metavar="FILE", help="write the page of all operations that moves them")


def run(options: argparse.Namespace) -> int:
    """Print the drawing, write the page. ValueError for options that do not fit together."""
    name = options.name
    if name is None:
        print("python -m pynccl explain OPERATION runs one of these on four ranks and draws it:\n")
        for one, row in OPERATIONS.items():
            print(f"  {one:<17}{words_of(one, row.ops[0], row.grads[0], example(one, 4)).shapes}")
        return command.GOOD
    row, setup = OPERATIONS[name], _setup(options)
    op = _choice("--op", options.op, row.ops, f"{name} reduces nothing")
    grad = _choice("--grad", options.grad, row.grads, f"{name} has one gradient only")
    with ranks_of_this_process(setup.ranks) as comms:
        found = run_operation(comms, name, op, grad, setup)
    print(drawing(found, style_of(sys.stdout, min(max(shutil.get_terminal_size().columns, 80), 120))))
    if options.html:
        from .page import page

        options.html.write_text(page(name, op, grad, setup.ranks, setup.root), encoding="utf-8")
        print(f"\nwrote {options.html}")
    return command.GOOD


def _sizes(text: str) -> tuple[int, ...]:
    sizes = tuple(map(command.whole(0, 9), text.split(",")))
    if not any(sizes) or len(sizes) > MOST_RANKS:
        raise argparse.ArgumentTypeError(f"{text!r}: expected 1 to 9, or up to {MOST_RANKS} such numbers: 2,0,3")
    return sizes


def _setup(options: argparse.Namespace) -> Setup:
    sizes = options.elements or ()
    ranks, root = options.ranks or (len(sizes) if len(sizes) > 1 else 4), options.root or 0
    if len(sizes) > 1 and options.name not in COUNTED:
        raise ValueError(f"--elements: {options.name} has equal blocks, pass one number")
    if len(sizes) not in (0, 1, ranks):
        raise ValueError(f"--elements has {len(sizes)} numbers, expected one, or one for each of {ranks} ranks")
    if options.root is not None and not OPERATIONS[options.name].rooted:
        raise ValueError(f"--root: {options.name} has no root, leave it away")
    if root >= ranks:
        raise ValueError(f"--root {root}: expected a rank in 0..{ranks - 1}")
    if not sizes:
        return example(options.name, ranks, root)
    return Setup(ranks, sizes if len(sizes) > 1 else sizes * ranks, root)


def _choice(option: str, text: str | None, known: tuple[str, ...], none: str) -> str:
    if text is not None and text not in known:
        expected = f"{none}, leave it away" if known == NONE else f"expected {', '.join(known[:-1])} or {known[-1]}"
        raise ValueError(f"{option} {text!r}: {expected}")
    return text or known[0]
