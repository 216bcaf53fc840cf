"""An operation drawn in characters: a column for each rank, its elements from top to bottom, arrows where they go.

In a row of the input, an arrow between two columns says that something crosses there; right of the row stands who gets
it. Box-drawing characters where stdout's encoding has them, else ASCII; colours, one for each rank, on a terminal only.
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from .arrows import aligned_rows, crossing, ending, labels, number, rows_of, sums_across_rows
from .colours import TERMINAL
from .execute import Pass, Run, Stage, Values
from .moves import Cuts
from .operations import OPERATIONS
from .words import SNIPPET, other_convention, step_words, words_of

_LABEL = 7
_NAMES = 17


class Signs(NamedTuple):
    corners: str  # top left, top right, bottom left, bottom right, left and right of a line between blocks
    line: str
    side: str
    right: str
    left: str
    both: str
    down: str
    cut: str


BOXES = Signs("┌┐└┘├┤", "─", "│", "→", "←", "↔", "▼", "┄")
ASCII = Signs("++++++", "-", "|", "->", "<-", "<>", "v", ".")


@dataclass(frozen=True)
class Style:
    """width: columns that lines should fit into."""

    width: int = 80
    signs: Signs = BOXES
    colour: bool = False

    def painted(self, text: str, rank: int | None) -> str:
        if not self.colour:
            return text
        return f"\x1b[2m{text}\x1b[0m" if rank is None else f"\x1b[38;5;{TERMINAL[rank]}m{text}\x1b[0m"

    def strong(self, text: str) -> str:
        return f"\x1b[1m{text}\x1b[0m" if self.colour else text


def style_of(stream: Any, width: int) -> Style:
    """What a stream can show; NO_COLOR and TERM=dumb are honoured."""
    try:
        "".join(BOXES).encode(stream.encoding or "ascii")
        signs = BOXES
    except (UnicodeEncodeError, LookupError):
        signs = ASCII
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or not stream.isatty()
    return Style(width, signs, not plain)


def drawing(run: Run, style: Style) -> str:
    """The whole answer: words, forward, adjoint, calls, what is mistaken for it."""
    layout = _layout(run, style)
    words, back = words_of(run.name, run.op, run.grad, run.setup)
    title = ", ".join([run.name, *([run.op] if run.op else []), f"{run.setup.ranks} ranks"])
    shapes = f"{words.shapes};  here {_sizes(run.forward.values)} -> {_sizes(run.forward.result)}"
    parts = [
        style.strong(title),
        *_wrapped(words.does, style),
        *_legend(run, style),
        "",
        *_headed("forward", words.formula, style),
        *_pass(run, run.forward, layout, style),
        "",
        *_headed("adjoint", back.formula, style),
        *_wrapped(f"{back.does} g is the cotangent: the gradient of y.", style),
        "",
        *_pass(run, run.adjoint, layout, style),
    ]
    if other := other_convention(run.name, run.grad):
        parts += ["", *_wrapped(other, style)]
    if OPERATIONS[run.name].way == "all_gather":
        parts += ["", *(line for name, text in SNIPPET for line in _row(name, text, style))]
    rows = [("shapes", shapes), ("pynccl", words.pynccl), ("pynccl_autograd", words.autograd), ("torch", words.torch)]
    parts += ["", *(line for row in rows for line in _row(*row, style))]
    parts += ["", "commonly confused", *(line for text in words.confused for line in _wrapped(text, style, "- "))]
    return "\n".join(line.rstrip() for line in parts)


def _sizes(values: Values) -> str:
    sizes = [len(own) for own in values]
    return f"[{sizes[0]}]" if len(set(sizes)) == 1 else " ".join(f"[{size}]" for size in sizes)


def _wrapped(text: str, style: Style, first: str = "", rest: str | None = None) -> list[str]:
    return textwrap.wrap(
        text,
        style.width,
        initial_indent=first,
        subsequent_indent=" " * len(first) if rest is None else rest,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _headed(name: str, formula: str, style: Style) -> list[str]:
    return [style.strong(line) for line in _wrapped(formula, style, f"{name:<11}")]


def _row(name: str, text: str, style: Style) -> list[str]:
    return _wrapped(text, style, f"{name:<{_NAMES}}" if name else "", " " * _NAMES if name else "")


def _legend(run: Run, style: Style) -> list[str]:
    """How the numbers say where they come from, where they do."""
    first = [own[:1] for own in run.forward.values]
    sent = next((rank for rank in (1, 0) if first[rank]), 0)
    own = run.forward.values[sent]
    if run.op in ("max", "min", "prod") or OPERATIONS[run.name].way == "halo_exchange" or len(set(first)) == 1:
        return []
    return _wrapped(f"The numbers say where they are from: {number(own[0])} is the first of rank {sent}.", style)


# ------------------------------------------------------------------------------------------------------------ a pass


def _pass(run: Run, one: Pass, layout: Layout, style: Style) -> list[str]:
    """What the ranks hold, stage after stage."""
    lines: list[str] = []
    names = labels(one)
    values, cuts, name = one.values, one.cuts, names[0]
    from_ranks: dict[tuple[int, int], int | None] = {
        (rank, i): rank for rank, own in enumerate(values) for i in range(len(own))
    }
    for at, stage in enumerate(one.stages):
        lines += _area(values, cuts, name, layout, style, from_ranks, stage, heads=at == 0)
        lines += ["", *_between(run, stage, layout, style)]
        values, cuts = stage.values, stage.cuts
        name = names[at + 1]
        from_ranks = _origins(stage, from_ranks)
    return lines + _area(values, cuts, name, layout, style, from_ranks)


def _origins(stage: Stage, before: dict[tuple[int, int], int | None]) -> dict[tuple[int, int], int | None]:
    """Of each element the rank that it is from; None where several came together. What is filled in is absent."""
    found: dict[tuple[int, int], int | None] = {}
    for landing in stage.landings:
        move = landing.move
        place = (move.target, move.to)
        found[place] = None if place in found else before.get((move.source, move.at))
    return found


class Layout(NamedTuple):
    cell: int  # characters inside a box
    gap: int
    bands: list[range]  # of ranks, drawn side by side


def _layout(run: Run, style: Style) -> Layout:
    """The widest that fits; the ranks in several bands, one under the other, where none does."""
    stages = [*run.forward.stages, *run.adjoint.stages]
    areas = [
        run.forward.values,
        run.adjoint.values,
        *(values for one in stages for values in (one.values, one.factors)),
    ]
    widest = max(len(number(value)) for values in areas for own in values for value in own)
    ranks = run.setup.ranks
    room = style.width - _LABEL - widest - len("  sum  -> rank 0")
    narrow = len(style.signs.right)
    for cell, gap in ((max(widest + 2, 4), 3), (widest, 3), (widest, narrow)):
        if ranks * (cell + 2) + (ranks - 1) * gap <= room:
            return Layout(cell, gap, [range(ranks)])
    cell = max(widest + 2, 4)
    each = max((room + 3) // (cell + 5), 1)
    return Layout(cell, 3, [range(start, min(start + each, ranks)) for start in range(0, ranks, each)])


def _between(run: Run, stage: Stage, layout: Layout, style: Style) -> list[str]:
    """The name of what happens; factors that differ; sums whose parts stand in different rows."""
    text = step_words(stage.way, stage.op, run.setup.by_counts)
    lines = _wrapped(text, style, f"{'':<{_LABEL}}  {style.signs.down} ")
    if len({factor for own in stage.factors for factor in own}) > 1:
        cuts = tuple((len(own),) for own in stage.factors)
        lines += _area(stage.factors, cuts, "times", layout, style, {})
    lines += [f"{'':<{_LABEL}}    {sum_of_some}" for sum_of_some in sums_across_rows(stage)]
    return [*lines, ""]


def _area(
    values: Values,
    cuts: Cuts,
    name: str,
    layout: Layout,
    style: Style,
    origins: dict[tuple[int, int], int | None],
    leaving: Stage | None = None,
    heads: bool = False,
) -> list[str]:
    """One column for each rank; `leaving` is the stage that takes the elements away from here."""
    lines = []
    for band in layout.bands:
        drawn = _band(values, cuts, name, layout, style, origins, leaving, band)
        lines += drawn if heads or len(layout.bands) > 1 else drawn[1:]
    return lines


def _band(
    values: Values,
    cuts: Cuts,
    name: str,
    layout: Layout,
    style: Style,
    origins: dict[tuple[int, int], int | None],
    leaving: Stage | None,
    band: range,
) -> list[str]:
    signs, gap = style.signs, " " * layout.gap
    width = layout.cell + 2
    columns = [_column(values[rank], cuts[rank], rank, layout.cell, style, origins) for rank in band]
    height = max(map(len, columns))
    names = [f"rank {rank}" if width > 5 else f"r{rank}" for rank in band]
    heads = [
        f"{name:^{width}}".replace(name, style.painted(name, rank)) for name, rank in zip(names, band, strict=True)
    ]
    lines = [(" " * _LABEL + gap.join(heads)).rstrip()]
    rows = aligned_rows(cuts)
    for at in range(height):
        element = rows[at] if at < len(rows) else None
        row = " " * _LABEL if at != 1 else f"{name:<{_LABEL}}"
        for rank, column in zip(band, columns, strict=True):
            row += column[at] if at < len(column) else " " * width
            if rank != band[-1]:
                row += _arrow(leaving, element, rank, layout.gap, signs)
        if element is not None and leaving is not None and (text := ending(leaving, element, len(values))):
            row += "  " + text.replace("->", signs.right)
        lines.append(row.rstrip())
    return lines


def _column(
    own: Sequence[float],
    cuts: Sequence[int],
    rank: int,
    cell: int,
    style: Style,
    origins: dict[tuple[int, int], int | None],
) -> list[str]:
    """The box of one rank; blocks of several elements are set apart."""
    signs = style.signs
    if not own:
        return []
    lines = [signs.corners[0] + signs.line * cell + signs.corners[1]]
    for element in rows_of(cuts):
        if element is None:
            lines.append(signs.corners[4] + signs.cut * cell + signs.corners[5])
            continue
        text = f"{number(own[element]):^{cell}}"
        if (rank, element) not in origins:
            text = style.painted(text, None)  # nothing came here
        else:
            origin = origins[rank, element]
            text = style.strong(text) if origin is None else style.painted(text, origin)
        lines.append(signs.side + text + signs.side)
    return [*lines, signs.corners[2] + signs.line * cell + signs.corners[3]]


def _arrow(stage: Stage | None, element: int | None, rank: int, gap: int, signs: Signs) -> str:
    """Between the columns of `rank` and of the next: which way something of this row crosses."""
    crosses = crossing(stage, element, rank) if stage is not None and element is not None else ""
    sign = {"right": signs.right, "left": signs.left, "both": signs.both}.get(crosses, "")
    return f"{sign:^{gap}}"
