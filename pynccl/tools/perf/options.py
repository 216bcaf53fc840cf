"""Command line of perf: sizes in bytes, data types, operators, and checks of combinations."""

from __future__ import annotations

import argparse
import re

from ...bindings.abi import DataType, RedOp
from ..command import integer, name_in, number, output_file

COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "reduce",
    "all_to_all",
    "gather",
    "scatter",
    "send_recv",
)
REDUCING = ("all_reduce", "reduce_scatter", "reduce")
ROOTED = ("broadcast", "reduce", "gather", "scatter")
# nccl-tests' names of the data types
TYPES: dict[str, DataType] = {
    "int8": DataType.INT8,
    "uint8": DataType.UINT8,
    "int32": DataType.INT32,
    "uint32": DataType.UINT32,
    "int64": DataType.INT64,
    "uint64": DataType.UINT64,
    "half": DataType.FLOAT16,
    "float": DataType.FLOAT32,
    "double": DataType.FLOAT64,
    "bfloat16": DataType.BFLOAT16,
    "f8e4m3": DataType.FLOAT8_E4M3,
    "f8e5m2": DataType.FLOAT8_E5M2,
}
_ALIASES = {"float16": "half", "float32": "float", "float64": "double"}
OPERATORS = tuple(op.name.lower() for op in RedOp)
DEFAULT_END = 32 << 20
FAILED = "wrong results, or a bandwidth below --min-busbw"
EXAMPLES = """
Each rank of a torchrun launch is a rank of the collective; without torchrun there is one rank. Defaults are in
parentheses.

Sizes are in bytes, or with K, M, G, T in powers of 1024. A size is that of the full buffer: the send buffer of
all_reduce, broadcast, reduce and send_recv, the output of all_gather and gather, the input of reduce_scatter,
all_to_all and scatter.

examples:
  torchrun --nproc-per-node=2 -m pynccl perf all_reduce -b 8 -e 1M -f 4
  torchrun --nproc-per-node=2 -m pynccl perf all_gather -e 4M --compare torch
  torchrun --nproc-per-node=2 -m pynccl perf reduce_scatter -d half -e 4M -o max
  python -m pynccl perf broadcast -b 1K -e 1M -f 2 --json perf.json
"""


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "collective",
        type=name_in(COLLECTIVES),
        choices=COLLECTIVES,
        metavar="COLLECTIVE",
        help=f"{', '.join(COLLECTIVES)} (around a ring)",
    )
    add("-b", "--minbytes", type=size, metavar="SIZE", help="first size (32M)")
    add("-e", "--maxbytes", type=size, metavar="SIZE", help="last size (32M, or -b if that is more)")
    add("-f", "--stepfactor", type=integer(2), default=2, metavar="N", help="factor from one size to the next (2)")
    add("-n", "--iters", type=integer(1), default=20, metavar="N", help="timed iterations (20)")
    add("-w", "--warmup_iters", type=integer(0), default=5, metavar="N", help="warm-up iterations (5)")
    add(
        "-c",
        "--check",
        type=integer(0),
        default=1,
        metavar="N",
        help="calls per size whose results are checked; 0: none (1)",
    )
    op = name_in(OPERATORS)
    names = f"{', '.join(TYPES)}; float16, float32, float64 are aliases (float)"
    add("-d", "--datatype", type=_type_name, choices=TYPES, default="float", metavar="TYPE", help=names)
    add("-o", "--op", type=op, choices=OPERATORS, default="sum", metavar="OP", help=f"{', '.join(OPERATORS)} (sum)")
    add(
        "-r",
        "--root",
        type=integer(0),
        default=0,
        metavar="RANK",
        help="root of broadcast, reduce, gather, scatter (0)",
    )
    add(
        "-J",
        "--json",
        type=output_file,
        metavar="FILE",
        help="also write all results and iteration times as JSON",
    )
    add("--compare", choices=["torch"], help="also measure torch.distributed, alternating with pynccl")
    busbw = "exit with 1 if the average bus bandwidth is lower"
    add("--min-busbw", type=number(0, "GB/s"), metavar="GB/s", help=busbw)


def _type_name(text: str) -> str:
    return name_in(TYPES)(_ALIASES.get(text, text))


def problem(options: argparse.Namespace, ranks: int) -> str:
    """Return the error of an invalid combination, equal on all ranks, or "". Fill in the default sizes."""
    if options.minbytes is None:
        options.minbytes = min(DEFAULT_END, options.maxbytes or DEFAULT_END)
    if options.maxbytes is None:
        options.maxbytes = max(DEFAULT_END, options.minbytes)
    if options.maxbytes < options.minbytes:
        return f"-e {options.maxbytes} is less than -b {options.minbytes}; pass sizes from small to large"
    if options.root >= ranks:
        return f"-r {options.root}: expected a rank in 0..{ranks - 1}"
    if options.collective not in REDUCING and options.op != "sum":
        return f"-o {options.op}: {options.collective} has no reduction operator; omit -o"
    return ""


def sizes(first: int, last: int, factor: int) -> list[int]:
    """Return the sizes in bytes from `first` up to `last`."""
    found = [first]
    while found[-1] * factor <= last:
        found.append(found[-1] * factor)
    return found


def size(text: str) -> int:
    """Parse a size in bytes, such as 8, 4K or 1G; the units are powers of 1024."""
    found = re.fullmatch(r"([0-9]+)([KMGT]?)B?", text.upper())
    if not found or not int(found[1]):
        raise argparse.ArgumentTypeError(f"{text!r}: expected bytes, 1 or more, such as 8, 4K, 128M or 1G")
    return int(found[1]) << 10 * " KMGT".index(found[2] or " ")
