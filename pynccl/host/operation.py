"""One call of a communication function: its arguments, their checks, and how messages describe it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING

from ..bindings.abi import ITEMSIZE, DataType, RedOp
from .connection import collective_call, header_text
from .failure import invalid_argument
from .reduction import PreMulSum

if TYPE_CHECKING:
    from .comm import Comm


class Where(Enum):
    """The ranks on which a buffer is used."""

    EVERYWHERE = 0
    ON_ROOT = 1
    NOWHERE = 2


@dataclass(frozen=True, eq=False)
class Kind:
    """What an operation is: its code, which arguments it uses, what it costs on a link.

    prepare(operation) makes the views of its buffers and returns what runs it, any number of times.
    traffic(p, nbytes of `count` elements, is root) -> (steps, bytes on the wire).
    """

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

    name: str
    kind: Kind
    comm: Comm
    send: int
    recv: int
    count: int
    dtype: int
    op: int = 0
    peer: int = 0
    # Bound when the operation is called, since its number may come to mean another one.
    premul: PreMulSum | None = field(default=None, init=False)
    held: int = 0  # bytes of its own, in which the peers' contributions arrive

    @property
    def nbytes(self) -> int:
        return self.count * ITEMSIZE[self.dtype]

    @cached_property
    def run(self) -> Callable[[], None]:
        return self.kind.prepare(self)

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
        if not 0 <= self.dtype < len(ITEMSIZE):
            raise invalid_argument(f"{self.name}: datatype is {self.dtype}; expected 0 to {len(ITEMSIZE) - 1}")
        if kind.reduces:
            self._check_operator()
        if kind.peer_is and not 0 <= self.peer < comm.size:
            raise invalid_argument(
                f"{self.name}: {kind.peer_is} is {self.peer}; expected a rank of the communicator, 0 to {comm.size - 1}"
            )
        for label, address, where in (("sendbuff", self.send, kind.send), ("recvbuff", self.recv, kind.recv)):
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
