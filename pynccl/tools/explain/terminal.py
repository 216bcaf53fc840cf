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

from .execute import Area, Landing, Pass, Run, Stage, Values, number
from .moves import Cuts
from .operations import OPERATIONS
from .words import SNIPPET, other_convention, words_of

_LABEL = 7  # columns before the first box
_NAMES = 17
_COLOURS = (33, 208, 35, 169, 37, 178, 99, 160)  # of 256, one for each rank; to be read on black and on white


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

    def painted(self, text: str, rank: int) -> str:
        return f"\x1b[38;5;{_COLOURS[rank]}m{text}\x1b[0m" if self.colour else text

    def strong(self, text: str) -> str:
        return f"\x1b[1m{text}\x1b[0m" if self.colour else text

    def faint(self, text: str) -> str:
        return f"\x1b[2m{text}\x1b[0m" if self.colour else text

    def wrapped(self, text: str, first: str = "", rest: str | None = None) -> list[str]:
        return textwrap.wrap(
            text,
            self.width,
            initial_indent=first,
            subsequent_indent=" " * len(first) if rest is None else rest,
            break_long_words=False,
            break_on_hyphens=False,
        )


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
    columns = _columns(run, style)
    words, back = words_of(run.name, run.op, run.grad, run.setup)
    title = ", ".join([run.name, *([run.op] if run.op else []), f"{run.setup.ranks} ranks"])
    parts = [
        style.strong(title),
        *style.wrapped(words.does),
        *_legend(run, style),
        "",
        *map(style.strong, style.wrapped(words.formula, f"{'forward':<11}")),
        *_pass(run.forward, columns, style),
        "",
        *map(style.strong, style.wrapped(back.formula, f"{'adjoint':<11}")),
        *style.wrapped(f"{back.does} g is the cotangent: the gradient of y."),
        "",
        *_pass(run.adjoint, columns, style),
    ]
    if run.grad:
        other = "replicated" if run.grad == "sum" else "sum"
        parts += ["", *style.wrapped(f"{other_convention(run.grad)}: --grad {other}")]
    if OPERATIONS[run.name].way == "all_gather":
        parts += ["", *(line for name, text in SNIPPET for line in _named(name, text, style))]
    shapes = f"{words.shapes};  here {_sizes(run.forward.areas[0].values)} -> {_sizes(run.forward.result)}"
    rows = [("shapes", shapes), ("pynccl", words.pynccl), ("pynccl_autograd", words.autograd), ("torch", words.torch)]
    parts += ["", *(line for row in rows for line in _named(*row, style))]
    parts += ["", "commonly confused", *(line for text in words.confused for line in style.wrapped(text, "- "))]
    return "\n".join(line.rstrip() for line in parts)


def _sizes(values: Values) -> str:
    sizes = [len(own) for own in values]
    return f"[{sizes[0]}]" if len(set(sizes)) == 1 else " ".join(f"[{size}]" for size in sizes)


def _named(name: str, text: str, style: Style) -> list[str]:
    return style.wrapped(text, f"{name:<{_NAMES}}" if name else "")


def _legend(run: Run, style: Style) -> list[str]:
    """How the numbers say where they come from, where they do."""
    values = run.forward.areas[0].values
    first = [own[:1] for own in values]
    sent = next((rank for rank in (1, 0) if first[rank]), 0)
    if run.op in ("max", "min", "prod") or OPERATIONS[run.name].way == "halo_exchange" or len(set(first)) == 1:
        return []
    return style.wrapped(f"The numbers say where they are from: {number(values[sent][0])} is the first of rank {sent}.")


# ------------------------------------------------------------------------------------------------------------ a pass


class Columns(NamedTuple):
    cell: int  # characters inside a box
    gap: int
    bands: list[range]  # of ranks, drawn side by side


