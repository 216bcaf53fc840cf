"""The store where ranks meet: a table of who has come, and a server that lends it to other processes.

What NCCL's bootstrap root is to NCCL. A request is a list in JSON behind its length, and so is its answer. Nobody but a
client that knows the store's key is listened to: see `admission`.
"""

from __future__ import annotations

import json
import selectors
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

from ..admission import STRANGER_SECONDS, Acceptor, Who, listen, receive

MAX_FRAME = 16 << 20
MAX_REQUEST = 4096
MAX_RANKS = 1 << 16
MAX_MEETINGS = 4096  # the oldest go first

_SEND_SECONDS = 1.0
_LENGTH = struct.Struct("<I")


def frame(message: Any) -> bytes:
    """A message as it travels."""
    body = json.dumps(message).encode()
    return _LENGTH.pack(len(body)) + body


def take_frames(received: bytearray, most: int = MAX_FRAME) -> Iterator[Any]:
    """The messages of at most so many bytes that have arrived whole; they are taken out of `received`. ValueError for
    what is none."""
    while len(received) >= _LENGTH.size:
        (length,) = _LENGTH.unpack_from(received)
        if length > most:
            raise ValueError(f"a message of {length} bytes")
        end = _LENGTH.size + length
        if len(received) < end:
            return
        body = bytes(received[_LENGTH.size : end])
        del received[:end]
        try:
            message = json.loads(body)
        except RecursionError as error:  # brackets without end
            raise ValueError("a message that is nested too deeply") from error
        yield message


class _Meeting:
    """The ranks of one communicator that have come, and where they listen."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.endpoints: dict[int, str] = {}
        self.contradiction = ""

    def enter(self, rank: int, size: int, endpoint: str) -> None:
        if size != self.size:
            self.contradiction = f"rank {rank} says there are {size} ranks, another rank says {self.size}"
        elif rank in self.endpoints:
            self.contradiction = f"two processes or threads claim to be rank {rank} of {size}"
        else:
            self.endpoints[rank] = endpoint


class Store:
    """Meetings by name, for the threads of this process."""

    def __init__(self) -> None:
        self._meetings: dict[str, _Meeting] = {}
        self._lock = threading.Lock()

    def answer(self, request: Any) -> list[Any]:
        """[how the ranks contradict each other, who is missing, the endpoints of all ranks once nobody is].

        A request is [meeting, rank, size, endpoint], where a rank that asks again leaves the endpoint empty. Raises
        ValueError for what is none."""
        match request:
            case [str(name), int(rank), int(size), str(endpoint)] if 0 <= rank < size <= MAX_RANKS:
                pass
            case _:
                raise ValueError(f"{request!r} is no request")
        with self._lock:
            meeting = self._meetings.setdefault(name, _Meeting(size))
            if len(self._meetings) > MAX_MEETINGS:
                del self._meetings[next(iter(self._meetings))]
            if endpoint:
                meeting.enter(rank, size, endpoint)
            missing = [rank for rank in range(meeting.size) if rank not in meeting.endpoints]
            endpoints = [] if missing else [meeting.endpoints[rank] for rank in range(meeting.size)]
            return [meeting.contradiction, missing, endpoints]


class Server:
    """A store that other processes reach at `port`, if they know its key; ends with the process."""

    def __init__(self, local: bool, key: bytes) -> None:
        """local: on the loopback alone."""
        self.store = Store()
        self._selector = selectors.DefaultSelector()
        self._acceptor = Acceptor(listen(local), self._selector, key, self._admit)
        self.port: int = self._acceptor.listener.getsockname()[1]
        self._clients: dict[socket.socket, bytearray] = {}  # what they have sent
        threading.Thread(target=self._serve, name="pynccl-host-store", daemon=True).start()

    def close(self) -> None:
        """Close this process's ends, at exit or in a forked child."""
        for sock in [self._acceptor.listener, *self._acceptor.waiting, *self._clients]:
            sock.close()

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select(STRANGER_SECONDS):
                sock: socket.socket = key.fileobj  # type: ignore[assignment]
                if sock in self._clients:
                    self._handle(sock)
                else:
                    self._acceptor.handle(sock)
            self._acceptor.drop()

    def _admit(self, sock: socket.socket, _: Who) -> None:
        self._clients[sock] = bytearray()
        self._selector.register(sock, selectors.EVENT_READ)

    def _handle(self, sock: socket.socket) -> None:
        """Answer what has arrived; let the client go that is of no use any more."""
        data = receive(sock)
        if data:
            received = self._clients[sock]
            received += data
            try:
                sock.settimeout(_SEND_SECONDS)
                for request in take_frames(received, MAX_REQUEST):
                    sock.sendall(frame(self.store.answer(request)))
                sock.setblocking(False)
            except (OSError, ValueError):  # a rank reads its answer at once
                data = b""
        if data == b"":
            self._selector.unregister(sock)
            del self._clients[sock]
            sock.close()
