"""The collectives as perf measures them: how much of each buffer, in place or not, the call, and what has to come out.

Block j of what rank r sends repeats `pattern(r, j)`: small integers, known without asking any other rank. What is
reduced is 1 or 2, so that sums and products are exact in the data type.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...bindings.abi import ELEMENTS, ITEMSIZE
from ...comm.collectives import PARTED
from ...comm.communicator import Communicator
from ...comm.groups import group
from .options import REDUCING, ROOTED, TYPES

Call = Callable[[], Any]
PERIOD = 4093  # a prime: what lands in a wrong place is seen
NEVER_IN_PLACE = ("all_to_all", "send_recv")
_ALIGNED = 16  # bytes: blocks in the middle of a buffer begin at multiples of it, where they are as large


@dataclass(frozen=True)
class Case:
    """One row of the table. count: elements, of one rank's block where there are blocks."""

    collective: str
    type: str
    op: str
    root: int
    ranks: int
    count: int

    @property
    def nbytes(self) -> int:
        """Of the full buffer."""
        return self.count * ITEMSIZE[TYPES[self.type]] * (self.ranks if self.collective in PARTED else 1)

    @property
    def reduction(self) -> str:
        """The operator; "" where nothing is reduced."""
        return self.op if self.collective in REDUCING else ""

    @property
    def rooted(self) -> bool:
        return self.collective in ROOTED


