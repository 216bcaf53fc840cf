"""One call of a communication function: its arguments, their checks, and how messages describe it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from ..abi import ITEMSIZE, DataType, RedOp
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

    traffic(p, nbytes of `count` elements, is root) -> (steps, bytes on the wire).
    """

    number: int
    run: Callable[[Comm, Operation], None]
    traffic: Callable[[int, int, bool], tuple[int, float]]
    send: Where = Where.EVERYWHERE
    recv: Where = Where.EVERYWHERE
    reduces: bool = False
    peer_is: str = ""  # "root", "peer" or nothing


@dataclass(eq=False)
class Operation:
    """`peer` is the root or the peer, where the kind has one; addresses are 0 for NULL."""

    name: str
    kind: Kind
    comm: Comm
    send: int
    recv: int
    count: int
    dtype: int
    op: int = 0
    peer: int = 0
    stream: int = 0

    @property
    def nbytes(self) -> int:
        return self.count * ITEMSIZE[self.dtype]

    @property
    def premul(self) -> PreMulSum | None:
        return self.comm.premul.get(self.op) if self.kind.reduces and self.op > RedOp.AVG else None

    @property
    def call(self) -> int:
        """A number that is equal on two ranks if their calls fit together, the count aside."""
        op = min(self.op, RedOp.AVG + 1)  # each rank numbers its own pre-multiplied sums
        return ((self.kind.number * 16 + self.dtype) * 8 + op) * 65536 + self.peer

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
        premul = self.comm.premul.get(self.op)
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
