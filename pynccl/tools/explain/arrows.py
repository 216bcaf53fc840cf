"""What a drawing shows of a stage: which way elements of a row cross between ranks, and what becomes of the row."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from .execute import Landing, Pass, Stage
from .moves import Cuts

NEIGHBOURS = ("permute", "permute_back", "send_recv", "send_recv_back", "halo_exchange", "halo_reduce")
_NAMES = {"premul": "sum"}


def number(value: float) -> str:
    """A small number as it is read: whole, or a fraction."""
    found = Fraction(value).limit_denominator(1000)
    return str(found) if abs(float(found) - value) < 1e-9 else f"{value:.3g}"


def rows_of(cuts: Sequence[int]) -> list[int | None]:
    """The elements of one rank from top to bottom, None for a line between blocks."""
    divided = max(cuts, default=0) > 1
    rows: list[int | None] = []
    for block, count in enumerate(cuts):
        start = sum(cuts[:block])
        if divided and count and start:
            rows.append(None)
        rows += range(start, start + count)
    return rows


def aligned_rows(cuts: Cuts) -> list[int | None]:
    """Which element stands in each row of all columns; none where the ranks are cut in different ways."""
    kinds = {own for own in cuts if own}
    if len(kinds) > 1 and any(len(own) > 1 for own in kinds):
        return []
    return [None, *rows_of(max(kinds, key=sum, default=()))]


def crossing(stage: Stage, element: int, rank: int) -> str:
    """Which way something of this row goes between the columns of `rank` and of the next: left, right, both, or ""."""
    if stage.is_local:
        return ""
    moves = [landing.move for landing in stage.landings if landing.move.at == element]
    if stage.way in NEIGHBOURS:
        moves = [move for move in moves if abs(move.source - move.target) == 1]
    to_right = any(move.source <= rank < move.target for move in moves)
    to_left = any(move.target <= rank < move.source for move in moves)
    return "both" if to_right and to_left else "right" if to_right else "left" if to_left else ""


def ending(stage: Stage, element: int, ranks: int) -> str:
    """What becomes of a row: who gets it, and the sum where it is one; "" where that is several things."""
    if stage.is_local:
        return ""
    found = [landing for landing in stage.landings if landing.move.at == element]
    if stage.way in NEIGHBOURS:
        far = [landing.move for landing in found if abs(landing.move.source - landing.move.target) > 1]
        return ", ".join(f"rank {move.source} -> rank {move.target}" for move in far)
    targets = sorted({landing.move.target for landing in found})
    if len(targets) not in (1, ranks):
        return ""
    to = f"-> rank {targets[0]}" if len(targets) == 1 else "-> all"
    last = {landing.move[2:]: landing.value for landing in found}
    combined = len(last) < len(found) and len(set(last.values())) == 1
    return f"{_NAMES.get(stage.op, stage.op)} {number(next(iter(last.values())))} {to}" if combined else to


def sums_across_rows(stage: Stage) -> list[str]:
    """Sums whose parts stand in different rows, so that no row says them."""
    parts: dict[tuple[int, int], list[Landing]] = {}
    for landing in stage.landings:
        parts.setdefault((landing.move.target, landing.move.to), []).append(landing)
    lines = []
    for (rank, _), found in sorted(parts.items()):
        if len({landing.move.at for landing in found}) > 1:
            sums = [landing.value for landing in found]
            terms = [total - before for total, before in zip(sums, [0.0, *sums], strict=False)]
            lines.append(f"rank {rank}: {' + '.join(map(number, terms))} = {number(sums[-1])}")
    return lines


def labels(one: Pass) -> list[str]:
    """Names of what the ranks hold: before the stages, and after each of them. G is the sum of all g."""
    names = ["g", *("G" if stage.op == "sum" else "g / N" for stage in one.stages[:-1]), "x.grad"]
    return names if one.is_adjoint else ["x", "y"]


def step_labels(stage: Stage, ranks: int) -> list[str]:
    """Who sends to whom in each step of a stage, in the order of drawing."""
    texts = []
    for step in range(stage.steps):
        pairs = sorted({(one.move.source, one.move.target) for one in stage.landings if one.step == step})
        far = (pairs[0][1] - pairs[0][0]) % ranks
        if far == 0:
            texts.append("" if stage.is_local else "each rank's own part")
        elif len(pairs) == ranks:
            texts.append(f"every rank r → r + {far} mod {ranks}")
        else:
            texts.append("rank " + ", ".join(f"{source} → {target}" for source, target in pairs))
    return texts