def case(collective: str, type: str, op: str, root: int, ranks: int, nbytes: int) -> Case:
    """The row whose full buffer has at most nbytes, or one element (a block) where that is more."""
    itemsize = ITEMSIZE[TYPES[type]]
    count = nbytes // itemsize
    if collective in PARTED:
        count //= ranks
        if count * itemsize >= _ALIGNED:
            count -= count % (_ALIGNED // itemsize)
    return Case(collective, type, op, root, ranks, max(count, 1))


class Buffers:
    """What one rank sends and receives in a case.

    places  (send, recv) out of place, and in place where the collective can, else None"""

    def __init__(self, row: Case, comm: Communicator) -> None:
        import torch

        self.case, self.rank = row, comm.rank
        sends = row.collective in ("reduce_scatter", "all_to_all", "scatter")
        receives = row.collective in ("all_gather", "all_to_all", "gather")
        self.send, self.recv = (
            torch.zeros(row.count * (row.ranks if whole else 1), dtype=torch_type(row.type), device=comm.device)
            for whole in (sends, receives)
        )
        self.places: list[tuple[Any, Any] | None] = [(self.send, self.recv), self._in_place()]

    def _in_place(self) -> tuple[Any, Any] | None:
        row, own = self.case, slice(self.rank * self.case.count, (self.rank + 1) * self.case.count)
        if row.collective in NEVER_IN_PLACE:
            return None
        if row.collective in ("gather", "scatter") and self.rank != row.root:
            return self.send, self.recv
        if row.collective in ("all_gather", "gather"):
            return self.recv[own], self.recv
        if row.collective in ("reduce_scatter", "scatter"):
            return self.send, self.send[own]
        return self.recv, self.recv

    def _sent(self) -> list[Any]:
        row = self.case
        blocks = self.send.numel() // row.count
        return [pattern(self.rank, block, row.reduction) for block in range(blocks)]

    def _expected(self) -> list[Any]:
        """What each block of recv has to repeat; [] where nothing is received."""
        row = self.case
        name, kind, op, root, ranks = row.collective, row.type, row.reduction, row.root, row.ranks
        if name in ("reduce", "gather") and self.rank != root:
            return []
        if name in ("all_reduce", "reduce"):
            return [reduced(0, ranks, kind, op)]
        if name == "reduce_scatter":
            return [reduced(self.rank, ranks, kind, op)]
        sources = {"broadcast": [root], "scatter": [root], "send_recv": [(self.rank - 1) % ranks]}
        block = self.rank if name in ("all_to_all", "scatter") else 0
        return [pattern(source, block, "") for source in sources.get(name, range(ranks))]

    def prepare(self, place: tuple[Any, Any]) -> None:
        """What is sent is as it should be, what is received into is 0, which is never right."""
        send, recv = place
        recv.zero_()
        for block, values in zip(send.split(self.case.count), self._sent(), strict=True):
            fill(block, values)

    def wrong(self, place: tuple[Any, Any]) -> int:
        """Elements of recv that are wrong on this rank."""
        blocks = place[1].split(self.case.count)
        pairs = zip(blocks, self._expected(), strict=False)
        slack = tolerance(self.case.type, self.case.ranks, self.case.reduction)
        return sum(count_wrong(block, values, slack) for block, values in pairs)

    def clear(self) -> None:
        """Zeros stay finite, however often they are added in place."""
        self.send.zero_()
        self.recv.zero_()


def call_of(comm: Communicator, row: Case, place: tuple[Any, Any]) -> Call:
    """The call as a user writes it, to be made again and again."""
    send, recv = place
    name, root = row.collective, row.root
    if name == "send_recv":
        return lambda: _round_a_ring(comm, send, recv)
    keywords: dict[str, Any] = {}
    if row.reduction:
        keywords["op"] = row.op
    if row.rooted:
        keywords["root"] = root
    if name == "scatter" and comm.rank != root:
        send = None
    elif name in ("gather", "reduce") and comm.rank != root:
        recv = None
    method = getattr(comm, name)
    return lambda: method(send, recv, **keywords)


def _round_a_ring(comm: Communicator, send: Any, recv: Any) -> None:
    with group():
        comm.send(send, (comm.rank + 1) % comm.size)
        comm.recv(recv, (comm.rank - 1) % comm.size)


def torch_type(name: str) -> Any:
    """torch's dtype of one of TYPES."""
    import torch

    return getattr(torch, next(element.name for element in ELEMENTS if element.dtype == TYPES[name]))


@functools.lru_cache(maxsize=1024)
def pattern(rank: int, block: int, op: str) -> Any:
    """int64 [PERIOD], none of them 0: what rank sends in that block. `op` is "" where nothing is reduced."""
    import torch

    generator = torch.Generator().manual_seed(1_000_003 * rank + block)
    return torch.randint(1, 3 if op else 101, (PERIOD,), generator=generator)


@functools.lru_cache(maxsize=64)
def reduced(block: int, ranks: int, name: str, op: str) -> Any:
    """What the reduction of all ranks' block is: int64 [PERIOD], float64 for a floating-point type."""
    import torch

    rows = torch.stack([pattern(rank, block, op) for rank in range(ranks)])
    if torch_type(name).is_floating_point:
        rows = rows.double()
    if op == "avg":
        return rows.sum(0) / ranks if rows.is_floating_point() else rows.sum(0) // ranks
    return getattr(rows, {"max": "amax", "min": "amin"}.get(op, op))(0)


def tolerance(name: str, ranks: int, op: str) -> float:
    """By how much of its value a result may be off: sums are exact as long as the type has all integers up to them."""
    import torch

    kind = torch_type(name)
    if not op or not kind.is_floating_point:
        return 0.0
    eps = torch.finfo(kind).eps
    if op == "avg":  # some multiply by 1/N before they add
        return max(4, ranks) * eps
    return ranks * eps if ranks * eps > 1 else 0.0


def fill(target: Any, values: Any) -> None:
    """Repeat values [PERIOD] over target [n]."""
    row = values.to(target.device, target.dtype)
    whole = target.numel() // PERIOD
    if whole:
        target[: whole * PERIOD].view(whole, PERIOD).copy_(row)
    target[whole * PERIOD :].copy_(row[: target.numel() - whole * PERIOD])


def count_wrong(result: Any, values: Any, slack: float) -> int:
    """How many elements of result [n] are not what values [PERIOD], repeated, says. slack: as of `tolerance`."""
    import torch

    row = values.to(result.device, torch.float64 if slack else result.dtype)
    wrong = 0
    for part in result.split(PERIOD * 256):  # what a comparison makes stays small
        whole = part.numel() // PERIOD * PERIOD
        for piece in (part[:whole].view(-1, PERIOD), part[whole:].view(1, -1)):
            expected = row[: piece.shape[1]]
            if slack:  # NaN is wrong, too
                right = (piece.to(torch.float64) - expected).abs() <= slack * expected.abs()
            else:
                right = piece == expected
            wrong += int((~right).sum())
    return wrong
