"""An operation drawn in characters: a column for each rank, its elements from top to bottom, arrows where they go.

In a row of the input, an arrow between two columns says that something crosses there; right of the row stands who gets
it. Box-drawing characters where stdout's encoding has them, else ASCII; colours, one for each rank, on a terminal only.
"""

from __future__ import annotations

import os
import textwrap
from dataclasses import dataclass
from typing import Any

from .execute import Area, Landing, Run, Values, number
from .operations import OTHER, words_of

_LABEL = 7  # columns before the first box
_COLOURS = (33, 208, 35, 169, 37, 178, 99, 160)  # of 256, one for each rank; to be read on black and on white
_SIGNS = "┌┐└┘├┤─│→←↔▼┄"
_ASCII = str.maketrans(_SIGNS, "++++++-|><=v.")

Origins = dict[tuple[int, int], set[int]]  # (rank, element) -> ranks that it is from


@dataclass(frozen=True)
class Style:
    """width: columns that lines should fit into."""

    width: int = 80
    ascii: bool = False
    colour: bool = False

    def painted(self, text: str, rank: int) -> str:
        return f"\x1b[38;5;{_COLOURS[rank]}m{text}\x1b[0m" if self.colour else text

    def strong(self, text: str) -> str:
        return f"\x1b[1m{text}\x1b[0m" if self.colour else text

    def wrapped(self, text: str, first: str = "") -> list[str]:
        return textwrap.wrap(
            text,
            self.width,
            initial_indent=first,
            subsequent_indent=" " * len(first),
            break_long_words=False,
            break_on_hyphens=False,
        )


def style_of(stream: Any, width: int) -> Style:
    """What a stream can show; NO_COLOR and TERM=dumb are honoured."""
    try:
        _SIGNS.encode(stream.encoding or "ascii")
        plain = False
    except (UnicodeEncodeError, LookupError):
        plain = True
    colourless = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or not stream.isatty()
    return Style(width, plain, not colourless)


def drawing(run: Run, style: Style) -> str:
    """The whole answer: words, forward, adjoint, calls, what is mistaken for it."""
    words = words_of(run.name, run.op, run.grad, run.setup)
    cell, gap = _spacing(run, style.width)
    title = ", ".join([run.name, *([run.op] if run.op else []), f"{run.setup.ranks} ranks"])
    parts = [
        style.strong(title),
        *style.wrapped(words.does),
        *_legend(run, style),
        "",
        *map(style.strong, style.wrapped(words.formula, f"{'forward':<11}")),
        *_pass(run.forward, cell, gap, style),
        "",
        *map(style.strong, style.wrapped(words.gradient, f"{'adjoint':<11}")),
        *style.wrapped(f"{words.back.strip()} g is the cotangent: the gradient of y."),
        "",
        *_pass(run.adjoint, cell, gap, style),
        "",
    ]
    if run.grad:
        parts += [*style.wrapped(OTHER[run.grad]), ""]
    shapes = f"{words.shapes};  here {_sizes(run.forward[0].values)} -> {_sizes(run.forward[-1].values)}"
    calls = {"shapes": shapes, "pynccl": words.pynccl, "pynccl_autograd": words.autograd, "torch": words.torch}
    parts += [line for name, text in calls.items() for line in style.wrapped(text, f"{name:<17}")]
    parts += ["", *style.wrapped(words.note, "note: ")]
    text = "\n".join(line.rstrip() for line in parts)
    return text.translate(_ASCII) if style.ascii else text


def _sizes(values: Values) -> str:
    sizes = [len(own) for own in values]
    return f"[{sizes[0]}]" if len(set(sizes)) == 1 else " ".join(f"[{size}]" for size in sizes)


def _legend(run: Run, style: Style) -> list[str]:
    """How the numbers say where they come from, where they do."""
    first = [own[:1] for own in run.forward[0].values]
    sent = next((rank for rank in (1, 0) if first[rank]), 0)
    if run.name == "halo_exchange" or len(set(first)) == 1:
        return []
    return style.wrapped(f"The numbers say where they are from: {number(first[sent][0])} is the first of rank {sent}.")


def _spacing(run: Run, width: int) -> tuple[int, int]:
    """Characters inside a box, and between two boxes."""
    values = [area.values for one in (run.forward, run.adjoint) for area in one]
    widest = max(len(number(value)) for ranks in values for own in ranks for value in own)
    ranks, roomy = run.setup.ranks, max(widest + 2, 4)
    room = width - _LABEL - widest - len("  sum  -> rank 0")
    return (roomy, 3) if ranks * (roomy + 5) - 3 <= room else (widest, 1)


# ------------------------------------------------------------------------------------------------------------ a pass


