"""Where ranks find each other: the unique id, the store behind it, and who has arrived.

The 128 bytes of a unique id hold the addresses of a store that the process which made the id keeps until it exits
(one per process), a mark of the machine, so that its other processes use 127.0.0.1, and a number of its own.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from ..bindings.abi import UNIQUE_ID_BYTES, Result
from .failure import HostFailure, exiting, invalid_argument, invalid_usage, last_error
from .interfaces import VARIABLES, machine_mark, on_one_machine, own_addresses
from .store import GREETING, Server, Store, frame, take_frames

_MAGIC = b"PYNCCLh2"
_HEAD = struct.Struct("<8sH8s8s")  # magic, port, machine, nonce; then the addresses as text
_PROBE_SECONDS = 5.0

_server: tuple[int, Server] | None = None  # with the process that made it: a forked child needs its own
_server_lock = threading.Lock()
_idle_clients: dict[tuple[int, str, int], list[Client]] = {}


class Client:
    """A store in another process. Every call ends at the deadline, also where the server accepts and is silent."""

    def __init__(self, host: str, port: int, deadline: float) -> None:
        self.deadline = deadline
        self._host, self._port = host, port
        self._received = bytearray()
        try:
            self._sock = socket.create_connection((host, port), timeout=min(_PROBE_SECONDS, self._left()))
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._sock.sendall(GREETING)
        except OSError as error:
            raise self._lost(error) from error

    def close(self) -> None:
        self._sock.close()

    def answer(self, request: Any) -> Any:
        """As `Store.answer`."""
        try:
            self._sock.settimeout(self._left())
            self._sock.sendall(frame(request))
            while True:
                for answer in take_frames(self._received):
                    return answer
                self._sock.settimeout(self._left())
                data = self._sock.recv(1 << 16)
                if not data:
                    raise ConnectionResetError("connection closed")
                self._received += data
        except (OSError, ValueError) as error:
            self.close()
            raise self._lost(error) from error

    def _left(self) -> float:
        return max(self.deadline - time.monotonic(), 0.001)

    def _lost(self, error: Exception) -> HostFailure:
        why = "no answer" if isinstance(error, TimeoutError) else str(error)
        return HostFailure(
            Result.REMOTE_ERROR,
            f"cannot reach the store of the process that made the unique id, {self._host} port {self._port} ({why}); "
            "it has to live as long as communicators are made of its ranks",
        )


class Meeting(NamedTuple):
    """Where ranks meet: in the store of this process or of one at (host, port), under a name."""

    store: tuple[str, int] | Store
    name: str

    def below(self, name: str) -> Meeting:
        return Meeting(self.store, f"{self.name}/{name}")

    @contextlib.contextmanager
    def _open(self, deadline: float) -> Iterator[Store | Client]:
        """The store. A client serves one thread at a time, so everyone takes one and leaves it to the next."""
        if isinstance(self.store, Store):
            yield self.store
            return
        idle = _idle_clients.setdefault((os.getpid(), *self.store), [])
        try:
            client = idle.pop()
            client.deadline = deadline
        except IndexError:
            client = Client(*self.store, deadline)
        try:
            yield client
        except BaseException:
            client.close()  # it may be in the middle of an answer
            raise
        idle.append(client)

    def wait(self, timeout: float, function: str, rank: int, size: int, endpoint: str) -> list[str]:
        """Wait until all ranks are there; returns what each of them gave as `endpoint`.

        While it waits, the process's last error says for whom `function` does. Ranks that contradict each other all get
        ncclInvalidUsage.
        """
        deadline = time.monotonic() + timeout
        what = f"{function}: rank {rank} of {size}"
        pause, missing = 0.001, []
        with self._open(deadline) as store:
            while True:
                try:
                    contradiction, missing, endpoints = store.answer([self.name, rank, size, endpoint])
                except HostFailure as failure:
                    if missing:
                        failure.text = f"{what} still waits for ranks {missing}, and {failure.text}"
                    raise
                if contradiction:
                    raise invalid_usage(f"{function}: {contradiction}")
                if not missing:
                    last_error.text = f"{what} connects to its peers"
                    return list(endpoints)
                endpoint = ""  # it is known there from now on
                last_error.text = f"{what} still waits for ranks {missing}"
                if time.monotonic() > deadline:
                    raise HostFailure(Result.SYSTEM_ERROR, f"{last_error.text} after {timeout:g} s")
                if exiting.wait(pause):
                    raise HostFailure(Result.SYSTEM_ERROR, f"{last_error.text} as the process exits")
                pause = min(2 * pause, 0.02)


def make_unique_id() -> bytes:
    """128 bytes; starts this process's store at the first call."""
    local = on_one_machine()
    head = _HEAD.pack(_MAGIC, _own_server(local).port, bytes.fromhex(machine_mark()), secrets.token_bytes(8))
    room = UNIQUE_ID_BYTES - len(head)
    text = ""
    for address in [] if local else own_addresses():
        if len(text) + len(address) + 1 <= room:
            text += ("," if text else "") + address
    return (head + text.encode()).ljust(UNIQUE_ID_BYTES, b"\0")


def _own_server(local: bool) -> Server:
    global _server
    with _server_lock:
        if _server is None or _server[0] != os.getpid():
            _server = os.getpid(), Server(local)
        return _server[1]


def close() -> None:
    """At exit; and in a forked child, where it closes copies of what the parent goes on using."""
    global _server, _server_lock
    _server_lock = threading.Lock()
    if _server is not None:
        _server[1].close()
    _server = None
    for clients in _idle_clients.values():
        for client in clients:
            client.close()
    _idle_clients.clear()


def meeting_of(unique_id: bytes, timeout: float) -> Meeting:
    """The part of a store that belongs to a unique id."""
    magic, port, machine, nonce = _HEAD.unpack_from(unique_id)
    if magic != _MAGIC or not port:
        raise invalid_argument(
            "commId was not made by ncclGetUniqueId of the host library; all ranks have to use "
            "the host library, and the 128 bytes have to arrive unchanged"
        )
    text = unique_id[_HEAD.size :].rstrip(b"\0").decode("ascii", "replace")
    here = machine.hex() == machine_mark()
    addresses = ["127.0.0.1"] if here else [address for address in text.split(",") if address]
    return Meeting((_reachable(addresses, port, timeout), port), nonce.hex())


def _reachable(addresses: list[str], port: int, timeout: float) -> str:
    """The first address that answers."""
    reasons = []
    deadline = time.monotonic() + timeout
    for address in addresses:
        try:
            left = max(min(_PROBE_SECONDS, deadline - time.monotonic()), 0.001)
            socket.create_connection((address, port), timeout=left).close()
            return address
        except OSError as error:
            reasons.append(f"{address}: {error}")
    tried = "; ".join(reasons) or "the unique id names no address that other machines could use"
    raise HostFailure(
        Result.REMOTE_ERROR,
        f"cannot reach the process that made the unique id, port {port} ({tried}); it has to live as long as "
        f"communicators are made of its ranks; where it has several interfaces, name one with {VARIABLES[0]} there",
    )
