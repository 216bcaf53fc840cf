"""Connections of a communicator made from another one with the same shared memory: it opens no sockets of its own.

Its control messages travel over the control connections of the other communicator, its trunk, each with the name of
the branch. They work until the trunk's sockets are closed, also after an operation of the trunk has failed.
"""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .connect import Channels
from .connection import BRANCH, FAIL, FINALIZE, ROW, Connection
from .failure import TransportFailure, invalid_usage
from .transport import Transport
from .watchdog import Activity

_POLL_MS = 20  # another thread may have read the message that this one waits for


class _Twig(Connection):
    """The connection to one peer, over that of the trunk."""

    def __init__(self, peer: int, carrier: Connection, name: str) -> None:
        super().__init__(peer, Channels(carrier.data, carrier.control, carrier.rma))
        self._carrier, self._name = carrier, name

    def send_control(self, message: Any) -> None:
        self._carrier.send_control([BRANCH, [self._name, message]])

    def flush_control(self) -> None:
        self._carrier.flush_control()

    def read_control(self) -> None:
        if self._carrier.outbox:
            self._carrier.flush_control()
        self._carrier.read_control()
        if self._carrier.closed:
            self.end(self._carrier.closed)


class Branch(Transport):
    """The connections of a communicator of some ranks of its trunk. Data goes through shared memory."""

    def __init__(
        self,
        trunk: Transport,
        members: Sequence[int],
        name: str,
        activity: Activity,
        timeout: float,
        check: Callable[[], None],
    ) -> None:
        """members: their ranks in the trunk. name: used once, equal on all members. check: raises if waiting for the
        other members is pointless."""
        self.rank, self._trunk, self._name, self._check = members.index(trunk.rank), trunk, name, check
        self._activity, self.timeout = activity, timeout
        self._broken: TransportFailure | None = None
        self.control_lock = trunk.control_lock
        carriers = {peer: trunk.connection(rank) for peer, rank in enumerate(members) if rank != trunk.rank}
        self._connections = {peer: _Twig(peer, carrier, name) for peer, carrier in carriers.items()}
        self._has_rma = False
        with self.control_lock:
            trunk.branches.add(name, {carrier.peer: self._connections[peer] for peer, carrier in carriers.items()})

    @property
    def nbytes(self) -> int:
        return 0

    def exchange_rows(self, row: dict[str, Any], number: int) -> list[dict[str, Any]]:
        if any(connection.control.fileno() < 0 for connection in self._connections.values()):
            raise invalid_usage("the default process group was destroyed before this group's first call")
        with self.control_lock:
            for connection in self._connections.values():
                connection.send_control([ROW, [number, row]])
        poller, deadline = select.poll(), time.monotonic() + self.timeout
        for connection in self._connections.values():
            poller.register(connection.control, select.POLLIN)
        while missing := [peer for peer, connection in self._connections.items() if number not in connection.rows]:
            self.read_control()
            self._check()
            self._check_peers(0.0)
            if time.monotonic() > deadline:
                text = f"still waits for ranks {missing} after {self.timeout:g} s"
                raise TransportFailure(text, timed_out=True, culprit=missing[0])
            if any(number not in self._connections[peer].rows for peer in missing):
                poller.poll(_POLL_MS)
        found = {peer: connection.rows.pop(number) for peer, connection in self._connections.items()}
        return [found.get(peer, row) for peer in range(len(found) + 1)]

    # One-sided operations need sockets

    @property
    def needs_rma(self) -> bool:
        return not self._has_rma

    def set_rma(self, channels: Mapping[int, Channels]) -> None:
        """Use the rma connections among these, and close the others."""
        self._has_rma = True
        for peer, ends in channels.items():
            self._connections[peer].rma = ends.rma
            self._limit_rma(ends.rma)
            ends.data.close()
            ends.control.close()

    def rma_send(self, peer: int, data: bytes) -> None:
        self._check_rma()
        super().rma_send(peer, data)

    def rma_recv(self, peer: int, data: memoryview) -> None:
        self._check_rma()
        super().rma_recv(peer, data)

    def _check_rma(self) -> None:
        if not self._has_rma:
            raise invalid_usage(
                "one-sided operations of this communicator, which was made from another one, need connections that "
                "ncclCommWindowRegister makes; call that first, on all ranks"
            )

    # End

    def finalize(self) -> None:
        with self.control_lock:
            for connection in self._connections.values():
                connection.send_control([FINALIZE, None])
                if self._has_rma:
                    with contextlib.suppress(OSError):
                        connection.rma.shutdown(socket.SHUT_WR)
        self._trunk.branches.remove(self._name)

    def abort(self, failure: Mapping[str, Any], broken: TransportFailure) -> None:
        self._broken = self._broken or broken
        with self.control_lock:
            for connection in self._connections.values():
                connection.send_control([FAIL, dict(failure)])
        self._trunk.branches.remove(self._name)
        self.end_rma()

    def end_rma(self) -> None:
        if self._has_rma:
            super().end_rma()

    def close(self) -> None:
        self._trunk.branches.remove(self._name)
        if self._has_rma:
            for connection in self._connections.values():
                connection.rma.close()
