"""A picture of what a layer's pass computes and communicates when: on one stream, and overlapped.

Two ranks over a modelled link on which communication takes as long as the matmuls (--balance). Each pass runs --rounds
times both ways, in turn; drawn is rank 0 in the round of median length. T_seq and T_ov are the caller's time on that
rank, median of the rounds; efficiency is (T_seq - T_ov) / min(T_comm, T_mm), where T_comm and T_mm are what the pass on
one stream spent on either. Communication is hatched while nothing is computed: that is what it costs.

ad.trace shows whole programs, for ui.perfetto.dev.

examples:
  python scripts/timeline.py --pattern row_backward --tokens 64 --width 64 --hidden 128 --rounds 1 --out out/small.svg
  python scripts/timeline.py  # long
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from bench.ranks import link_for, linked, measure, run_ranks

import pynccl_autograd as ad
from pynccl import Communicator, progress
from pynccl.tools import command
from pynccl_autograd import OverlapConfig
from pynccl_autograd.overlap import lanes
from pynccl_autograd.overlap.trace import Interval, Operation, recording

CPU, RANKS = "cpu", 2
DEFAULT = ("all_gather_matmul", "column_backward", "matmul_reduce_scatter", "row_backward")
METHODS = ("slices", "exchange", "ring", "bulk")
Step = Callable[[], Any]


class Case(NamedTuple):
    """A pass: the function whose forward or backward pass it is, how often it moves a tensor [tokens, width]."""

    layer: str
    moves: int = 1
    backward: bool = False
    save_gathered: bool = True


BY_NAME = {
    "all_gather_matmul": Case("all_gather_matmul"),
    "matmul_reduce_scatter": Case("matmul_reduce_scatter"),
    "matmul_all_reduce": Case("matmul_all_reduce", 2),
    "column_backward": Case("all_gather_matmul", 1, True),
    "column_backward_regather": Case("all_gather_matmul", 2, True, False),
    "row_backward": Case("matmul_reduce_scatter", 1, True),
    "copy_backward": Case("copy_matmul", 2, True),
}


class Options(NamedTuple):
    """Of the command line. tokens: None to find a number by `milliseconds`."""

    pattern: Sequence[str]
    method: str
    chunks: int
    rounds: int
    tokens: int | None
    width: int
    hidden: int
    milliseconds: float
    balance: float


class Both(NamedTuple):
    """A pass on one rank, both ways: the rounds. Plain values."""

    name: str
    way: str
    link: str
    serial: list[Operation]
    overlapped: list[Operation]

    def drawn(self) -> tuple[Operation, Operation]:
        return _median_one(self.serial), _median_one(self.overlapped)

    def times(self) -> tuple[float, float, float]:
        """(T_seq, T_ov, efficiency)"""
        t_seq, t_ov = (statistics.median(one.wall for one in rounds) for rounds in (self.serial, self.overlapped))
        t_comm, t_mm = (statistics.median(getattr(one, lane) for one in self.serial) for lane in ("comm", "compute"))
        return t_seq, t_ov, (t_seq - t_ov) / min(t_comm, t_mm)


def _median_one(rounds: Sequence[Operation]) -> Operation:
    return sorted(rounds, key=lambda one: one.wall)[(len(rounds) - 1) // 2]


def run(rank: int, options: Options) -> list[Both]:
    """The passes, both ways, on one rank."""
    tokens = options.tokens or _tokens(options)
    passes = progress.over(options.pattern, "measuring", "pass", own=rank == 0)
    return [_both(name, tokens, options) for name in passes]


def _tokens(options: Options) -> int:
    """So many that a forward matmul takes the milliseconds that were asked for."""
    unit = 16 * RANKS
    seconds = _matmul_seconds(16 * unit, options)
    return max(1, round(options.milliseconds / 1e3 / seconds * 16)) * unit


def _matmul_seconds(tokens: int, options: Options) -> float:
    """Of the forward matmul, which every other of a pass is as large as."""
    x, w = torch.randn(tokens, options.width), torch.randn(options.hidden // RANKS, options.width)
    return statistics.median(measure(CPU, lambda: x @ w.t()) for _ in range(5))


def _both(name: str, tokens: int, options: Options) -> Both:
    case = BY_NAME[name]
    t_mm = _matmul_seconds(tokens, options) * (2 if case.backward else 1)
    nbytes = case.moves * (RANKS - 1) / RANKS * tokens * options.width * torch.float32.itemsize
    link = link_for(options.balance * t_mm, case.moves * (RANKS - 1), nbytes)
    cut = options.method in ("slices", "exchange")
    config = OverlapConfig(options.method, options.chunks if cut else None, save_gathered=case.save_gathered)
    with linked(CPU, link) as comm:
        serial = _step_of(case, tokens, options, comm, OverlapConfig("bulk", save_gathered=case.save_gathered))
        overlapped = _step_of(case, tokens, options, comm, config)
        rounds = [(_one_stream(serial), _recorded(overlapped)) for _ in range(options.rounds + 1)][1:]
    way = f"{options.method} {options.chunks}" if cut else options.method
    return Both(name, way, link, [one for one, _ in rounds], [other for _, other in rounds])


def _step_of(case: Case, tokens: int, options: Options, comm: Communicator, config: OverlapConfig) -> Step:
    """The pass, once. Of a backward pass the forward one is done here, undrawn."""
    column, inner = case.layer in ("all_gather_matmul", "copy_matmul"), options.hidden // RANKS
    n, k = (inner, options.width) if column else (options.width, inner)
    rows = tokens // RANKS if case.layer == "all_gather_matmul" else tokens
    x, w = torch.randn(rows, k, requires_grad=True), torch.randn(n, k, requires_grad=True)
    layer = getattr(ad, case.layer)
    if not case.backward:
        return lambda: layer(x, w, comm, overlap=config)
    y = layer(x, w, comm, overlap=config)
    gy = torch.randn_like(y)
    return lambda: torch.autograd.grad(y, (x, w), gy, retain_graph=True)


def _recorded(step: Step) -> Operation:
    with recording() as trace:
        measure(CPU, step)
    return trace.operations()[-1]


def _one_stream(step: Step) -> Operation:
    """All on the caller's stream, in the order of issue."""
    hook, before = "maker", lanes.maker
    setattr(lanes, hook, _caller_alone)
    try:
        return _recorded(step)
    finally:
        setattr(lanes, hook, before)


