"""The collectives as perf measures them: how much of each buffer, in place or not, the call, and what has to come out.

Block j of what rank r sends repeats `pattern(r, j)`: small integers, known without asking any other rank. Results are
exact in the data type: sums stay below its limit, products are powers of two.
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
MOST = 1 << 20  # larger integers would prove nothing more
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
        return [pattern(self.rank, block, row.ranks, row.type, row.reduction) for block in range(blocks)]

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
        return [pattern(source, block, ranks, kind, "") for source in sources.get(name, range(ranks))]

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
        return sum(count_wrong(block, values, self.case.reduction) for block, values in pairs)

    def clear(self) -> None:
        """Zeros stay finite, however often they are added in place."""
        self.send.zero_()
        self.recv.zero_()


def call_of(comm: Communicator, row: Case, place: tuple[Any, Any], planned: bool) -> Call:
    """The call, to be made again and again: a plain one as a user writes it, or a prepared one."""
    send, recv = place
    name, op, root = row.collective, row.op, row.root
    if name == "send_recv":
        return _round_a_ring(comm, send, recv, planned)
    keywords: dict[str, Any] = {}
    if row.reduction:
        keywords["op"] = op
    if row.rooted:
        keywords["root"] = root
    if name == "scatter" and comm.rank != root:
        send = None
    elif name in ("gather", "reduce") and comm.rank != root:
        recv = None
    if planned:
        plan: Call = getattr(comm.plan, name)(send, recv, **keywords)
        return plan
    method = getattr(comm, name)
    return lambda: method(send, recv, **keywords)


def _round_a_ring(comm: Communicator, send: Any, recv: Any, planned: bool) -> Call:
    target, source = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    if planned:
        return comm.plan.group([comm.plan.send(send, target), comm.plan.recv(recv, source)])

    def exchange() -> None:
        with group():
            comm.send(send, target)
            comm.recv(recv, source)

    return exchange


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
