"""One call of a communication function: its arguments, their checks, and how messages describe it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any

from ..bindings.abi import ITEMSIZE, DataType, RedOp
from .argcheck import check_dtype, check_peer
from .comm import Comm
from .connection import Label, collective_call, collective_tag, header_text, message_tag
from .failure import invalid_argument
from .reduction import PreMulSum
from .segment import SMALL_BYTES

# Small operations keep scratch of their own size, unless their ranks share memory.
_KEPT_OPERATIONS = 512
_KEPT_BYTES = 8 << 10
_KEPT_SHARED_BYTES = SMALL_BYTES


class Where(Enum):
    """The ranks on which a buffer is used."""

    EVERYWHERE = 0
    ON_ROOT = 1
    NOWHERE = 2


@dataclass(frozen=True, eq=False)
class Kind:
    """What an operation is: its C function and code, which arguments it uses, what it costs on a link.

    prepare(operation) makes the views of its buffers and returns what runs it, any number of times.
    traffic(p, nbytes of `count` elements, is root) -> (steps, bytes on the wire).
    """

    name: str
    number: int
    prepare: Callable[[Operation], Callable[[], None]]
    traffic: Callable[[int, int, bool], tuple[int, float]]
    send: Where = Where.EVERYWHERE
    recv: Where = Where.EVERYWHERE
    reduces: bool = False
    peer_is: str = ""  # "root", "peer" or nothing


@dataclass(eq=False)
class Operation:
    """`peer` is the root or the peer, where the kind has one; addresses are 0 for NULL.

    A communicator keeps the operations of its last calls: a training step repeats the ones of the step before, and
    what is checked and prepared once is most of the latency of a small one.
    """

    kind: Kind
    comm: Comm
    send_ptr: int
    recv_ptr: int
    count: int
    dtype: int
    op: int = 0
    peer: int = 0
    # Bound when the operation is called, since its number may come to mean another one.
    premul: PreMulSum | None = field(default=None, init=False)
    held: int = 0  # bytes of its own, in which the peers' contributions arrive
    is_kept: bool = field(default=False, init=False)  # for the next call like it
    _prepared: Callable[[], None] | None = field(default=None, init=False)

    @property
    def name(self) -> str:
        return self.kind.name

    @property
    def nbytes(self) -> int:
        return self.count * ITEMSIZE[self.dtype]

    @property
    def run(self) -> Callable[[], None]:
        run = self._prepared
        if run is None:
            run = self.kind.prepare(self)
            if self.is_kept:
                self._prepared = run
        return run

    def forget(self) -> None:
        """It is not kept any more. What was prepared refers to it, and to memory that should end now."""
        self.is_kept, self._prepared = False, None

    @cached_property
    def call(self) -> int:
        """Part of the tag of a collective: equal on two ranks if their calls fit together."""
        op = min(self.op, int(RedOp.AVG) + 1)  # each rank numbers its own pre-multiplied sums
        return collective_call(self.count, ((self.kind.number * 16 + self.dtype) * 8 + op) * 65536 + self.peer)

    @cached_property
    def text(self) -> bytes:
        """`describe`, for the headers of messages."""
        return header_text(self.describe())

    def traffic(self) -> tuple[int, float]:
        if self.comm.size == 1:
            return 0, 0.0
        return self.kind.traffic(self.comm.size, self.nbytes, self.peer == self.comm.rank)

    def label(self) -> Label:
        """Label of the next round of exchanges of this collective; every rank calls it once per round."""
        comm = self.comm
        comm.rounds += 1
        if comm.activity.round == 0:
            comm.activity.round = comm.rounds
        return Label(collective_tag(comm.rounds, self.call), comm.rounds, self.text)

    def message_label(self, sending: bool) -> Label:
        """Label of this send or receive, the next one between the two ranks."""
        counters, peer = self.comm.sent if sending else self.comm.received, self.peer
        counters[peer] += 1
        self.comm.activity.messages.append((sending, peer, counters[peer], self.nbytes))
        return Label(message_tag(counters[peer], self.nbytes), counters[peer], self.text)

    def describe(self) -> str:
        """The call without its addresses; equal on ranks whose calls fit together."""
        parts = [f"count={self.count}", f"datatype={DataType(self.dtype).name.lower()}"]
        if self.kind.reduces:
            parts.append(f"op={RedOp(self.op).name.lower() if self.op <= RedOp.AVG else 'premulsum'}")
        if self.kind.peer_is:
            parts.append(f"{self.kind.peer_is}={self.peer}")
        return f"{self.name}({', '.join(parts)})"

    def check(self) -> None:
        """Raise HostFailure(ncclInvalidArgument) for arguments that no rank could run."""
        kind, comm = self.kind, self.comm
        check_dtype(self.name, self.dtype)
        if kind.reduces:
            self._check_operator()
        if kind.peer_is:
            check_peer(self.name, kind.peer_is, self.peer, comm.size)
        for label, address, where in (("sendbuff", self.send_ptr, kind.send), ("recvbuff", self.recv_ptr, kind.recv)):
            used = where is Where.EVERYWHERE or (where is Where.ON_ROOT and self.peer == comm.rank)
            if used and not address and self.count:
                raise invalid_argument(f"{self.name}: {label} is NULL; expected the address of {self.nbytes} bytes")

    def _check_operator(self) -> None:
        if 0 <= self.op <= RedOp.AVG:
            return
        premul = self.premul = self.comm.premul.get(self.op)
        if premul is None:
            raise invalid_argument(
                f"{self.name}: op is {self.op}; expected 0 to {int(RedOp.AVG)}, or one that "
                "ncclRedOpCreatePreMulSum made for this communicator"
            )
        if premul.dtype != self.dtype:
            raise invalid_argument(
                f"{self.name}: op was made for datatype {DataType(premul.dtype).name.lower()}, "
                f"the call has {DataType(self.dtype).name.lower()}"
            )


def operation_of(
    comm: Comm, kind: Kind, send_ptr: int, recv_ptr: int, count: int, dtype: int, op: int, peer: int
) -> Operation:
    """The call with these arguments, checked; the one of the last time if there was one."""
    key = (kind, send_ptr, recv_ptr, count, dtype, op, peer)
    known: Any = comm.kept.get(key)
    if known is not None:
        return known
    fresh = Operation(kind, comm, send_ptr, recv_ptr, count, dtype, op, peer)
    fresh.check()
    # The number of a pre-multiplied sum may come to mean another one; large operations gain nothing.
    if op <= RedOp.AVG and fresh.nbytes <= (_KEPT_BYTES if comm.shared is None else _KEPT_SHARED_BYTES):
        if len(comm.kept) >= _KEPT_OPERATIONS:
            comm.forget_kept()
        fresh.is_kept = True
        comm.kept[key] = fresh
    return fresh
