"""What the command line of perf says: sizes in bytes, types, operators, and what does not fit together."""

from __future__ import annotations

import argparse

from ...bindings.abi import ELEMENTS, DataType, RedOp
from ..command import whole

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
AGGREGATES = ("rank0", "avg", "min", "max")  # as nccl-tests numbers them
# The types under nccl-tests' names, in which they are printed; those of torch are understood, too.
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
OPERATORS = tuple(op.name.lower() for op in RedOp)
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
FP8, FP8_SINCE = ("f8e4m3", "f8e5m2"), (2, 24, 0)  # NCCL has them from this version on
MOST_SIZES = 10_000
DEFAULT_END = 32 << 20
FAILED = "wrong results, or a bandwidth below --min-busbw"
EXAMPLES = """
Sizes: bytes, or with K, M, G, T for powers of 1024. The size is that of the full buffer: send of all_reduce,
broadcast, reduce and send_recv, the output of all_gather and gather, the input of reduce_scatter, all_to_all, scatter.

examples:
  torchrun --nproc-per-node=2 -m pynccl perf all_reduce -b 8 -e 1M -f 4
  torchrun --nproc-per-node=2 -m pynccl perf all_gather -b 1M -e 4M -f 4 --compare torch --stats
  torchrun --nproc-per-node=2 -m pynccl perf reduce_scatter -b 4M -e 4M -d bfloat16 -o all --min-busbw 0.001
  python -m pynccl perf broadcast -b 1K -e 1M -f 2 --json perf.json --plot perf.png
"""


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("collective", choices=COLLECTIVES, help="what is measured; send_recv goes round a ring")
    add("-b", "--minbytes", type=size, default=None, metavar="SIZE", help="first size (32M)")
    add("-e", "--maxbytes", type=size, default=None, metavar="SIZE", help="last size (32M, or -b if that is more)")
    add("-i", "--stepbytes", type=size, default=None, metavar="SIZE", help="added from one size to the next (1M)")
    add("-f", "--stepfactor", type=_factor, default=None, metavar="N", help="or the factor from one to the next")
    add("-n", "--iters", type=whole(1), default=20, metavar="N", help="iterations that are timed (20)")
    add("-w", "--warmup_iters", type=whole(0), default=5, metavar="N", help="iterations before them (5)")
    add("-c", "--check", type=whole(0), default=1, metavar="N", help="calls checked of each size; 0: none (1)")
    add("-d", "--datatype", type=_types, default=["float"], metavar="TYPE", help=f"{', '.join(TYPES)}, or all (float)")
    add("-o", "--op", type=_operators, default=["sum"], metavar="OP", help=f"{', '.join(OPERATORS)}, or all (sum)")
    add("-r", "--root", type=whole(0), default=0, metavar="RANK", help="of those with a root (0)")
    add(
        "-a", "--average", type=_aggregate, default="max", metavar="0..3", help="across ranks: rank0, avg, min, max (3)"
    )
    add(
        "-R",
        "--local_register",
        type=_registration,
        default=0,
        metavar="0..2",
        help="buffers: 0 torch's, 1 registered, 2 windows (0)",
    )
    add("-g", "--ngpus", type=_one, default=1, metavar="1", help="GPUs a thread, as in nccl-tests: here always 1")
    add("-t", "--nthreads", type=_one, default=1, metavar="1", help="threads a process: here always 1")
    add("-G", "--graph", type=whole(0), default=0, metavar="N", help="all iterations as a CUDA graph, run N times")
    add("-J", "--json", metavar="FILE", help="write everything as JSON, too")
    add("--plan", action="store_true", help="prepared calls (comm.plan) instead of plain ones")
    add("--compare", choices=["torch"], help="the same by torch.distributed, by turns")
    add("--stats", action="store_true", help="also min, median, p99, max and variation of the iterations")
    add("--min-busbw", type=_bandwidth, metavar="GB/s", help="exit code 1 if the average bus bandwidth is below")
    add("--plot", metavar="FILE", help="draw bus bandwidth over size (matplotlib)")


