"""What is sent, and what has to come out: small integers, known without asking any other rank.

Block j of what rank r sends repeats `pattern(r, j)`, of PERIOD elements, a prime, so that what lands in a wrong place
is seen. Results are exact in the data type: sums stay below its limit, products are powers of two.
"""

from __future__ import annotations

import functools
from typing import Any

from ...bindings.abi import ELEMENTS
from .options import TYPES

PERIOD = 4093
MOST = 1 << 20  # larger integers would prove nothing more


def torch_type(name: str) -> Any:
    """torch's dtype of one of TYPES."""
    import torch

    return getattr(torch, next(element.name for element in ELEMENTS if element.dtype == TYPES[name]))


def _limit(name: str) -> int:
    """The largest integer up to which all are exact in the type."""
    import torch

    kind = torch_type(name)
    return min(int(2 / torch.finfo(kind).eps) if kind.is_floating_point else torch.iinfo(kind).max, MOST)


@functools.lru_cache(maxsize=1024)
def pattern(rank: int, block: int, ranks: int, name: str, op: str) -> Any:
    """int64 [PERIOD], none of them 0: what rank sends in that block. `op` is "" where nothing is reduced."""
    import torch

    limit = _limit(name)
    place = torch.arange(PERIOD)
    if op == "prod":  # at most so many ranks bring a two
        most = min(ranks, limit.bit_length() - 1)
        return 1 + ((place + rank + block) % ranks < place // ranks % (most + 1)).long()
    if op in ("sum", "avg") and ranks > limit:
        return ((place + rank + block) % ranks < limit).long()
    high = limit // ranks if op in ("sum", "avg") else limit
    generator = torch.Generator().manual_seed(1_000_003 * rank + block)
    return torch.randint(1, high + 1, (PERIOD,), generator=generator)


@functools.lru_cache(maxsize=64)
def reduced(block: int, ranks: int, name: str, op: str) -> Any:
    """What the reduction of all ranks' block is: int64 [PERIOD], or float64 for the avg of a floating-point type."""
    import torch

    rows = torch.stack([pattern(rank, block, ranks, name, op) for rank in range(ranks)])
    if op == "sum":
        return rows.sum(0)
    if op == "prod":
        return rows.prod(0)
    if op == "avg":
        return rows.sum(0).double() / ranks if torch_type(name).is_floating_point else rows.sum(0) // ranks
    return rows.amax(0) if op == "max" else rows.amin(0)


def fill(target: Any, values: Any) -> None:
    """Repeat values [PERIOD] over target [n]."""
    row = values.to(target.device, target.dtype)
    whole = target.numel() // PERIOD
    if whole:
        target[: whole * PERIOD].view(whole, PERIOD).copy_(row)
    target[whole * PERIOD :].copy_(row[: target.numel() - whole * PERIOD])


def count_wrong(result: Any, values: Any, op: str) -> int:
    """How many elements of result [n] are not what values [PERIOD], repeated, says."""
    import torch

    rounded = op == "avg" and result.dtype.is_floating_point
    row = values.to(result.device, torch.float64 if rounded else result.dtype)
    slack = 4 * torch.finfo(result.dtype).eps * row.abs() if rounded else row  # some multiply by 1/N before they add
    wrong = 0
    for part in result.split(PERIOD * 256):  # what a comparison makes stays small
        whole = part.numel() // PERIOD * PERIOD
        for piece in (part[:whole].view(-1, PERIOD), part[whole:].view(1, -1)):
            expected = row[: piece.shape[1]]
            if rounded:  # NaN is wrong, too
                right = (piece.to(torch.float64) - expected).abs() <= slack[: piece.shape[1]]
            else:
                right = piece == expected
            wrong += int((~right).sum())
    return wrong
