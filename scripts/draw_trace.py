"""A picture of a trace that `ad.trace` or --trace wrote, for where no browser is: lanes of all ranks over time.

Layers' forward passes are blue, nodes of the backward pass green, communication is orange, waiting for it red. Lines
join the same collective on the ranks. Needs matplotlib.

examples:
  python scripts/draw_trace.py out/trace.json.gz --out out/trace.png  # long: it needs a trace
  python scripts/draw_trace.py out/trace.json.gz --span "step 3" --rank 0  # long: likewise
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from pynccl.tools import command

Event = dict[str, Any]
Lane = tuple[int, int]  # pid, tid
COLORS = {
    "step": "#b0b0b0",
    "user_annotation": "#4c78a8",
    "gpu_user_annotation": "#4c78a8",
    "backward": "#59a89c",
    "kernel": "#9ecae9",
    "comm": "#f58518",
    "exposed": "#d62728",
}  # of torch's operators the nodes of the backward pass alone are drawn
NAMES = {
    "user_annotation": "forward pass of a layer",
    "backward": "node of the backward pass",
    "comm": "communication",
    "exposed": "computation waits for communication",
}
NODE = "autograd::engine::evaluate_function: "
GAP = 0.5  # rows between two lanes
INCHES_OF_ROW, WIDTH, CHARACTER = 0.2, 15.0, 0.055  # inches


def read(path: Path) -> list[Event]:
    """The events of the file; ValueError where it is no trace."""
    try:
        data = path.read_bytes()
        found = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)["traceEvents"]
        return [dict(one) for one in found]
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, EOFError):
        raise ValueError(f"{path} is no trace: expected JSON with traceEvents, as ad.trace writes it") from None


def between(events: list[Event], asked: argparse.Namespace) -> tuple[float, float]:
    """Begin and end of the picture, in microseconds."""
    pieces = [one for one in events if one["ph"] == "X"]
    begin = min((one["ts"] for one in pieces), default=0.0)
    end = max((one["ts"] + one["dur"] for one in pieces), default=1.0)
    if asked.span is not None:
        named = [one for one in pieces if one["cat"] == "step" and one["name"] == asked.span]
        if not named:
            known = sorted({one["name"] for one in pieces if one["cat"] == "step"})
            raise ValueError(f"--span {asked.span!r} is in no lane `steps`; there are {known}")
        begin, end = min(one["ts"] for one in named), max(one["ts"] + one["dur"] for one in named)
    begin = begin if asked.begin is None else asked.begin * 1e3
    end = end if asked.end is None else asked.end * 1e3
    if begin >= end:
        raise ValueError(f"there is nothing between {begin / 1e3:g} and {end / 1e3:g} ms")
    return begin, end


def placed(pieces: list[Event]) -> tuple[list[tuple[Event, float]], dict[Lane, float], float]:
    """(pieces with their rows, the first row of each lane, rows in all): what lies within another one is below it."""
    by_lane: dict[Lane, list[Event]] = defaultdict(list)
    for one in pieces:
        by_lane[one["pid"], one["tid"]].append(one)
    found, first, row = [], {}, 0.0
    for lane in sorted(by_lane):
        first[lane], deepest, around = row, 0, list[float]()
        for one in sorted(by_lane[lane], key=lambda one: (one["ts"], -one["dur"])):
            while around and around[-1] <= one["ts"] + 1e-6:
                around.pop()
            found.append((one, row + len(around)))
            around.append(one["ts"] + one["dur"])
            deepest = max(deepest, len(around))
        row += deepest + GAP
    return found, first, row


def drawn(event: Event) -> Event | None:
    """A slice as it is drawn; None: it is not."""
    if event["ph"] != "X":
        return None
    if event["cat"] == "cpu_op" and event["name"].startswith(NODE):
        return event | {"cat": "backward", "name": event["name"].removeprefix(NODE)}
    return event if event["cat"] in COLORS else None


def draw(events: list[Event], begin: float, end: float, out: Path) -> None:
    from matplotlib.figure import Figure  # no window, no display
    from matplotlib.patches import Patch

    pieces = [one for event in events if (one := drawn(event)) is not None]
    pieces = [one for one in pieces if one["ts"] < end and one["ts"] + one["dur"] > begin]
    found, first, rows = placed(pieces)
    names = {(one["pid"], one["tid"]): one["args"]["name"] for one in events if one["name"] == "thread_name"}
    figure = Figure(figsize=(WIDTH, 1.0 + INCHES_OF_ROW * rows), layout="constrained")
    axes = figure.add_subplot()
    for one, row in found:
        at, length = (one["ts"] - begin) / 1e3, one["dur"] / 1e3
        axes.broken_barh([(at, length)], (row, 0.92), facecolor=COLORS[one["cat"]], edgecolor="white", linewidth=0.3)
        seen = (min(one["ts"] + one["dur"], end) - max(one["ts"], begin)) / (end - begin) * (WIDTH - 2)
        text = one["name"]
        if seen > CHARACTER * len(text):
            middle = (max(one["ts"], begin) + min(one["ts"] + one["dur"], end)) / 2 - begin
            axes.text(middle / 1e3, row + 0.46, text, ha="center", va="center", fontsize=6, color="white")
    joined: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for one in events:
        if (
            one["ph"] in "stf"
            and one["cat"] == "collective"
            and begin <= one["ts"] <= end
            and (one["pid"], one["tid"]) in first
        ):
            joined[one["id"]].append(((one["ts"] - begin) / 1e3, first[one["pid"], one["tid"]] + 0.46))
    for points in joined.values():
        axes.plot(*zip(*points, strict=True), color="black", linewidth=0.4, alpha=0.5)
    ticks = [row + 0.46 for row in first.values()]
    axes.set_yticks(ticks, [f"rank {lane[0]}: {names.get(lane, '')}" for lane in first], fontsize=7)
    axes.set_ylim(rows, -GAP)
    axes.set_xlim(0, (end - begin) / 1e3)
    axes.set_xlabel("ms", fontsize=8)
    axes.tick_params(axis="x", labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    patches = [Patch(facecolor=COLORS[kind], label=name) for kind, name in NAMES.items()]
    figure.legend(handles=patches, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    figure.savefig(out, dpi=100)


def main() -> int:
    asked = _arguments()
    try:
        events = read(asked.trace)
        if asked.rank:
            events = [one for one in events if one["pid"] in asked.rank]
        begin, end = between(events, asked)
    except ValueError as error:
        raise command.FailedError(str(error)) from None
    try:
        draw(events, begin, end, asked.out)
    except ImportError:
        raise ImportError("matplotlib is not installed; pip install matplotlib") from None
    print(f"wrote {asked.out}")
    return 0


def _arguments() -> argparse.Namespace:
    parser = command.Parser(__doc__, failed="the file is no such trace")
    parser.add_argument("trace", type=Path, help="the file, .json or .json.gz")
    parser.add_argument(
        "--out", type=command.output_file, default=Path("trace.png"), help=".png, .svg or .pdf (default trace.png)"
    )
    parser.add_argument("--span", metavar="NAME", help='of the lane `steps`, such as "step 3"')
    parser.add_argument("--begin", type=float, metavar="MS", help="of the picture, from the begin of the trace")
    parser.add_argument("--end", type=float, metavar="MS", help="of the picture, from the begin of the trace")
    parser.add_argument("--rank", type=command.whole(0), nargs="+", metavar="N", help="these alone; default: all")
    asked = parser.parse_args()
    if asked.out.suffix not in (".png", ".svg", ".pdf"):
        parser.error(f"--out is {asked.out}, expected a file that ends in .png, .svg or .pdf")
    return asked


if __name__ == "__main__":
    command.run(main)