def _pass(areas: list[Area], cell: int, gap: int, style: Style) -> list[str]:
    """What the ranks hold, one after the other."""
    origins: Origins = {(rank, i): {rank} for rank, own in enumerate(areas[0].values) for i in range(len(own))}
    heads = [f"rank {rank}" if cell > 3 else f"r{rank}" for rank in range(len(areas[0].values))]
    columns = [f"{head:^{cell + 2}}".replace(head, style.painted(head, rank)) for rank, head in enumerate(heads)]
    lines = [" " * _LABEL + (" " * gap).join(columns)]
    for area, leaving in zip(areas, [*areas[1:], None], strict=True):
        if area.text:
            lines += ["", *style.wrapped(area.text, f"{'':<{_LABEL}}  ▼ ")]
            landed: Origins = {}
            for move, _, _ in area.landings:
                landed.setdefault(move[2:], set()).update(origins.get(move[:2], ()))
            origins = landed
        lines += [*([""] if area.text else []), *_area(area, cell, gap, style, origins, leaving)]
    return lines


def _area(area: Area, cell: int, gap: int, style: Style, origins: Origins, leaving: Area | None = None) -> list[str]:
    """One column for each rank; `leaving` is the stage that takes the elements away from here."""
    boxes = [_box(area, rank, cell, style, origins) for rank in range(len(area.values))]
    kinds = {own for own in area.cuts if own}
    alike = len(kinds) == 1 or all(len(own) == 1 for own in kinds)  # a row of the drawing is one element of each rank
    elements = [None, *_rows(max(kinds, key=sum))] if alike else []
    lines = []
    for at in range(max(map(len, boxes))):
        moves = _leaving(leaving, elements[at] if at < len(elements) else None)
        row = f"{area.label if at == 1 else '':<{_LABEL}}"
        for rank, box in enumerate(boxes):
            row += box[at] if at < len(box) else " " * (cell + 2)
            if rank + 1 < len(boxes):
                row += f"{_arrow(moves, rank, leaving):^{gap}}"
        ending = _ending(moves, leaving, len(boxes))
        lines.append(f"{row}  {ending}" if ending else row.rstrip())
    return lines


def _box(area: Area, rank: int, cell: int, style: Style, origins: Origins) -> list[str]:
    """The memory of one rank; blocks of several elements are set apart."""
    own = area.values[rank]
    if not own:
        return []
    lines = [f"┌{'─' * cell}┐"]
    for element in _rows(area.cuts[rank]):
        if element is None:
            lines.append(f"├{'┄' * cell}┤")
            continue
        text, ranks = f"{number(own[element]):^{cell}}", origins.get((rank, element), set())
        lines.append(f"│{style.painted(text, *ranks) if len(ranks) == 1 else style.strong(text) if ranks else text}│")
    return [*lines, f"└{'─' * cell}┘"]


def _rows(cuts: tuple[int, ...]) -> list[int | None]:
    """The elements of one rank from top to bottom, None for a line between blocks."""
    rows: list[int | None] = []
    for block, count in enumerate(cuts):
        start = sum(cuts[:block])
        if max(cuts) > 1 and count and start:
            rows.append(None)
        rows += range(start, start + count)
    return rows


# -------------------------------------------------------------------------------------------------- where a row goes


def _leaving(stage: Area | None, element: int | None) -> list[Landing]:
    if stage is None or element is None or stage.is_local:
        return []
    return [landing for landing in stage.landings if landing.move.at == element]


def _arrow(found: list[Landing], rank: int, stage: Area | None) -> str:
    """Which way something of this row goes between the columns of `rank` and of the next."""
    moves = [landing.move for landing in found]
    if stage is not None and not stage.collective:  # messages: those to a neighbour; `_ending` names the others
        moves = [move for move in moves if abs(move.source - move.target) == 1]
    to_right = any(move.source <= rank < move.target for move in moves)
    to_left = any(move.target <= rank < move.source for move in moves)
    return "↔" if to_right and to_left else "→" if to_right else "←" if to_left else ""


def _ending(found: list[Landing], stage: Area | None, ranks: int) -> str:
    """What becomes of a row: who gets it, and the sum where it is one; "" where that is several things."""
    if stage is None or not found:
        return ""
    if not stage.collective:
        far = [one.move for one in found if abs(one.move.source - one.move.target) > 1]
        return ", ".join(f"rank {move.source} → rank {move.target}" for move in far)
    targets = {landing.move.target for landing in found}
    if len(targets) not in (1, ranks):
        return ""
    to = f"→ rank {min(targets)}" if len(targets) == 1 else "→ all"
    last = {landing.move[2:]: landing.value for landing in found}
    if len(last) == len(found) or len(set(last.values())) > 1:  # nothing is combined, or not to one value
        return to
    return f"{stage.op} {number(found[-1].value)} {to}"
