"""The collectives as perf measures them: buffer sizes, in-place and out-of-place buffers, calls, and expected results.

Block j of rank r's send buffer repeats `pattern(r, j)`: small integers that every rank can compute locally. Values to
reduce are 1 or 2, so that sums and products are exact in the data type.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...bindings.abi import ELEMENTS, ITEMSIZE
from ...comm.collectives import BLOCK_COLLECTIVES
from ...comm.communicator import Communicator
from ...comm.groups import group
from .options import REDUCING, ROOTED, TYPES

Call = Callable[[], Any]
PERIOD = 4093  # a prime, so that data at a wrong offset is detected
NEVER_IN_PLACE = ("all_to_all", "send_recv")
_ALIGNED = 16  # bytes: alignment of blocks inside a buffer, unless they are smaller


@dataclass(frozen=True)
class Case:
    """One row of the table. count: elements of the buffer, or of one rank's block if the buffer has blocks."""

    collective: str
    type: str
    op: str
    root: int
    ranks: int
    count: int

    @property
    def nbytes(self) -> int:
        """Size of the full buffer."""
        return self.count * ITEMSIZE[TYPES[self.type]] * (self.ranks if self.collective in BLOCK_COLLECTIVES else 1)

    @property
    def reduction(self) -> str:
        """The reduction operator; "" if the collective does not reduce."""
        return self.op if self.collective in REDUCING else ""

    @property
    def rooted(self) -> bool:
        return self.collective in ROOTED


def case(collective: str, type: str, op: str, root: int, ranks: int, nbytes: int) -> Case:
    """Return the row whose full buffer has at most nbytes, but at least one element (per block)."""
    itemsize = ITEMSIZE[TYPES[type]]
    count = nbytes // itemsize
    if collective in BLOCK_COLLECTIVES:
        count //= ranks
        if count * itemsize >= _ALIGNED:
            count -= count % (_ALIGNED // itemsize)
    return Case(collective, type, op, root, ranks, max(count, 1))


class Buffers:
    """The send and receive buffers of one rank in a case.

    placements  (send, recv) out of place, and in place; None if the collective has no in-place form
    """

    def __init__(self, row: Case, comm: Communicator) -> None:
        import torch

        self.case, self.rank = row, comm.rank
        sends = row.collective in ("reduce_scatter", "all_to_all", "scatter")
        receives = row.collective in ("all_gather", "all_to_all", "gather")
        self.send, self.recv = (
            torch.zeros(row.count * (row.ranks if full else 1), dtype=torch_type(row.type), device=comm.device)
            for full in (sends, receives)
        )
        self.placements: list[tuple[Any, Any] | None] = [(self.send, self.recv), self._in_place()]

    def _in_place(self) -> tuple[Any, Any] | None:
        row, block = self.case, slice(self.rank * self.case.count, (self.rank + 1) * self.case.count)
        if row.collective in NEVER_IN_PLACE:
            return None
        if row.collective in ("gather", "scatter") and self.rank != row.root:
            return self.send, self.recv
        if row.collective in ("all_gather", "gather"):
            return self.recv[block], self.recv
        if row.collective in ("reduce_scatter", "scatter"):
            return self.send, self.send[block]
        return self.recv, self.recv

    def _sent(self) -> list[Any]:
        row = self.case
        blocks = self.send.numel() // row.count
        return [pattern(self.rank, block, row.reduction) for block in range(blocks)]

    def _expected(self) -> list[Any]:
        """Return the pattern of each block of recv; [] if this rank receives nothing."""
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

    def prepare(self, placement: tuple[Any, Any]) -> None:
        """Fill send with its pattern and recv with 0, which is never a correct result."""
        send, recv = placement
        recv.zero_()
        for block, values in zip(send.split(self.case.count), self._sent(), strict=True):
            fill(block, values)

    def wrong(self, placement: tuple[Any, Any]) -> int:
        """Return the number of wrong elements of recv on this rank."""
        blocks = placement[1].split(self.case.count)
        pairs = zip(blocks, self._expected(), strict=False)
        rtol = tolerance(self.case.type, self.case.ranks, self.case.reduction)
        return sum(count_wrong(block, values, rtol) for block, values in pairs)

    def clear(self) -> None:
        """Zero both buffers, so that repeated in-place sums stay finite."""
        self.send.zero_()
        self.recv.zero_()


def call_of(comm: Communicator, row: Case, placement: tuple[Any, Any]) -> Call:
    """Return a function that makes the call as a user writes it."""
    send, recv = placement
    name, root = row.collective, row.root
    if name == "send_recv":
        return lambda: _ring_step(comm, send, recv)
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


def _ring_step(comm: Communicator, send: Any, recv: Any) -> None:
    with group():
        comm.send(send, (comm.rank + 1) % comm.size)
        comm.recv(recv, (comm.rank - 1) % comm.size)


def torch_type(name: str) -> Any:
    """Return the torch dtype of a name in TYPES."""
    import torch

    return getattr(torch, next(element.name for element in ELEMENTS if element.dtype == TYPES[name]))


@functools.lru_cache(maxsize=1024)
def pattern(rank: int, block: int, op: str) -> Any:
    """Return the nonzero values int64 [PERIOD] that rank sends in a block. op: "" if nothing is reduced."""
    import torch

    generator = torch.Generator().manual_seed(1_000_003 * rank + block)
    return torch.randint(1, 3 if op else 101, (PERIOD,), generator=generator)


@functools.lru_cache(maxsize=64)
def reduced(block: int, ranks: int, name: str, op: str) -> Any:
    """Return the reduction of a block over all ranks: int64 [PERIOD], or float64 for a floating-point type."""
    import torch

    rows = torch.stack([pattern(rank, block, op) for rank in range(ranks)])
    if torch_type(name).is_floating_point:
        rows = rows.double()
    if op == "avg":
        return rows.sum(0) / ranks if rows.is_floating_point() else rows.sum(0) // ranks
    return getattr(rows, {"max": "amax", "min": "amin"}.get(op, op))(0)


def tolerance(name: str, ranks: int, op: str) -> float:
    """Return the allowed relative error of a result: 0 while the type represents all integers up to the sum."""
    import torch

    kind = torch_type(name)
    if not op or not kind.is_floating_point:
        return 0.0
    eps = torch.finfo(kind).eps
    if op == "avg":  # some implementations multiply by 1/N before they add
        return max(4, ranks) * eps
    return ranks * eps if ranks * eps > 1 else 0.0


def fill(target: Any, values: Any) -> None:
    """Repeat values [PERIOD] over target [n]."""
    row = values.to(target.device, target.dtype)
    repeats = target.numel() // PERIOD
    if repeats:
        target[: repeats * PERIOD].view(repeats, PERIOD).copy_(row)
    target[repeats * PERIOD :].copy_(row[: target.numel() - repeats * PERIOD])


def count_wrong(result: Any, values: Any, rtol: float) -> int:
    """Return how many elements of result [n] differ from values [PERIOD], repeated. rtol: from `tolerance`."""
    import torch

    row = values.to(result.device, torch.float64 if rtol else result.dtype)
    wrong = 0
    for chunk in result.split(PERIOD * 256):  # chunks keep the temporaries of the comparison small
        end = chunk.numel() // PERIOD * PERIOD
        for piece in (chunk[:end].view(-1, PERIOD), chunk[end:].view(1, -1)):
            expected = row[: piece.shape[1]]
            if rtol:  # NaN counts as wrong
                right = (piece.to(torch.float64) - expected).abs() <= rtol * expected.abs()
            else:
                right = piece == expected
            wrong += int((~right).sum())
    return wrong