def problem(options: argparse.Namespace, ranks: int) -> str:
    """What does not fit together, found on every rank alike; "" if all is well. Fills in what was left open."""
    if options.stepbytes is not None and options.stepfactor is not None:
        return f"-i {options.stepbytes} and -f {options.stepfactor} are two ways to step: pass one"
    if options.minbytes is None:
        options.minbytes = min(DEFAULT_END, options.maxbytes or DEFAULT_END)
    if options.maxbytes is None:
        options.maxbytes = max(DEFAULT_END, options.minbytes)
    if options.maxbytes < options.minbytes:
        return f"-e {options.maxbytes} is less than -b {options.minbytes}: pass sizes from small to large"
    if options.stepfactor is None and options.stepbytes is None:
        options.stepbytes = 1 << 20
    if options.stepbytes and (options.maxbytes - options.minbytes) // options.stepbytes >= MOST_SIZES:
        return f"these are more than {MOST_SIZES:,} sizes: pass a larger -i, or -f 2"
    if options.root >= ranks:
        return f"-r {options.root}: expected a rank in 0..{ranks - 1}"
    if options.collective not in REDUCING and options.op != ["sum"]:
        return f"-o: {options.collective} reduces nothing: leave it away"
    if options.graph and options.compare:
        return "-G and --compare: torch.distributed is not captured here: pass one of them"
    return ""


def sizes(first: int, last: int, step: int | None, factor: int | None) -> list[int]:
    """Bytes, from `first` to `last` by addition or multiplication."""
    found, nbytes = [], first
    while nbytes <= last:
        found.append(nbytes)
        nbytes = nbytes * factor if factor else nbytes + (step or 1)
    return found


def size(text: str) -> int:
    """Bytes: 8, 4K, 1.5M, 1G; powers of 1024."""
    number = text.strip().upper().removesuffix("B")
    unit = number[-1:] if number[-1:] in UNITS else ""
    number = number[: len(number) - len(unit)]
    if not number.replace(".", "", 1).isdecimal() or not number.isascii():
        raise argparse.ArgumentTypeError(f"{text!r}: expected bytes, such as 8, 4K, 128M or 1G")
    value = float(number) * UNITS[unit] if "." in number else int(number) * UNITS[unit]
    if value < 1 or value != int(value):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number of bytes, 1 or more")
    return int(value)


def _one(text: str) -> int:
    if text != "1":
        raise argparse.ArgumentTypeError(f"{text!r}: a process has one GPU here; pass torchrun --nproc-per-node=N")
    return 1


def _registration(text: str) -> int:
    if text not in ("0", "1", "2"):
        raise argparse.ArgumentTypeError(f"{text!r}: expected 0 (none), 1 (registered) or 2 (symmetric windows)")
    return int(text)


def _factor(text: str) -> int:
    value = whole(1)(text)
    if value < 2:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a factor of 2 or more; -i SIZE steps by addition")
    return value


def _types(text: str) -> list[str]:
    if text == "all":
        return list(TYPES)
    named = {element.name: name for name, dtype in TYPES.items() for element in ELEMENTS if element.dtype == dtype}
    found = text if text in TYPES else named.get(text.removeprefix("torch."))
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r}: expected one of {', '.join(TYPES)}, all")
    return [found]


def _operators(text: str) -> list[str]:
    if text != "all" and text not in OPERATORS:
        raise argparse.ArgumentTypeError(f"{text!r}: expected one of {', '.join(OPERATORS)}, all")
    return list(OPERATORS) if text == "all" else [text]


def _aggregate(text: str) -> str:
    numbered = dict(zip("0123", AGGREGATES, strict=True))
    found = numbered.get(text, text)
    if found not in AGGREGATES:
        raise argparse.ArgumentTypeError(f"{text!r}: expected 0 (rank0), 1 (avg), 2 (min) or 3 (max)")
    return found


def _bandwidth(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: expected GB/s, a number of 0 or more")
    return value
