"""The collectives as perf measures them: how much of each buffer, in place or not, what comes out, and the call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...bindings.abi import ITEMSIZE
from ...comm.collectives import PARTED
from ...comm.communicator import Communicator
from ...comm.groups import group
from ...comm.memory import mem_alloc
from .data import count_wrong, fill, pattern, reduced, torch_type
from .options import REDUCING, ROOTED, TYPES

Call = Callable[[], Any]
WINDOW = 2
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
    """What one rank sends and receives in a case, in the memory that -R asks for; to be closed.

    places  (send, recv) out of place, and in place where the collective can, else None"""

    def __init__(self, row: Case, comm: Communicator, registration: int = 0) -> None:
        import torch

        self.case, self.rank = row, comm.rank
        sends = row.collective in ("reduce_scatter", "all_to_all", "scatter")
        receives = row.collective in ("all_gather", "all_to_all", "gather")
        counts = [row.count * (row.ranks if whole else 1) for whole in (sends, receives)]
        kind = torch_type(row.type)
        self._memory: list[Any] = []
        self._registered: list[Any] = []
        if registration == WINDOW:
            where = None if comm.library.is_host else comm.device
            self._memory = [mem_alloc(count, kind, device=where, library=comm.library) for count in counts]
            self.send, self.recv = map(torch.from_dlpack, self._memory)
        else:
            self.send, self.recv = (torch.empty(count, dtype=kind, device=comm.device) for count in counts)
        self.places: list[tuple[Any, Any] | None] = [(self.send, self.recv), self._in_place()]
        self.send.zero_()  # touched before it is timed
        self.recv.zero_()

    def register(self, comm: Communicator, registration: int) -> None:
        """With the communicator, as -R says: 1 each rank its own, 2 as windows of all ranks together."""
        if registration == WINDOW:
            self._registered += [comm.window(memory) for memory in self._memory]
        elif registration:
            self._registered += [comm.register(buffer) for buffer in (self.send, self.recv)]

    def close(self) -> None:
        """End the registrations, on all ranks together."""
        while self._registered:
            self._registered.pop().close()

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
