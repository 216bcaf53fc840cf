"""ncclPutSignal, ncclSignal and ncclWaitSignal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..bindings.abi import DataType
from . import group
from .comm import Comm, find
from .failure import invalid_argument
from .operation import Kind, Operation, Where
from .puts import Put
from .registry import entry
from .stream import find as find_stream


@dataclass(eq=False)
class PutOperation(Operation):
    """A put or, with count 0 and no window, a signal alone. It takes its turn among the communicator's operations."""

    window: int = 0
    offset: int = 0
    signal: int = 0
    context: int = 0
    flags: int = 0

    def check(self) -> None:
        super().check()
        _check_signal(self.name, self.comm, self.signal, self.context)
        if self.flags:
            raise invalid_argument(f"{self.name}: flags is {self.flags:#x}; expected 0")
        if self.kind is PUT:
            record = self.comm.puts.window(self.name, self.window)
            room = record.sizes[self.peer] if record.sizes else record.nbytes
            if self.offset + self.nbytes > room:
                raise invalid_argument(
                    f"{self.name}: {self.nbytes} bytes at offset {self.offset} do not fit into the window of rank "
                    f"{self.peer}, which has {room}"
                )


def _prepare(operation: Any) -> Callable[[], None]:
    own: PutOperation = operation
    put = Put(own.peer, own.send, own.nbytes, own.window, own.offset, own.signal, own.context)
    return partial(own.comm.puts.put, put)


def _traffic(p: int, nbytes: int, to_itself: bool) -> tuple[int, float]:
    return (0, 0.0) if to_itself else (1, float(nbytes))


PUT = Kind(14, _prepare, _traffic, recv=Where.NOWHERE, peer_is="peer")
SIGNAL = Kind(15, _prepare, _traffic, send=Where.NOWHERE, recv=Where.NOWHERE, peer_is="peer")


def _check_signal(name: str, comm: Comm, signal: int, context: int) -> None:
    for label, value, limit, setting in (
        ("sigIdx", signal, comm.rma_signals, "numRmaSig"),
        ("ctx", context, comm.rma_contexts, "numRmaCtx"),
    ):
        if not 0 <= value < limit:
            raise invalid_argument(f"{name}: {label} is {value}; expected 0 to {limit - 1} ({setting} is {limit})")


@entry
def ncclPutSignal(buffer, count, dtype, peer, window, offset, signal, context, flags, comm, stream) -> None:  # type: ignore[no-untyped-def]
    own = find(comm)
    own.check_usable()
    put = PutOperation(
        "ncclPutSignal", PUT, own, buffer or 0, 0, count, dtype, 0, peer, 0, window or 0, offset, signal, context, flags
    )
    put.check()
    group.issue(put, find_stream(stream))


@entry
def ncclSignal(peer: int, signal: int, context: int, flags: int, comm: int | None, stream: int | None) -> None:
    own = find(comm)
    own.check_usable()
    uint8 = int(DataType.UINT8)
    raised = PutOperation("ncclSignal", SIGNAL, own, 0, 0, 0, uint8, 0, peer, 0, 0, 0, signal, context, flags)
    raised.check()
    group.issue(raised, find_stream(stream))


@entry
def ncclWaitSignal(count: int, rows: Any, comm: int | None, stream: int | None) -> None:
    """The rows are read now; the wait itself is ordered on its stream and holds up no other stream's operations."""
    own = find(comm)
    own.check_usable()
    if count < 1 or not rows:
        raise invalid_argument(
            f"ncclWaitSignal: {count} descriptors at {'an address' if rows else 'NULL'}; expected 1+"
        )
    wanted: Counter[tuple[int, int, int]] = Counter()
    for row in (rows[i] for i in range(count)):
        if not 0 <= row.peer < own.size or row.opCnt < 1:
            raise invalid_argument(
                f"ncclWaitSignal: {row.opCnt} signals of rank {row.peer}; expected 1+, of rank 0.. {own.size - 1}"
            )
        _check_signal("ncclWaitSignal", own, row.sigIdx, row.ctx)
        wanted[row.peer, row.sigIdx, row.ctx] += row.opCnt
    group.issue_wait(own, partial(own.puts.wait, wanted), find_stream(stream))
