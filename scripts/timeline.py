"""Draw when a layer's pass computes and when it communicates: on one stream, and overlapped.

Two ranks communicate over a simulated link, on which communication takes as long as the matmuls; the overlapped pass
uses four slices. Each pass runs --rounds times, alternating between the two schedules. The picture shows rank 0 in the
round of median length. The times, serial and overlapped, are the medians of that rank. The efficiency is their
difference / min(T_comm, T_mm), where T_comm and T_mm are the times that the serial pass spends on communication and
matmuls. Exposed communication is hatched.

With --device cuda there is no link: two ranks communicate over what connects their GPUs, or share one and use a socket
(under scripts/gpu/under_mps.py, else they take turns). Without matplotlib there, write the times to a .json file with
--out, and draw it elsewhere with --load.

To trace a full program for ui.perfetto.dev, use ad.trace.

examples:
  python scripts/timeline.py --pattern row_backward --tokens 64 --rounds 1 --out out/small.svg
  python scripts/timeline.py  # long
  python scripts/gpu/under_mps.py python scripts/timeline.py --device cuda --hidden 32768 --tokens 16384  # long: GPU
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from bench.ranks import link_for, linked, measure, run_ranks, surroundings, undisturbed

import pynccl_autograd as ad
from pynccl import Communicator, progress
from pynccl.tools import command
from pynccl_autograd import OverlapConfig
from pynccl_autograd.overlap import lanes
from pynccl_autograd.overlap.report import Interval, Operation, recording

RANKS, CHUNKS, WIDTH = 2, 4, 512
MATMUL_SECONDS = 0.04  # duration of one forward matmul if --tokens is not given
# Pass -> function, whether to run its backward pass, how often it moves a tensor [tokens, width]
PASSES = {
    "all_gather_matmul": ("all_gather_matmul", False, 1),
    "matmul_reduce_scatter": ("matmul_reduce_scatter", False, 1),
    "matmul_all_reduce": ("matmul_all_reduce", False, 2),
    "column_backward": ("all_gather_matmul", True, 1),
    "row_backward": ("matmul_reduce_scatter", True, 1),
    "copy_backward": ("copy_matmul", True, 2),
}
TITLES = {
    "all_gather_matmul": "column-parallel forward pass",
    "matmul_reduce_scatter": "row-parallel forward pass",
    "matmul_all_reduce": "row-parallel forward pass with all-reduce",
    "column_backward": "column-parallel backward pass",
    "row_backward": "row-parallel backward pass",
    "copy_backward": "column-parallel backward pass with all-reduce",
}
DEFAULT = ("all_gather_matmul", "column_backward", "matmul_reduce_scatter", "row_backward")
Step = Callable[[], Any]


class Comparison(NamedTuple):
    """The rounds of a pass on one rank, serial and overlapped. Picklable."""

    name: str
    serial: list[Operation]
    overlapped: list[Operation]

    def medians(self) -> tuple[Operation, Operation]:
        serial, overlapped = (sorted(rounds, key=lambda one: one.wall) for rounds in (self.serial, self.overlapped))
        return serial[(len(serial) - 1) // 2], overlapped[(len(overlapped) - 1) // 2]

    def times(self) -> tuple[float, float, float]:
        """Return (time on one stream, time overlapped, efficiency)."""
        serial, overlapped = (
            statistics.median(one.wall for one in rounds) for rounds in (self.serial, self.overlapped)
        )
        t_comm, t_mm = (statistics.median(getattr(one, lane) for one in self.serial) for lane in ("comm", "compute"))
        return serial, overlapped, (serial - overlapped) / min(t_comm, t_mm)


def run(rank: int, options: argparse.Namespace) -> list[Comparison]:
    """Measure the passes on one rank."""
    if options.tokens is None:
        options.tokens = max(1, round(MATMUL_SECONDS / matmul_seconds(512, options) * 16)) * 16 * RANKS
    return [compare(name, options) for name in progress.over(options.pattern, "measuring", "pass", own=rank == 0)]


def matmul_seconds(tokens: int, options: argparse.Namespace) -> float:
    """Measure the forward matmul. All other matmuls of a pass have the same size."""
    x, w = (torch.randn(size, WIDTH, device=options.device) for size in (tokens, options.hidden // RANKS))
    return undisturbed(lambda: x @ w.t())


def compare(name: str, options: argparse.Namespace) -> Comparison:
    """Record the rounds of a pass, serial and overlapped, without the first round, which warms up."""
    function, backward, moves = PASSES[name]
    link, device = "", torch.empty(0, device=options.device).device
    if options.device == "cpu":
        steps = moves * (RANKS - 1)
        nbytes = steps / RANKS * options.tokens * WIDTH * torch.float32.itemsize
        link = link_for(matmul_seconds(options.tokens, options) * (1 + backward), steps, nbytes)
    with linked(link, device) as comm:
        serial = step_of(function, backward, options, comm, OverlapConfig("bulk"))
        overlapped = step_of(function, backward, options, comm, OverlapConfig("slices", CHUNKS))
        pairs = [(on_one_stream(serial), recorded(overlapped)) for _ in range(options.rounds + 1)][1:]
    return Comparison(name, [first for first, _ in pairs], [second for _, second in pairs])


def step_of(
    function: str, backward: bool, options: argparse.Namespace, comm: Communicator, config: OverlapConfig
) -> Step:
    """Return a function that runs the pass once. For a backward pass, the forward pass runs here and is not drawn."""
    layer, inner, tokens = getattr(ad, function), options.hidden // RANKS, options.tokens
    n, k = (WIDTH, inner) if function.startswith("matmul_") else (inner, WIDTH)
    rows = tokens // RANKS if function == "all_gather_matmul" else tokens
    x, w = (torch.randn(size, k, requires_grad=True, device=comm.device) for size in (rows, n))
    if not backward:
        return lambda: layer(x, w, comm, overlap=config)
    y = layer(x, w, comm, overlap=config)
    gy = torch.randn_like(y)
    return lambda: torch.autograd.grad(y, (x, w), gy, retain_graph=True)


def recorded(step: Step) -> Operation:
    with recording() as trace:
        measure(step)
    return trace.operations()[-1]


def on_one_stream(step: Step) -> Operation:
    """Run everything on the caller's stream, in the order of issue. The lane "comm" only labels communication."""
    original: Any = lanes.make_lanes

    def caller_only(*given: Any) -> list[lanes.Lane]:
        main = original(*given)[0]
        return [main, type(main)("comm", main.lanes, main.stream)]

    lanes.make_lanes = caller_only  # type: ignore[assignment]
    try:
        return recorded(step)
    finally:
        lanes.make_lanes = original


