"""The tables of scripts/bench_overlap.py, and the bounds that it holds its figures against."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import pynccl

Row = Mapping[str, Any]
FORWARD, OF_MODEL, BACKWARD, CONTROL, SMALL, DTENSOR = 0.80, 0.9, 0.85, 0.05, 0.98, 1.2
HEADINGS = ("pass", "way", "T_comm", "T_mm", "T_seq", "T", "exposed", "tax", "efficiency", "model")
WIDTHS = (24, 20, 8, 8, 8, 8, 8, 8, 10, 6)


def surroundings() -> dict[str, Any]:
    """Command, date, machine and versions."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "command": f"python scripts/{Path(sys.argv[0]).name} {' '.join(sys.argv[1:])}".strip(),
        "date": str(datetime.now(timezone.utc).date()),
        "machine": {
            "cpu": models[0] if models else platform.machine(),
            "cores": len(os.sched_getaffinity(0)),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            "load": round(os.getloadavg()[0], 2),
        },
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "pynccl": getattr(pynccl, "__version__", None),
        },
    }


def bounds(found: Row) -> list[dict[str, Any]]:
    """What has to hold of what was measured: what, found, at_least or at_most, pass."""
    return [*_of_patterns(found["patterns"]), *_of_others(found)]


def _of_patterns(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    for row in rows:
        auto = next(way for way in row["ways"] if way["way"] == "auto")
        name, backward = row["name"], row["pattern"].endswith("_backward")
        yield _bound(f"{name}: efficiency of auto", auto["efficiency"], at_least=BACKWARD if backward else FORWARD)
        if not backward and auto["model"]:
            part = auto["efficiency"] / auto["model"]
            yield _bound(f"{name}: efficiency of auto / the model's", part, at_least=OF_MODEL)
        for control in row["controls"]:
            yield _bound(f"{name}: |efficiency|, {control['way']}", abs(control["efficiency"]), at_most=CONTROL)


def _of_others(found: Row) -> Iterator[dict[str, Any]]:
    for small in found["small"]:
        yield _bound(f"small {_sizes(small['shape'])}: off / auto", small["ratio"], at_least=SMALL)
        yield _bound(f"small {_sizes(small['shape'])}: auto declines", float(small["declined"]), at_least=1.0)
    if mlp := found["mlp"]:
        yield _bound("mlp: DTensor / auto", mlp["ratio"]["auto"], at_least=DTENSOR)


def _bound(what: str, found: float, at_least: float | None = None, at_most: float | None = None) -> dict[str, Any]:
    holds = (at_least is None or found >= at_least) and (at_most is None or found <= at_most)
    return {"what": what, "found": found, "at_least": at_least, "at_most": at_most, "pass": holds}


def _sizes(shape: Sequence[int]) -> str:
    return " x ".join(str(size) for size in shape)


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.2f}"


