"""The rendezvous store: a table of the ranks that have joined, and a server for other processes.

It is the counterpart of NCCL's bootstrap root. Requests and answers are JSON lists, each preceded by its length. Only
clients that know the store's key are served: see `admission`.
"""

from __future__ import annotations

import json
import selectors
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

from ..admission import HANDSHAKE_SECONDS, Acceptor, PeerId, listen, receive

MAX_FRAME = 16 << 20
MAX_REQUEST = 4096
MAX_RANKS = 1 << 16
MAX_RENDEZVOUS = 4096  # the oldest are dropped first

_SEND_SECONDS = 1.0
_LENGTH = struct.Struct("<I")


def frame(message: Any) -> bytes:
    """Serialize a message: length, then JSON."""
    body = json.dumps(message).encode()
    return _LENGTH.pack(len(body)) + body


def take_frames(received: bytearray, max_bytes: int = MAX_FRAME) -> Iterator[Any]:
    """Remove complete messages from `received` and yield them.

    Raises ValueError for invalid messages and for those above `max_bytes`."""
    while len(received) >= _LENGTH.size:
        (length,) = _LENGTH.unpack_from(received)
        if length > max_bytes:
            raise ValueError(f"a message of {length} bytes")
        end = _LENGTH.size + length
        if len(received) < end:
            return
        body = bytes(received[_LENGTH.size : end])
        del received[:end]
        try:
            message = json.loads(body)
        except RecursionError as error:  # deeply nested brackets
            raise ValueError("a message that is nested too deeply") from error
        yield message


class _Rendezvous:
    """The ranks of one communicator that have joined, and their endpoints."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.endpoints: dict[int, str] = {}
        self.contradiction = ""

    def join(self, rank: int, size: int, endpoint: str) -> None:
        if size != self.size:
            self.contradiction = f"rank {rank} says there are {size} ranks, another rank says {self.size}"
        elif rank in self.endpoints:
            self.contradiction = f"two processes or threads claim to be rank {rank} of {size}"
        else:
            self.endpoints[rank] = endpoint


class Store:
    """Rendezvous by name, for the threads of this process."""

    def __init__(self) -> None:
        self._rendezvous: dict[str, _Rendezvous] = {}
        self._lock = threading.Lock()

    def handle(self, request: Any) -> list[Any]:
        """Handle [name, rank, size, endpoint]; return [contradiction, missing ranks, endpoints of all ranks].

        The contradiction is "" if there is none; the endpoints are [] until all ranks have joined. Later requests of
        a rank have an empty endpoint. Raises ValueError for an invalid request."""
        match request:
            case [str(name), int(rank), int(size), str(endpoint)] if 0 <= rank < size <= MAX_RANKS:
                pass
            case _:
                raise ValueError(f"{request!r} is not a valid request")
        with self._lock:
            rendezvous = self._rendezvous.setdefault(name, _Rendezvous(size))
            if len(self._rendezvous) > MAX_RENDEZVOUS:
                del self._rendezvous[next(iter(self._rendezvous))]
            if endpoint:
                rendezvous.join(rank, size, endpoint)
            missing = [rank for rank in range(rendezvous.size) if rank not in rendezvous.endpoints]
            endpoints = [] if missing else [rendezvous.endpoints[rank] for rank in range(rendezvous.size)]
            return [rendezvous.contradiction, missing, endpoints]


class Server:
    """A store for other processes that know its key, at `port`. It ends with the process."""

    def __init__(self, local: bool, key: bytes) -> None:
        """local: listen on loopback only."""
        self.store = Store()
        self._selector = selectors.DefaultSelector()
        self._acceptor = Acceptor(listen(local), self._selector, key, self._admit)
        self.port: int = self._acceptor.listener.getsockname()[1]
        self._clients: dict[socket.socket, bytearray] = {}  # received bytes
        threading.Thread(target=self._serve, name="pynccl-host-store", daemon=True).start()

    def close(self) -> None:
        """Close the descriptors, at exit or in a forked child."""
        for sock in [self._acceptor.listener, *self._acceptor.waiting, *self._clients]:
            sock.close()

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select(HANDSHAKE_SECONDS):
                sock: socket.socket = key.fileobj  # type: ignore[assignment]
                if sock in self._clients:
                    self._handle(sock)
                else:
                    self._acceptor.handle(sock)
            self._acceptor.drop()

    def _admit(self, sock: socket.socket, _: PeerId) -> None:
        self._clients[sock] = bytearray()
        self._selector.register(sock, selectors.EVENT_READ)

    def _handle(self, sock: socket.socket) -> None:
        """Answer the requests of a client, and disconnect it after an error or at its end."""
        data = receive(sock)
        if data:
            received = self._clients[sock]
            received += data
            try:
                sock.settimeout(_SEND_SECONDS)
                for request in take_frames(received, MAX_REQUEST):
                    sock.sendall(frame(self.store.handle(request)))
                sock.setblocking(False)
            except (OSError, ValueError):  # also a client that does not read its answer
                data = b""
        if data == b"":
            self._selector.unregister(sock)
            del self._clients[sock]
            sock.close()