# ---------------------------------------------------------------------------------------------------- drawing

COLORS = {"matmul": "#4c78a8", "wgrad": "#72b7b2", "other": "#9d9d9d", "comm": "#f58518"}
NAMES = {
    "matmul": "matmul of rows: forward, or gradient of the input",
    "wgrad": "gradient of the weight",
    "other": "copies, local sums",
    "comm": "communication",
}
HATCHED: Any = {"edgecolor": "black", "hatch": "////"}
EXPOSED = "communication while nothing is computed"
HEIGHT = 0.8
ROWS = {"serial: compute": 3.3, "serial: comm": 2.4, "overlapped: compute": 0.9, "overlapped: comm": 0.0}


def kind_of(interval: Interval) -> str:
    if interval.lane == "comm":
        return "comm"
    if interval.what.startswith("linear_"):
        return "matmul"
    return "wgrad" if "outer_rows" in interval.what else "other"


def label_of(interval: Interval, gathers: bool) -> str:
    """Return the number of its slice, from 1. In a gather, "own" is the rank's own rows, which come first."""
    kind = kind_of(interval)
    number = interval.number + (interval.what == "add_outer_rows")  # the first is outer_rows
    if kind == "other" or (kind == "wgrad" and not gathers):
        return "" if kind == "other" else "wgrad"
    if kind == "comm" or not gathers:
        return str(number + 1)
    return str(number) if number else "own"


def uncovered(interval: Interval, others: Sequence[Interval]) -> list[tuple[float, float]]:
    """Return (begin, length) of the parts of an interval in which none of the others runs."""
    parts, at = [], interval.begin
    for other in sorted(others, key=lambda one: one.begin):
        if other.begin >= interval.end:
            break
        if other.begin > at:
            parts.append((at, other.begin - at))
        at = max(at, other.end)
    return [*parts, (at, interval.end - at)] if at < interval.end else parts


def draw(found: Sequence[Comparison], path: Path) -> None:
    from matplotlib.figure import Figure  # no window, no display
    from matplotlib.patches import Patch

    figure = Figure(figsize=(11, 0.9 + 2.5 * len(found)), layout="constrained")
    for axes, comparison in zip(figure.subplots(len(found), 1, squeeze=False)[:, 0], found, strict=True):
        draw_pass(axes, comparison)
    drawn = {kind_of(one) for comparison in found for each in comparison.medians() for one in each.intervals}
    patches = [Patch(facecolor=color, label=NAMES[kind]) for kind, color in COLORS.items() if kind in drawn]
    patches.append(Patch(facecolor=COLORS["comm"], label=EXPOSED, **HATCHED))
    figure.legend(handles=patches, loc="outside lower center", ncols=3, fontsize=9, frameon=False)
    figure.savefig(path, dpi=130)


