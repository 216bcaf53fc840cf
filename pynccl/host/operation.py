"""One call of a communication function: its arguments, their checks, and its description in error messages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from typing import NamedTuple

from ..bindings.abi import ITEMSIZE, DataType, RedOp
from .argcheck import check_dtype, check_peer
from .comm import Comm
from .connection import Form, Label, header_text
from .failure import invalid_argument
from .reduction import PreMulSum


class UsedOn(Enum):
    """The ranks that use a buffer."""

    ALL = 0
    ROOT = 1
    NONE = 2


@dataclass(frozen=True, eq=False)
class Kind:
    """A type of operation: its C function, the arguments that it uses, and its cost on a link.

    traffic(p, nbytes of `count` elements, is_root) -> (steps, bytes on the wire)
    """

    name: str
    execute: Callable[[Operation], None]
    traffic: Callable[[int, int, bool], tuple[int, float]]
    send: UsedOn = UsedOn.ALL
    recv: UsedOn = UsedOn.ALL
    reduces: bool = False
    peer_is: str = ""  # what `Operation.peer` is: "root", "peer" or unused


@dataclass(eq=False)
class Operation:
    """`peer` is the root or the peer, if the kind has one. Addresses are 0 for NULL."""

    kind: Kind
    comm: Comm
    send_ptr: int
    recv_ptr: int
    count: int
    dtype: int
    op: int = 0
    peer: int = 0
    # Looked up when the operation is called, since the number may be reused for another operator.
    premul: PreMulSum | None = field(default=None, init=False)

    @property
    def name(self) -> str:
        return self.kind.name

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    @property
    def nbytes(self) -> int:
        return self.count * ITEMSIZE[self.dtype]

    def run(self) -> None:
        self.kind.execute(self)

    @property
    def words(self) -> _Words:
        return _words(self.kind, self.count, self.dtype, self.op, self.peer)

    def traffic(self) -> tuple[int, float]:
        if self.comm.size == 1:
            return 0, 0.0
        return self.kind.traffic(self.comm.size, self.nbytes, self.peer == self.comm.rank)

    def label(self) -> Label:
        """Return the label of this collective's messages. Call it once per operation, on every rank."""
        return Label(Form.COLLECTIVE, self.comm.activity.begin_collective(), self.words.text)

    def message_label(self, sending: bool) -> Label:
        """Return the label of this send or receive, which is the next one between the two ranks."""
        return Label(Form.MESSAGE, self.comm.activity.begin_message(sending, self.peer), self.words.text)

    def describe(self) -> str:
        """Return the call without its addresses, which is equal on ranks with matching calls."""
        return self.words.description

    def check(self) -> None:
        """Raise HostFailure(ncclInvalidArgument) for invalid arguments."""
        kind, comm = self.kind, self.comm
        check_dtype(self.name, self.dtype)
        if kind.reduces:
            self._check_operator()
        if kind.peer_is:
            check_peer(self.name, kind.peer_is, self.peer, comm.size)
        for label, address, used_on in (("sendbuff", self.send_ptr, kind.send), ("recvbuff", self.recv_ptr, kind.recv)):
            used = used_on is UsedOn.ALL or (used_on is UsedOn.ROOT and self.peer == comm.rank)
            if used and not address and self.count:
                raise invalid_argument(f"{self.name}: {label} is NULL; expected the address of {self.nbytes} bytes")

    def _check_operator(self) -> None:
        if 0 <= self.op <= RedOp.AVG:
            return
        premul = self.premul = self.comm.premul.get(self.op)
        if premul is None:
            raise invalid_argument(
                f"{self.name}: op is {self.op}; expected 0 to {int(RedOp.AVG)}, or an operator "
                "from ncclRedOpCreatePreMulSum for this communicator"
            )
        if premul.dtype != self.dtype:
            raise invalid_argument(
                f"{self.name}: op was created for datatype {DataType(premul.dtype).name.lower()}, "
                f"but the call has {DataType(self.dtype).name.lower()}"
            )


class _Words(NamedTuple):
    """The text of a call, without addresses."""

    description: str
    text: bytes  # the description as in message headers


@lru_cache(1024)
def _words(kind: Kind, count: int, dtype: int, op: int, peer: int) -> _Words:
    parts = [f"count={count}", f"datatype={DataType(dtype).name.lower()}"]
    if kind.reduces:
        parts.append(f"op={RedOp(op).name.lower() if op <= RedOp.AVG else 'premulsum'}")
    if kind.peer_is:
        parts.append(f"{kind.peer_is}={peer}")
    description = f"{kind.name}({', '.join(parts)})"
    return _Words(description, header_text(description))