def _part(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def pattern_cells(row: Row) -> Iterator[list[str]]:
    """The lines of one pass: times in milliseconds."""
    parts = [_ms(row[name]) for name in ("t_comm", "t_mm", "t_seq")]
    for number, way in enumerate(row["ways"]):
        name = way["way"]
        if name == "auto":
            cut = f" {way['chunks']}" if way["method"] in ("slices", "exchange") else ""
            name = f"auto: {way['method']}{cut}"
        times = [_ms(way[key]) for key in ("seconds", "exposed", "tax")]
        first = [row["name"], name, *parts] if number == 0 else ["", name, "", "", ""]
        yield [*first, *times, _part(way["efficiency"]), _part(way["model"])]
    for control in row["controls"]:
        yield ["", control["way"], *[""] * 3, _ms(control["seconds"]), "", "", _part(control["efficiency"]), ""]
    for name, key in (("off", "t_off"), ("torch, link", "t_torch_link"), ("torch", "t_torch")):
        if row[key] is not None:
            yield ["", name, *[""] * 3, _ms(row[key]), *[""] * 4]


def mlp_cells(mlp: Row) -> list[list[str]]:
    return [[name, _ms(seconds), f"{mlp['ratio'][name]:.2f}"] for name, seconds in mlp["seconds"].items()]


def small_cells(rows: Sequence[Row]) -> list[list[str]]:
    return [
        [
            _sizes(row["shape"]),
            "declines" if row["declined"] else "overlaps",
            f"{row['auto'] * 1e6:.0f}",
            f"{row['off'] * 1e6:.0f}",
            f"{row['ratio']:.3f}",
        ]
        for row in rows
    ]


def _tables(found: Row) -> Iterator[tuple[Sequence[str], Sequence[int], list[list[str]]]]:
    """(headings, widths, lines) of each."""
    if found["patterns"]:
        yield HEADINGS, WIDTHS, [cells for row in found["patterns"] for cells in pattern_cells(row)]
    if found["mlp"]:
        against = "DTensor, link" if found["mlp"]["link"] else "DTensor"
        yield ("MLP, both ways", "ms", f"{against} / it"), (24, 10, 20), mlp_cells(found["mlp"])
    if found["small"]:
        headings = ("tokens x width x hidden", "auto", "auto us", "off us", "off / auto")
        yield headings, (24, 10, 10, 10, 12), small_cells(found["small"])


def table(found: Row) -> str:
    """For a terminal of 120 columns."""
    blocks = []
    for headings, widths, lines in _tables(found):
        rows = [headings, *lines]
        blocks.append("\n".join(_line(row, widths) for row in rows))
    verdicts = [
        f"{'PASS' if bound['pass'] else 'FAIL'} {bound['what']}: {bound['found']:.3f}, {_asked(bound)}"
        for bound in found["bounds"]
    ]
    return "\n\n".join([*blocks, "\n".join(verdicts), _said(found)])


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    """Names to the left, numbers to the right."""
    named = 2 if len(widths) == len(WIDTHS) else 1
    texts = [
        cell.ljust(width) if number < named else cell.rjust(width)
        for number, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return " ".join(texts).rstrip()


def _asked(bound: Row) -> str:
    least = bound["at_least"]
    return f"at most {bound['at_most']:g}" if least is None else f"at least {least:g}"


def markdown(found: Row) -> str:
    """For docs/."""
    blocks = []
    for headings, _, lines in _tables(found):
        named = 2 if len(headings) == len(WIDTHS) else 1
        rule = ["---"] * named + ["---:"] * (len(headings) - named)
        blocks.append("\n".join("| " + " | ".join(cells) + " |" for cells in (headings, rule, *lines)))
    verdicts = "\n".join(
        f"| {bound['what']} | {bound['found']:.3f} | {_asked(bound)} | {'PASS' if bound['pass'] else 'FAIL'} |"
        for bound in found["bounds"]
    )
    blocks.append(f"| bound | found | asked for | |\n|---|---:|---|---|\n{verdicts}")
    return "\n\n".join([*blocks, _said(found)])


def _said(found: Row) -> str:
    """Command, machine, shape and links."""
    machine, versions, shape = found["machine"], found["versions"], found["shape"]
    on = f"{found['ranks']} x {machine['gpu']}" if found["device"] == "cuda" else machine["cpu"]
    links = [f"{row['name']} {row['link']}" for row in found["patterns"] if row["link"]]
    if found["mlp"] and found["mlp"]["link"]:
        links.append(f"mlp {found['mlp']['link']}")
    lines = [
        f"`{found['command']}` on {found['date']}: {machine['cores']} cores, {on}, Python {versions['python']}, torch "
        f"{versions['torch']}, load {machine['load']}.",
        f"Times in ms; {found['ranks']} ranks, {shape['dtype']}, {shape['tokens']} tokens, width {shape['width']}, "
        f"hidden {shape['hidden']}.",
    ]
    return "\n".join([*lines, *(["Modelled links:", *(f"  {link}" for link in links)] if links else [])])