def draw_pass(axes: Any, comparison: Comparison) -> None:
    drawn = dict(zip(("serial", "overlapped"), comparison.medians(), strict=True))
    span = max(one.wall for one in drawn.values())
    gathers = any(one.what == "all_gather" for one in drawn["overlapped"].intervals)
    for schedule, operation in drawn.items():
        computed = [one for one in operation.intervals if one.lane != "comm"]
        for one in operation.intervals:
            row = ROWS[f"{schedule}: {'comm' if one.lane == 'comm' else 'compute'}"]
            draw_interval(axes, one, row, label_of(one, gathers), span)
            if one.lane == "comm":
                axes.broken_barh(uncovered(one, computed), (row, HEIGHT), facecolor="none", linewidth=0, **HATCHED)
        low, top = ROWS[f"{schedule}: comm"], ROWS[f"{schedule}: compute"] + HEIGHT
        axes.plot([operation.wall] * 2, [low, top], color="black", linewidth=1.2)
        text = f"{operation.wall * 1e3:.1f} ms"
        axes.text(operation.wall + span * 0.006, (low + top) / 2, text, va="center", fontsize=9)
    axes.set_title(f"{TITLES[comparison.name]}, {CHUNKS} slices: {described(comparison)}", fontsize=11, loc="left")
    axes.set_yticks([y + HEIGHT / 2 for y in ROWS.values()], list(ROWS), fontsize=9)
    axes.set_xlim(0, span * 1.09)
    axes.xaxis.set_major_formatter(lambda seconds, _: f"{seconds * 1e3:g}")
    axes.set_xlabel("ms", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)


def draw_interval(axes: Any, one: Interval, row: float, text: str, span: float) -> None:
    color, width = COLORS[kind_of(one)], one.end - one.begin
    axes.broken_barh([(one.begin, width)], (row, HEIGHT), facecolor=color, edgecolor="white", linewidth=0.8)
    if text and width > span * 0.011 * len(text):
        box = {"facecolor": color, "edgecolor": "none", "pad": 1.0}  # readable over hatching
        middle = (one.begin + width / 2, row + HEIGHT / 2)
        axes.text(*middle, text, ha="center", va="center", fontsize=8, color="white", bbox=box, zorder=5)


def described(comparison: Comparison) -> str:
    serial, overlapped, efficiency = comparison.times()
    return f"serial {serial * 1e3:.1f} ms, overlapped {overlapped * 1e3:.1f} ms, efficiency {efficiency:.2f}"


def main() -> None:
    options = arguments()
    is_drawn = options.out.suffix != ".json"
    if is_drawn:
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            raise ImportError("matplotlib is not installed: pip install matplotlib") from None
    found: list[Comparison] = (
        loaded(options.load) if options.load else run_ranks(RANKS, run, options, device=options.device)
    )
    if is_drawn:
        draw(found, options.out)
    else:
        options.out.write_text(json.dumps(found, default=str))  # the decisions, which are not drawn
    for comparison in found:
        print(f"{comparison.name:24} {described(comparison)}")
    if not options.load:
        print(surroundings(options.device, RANKS))
    print(f"wrote {options.out}")


def loaded(path: Path) -> list[Comparison]:
    """Read what --out has written: JSON has lists in place of named tuples."""

    def operation(owner: str, decision: object, wall: float, intervals: list[list[Any]]) -> Operation:
        return Operation(owner, decision, wall, tuple(Interval(*one) for one in intervals))

    try:
        found = json.loads(path.read_text())
        if not found:
            raise ValueError("it has no passes")
        return [Comparison(name, *([operation(*one) for one in rounds] for rounds in pair)) for name, *pair in found]
    except (TypeError, ValueError) as error:
        raise ValueError(f"--load {path}: not a file that --out has written: {error}") from None


def arguments() -> argparse.Namespace:
    parser = command.Parser(__doc__, failed="a rank failed")
    names = f"passes to draw: {', '.join(PASSES)} (default {' '.join(DEFAULT)})"
    parser.add_argument("--pattern", nargs="+", choices=tuple(PASSES), default=DEFAULT, metavar="NAME", help=names)
    parser.add_argument("--rounds", type=command.integer(1), default=7, help="repetitions (%(default)s)")
    tokens = "total rows of both ranks (default: a matmul takes 40 ms)"
    parser.add_argument("--tokens", type=command.integer(1), help=tokens)
    parser.add_argument("--hidden", type=command.integer(1), default=2048, help="features of both ranks (%(default)s)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the layers are (%(default)s)")
    parser.add_argument("--load", type=Path, metavar="FILE", help="draw the times in this file instead of measuring")
    parser.add_argument("--out", type=command.output_file, default="out/timeline.png", help="picture (%(default)s)")
    options = parser.parse_args()
    for name in ("tokens", "hidden"):
        if (value := getattr(options, name)) and value % RANKS:
            parser.error(f"--{name} is {value}, expected a multiple of {RANKS} ranks")
    if options.device == "cuda" and not torch.cuda.device_count():
        parser.error(f"--device cuda: torch {torch.__version__} finds no GPU; use --device cpu")
    if options.load and not options.load.is_file():
        parser.error(f"--load {options.load}: no such file; write one with --out {options.load}")
    if options.out.suffix not in (".png", ".svg", ".pdf", ".json"):
        parser.error(f"--out is {options.out}, expected a file name ending in .png, .svg, .pdf or .json")
    return options


if __name__ == "__main__":
    command.run(main)