def _caller_alone(of: lanes.Lanes, *_: Any) -> tuple[lanes.Lane, lanes.Lane, list[lanes.Lane]]:
    """(main, comm, those of matmuls): communication is on a lane of its own by name alone."""
    main = lanes.CallerLane("main", of)
    return main, lanes.CallerLane("comm", of), [main]


# ---------------------------------------------------------------------------------------------------- the picture

COLORS = {"matmul": "#4c78a8", "wgrad": "#72b7b2", "other": "#9d9d9d", "comm": "#f58518"}
NAMES = {
    "matmul": "matmul of rows: forward, or gradient of the input",
    "wgrad": "gradient of the weight",
    "other": "copies, local sums",
    "comm": "communication",
    "exposed": "communication while nothing is computed",
}
HEIGHT = 0.8
ROWS = {
    ("serial", "compute"): 3.3,
    ("serial", "comm"): 2.4,
    ("overlapped", "compute"): 0.9,
    ("overlapped", "comm"): 0.0,
}


def kind_of(interval: Interval) -> str:
    if interval.lane == "comm":
        return "comm"
    if interval.what.startswith("linear_"):
        return "matmul"
    return "wgrad" if "outer_rows" in interval.what else "other"


def label_of(interval: Interval, gathers: bool) -> str:
    """The number of its slice, from 1. Where rows are gathered, this rank's own come first and need no slice."""
    if kind_of(interval) == "other":
        return ""
    number = interval.number
    if interval.lane == "comm":
        return str(number + 1)
    if interval.what == "add_outer_rows":  # the first is outer_rows
        number += 1
    if not gathers:
        return "wgrad" if kind_of(interval) == "wgrad" else str(number + 1)
    return "own" if number == 0 else str(number)


def uncovered(interval: Interval, others: Sequence[Interval]) -> list[tuple[float, float]]:
    """The parts of an interval in which none of the others runs."""
    parts, at = [], interval.begin
    for other in sorted(others, key=lambda one: one.begin):
        if other.end <= at or other.begin >= interval.end:
            continue
        if other.begin > at:
            parts.append((at, other.begin))
        at = max(at, other.end)
    if at < interval.end:
        parts.append((at, interval.end))
    return parts


