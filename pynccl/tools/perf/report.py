"""The figures as text, in the columns of nccl-tests, as JSON, and as a plot."""

from __future__ import annotations

import argparse
import json
import math
import statistics
from dataclasses import dataclass, field
from typing import Any

from ...comm.collectives import bus_factor
from .operations import Case
from .ways import in_lines

NONE = "N/A"
PLACES = ("out-of-place", "in-place")


@dataclass
class Side:
    """What was measured of one case in one place, combined over the ranks. Seconds."""

    times: list[float]  # of each iteration, in the order in which they ran
    mean: float
    wrong: int | None = None  # elements of all ranks; None: not checked
    torch: float | None = None  # mean of torch's iterations; None: not measured, or torch cannot
    way: str = ""  # which kernels ran, on a GPU


@dataclass
class Row:
    case: Case
    sides: list[Side | None]  # out of place, in place; None where the collective cannot

    @property
    def wrong(self) -> int:
        return sum(side.wrong or 0 for side in self.sides if side)

    @property
    def measured(self) -> list[tuple[str, Side]]:
        """(place, side) of those that were."""
        return [(place, side) for place, side in zip(PLACES, self.sides, strict=True) if side]

    def bandwidths(self, seconds: float) -> tuple[float, float]:
        """Of the algorithm and of the bus, in GB/s."""
        algorithm = self.case.nbytes / seconds * 1e-9 if seconds else 0.0
        return algorithm, algorithm * bus_factor(self.case.collective, self.case.ranks)


@dataclass
class Whole:
    """All that a run has found."""

    head: dict[str, Any]
    rows: list[Row] = field(default_factory=list)

    @property
    def wrong(self) -> int:
        return sum(row.wrong for row in self.rows)

    @property
    def average(self) -> float:
        """Of the bus bandwidths of all rows and places, in GB/s."""
        return statistics.fmean(row.bandwidths(side.mean)[1] for row in self.rows for _, side in row.measured)


def head_lines(head: dict[str, Any]) -> list[str]:
    def counted(number: int, what: str) -> str:
        return f"{number} {what}{'s' * (number != 1)}"

    lines = [
        f"pynccl perf {head['collective']}: {counted(len(head['ranks']), 'rank')} on {counted(head['nodes'], 'node')}"
    ]
    rows = {
        "library": f"{head['library']} {head['version']} ({head['path']}; {head['origin']})",
        "pynccl": f"{head['pynccl']}, Python {head['python']}, torch {head['torch']}",
        "transport": head["transport"],
        "timing": f"{head['iterations']} iterations after {head['warm_up']}, {head['clock']}, {head['calls']}",
        "across": head["rule"],
        "buffers": head["buffers"],
        "data": head["data"],
        "compare": head["backend"] and f"torch.distributed with {head['backend']}, by turns",
    }
    lines += [f"{name:<12}{text}" for name, text in rows.items() if text]
    for number, rank in enumerate(head["ranks"]):
        lines.append(f"rank {number:<6} {rank['host']} pid {rank['pid']} {rank['device']} {rank['name']}")
    return [*(f"# {line}" for line in lines), "#"]


def column_lines(comparing: bool) -> list[str]:
    names, units = ["time", "algbw", "busbw", "#wrong"], ["(us)", "(GB/s)", "(GB/s)", ""]
    if comparing:
        names, units = [*names, "torch", "torch/"], [*units, "(us)", "ours"]
    side, under = _columns(names), _columns(units)
    front = f"{'size':>11} {'count':>12} {'type':>9} {'redop':>6} {'root':>5}"
    places = " ".join(f"{place:^{len(side)}}" for place in PLACES)
    below = f"{'(B)':>11} {'(elements)':>12} {'':>9} {'':>6} {'':>5} {under} {under}"
    return [f"#{line}".rstrip() for line in (f"{'':{len(front)}} {places}", f"{front} {side} {side}", below)]


def _columns(cells: list[str]) -> str:
    """Of one place: time, bandwidths, wrong elements; torch's time and the ratio."""
    return " ".join(f"{cell:>{width}}" for cell, width in zip(cells, (9, 7, 7, 7, 9, 7), strict=False))


def row_line(row: Row, comparing: bool) -> str:
    cells = [_front(row.case)]
    for side in row.sides:
        found = [NONE] * (6 if comparing else 4)
        if side is not None:
            algorithm, bus = row.bandwidths(side.mean)
            found[:4] = [
                _us(side.mean),
                f"{algorithm:.2f}",
                f"{bus:.2f}",
                NONE if side.wrong is None else str(side.wrong),
            ]
            if side.torch is not None:
                found[4:] = [_us(side.torch), f"{side.torch / side.mean:.2f}"]
        cells.append(_columns(found))
    return " ".join(cells) + ("  WRONG" if row.wrong else "")


