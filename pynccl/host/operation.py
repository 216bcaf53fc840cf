"""One call of a communication function: its arguments, their checks, and how messages describe it."""

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


class Where(Enum):
    """The ranks on which a buffer is used."""

    EVERYWHERE = 0
    ON_ROOT = 1
    NOWHERE = 2


@dataclass(frozen=True, eq=False)
class Kind:
    """What an operation is: its C function, which arguments it uses, what it costs on a link.

    traffic(p, nbytes of `count` elements, is root) -> (steps, bytes on the wire).
    """

    name: str
    execute: Callable[[Operation], None]
    traffic: Callable[[int, int, bool], tuple[int, float]]
    send: Where = Where.EVERYWHERE
    recv: Where = Where.EVERYWHERE
    reduces: bool = False
    peer_is: str = ""  # "root", "peer" or nothing


@dataclass(eq=False)
class Operation:
    """`peer` is the root or the peer, where the kind has one; addresses are 0 for NULL."""

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
        """Label of the messages of this collective; every rank calls it once per call."""
        return Label(Form.COLLECTIVE, self.comm.activity.begin_collective(), self.words.text)

    def message_label(self, sending: bool) -> Label:
        """Label of this send or receive, the next one between the two ranks."""
        return Label(Form.MESSAGE, self.comm.activity.begin_message(sending, self.peer), self.words.text)

    def describe(self) -> str:
        """The call without its addresses; equal on ranks whose calls fit together."""
        return self.words.description

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


class _Words(NamedTuple):
    """A call without its addresses."""

    description: str
    text: bytes  # the same, for the headers of messages


@lru_cache(1024)
def _words(kind: Kind, count: int, dtype: int, op: int, peer: int) -> _Words:
    parts = [f"count={count}", f"datatype={DataType(dtype).name.lower()}"]
    if kind.reduces:
        parts.append(f"op={RedOp(op).name.lower() if op <= RedOp.AVG else 'premulsum'}")
    if kind.peer_is:
        parts.append(f"{kind.peer_is}={peer}")
    description = f"{kind.name}({', '.join(parts)})"
    return _Words(description, header_text(description))