def _columns(run: Run, style: Style) -> Columns:
    """The widest that fits; the ranks in several bands, one under the other, where none does."""
    numbers = [values for one in (run.forward, run.adjoint) for values in (area.values for area in one.areas)]
    numbers += [stage.factors for stage in run.adjoint.stages]
    widest = max(len(number(value)) for values in numbers for own in values for value in own)
    ranks = run.setup.ranks
    room = style.width - _LABEL - widest - len("  sum  -> rank 0")
    for cell, gap in ((max(widest + 2, 4), 3), (widest, 3), (widest, len(style.signs.right))):
        if ranks * (cell + 2) + (ranks - 1) * gap <= room:
            return Columns(cell, gap, [range(ranks)])
    cell = max(widest + 2, 4)
    each = max((room + 3) // (cell + 5), 1)
    return Columns(cell, 3, [range(start, min(start + each, ranks)) for start in range(0, ranks, each)])


Origins = dict[tuple[int, int], set[int]]  # (rank, element) -> ranks that it is from


def _pass(one: Pass, columns: Columns, style: Style) -> list[str]:
    """What the ranks hold, stage after stage."""
    first = one.areas[0]
    origins: Origins = {(rank, i): {rank} for rank, own in enumerate(first.values) for i in range(len(own))}
    lines = _area(first, columns, style, origins, one.stages[0], heads=True)
    for at, (stage, area) in enumerate(zip(one.stages, one.areas[1:], strict=True), 1):
        lines += ["", *_between(stage, columns, style), ""]
        landed: Origins = {}
        for move, _, _ in stage.landings:
            landed.setdefault(move[2:], set()).update(origins.get(move[:2], ()))
        origins = landed
        lines += _area(area, columns, style, origins, one.stages[at] if at < len(one.stages) else None)
    return lines


def _between(stage: Stage, columns: Columns, style: Style) -> list[str]:
    """The name of what happens; factors that differ; sums whose parts stand in different rows."""
    lines = style.wrapped(stage.text, f"{'':<{_LABEL}}  {style.signs.down} ")
    if len({factor for own in stage.factors for factor in own}) > 1:
        cuts = tuple((len(own),) for own in stage.factors)
        lines += _area(Area("times", stage.factors, cuts), columns, style, {})
    return lines + [f"{'':<{_LABEL}}    {text}" for text in _sums_across_rows(stage)]


def _area(
    area: Area, columns: Columns, style: Style, origins: Origins, leaving: Stage | None = None, heads: bool = False
) -> list[str]:
    """One column for each rank; `leaving` is the stage that takes the elements away from here."""
    lines = []
    for band in columns.bands:
        if heads or len(columns.bands) > 1:
            lines.append(_heads(band, columns, style))
        boxes = [_box(area, rank, columns.cell, style, origins) for rank in band]
        elements = _aligned_rows(area.cuts)
        for at in range(max(map(len, boxes))):
            element = elements[at] if at < len(elements) else None
            row = f"{area.label if at == 1 else '':<{_LABEL}}"
            for rank, box in zip(band, boxes, strict=True):
                row += box[at] if at < len(box) else " " * (columns.cell + 2)
                if rank != band[-1]:
                    row += f"{_arrow(leaving, element, rank, style.signs):^{columns.gap}}"
            if text := _ending(leaving, element, len(area.values)):
                row += "  " + text.replace("->", style.signs.right)
            lines.append(row.rstrip())
    return lines


def _heads(band: range, columns: Columns, style: Style) -> str:
    width = columns.cell + 2
    heads = []
    for rank in band:
        name = f"rank {rank}" if width > 5 else f"r{rank}"
        heads.append(f"{name:^{width}}".replace(name, style.painted(name, rank)))
    return " " * _LABEL + (" " * columns.gap).join(heads)


def _box(area: Area, rank: int, cell: int, style: Style, origins: Origins) -> list[str]:
    """The memory of one rank; blocks of several elements are set apart."""
    signs, own = style.signs, area.values[rank]
    if not own:
        return []
    lines = [signs.corners[0] + signs.line * cell + signs.corners[1]]
    for element in _rows(area.cuts[rank]):
        if element is None:
            lines.append(signs.corners[4] + signs.cut * cell + signs.corners[5])
            continue
        text, ranks = f"{number(own[element]):^{cell}}", origins.get((rank, element), set())
        shown = style.painted(text, *ranks) if len(ranks) == 1 else style.strong(text) if ranks else style.faint(text)
        lines.append(signs.side + shown + signs.side)
    return [*lines, signs.corners[2] + signs.line * cell + signs.corners[3]]


def _rows(cuts: Sequence[int]) -> list[int | None]:
    """The elements of one rank from top to bottom, None for a line between blocks."""
    divided = max(cuts, default=0) > 1
    rows: list[int | None] = []
    for block, count in enumerate(cuts):
        start = sum(cuts[:block])
        if divided and count and start:
            rows.append(None)
        rows += range(start, start + count)
    return rows


def _aligned_rows(cuts: Cuts) -> list[int | None]:
    """Which element stands in each line of all boxes; none where the ranks are cut in different ways."""
    kinds = {own for own in cuts if own}
    if len(kinds) > 1 and any(len(own) > 1 for own in kinds):
        return []
    return [None, *_rows(max(kinds, key=sum, default=()))]


# -------------------------------------------------------------------------------------------------- where a row goes


def _of_row(stage: Stage | None, element: int | None) -> list[Landing]:
    if stage is None or element is None or stage.is_local:
        return []
    return [landing for landing in stage.landings if landing.move.at == element]


def _arrow(stage: Stage | None, element: int | None, rank: int, signs: Signs) -> str:
    """Which way something of this row goes between the columns of `rank` and of the next."""
    moves = [landing.move for landing in _of_row(stage, element)]
    if stage is not None and not stage.is_collective:  # messages: those to a neighbour; `_ending` names the others
        moves = [move for move in moves if abs(move.source - move.target) == 1]
    to_right = any(move.source <= rank < move.target for move in moves)
    to_left = any(move.target <= rank < move.source for move in moves)
    return signs.both if to_right and to_left else signs.right if to_right else signs.left if to_left else ""


def _ending(stage: Stage | None, element: int | None, ranks: int) -> str:
    """What becomes of a row: who gets it, and the sum where it is one; "" where that is several things."""
    found = _of_row(stage, element)
    if stage is None or not found:
        return ""
    if not stage.is_collective:
        far = [one.move for one in found if abs(one.move.source - one.move.target) > 1]
        return ", ".join(f"rank {move.source} -> rank {move.target}" for move in far)
    targets = {landing.move.target for landing in found}
    if len(targets) not in (1, ranks):
        return ""
    to = f"-> rank {min(targets)}" if len(targets) == 1 else "-> all"
    last = {landing.move[2:]: landing.value for landing in found}
    if len(last) == len(found) or len(set(last.values())) > 1:  # nothing is combined, or not to one value
        return to
    return f"{'sum' if stage.op == 'premul' else stage.op} {number(found[-1].value)} {to}"


def _sums_across_rows(stage: Stage) -> list[str]:
    """Sums whose parts stand in different rows, so that no row says them."""
    parts: dict[tuple[int, int], list[Landing]] = {}
    for landing in stage.landings:
        parts.setdefault(landing.move[2:], []).append(landing)
    lines = []
    for (rank, _), found in sorted(parts.items()):
        if len({landing.move.at for landing in found}) > 1:
            sums = [landing.value for landing in found]
            terms = [total - before for total, before in zip(sums, [0.0, *sums], strict=False)]
            lines.append(f"rank {rank}: {' + '.join(map(number, terms))} = {number(sums[-1])}")
    return lines