def _front(case: Case) -> str:
    root = case.root if case.rooted else -1
    return f"{case.nbytes:>12} {case.count:>12} {case.type:>9} {case.reduction or 'none':>6} {root:>5}"


def _us(seconds: float) -> str:
    """Microseconds in four or five digits."""
    value = seconds * 1e6
    return f"{value:.0f}" if value >= 9999.5 else f"{value:.1f}" if value >= 999.5 else f"{value:.2f}"


def quantile(times: list[float], part: float) -> float:
    """The smallest time that at least this part of the iterations does not exceed."""
    return sorted(times)[max(math.ceil(part * len(times)), 1) - 1]


def spread(times: list[float]) -> dict[str, float]:
    """Seconds; cv is the standard deviation over the mean."""
    mean = statistics.fmean(times)
    deviation = statistics.stdev(times) if len(times) > 1 else 0.0
    return {
        "min": min(times),
        "median": statistics.median(times),
        "p99": quantile(times, 0.99),
        "max": max(times),
        "cv": deviation / mean if mean else 0.0,
    }


def stats_lines(rows: list[Row]) -> list[str]:
    """A table of how the iterations spread, each as it was across the ranks."""
    names = ("min", "median", "p99", "max")
    front = f"{'size':>11} {'count':>12} {'type':>9} {'redop':>6} {'root':>5}"
    columns = " ".join(f"{name:>9}" for name in names)
    lines = ["#", "# spread over the iterations (us); cv: standard deviation / mean"]
    lines.append(f"#{front} {'':>12} {columns} {'cv':>7}")
    for row in rows:
        for place, side in row.measured:
            found = spread(side.times)
            times = " ".join(f"{_us(found[name]):>9}" for name in names)
            lines.append(f"{_front(row.case)} {place:>12} {times} {found['cv']:>7.1%}")
    return lines


def foot_lines(whole: Whole, options: argparse.Namespace) -> list[str]:
    wrong = f"{whole.wrong} {'FAILED' if whole.wrong else 'OK'}" if options.check else f"{NONE} (-c 0: not checked)"
    lines = [f"# Out of bounds values : {wrong}", f"# Avg bus bandwidth    : {whole.average:.6g}"]
    if options.min_busbw is not None:
        below = whole.average < options.min_busbw
        lines.append(f"# --min-busbw          : {options.min_busbw:g} {'FAILED' if below else 'OK'}")
    for place in PLACES:
        ways = [(row.case.nbytes, side.way) for row in whole.rows for where, side in row.measured if where == place]
        lines += [f"# NCCL ran, {place:<11}: {line}" for line in in_lines(ways)]
    return [*lines, "#"]


def as_json(whole: Whole, code: int) -> str:
    rows = []
    for row in whole.rows:
        case = row.case
        found: dict[str, Any] = {
            "size": case.nbytes,
            "count": case.count,
            "type": case.type,
            "redop": case.reduction or None,
            "root": case.root if case.rooted else None,
        }
        for name, side in zip(("out_of_place", "in_place"), row.sides, strict=True):
            found[name] = side and _side_json(row, side)
        rows.append(found)
    summary = {"wrong": whole.wrong if whole.head["checked"] else None, "avg_busbw_GBps": whole.average, "exit": code}
    return json.dumps({**whole.head, "rows": rows, "summary": summary}, indent=1) + "\n"


def _side_json(row: Row, side: Side) -> dict[str, Any]:
    algorithm, bus = row.bandwidths(side.mean)
    return {
        "time_s": side.mean,
        "algbw_GBps": algorithm,
        "busbw_GBps": bus,
        "wrong": side.wrong,
        "torch_time_s": side.torch,
        "torch_over_ours": None if side.torch is None else side.torch / side.mean,
        "way": side.way or None,
        "iterations_s": side.times,
        "stats_s": spread(side.times),
    }


def plot(whole: Whole, file: str) -> None:
    """Bus bandwidth over size, a line for each type, operator and place."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines: dict[str, list[tuple[int, float]]] = {}
    for row in whole.rows:
        for place, side in row.measured:
            name = f"{row.case.type} {row.case.reduction}".strip() + f", {place}"
            for label, seconds in ((name, side.mean), (f"torch: {name}", side.torch)):
                if seconds:
                    lines.setdefault(label, []).append((row.case.nbytes, row.bandwidths(seconds)[1]))
    figure, axes = pyplot.subplots(figsize=(8, 5))
    for label, points in lines.items():
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=label)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("size (bytes)")
    axes.set_ylabel("bus bandwidth (GB/s)")
    axes.set_title(f"{whole.head['collective']}, {len(whole.head['ranks'])} ranks, {whole.head['library']}")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, bbox_inches="tight", dpi=120)
    pyplot.close(figure)
