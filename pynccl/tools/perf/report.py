"""The figures as text, in the columns of nccl-tests, and as JSON."""

from __future__ import annotations

import argparse
import json
import math
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .operations import Case, bus_factor
from .ways import in_lines

NONE = "N/A"
PLACES = ("out-of-place", "in-place")


@dataclass
class Side:
    """What was measured of one case in one place, combined over the ranks. Seconds."""

    times: list[float]  # of each iteration, in the order in which they ran
    mean: float
    wrong: int | None  # elements of all ranks; None: not checked
    torch: float | None  # mean of torch's iterations; None: not measured, or torch cannot
    way: str = ""  # which kernels ran, on a GPU

    def bandwidths(self, case: Case) -> tuple[float, float]:
        """Of the algorithm and of the bus, in GB/s."""
        algorithm = case.nbytes / self.mean * 1e-9 if self.mean else 0.0
        return algorithm, algorithm * bus_factor(case.collective, case.ranks)


@dataclass
class Row:
    case: Case
    sides: list[Side | None]  # out of place, in place; None where the collective cannot

    @property
    def wrong(self) -> int:
        return sum(side.wrong or 0 for side in self.sides if side)


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
        return statistics.fmean(side.bandwidths(row.case)[1] for row in self.rows for side in row.sides if side)


def head_lines(head: dict[str, Any]) -> list[str]:
    ranks = head["ranks"]
    lines = [
        f"pynccl perf {head['collective']}: {len(ranks)} {'rank' if len(ranks) == 1 else 'ranks'} on "
        f"{head['nodes']} {'node' if head['nodes'] == 1 else 'nodes'}",
        f"library     {head['library']} {head['version']} ({head['path']}; {head['origin']})",
        f"pynccl      {head['pynccl']}, Python {head['python']}, torch {head['torch']}",
        *([f"transport   {head['transport']}"] if head["transport"] else []),
        f"timing      {head['iterations']} iterations after {head['warm_up']}, {head['clock']}, {head['calls']}",
        f"across      {head['rule']}",
        f"buffers     {head['buffers']}",
        f"data        {head['data']}",
        *([f"compare     torch.distributed with {head['backend']}, by turns"] if head["backend"] else []),
    ]
    for number, rank in enumerate(ranks):
        lines.append(f"rank {number:<6} {rank['host']} pid {rank['pid']} {rank['device']} {rank['name']}")
    return [*(f"# {line}" for line in lines), "#"]


def column_lines(comparing: bool) -> list[str]:
    side = f"{'time':>9} {'algbw':>7} {'busbw':>7} {'#wrong':>7}"
    units = f"{'(us)':>9} {'(GB/s)':>7} {'(GB/s)':>7} {'':>7}"
    if comparing:
        side, units = f"{side} {'torch':>9} {'torch/':>7}", f"{units} {'(us)':>9} {'ours':>7}"
    front = f"{'size':>11} {'count':>12} {'type':>9} {'redop':>6} {'root':>5}"
    under = f"{'(B)':>11} {'(elements)':>12} {'':>9} {'':>6} {'':>5}"
    places = " ".join(f"{place:^{len(side)}}" for place in PLACES)
    lines = ["#" + " " * len(front) + " " + places, f"#{front} {side} {side}", f"#{under} {units} {units}"]
    return [line.rstrip() for line in lines]


def row_line(row: Row, comparing: bool) -> str:
    cells = [_front(row.case), *(_side(row.case, side, comparing) for side in row.sides)]
    return " ".join(cells) + ("  WRONG" if row.wrong else "")


def _front(case: Case) -> str:
    root = case.root if case.rooted else -1
    return f"{case.nbytes:>12} {case.count:>12} {case.type:>9} {case.reduction or 'none':>6} {root:>5}"


def _side(case: Case, side: Side | None, comparing: bool) -> str:
    if side is None:
        return f"{NONE:>9} {NONE:>7} {NONE:>7} {NONE:>7}" + (f" {NONE:>9} {NONE:>7}" if comparing else "")
    algorithm, bus = side.bandwidths(case)
    wrong = NONE if side.wrong is None else str(side.wrong)
    text = f"{_us(side.mean):>9} {algorithm:>7.2f} {bus:>7.2f} {wrong:>7}"
    if comparing and side.torch is None:
        text += f" {NONE:>9} {NONE:>7}"
    elif comparing:
        text += f" {_us(side.torch or 0.0):>9} {(side.torch or 0.0) / side.mean:>7.2f}"
    return text


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
        for place, side in zip(PLACES, row.sides, strict=True):
            if side is not None:
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
    if whole.head["taken"]:
        lines.append(f"# NCCL went via        : {whole.head['taken']}")
    sides = [[(row.case.nbytes, side.way) for row in whole.rows if (side := row.sides[i])] for i in (0, 1)]
    for place, found in zip(PLACES, sides, strict=True):
        lines += [f"# NCCL ran, {place:<11}: {line}" for line in in_lines(found)]
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
            found[name] = None if side is None else _side_json(case, side)
        rows.append(found)
    summary = {"wrong": whole.wrong if whole.head["checked"] else None, "avg_busbw_GBps": whole.average, "exit": code}
    return json.dumps({**whole.head, "rows": rows, "summary": summary}, indent=1) + "\n"


def _side_json(case: Case, side: Side) -> dict[str, Any]:
    algorithm, bus = side.bandwidths(case)
    values = asdict(side)
    return {
        "time_s": side.mean,
        "algbw_GBps": algorithm,
        "busbw_GBps": bus,
        "wrong": side.wrong,
        "torch_time_s": side.torch,
        "way": side.way or None,
        "torch_over_ours": None if side.torch is None else side.torch / side.mean,
        "iterations_s": values["times"],
        "stats_s": spread(side.times),
    }


def plot(whole: Whole, file: str) -> None:
    """Bus bandwidth over size, a line for each type, operator and place."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in whole.rows:
        name = " ".join(one for one in (row.case.type, row.case.reduction) if one)
        for place, side in zip(PLACES, row.sides, strict=True):
            if side is not None:
                lines.setdefault(f"{name}, {place}", []).append((row.case.nbytes, side.bandwidths(row.case)[1]))
                if side.torch:
                    bus = side.bandwidths(row.case)[1] * side.mean / side.torch
                    lines.setdefault(f"torch: {name}, {place}", []).append((row.case.nbytes, bus))
    for name, points in lines.items():
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=name)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("size (bytes)")
    axes.set_ylabel("bus bandwidth (GB/s)")
    axes.set_title(f"{whole.head['collective']}, {len(whole.head['ranks'])} ranks, {whole.head['library']}")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(Path(file), bbox_inches="tight", dpi=120)
    pyplot.close(figure)
