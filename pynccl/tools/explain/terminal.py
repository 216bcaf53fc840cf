"""An operation drawn in characters: a column for each rank, its elements from top to bottom, arrows where they go.

In a row of the input, an arrow between two columns says that something crosses there; right of the row stands who gets
it.
"""

from __future__ import annotations

import textwrap

from .execute import Pass, Run, Values
from .moves import Move
from .operations import OTHER, backwards, words_of

_WIDTH = 80
_LABEL = 7  # columns before the first box
_CELL = 4  # characters inside a box
_ASCII = str.maketrans("┌┐└┘─│→←↔▼", "+++++|><=v")


def drawing(run: Run, encoding: str) -> str:
    """The whole answer: words, forward, adjoint, calls, what is mistaken for it; in ASCII if `encoding` lacks boxes."""
    words = words_of(run.name, run.grad)
    parts = [
        f"{run.name}, {run.ranks} ranks",
        *_wrapped(words.does),
        "The numbers say where they are from: 11 is the first of rank 1.",
        "",
        *_wrapped(words.formula, "forward    "),
        *_pass(run.forward),
        "",
        *_wrapped(words.gradient, "adjoint    "),
        *_wrapped(f"{backwards(run.name, run.grad)} g is the cotangent: the gradient of y."),
        "",
        *_pass(run.adjoint),
        "",
        *([*_wrapped(OTHER[run.grad]), ""] if run.grad else []),
    ]
    calls = {"shapes": words.shapes, "pynccl": words.pynccl, "pynccl_autograd": words.autograd, "torch": words.torch}
    parts += [line for name, text in calls.items() for line in _wrapped(text, f"{name:<17}")]
    text = "\n".join([*parts, "", *_wrapped(words.note, "note: ")])
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.translate(_ASCII)
    return text


def _wrapped(text: str, first: str = "") -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=first,
        subsequent_indent=" " * len(first),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _pass(one: Pass) -> list[str]:
    """What the ranks hold before and after."""
    ranks = len(one.before)
    gap = 3 if ranks <= 6 else 1
    heads = (" " * gap).join(f"rank {rank}" for rank in range(ranks))
    return [
        " " * _LABEL + heads,
        *_boxes(one.labels[0], one.before, gap, one),
        "",
        f"{'':<{_LABEL}}  ▼ {one.text}",
        "",
        *_boxes(one.labels[1], one.after, gap, None),
    ]


def _boxes(label: str, values: Values, gap: int, leaving: Pass | None) -> list[str]:
    """The memories of all ranks; `leaving` is what takes the elements away from here."""

    def row(cells: list[str], start: str = "", gaps: list[str] | None = None, end: str = "") -> str:
        between = [f"{one:^{gap}}" for one in gaps or [""] * (len(cells) - 1)]
        line = "".join(cell + space for cell, space in zip(cells, [*between, ""], strict=True))
        return f"{start:<{_LABEL}}{line}  {end}".rstrip()

    blank = " " * (_CELL + 2)
    lines = [row([f"┌{'─' * _CELL}┐" if own else blank for own in values])]
    for i in range(max(map(len, values))):
        cells = [f"│{own[i]:^{_CELL}}│" if own else blank for own in values]
        moves = [move for move in leaving.moves if move.at == i] if leaving else []
        gaps = [_arrow(moves, rank, leaving) for rank in range(len(values) - 1)]
        lines.append(row(cells, label if i == 0 else "", gaps, _ending(moves, leaving)))
    return [*lines, row([f"└{'─' * _CELL}┘" if own else blank for own in values])]


def _arrow(moves: list[Move], rank: int, leaving: Pass | None) -> str:
    """Which way something of this row goes between the columns of `rank` and of the next."""
    if leaving and not leaving.method:  # messages: those to a neighbour; `_ending` names the others
        moves = [move for move in moves if abs(move.source - move.target) == 1]
    to_right = any(move.source <= rank < move.target for move in moves)
    to_left = any(move.target <= rank < move.source for move in moves)
    return "↔" if to_right and to_left else "→" if to_right else "←" if to_left else ""


def _ending(moves: list[Move], leaving: Pass | None) -> str:
    """What becomes of a row: who gets it, and the sum where it is one; "" where that is several things."""
    if leaving is None:
        return ""
    if not leaving.method:
        far = [move for move in moves if abs(move.source - move.target) > 1]
        return ", ".join(f"rank {move.source} → rank {move.target}" for move in far)
    targets = sorted({move.target for move in moves})
    if len(targets) not in (1, len(leaving.after)):
        return ""
    to = f"→ rank {targets[0]}" if len(targets) == 1 else "→ all"
    combined = len({(move.target, move.to) for move in moves}) < len(moves)
    return f"sum {leaving.after[targets[0]][moves[0].to]} {to}" if combined else to
