"""The figures of scripts/bench/overlap.py, the bounds that it holds them against, and their tables."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from bench.ranks import columns

Row = dict[str, Any]
GAIN = 0.92  # of T_off: who takes less gains 8% or more


def figures(row: Row, by_hand: Sequence[str]) -> Row:
    """What follows from the times of a case.

    seconds   of each, median of the rounds
    ratio     of each way to "off"
    best      the fastest of those chosen by hand;   to_best  "auto" / it;   to_plain  "auto" / F.linear and collective
    """
    times = row["times"]
    ratio = {name: _ratio(times, name, "off") for name in times if name not in ("comm", "mm")}
    best = min(by_hand, key=lambda name: ratio[name])
    rounds = zip(*(times[name] for name in ("off", "auto", "comm", "mm")), strict=True)
    return {
        "rounds": len(times["off"]),
        "seconds": {name: statistics.median(values) for name, values in times.items()},
        "ratio": ratio,
        "best": best,
        "to_best": _ratio(times, "auto", best),
        "to_plain": _ratio(times, "auto", "plain"),
        "efficiency": statistics.median((off - auto) / min(comm, mm) for off, auto, comm, mm in rounds),
        "comm_mm": _ratio(times, "comm", "mm"),
    }


def _ratio(times: Mapping[str, Sequence[float]], one: str, other: str) -> float:
    """Of each round; the median."""
    return statistics.median(a / b for a, b in zip(times[one], times[other], strict=True))


def bounds(rows: Sequence[Row]) -> list[Row]:
    """What has to hold: what, asked, the worst figure found and the case that it is of, pass. found and case are None,
    and it passes, where it holds for no case."""
    gaining = [row for row in rows if row["ratio"][row["best"]] <= GAIN]
    declined = [row for row in rows if all(one["way"] == "off" for one in row["decisions"].values())]
    balanced = [row for row in rows if row["balance"] == 1 and row["rows"] >= 1024]
    forward, backward = ([row for row in balanced if row["passes"] == name] for name in ("forward", "backward"))
    of_balanced = "T_comm = T_mm, 1024 rows and more"
    return [
        _bound("auto / off", 1.05, [(row["ratio"]["auto"], row) for row in rows]),
        _bound("auto / best by hand, where that gains 8% or more", 1.10, [(row["to_best"], row) for row in gaining]),
        _bound(f"efficiency, forward, {of_balanced}", 0.75, [(row["efficiency"], row) for row in forward], least=True),
        _bound(
            f"efficiency, + backward, {of_balanced}", 0.8, [(row["efficiency"], row) for row in backward], least=True
        ),
        _bound("calls until decided", 25, [(row["calls"], row) for row in rows]),
        _bound("auto that chose off / F.linear and collective", 1.02, [(row["to_plain"], row) for row in declined]),
    ]


def _bound(what: str, bound: float, figures: Sequence[tuple[float, Row]], least: bool = False) -> Row:
    said: Row = {"what": what, "asked": f"{'>=' if least else '<='} {bound:g}"}
    if not figures:
        return {**said, "found": None, "case": None, "pass": True}
    found, row = (min if least else max)(figures, key=lambda pair: pair[0])
    return {**said, "found": found, "case": case_of(row), "pass": found >= bound if least else found <= bound}


def case_of(row: Row) -> str:
    return f"{row['layer']}, {_passes(row)}, {row['rows']} rows, T_comm/T_mm {_balance(row)}"


def _passes(row: Row) -> str:
    return "forward" if row["passes"] == "forward" else "+ backward"


def _balance(row: Row) -> str:
    return "none" if row["balance"] is None else f"{row['balance']:g}"


# ------------------------------------------------------------------------------------------------------------- tables


def case_lines(rows: Sequence[Row]) -> list[list[str]]:
    """Times as ratios to "off"."""
    ways = [name for name in rows[0]["ratio"] if name not in ("off", "auto")]
    last = ["auto/best", "eff.", "calls", "chosen"]
    lines = [["layer", "pass", "rows", "comm/mm", "off ms", *ways, "auto/off", *last]]
    for row in rows:
        chosen = ", ".join(one["way"] for one in row["decisions"].values()) or "-"
        efficiency = "" if row["balance"] is None else f"{row['efficiency']:.2f}"
        cells = [row["layer"], _passes(row), str(row["rows"]), f"{_balance(row)} ({row['comm_mm']:.2f})"]
        cells += [f"{row['seconds']['off'] * 1e3:.1f}", *(f"{row['ratio'][name]:.2f}" for name in (*ways, "auto"))]
        lines.append([*cells, f"{row['to_best']:.2f}", efficiency, str(row["calls"]), chosen])
    return lines


def bound_lines(found: Sequence[Row]) -> list[list[str]]:
    lines = [["bound", "asked for", "worst", "case", ""]]
    for one in found:
        worst = "" if one["found"] is None else f"{one['found']:.3f}"
        lines.append([one["what"], one["asked"], worst, one["case"] or "no case", "PASS" if one["pass"] else "FAIL"])
    return lines


def table(found: Row, markdown: bool = False) -> str:
    """For a terminal, or for docs/."""
    tables = (case_lines(found["cases"]), bound_lines(found["bounds"]))
    return "\n\n".join([*(columns(lines, markdown) for lines in tables), _said(found)])


def _said(found: Row) -> str:
    """Command, machine and sizes."""
    machine, versions = found["machine"], found["versions"]
    on = f"{found['ranks']} x {machine['gpu']}" if found["device"] == "cuda" else machine["cpu"]
    return (
        f"`{found['command']}` on {found['date']}: {machine['cores']} cores, {on}, load {machine['load']}, Python "
        f"{versions['python']}, torch {versions['torch']}; {found['ranks']} ranks, width {found['width']}, hidden "
        f"{found['hidden']}. Ways are ratios to off."
    )
