"""An operation as a picture: forward on the left, its adjoint on the right with the same places and arrows turned up.

Needs matplotlib, which is imported here alone and when a picture is asked for.
"""

from __future__ import annotations

import textwrap
from typing import Any

from .arrows import aligned_rows, crossing, ending, labels, number, sums_across_rows
from .colours import PLAIN, mixed
from .execute import Pass, Run, Stage, Values
from .moves import Cuts
from .words import step_words, words_of

_INK, _SOFT, _LANE, _EMPTY = "#1b1f26", "#5b6472", "#f0f2f5", "#ffffff"
_PITCH, _CELL, _ROW, _DIVIDER = 1.35, 0.92, 0.5, 0.16  # in units of the drawing, as all below
_LABEL, _ENDING, _BETWEEN, _HEAD = 1.0, 2.4, 1.35, 0.55
_INCHES = 0.5  # of one unit
_MONO = "DejaVu Sans Mono"


def draw(found: Run, file: str) -> None:
    """Write the picture; what kind it is, the ending of the file's name says."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    words, back = words_of(found.name, found.op, found.grad, found.setup)
    wide = _LABEL + _PITCH * found.setup.ranks + _ENDING
    panels = [
        (found.forward, "forward", words.formula, words.does),
        (found.adjoint, "adjoint", back.formula, back.does),
    ]
    letters = int(wide * _INCHES * 13.5)  # of the text that fit over a panel
    texts = [[textwrap.wrap(formula, letters), textwrap.wrap(does, letters)] for _, _, formula, does in panels]
    head = 0.9 + 0.34 * max(len(formula) + len(does) for formula, does in texts)
    tall = max(_height(one) for one, *_ in panels)
    across, down = 2 * wide + 0.9, tall + head + 0.9
    figure = pyplot.figure(figsize=(across * _INCHES, down * _INCHES), facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(-0.3, across - 0.3)
    axes.set_ylim(down - 0.7, -0.7)
    axes.axis("off")
    title = ", ".join([found.name, *([found.op] if found.op else []), f"{found.setup.ranks} ranks"])
    axes.text(0, -0.3, title, fontsize=15, weight="bold", color=_INK, va="center")
    for at, (one, name, _, _) in enumerate(panels):
        x = at * (wide + 0.6)
        y = _text(axes, x, 0.5, name, texts[at])
        _panel(axes, found, one, x, max(y, head), name == "adjoint")
    figure.savefig(file, dpi=160)
    pyplot.close(figure)


def _text(axes: Any, x: float, y: float, name: str, text: list[list[str]]) -> float:
    """The head of a panel; returns where it ends."""
    axes.text(x, y, name, fontsize=12, weight="bold", color=_INK, va="center")
    formula, does = text
    for lines, font, colour in ((formula, {"family": _MONO, "size": 8.5}, _INK), (does, {"size": 9}, _SOFT)):
        for line in lines:
            y += 0.34
            axes.text(x, y, line, color=colour, va="center", **font)
    return y + 0.4


def _areas(one: Pass) -> list[tuple[str, Values, Cuts]]:
    stages = [(stage.values, stage.cuts) for stage in one.stages]
    return [(name, *area) for name, area in zip(labels(one), [(one.values, one.cuts), *stages], strict=True)]


def _divided(cuts: Cuts) -> bool:
    return any(max(own, default=0) > 1 and len(own) > 1 for own in cuts)


def _tops(cuts: tuple[int, ...], divided: bool) -> list[float]:
    """Where each element of a rank begins, and where the last one ends."""
    tops, y = [], 0.0
    for block, count in enumerate(cuts):
        if divided and count and sum(cuts[:block]):
            y += _DIVIDER
        for _ in range(count):
            tops.append(y)
            y += _ROW
    return [*tops, y]


def _height(one: Pass) -> float:
    areas = [max(_tops(own, _divided(cuts))[-1] for own in cuts) for _, _, cuts in _areas(one)]
    notes = sum(0.3 * len(sums_across_rows(stage)) for stage in one.stages)
    return _HEAD + sum(areas) + _BETWEEN * len(one.stages) + notes


def _panel(axes: Any, found: Run, one: Pass, x: float, y: float, upwards: bool) -> None:
    from matplotlib.patches import FancyBboxPatch

    ranks = found.setup.ranks
    for rank in range(ranks):
        left = x + _LABEL + rank * _PITCH
        axes.add_patch(
            FancyBboxPatch(
                (left + 0.12, y - 0.1), _PITCH - 0.24, _height(one) + 0.15, boxstyle="round,pad=0,rounding_size=0.1",
                facecolor=_LANE, edgecolor="none", zorder=0,
            )
        )  # fmt: skip
        axes.text(left + _PITCH / 2, y + 0.15, f"rank {rank}", ha="center", va="center", fontsize=9, weight="bold",
                  color=mixed(PLAIN[rank], "#000000", 0.85))  # fmt: skip
    y += _HEAD
    areas = _areas(one)
    origins = _origins(one)
    order = range(len(areas) - 1, -1, -1) if upwards else range(len(areas))
    for place, at in enumerate(order):
        name, values, cuts = areas[at]
        leaving = one.stages[at] if at < len(one.stages) else None
        y = _area(axes, x, y, name, values, cuts, origins[at], leaving)
        if place < len(areas) - 1:
            y = _between(axes, found, one.stages[at - 1 if upwards else at], x, y, upwards)


def _origins(one: Pass) -> list[dict[tuple[int, int], list[int]]]:
    """Of each element of each area the ranks that it is from."""
    held = {(rank, i): [rank] for rank, own in enumerate(one.values) for i in range(len(own))}
    found = [held]
    for stage in one.stages:
        after: dict[tuple[int, int], list[int]] = {}
        for (source, at, target, to), _, _ in stage.landings:
            parts = after.setdefault((target, to), [])
            parts += [rank for rank in found[-1].get((source, at), []) if rank not in parts]
        found.append(after)
    return found


def _area(
    axes: Any,
    x: float,
    y: float,
    name: str,
    values: Values,
    cuts: Cuts,
    origins: dict[tuple[int, int], list[int]],
    leaving: Stage | None,
) -> float:
    """The elements of all ranks, with arrows where they cross; returns where the area ends."""
    divided = _divided(cuts)
    axes.text(x + _LABEL - 0.12, y + _ROW / 2, name, ha="right", va="center", fontsize=9, weight="bold", family=_MONO,
              color=_SOFT)  # fmt: skip
    for rank, own in enumerate(values):
        tops = _tops(cuts[rank], divided)
        for i, value in enumerate(own):
            left = x + _LABEL + rank * _PITCH + (_PITCH - _CELL) / 2
            _cell(axes, left, y + tops[i], number(value), sorted(origins.get((rank, i), [])))
    tallest = max(cuts, key=sum)
    tops = _tops(tallest, divided)
    if leaving is not None:
        for element in aligned_rows(cuts):
            if element is not None:
                _row(axes, x, y + tops[element] + _ROW / 2, leaving, element, len(values))
    return y + max(_tops(own, divided)[-1] for own in cuts)


def _cell(axes: Any, x: float, y: float, text: str, ranks: list[int]) -> None:
    from matplotlib.patches import Rectangle

    tall = _ROW - 0.07
    for at, rank in enumerate(ranks):
        part = _CELL / len(ranks)
        pale = mixed(PLAIN[rank], "#ffffff", 0.28)
        axes.add_patch(Rectangle((x + at * part, y), part, tall, facecolor=pale, edgecolor="none", zorder=2))
    edge, line = (_INK, "-") if len(ranks) > 1 else ("none", "-") if ranks else (_SOFT, ":")
    ground = "none" if ranks else _EMPTY
    axes.add_patch(Rectangle((x, y), _CELL, tall, facecolor=ground, edgecolor=edge, linewidth=0.9, linestyle=line,
                             zorder=2.5))  # fmt: skip
    axes.text(x + _CELL / 2, y + tall / 2 + 0.01, text, ha="center", va="center", fontsize=9.5, zorder=3,
              weight="bold" if ranks else "normal", color=_INK if ranks else _SOFT)  # fmt: skip


def _row(axes: Any, x: float, y: float, stage: Stage, element: int, ranks: int) -> None:
    """Arrows between the columns, and what becomes of the row."""
    gap = _PITCH - _CELL
    styles = {"right": "->", "left": "<-", "both": "<->"}
    for rank in range(ranks - 1):
        if way := crossing(stage, element, rank):
            middle = x + _LABEL + (rank + 1) * _PITCH
            ends = (middle - gap / 2 + 0.03, y - 0.035), (middle + gap / 2 - 0.03, y - 0.035)
            axes.annotate("", ends[1], ends[0], zorder=4, arrowprops={
                "arrowstyle": styles[way], "color": _INK, "linewidth": 1.1, "shrinkA": 0, "shrinkB": 0,
                "mutation_scale": 8,
            })  # fmt: skip
    if text := ending(stage, element, ranks):
        axes.text(x + _LABEL + ranks * _PITCH + 0.02, y - 0.03, text.replace("->", "→"), va="center", fontsize=8.5,
                  color=_INK)  # fmt: skip


def _between(axes: Any, found: Run, stage: Stage, x: float, y: float, upwards: bool) -> float:
    """A large arrow and the name of what happens; returns where that ends."""
    text = step_words(stage.way, stage.op, found.setup.by_counts)
    notes = sums_across_rows(stage)
    middle = x + _LABEL + found.setup.ranks * _PITCH / 2
    tall = _BETWEEN + 0.3 * len(notes)
    top, bottom = y + 0.08, y + tall - 0.13
    ends = ((middle, bottom), (middle, top)) if upwards else ((middle, top), (middle, bottom))
    axes.annotate("", ends[1], ends[0], zorder=1, arrowprops={
        "arrowstyle": "-|>", "color": _SOFT, "linewidth": 1.6, "mutation_scale": 16, "shrinkA": 0, "shrinkB": 0,
    })  # fmt: skip
    lines = "\n".join([text, *notes])
    axes.text(middle, (top + bottom) / 2, lines, ha="center", va="center", fontsize=8.5, color=_INK, zorder=5,
              linespacing=1.35,
              bbox={"boxstyle": "round,pad=0.35", "facecolor": "white", "edgecolor": "#d8dce3"})  # fmt: skip
    return y + tall
