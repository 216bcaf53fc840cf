"""Draw an operation as text: one column per rank, its elements from top to bottom, and arrows for the moves.

In a row of the input, an arrow between two columns means that data crosses there; the text right of the row names the
receiver.
"""

from __future__ import annotations

import textwrap

from .execute import Pass, Run, Values
from .moves import Move
from .operations import GRAD_NOTES, adjoint_text, texts_for

_WIDTH = 80
_LABEL = 7  # columns before the first box
_CELL = 4  # characters inside a box
_ASCII = str.maketrans("┌┐└┘─│→←↔▼", "+++++|><=v")


def drawing(run: Run, encoding: str) -> str:
    """Return description, forward, adjoint, calls and note as text; in ASCII if `encoding` lacks box characters."""
    texts = texts_for(run.name, run.grad)
    lines = [
        f"{run.name}, {run.ranks} ranks",
        *_wrapped(texts.does),
        "Each number shows its origin: 11 is the first element of rank 1.",
        "",
        *_wrapped(texts.formula, "forward    "),
        *_pass(run.forward),
        "",
        *_wrapped(texts.gradient, "adjoint    "),
        *_wrapped(f"{adjoint_text(run.name, run.grad)} g is the cotangent: the gradient of y."),
        "",
        *_pass(run.adjoint),
        "",
        *([*_wrapped(GRAD_NOTES[run.grad]), ""] if run.grad else []),
    ]
    calls = {"shapes": texts.shapes, "pynccl": texts.pynccl, "pynccl_autograd": texts.autograd, "torch": texts.torch}
    lines += [line for name, text in calls.items() for line in _wrapped(text, f"{name:<17}")]
    text = "\n".join([*lines, "", *_wrapped(texts.note, "note: ")])
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


def _pass(drawn: Pass) -> list[str]:
    """Return the lines of one direction: the values before, the method, the values after."""
    ranks = len(drawn.before)
    gap = 3 if ranks <= 6 else 1
    heads = (" " * gap).join(f"rank {rank}" for rank in range(ranks))
    return [
        " " * _LABEL + heads,
        *_boxes(drawn.labels[0], drawn.before, gap, drawn),
        "",
        f"{'':<{_LABEL}}  ▼ {drawn.text}",
        "",
        *_boxes(drawn.labels[1], drawn.after, gap, None),
    ]


def _boxes(label: str, values: Values, gap: int, leaving: Pass | None) -> list[str]:
    """Return the boxes of all ranks' memory; `leaving` is the pass that moves these elements, if any."""

    def row(cells: list[str], start: str = "", gaps: list[str] | None = None, end: str = "") -> str:
        between = [f"{arrow:^{gap}}" for arrow in gaps or [""] * (len(cells) - 1)]
        line = "".join(cell + space for cell, space in zip(cells, [*between, ""], strict=True))
        return f"{start:<{_LABEL}}{line}  {end}".rstrip()

    blank = " " * (_CELL + 2)
    lines = [row([f"┌{'─' * _CELL}┐" if own else blank for own in values])]
    for i in range(max(map(len, values))):
        cells = [f"│{own[i]:^{_CELL}}│" if own else blank for own in values]
        moves = [move for move in leaving.moves if move.at == i] if leaving else []
        gaps = [_arrow(moves, rank, leaving) for rank in range(len(values) - 1)]
        lines.append(row(cells, label if i == 0 else "", gaps, _destination(moves, leaving)))
    return [*lines, row([f"└{'─' * _CELL}┘" if own else blank for own in values])]


def _arrow(moves: list[Move], rank: int, leaving: Pass | None) -> str:
    """Return the arrow between the columns of `rank` and the next rank: the direction of the moves that cross there."""
    if leaving and not leaving.method:  # messages: draw only those between neighbours; `_destination` names the others
        moves = [move for move in moves if abs(move.source - move.target) == 1]
    to_right = any(move.source <= rank < move.target for move in moves)
    to_left = any(move.target <= rank < move.source for move in moves)
    return "↔" if to_right and to_left else "→" if to_right else "←" if to_left else ""


def _destination(moves: list[Move], leaving: Pass | None) -> str:
    """Return the text right of a row: receiver and sum, if the row has one receiver or goes to all ranks; else ""."""
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