def draw(found: Sequence[Both], path: Path) -> None:
    from matplotlib.figure import Figure  # no window, no display
    from matplotlib.patches import Patch

    figure = Figure(figsize=(11, 0.9 + 2.5 * len(found)), layout="constrained")
    for axes, both in zip(figure.subplots(len(found), 1, squeeze=False)[:, 0], found, strict=True):
        _draw_one(axes, both)
    patches = [Patch(facecolor=color, label=NAMES[kind]) for kind, color in COLORS.items()]
    patches.append(Patch(facecolor=COLORS["comm"], hatch="////", edgecolor="black", label=NAMES["exposed"]))
    figure.legend(handles=patches, loc="outside lower center", ncols=3, fontsize=9, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def _draw_one(axes: Any, both: Both) -> None:
    serial, overlapped = both.drawn()
    span = max(serial.wall, overlapped.wall) * 1e3
    gathers = any(one.what == "all_gather" for one in overlapped.intervals) and "regather" not in both.name
    gathers = gathers or (both.way == "ring" and both.name in ("all_gather_matmul", "row_backward"))
    for way, operation in (("serial", serial), ("overlapped", overlapped)):
        computed = [one for one in operation.intervals if one.lane != "comm"]
        for one in operation.intervals:
            row = ROWS[way, "comm" if one.lane == "comm" else "compute"]
            _bar(axes, one, row, span, gathers)
            for begin, end in uncovered(one, computed) if one.lane == "comm" else ():
                part = (begin * 1e3, (end - begin) * 1e3)
                axes.broken_barh([part], (row, HEIGHT), facecolor="none", edgecolor="black", hatch="////", linewidth=0)
        top = ROWS[way, "compute"] + HEIGHT
        axes.plot([operation.wall * 1e3] * 2, [ROWS[way, "comm"], top], color="black", linewidth=1.2)
        axes.text(
            operation.wall * 1e3 + span * 0.006,
            (ROWS[way, "comm"] + top) / 2,
            f"{operation.wall * 1e3:.1f} ms",
            va="center",
            fontsize=9,
        )
    t_seq, t_ov, efficiency = both.times()
    axes.set_title(
        f"{both.name}, {both.way}:  $T_{{seq}}$ {t_seq * 1e3:.1f} ms,  $T_{{ov}}$ {t_ov * 1e3:.1f} ms,  "
        f"efficiency {efficiency:.2f}",
        fontsize=11,
        loc="left",
    )
    axes.set_yticks([y + HEIGHT / 2 for y in ROWS.values()], [f"{way}: {lane}" for way, lane in ROWS], fontsize=9)
    axes.set_xlim(0, span * 1.09)
    axes.set_xlabel("ms", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)


def _bar(axes: Any, one: Interval, row: float, span: float, gathers: bool) -> None:
    begin, width = one.begin * 1e3, (one.end - one.begin) * 1e3
    axes.broken_barh([(begin, width)], (row, HEIGHT), facecolor=COLORS[kind_of(one)], edgecolor="white", linewidth=0.8)
    text = label_of(one, gathers)
    if text and width > span * 0.011 * len(text):
        box = {"facecolor": COLORS[kind_of(one)], "edgecolor": "none", "pad": 1.0}  # readable over hatching
        middle = (begin + width / 2, row + HEIGHT / 2)
        axes.text(*middle, text, ha="center", va="center", fontsize=8, color="white", bbox=box, zorder=5)


# ---------------------------------------------------------------------------------------------------- command line


def main() -> None:
    asked = _arguments()
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ImportError("matplotlib is not installed: pip install matplotlib") from None
    options = Options(*(getattr(asked, name) for name in Options._fields))
    by_rank: list[list[Both]] = run_ranks(RANKS, CPU, run, options)
    draw(by_rank[0], asked.out)
    for both in by_rank[0]:
        t_seq, t_ov, efficiency = both.times()
        print(
            f"{both.name:24} {both.way:10} T_seq {t_seq * 1e3:8.2f} ms  T_ov {t_ov * 1e3:8.2f} ms  efficiency "
            f"{efficiency:6.3f}  link {both.link}"
        )
    print(f"wrote {asked.out}")


def _arguments() -> argparse.Namespace:
    parser = command.Parser(__doc__, failed="a rank failed")
    names = f"of {', '.join(BY_NAME)} (default {' '.join(DEFAULT)})"
    parser.add_argument("--pattern", nargs="+", choices=tuple(BY_NAME), default=DEFAULT, metavar="NAME", help=names)
    parser.add_argument("--method", choices=METHODS, default="slices", help="default slices")
    parser.add_argument("--chunks", type=command.whole(1), default=4, help="of slices and exchange (default 4)")
    parser.add_argument("--rounds", type=command.whole(1), default=7, help="repetitions (default 7)")
    parser.add_argument(
        "--milliseconds",
        type=command.number(0.1, "milliseconds"),
        default=40.0,
        help="of one forward matmul (default 40)",
    )
    parser.add_argument("--tokens", type=command.whole(1), help="rows of both ranks, in place of --milliseconds")
    parser.add_argument("--width", type=command.whole(1), default=512, help="features of what travels (default 512)")
    parser.add_argument(
        "--hidden", type=command.whole(1), default=2048, help="features between the layers (default 2048)"
    )
    parser.add_argument(
        "--balance", type=command.number(0.01), default=1.0, help="T_comm / T_mm of the modelled link (default 1)"
    )
    parser.add_argument(
        "--out", type=command.output_file, default="out/timeline.png", help="the picture; default out/timeline.png"
    )
    asked = parser.parse_args()
    if problem := _problem(asked):
        parser.error(problem)
    return asked


def _problem(asked: argparse.Namespace) -> str:
    """What is wrong with the options; "" if nothing is."""
    for name in ("tokens", "hidden"):
        value = getattr(asked, name)
        if value is not None and (value < RANKS or value % RANKS):
            return f"--{name} is {value}, expected a multiple of {RANKS} ranks"
    if asked.out.suffix not in (".png", ".svg", ".pdf"):
        return f"--out is {asked.out}, expected a file that ends in .png, .svg or .pdf"
    return ""


if __name__ == "__main__":
    command.run(main)
