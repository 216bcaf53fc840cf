"""The store where ranks meet: a table of who has come, and a server that lends it to other processes.

What NCCL's bootstrap root is to NCCL. A request is a list in JSON behind its length, and so is its answer. Nobody but a
client that greets is listened to.
"""

from __future__ import annotations

import json
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

GREETING = b"PYNCCLh2"
MAX_FRAME = 16 << 20
MAX_RANKS = 1 << 16
STRANGERS = 256  # connections that have not greeted
STRANGER_SECONDS = 5.0
BACKLOG = 4096

_LENGTH = struct.Struct("<I")


def frame(message: Any) -> bytes:
    """A message as it travels."""
    body = json.dumps(message).encode()
    return _LENGTH.pack(len(body)) + body


def take_frames(received: bytearray) -> Iterator[Any]:
    """The messages that have arrived whole; they are taken out of `received`. ValueError for what is none."""
    while len(received) >= _LENGTH.size:
        (length,) = _LENGTH.unpack_from(received)
        if length > MAX_FRAME:
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


def receive(sock: socket.socket, most: int = 1 << 16) -> bytes | None:
    """What has come on a connection that does not block; None if nothing has, b"" at its end."""
    try:
        return sock.recv(most)
    except BlockingIOError:
        return None
    except OSError:
        return b""


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
            if endpoint:
                meeting.enter(rank, size, endpoint)
            missing = [rank for rank in range(meeting.size) if rank not in meeting.endpoints]
            endpoints = [] if missing else [meeting.endpoints[rank] for rank in range(meeting.size)]
            return [meeting.contradiction, missing, endpoints]


class Acceptor:
    """A listening socket, and those who have connected to it and not sent their greeting, of a fixed size, yet.

    Strangers cannot crowd out ranks: of the connections that have not greeted, the oldest go first."""

    def __init__(
        self,
        listener: socket.socket,
        selector: selectors.BaseSelector,
        size: int,
        greeted: Callable[[socket.socket, bytes], None],
    ) -> None:
        """greeted: takes over a connection, and closes it if the greeting is none."""
        self.listener, self._selector, self._size, self._greeted = listener, selector, size, greeted
        self.waiting: dict[socket.socket, tuple[float, bytearray]] = {}
        selector.register(listener, selectors.EVENT_READ)

    def handle(self, sock: socket.socket) -> bool:
        """Do what there is to do for a socket that the selector named; False if it is not one of these."""
        if sock is self.listener:
            self._accept()
        elif sock in self.waiting:
            self._read(sock)
        else:
            return False
        return True

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self.listener.accept()
            except BlockingIOError:
                return
            except ConnectionError:  # closed again already
                continue
            except OSError:  # the process has no descriptor left
                self.drop(0, 0.0)
                time.sleep(0.01)
                return
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.waiting[sock] = time.monotonic(), bytearray()
            self._selector.register(sock, selectors.EVENT_READ)
            self.drop()

    def _read(self, sock: socket.socket) -> bool:
        """Read a stranger's greeting; False if it is not complete."""
        _, greeting = self.waiting[sock]
        data = receive(sock, self._size - len(greeting))
        greeting += data or b""
        if data is None or (data and len(greeting) < self._size):
            return False
        self._forget(sock)
        if data:
            self._greeted(sock, bytes(greeting))
        else:
            sock.close()
        return True

    def drop(self, most: int = STRANGERS, seconds: float = STRANGER_SECONDS) -> None:
        """Close all but the newest `most`, and those that took longer than `seconds`."""
        now, surplus = time.monotonic(), len(self.waiting) - most
        for i, (sock, (since, _)) in enumerate(list(self.waiting.items())):  # in the order in which they came
            due = i < surplus or now - since > seconds
            if due and not self._read(sock):  # its greeting may have come meanwhile
                self._forget(sock)
                sock.close()

    def _forget(self, sock: socket.socket) -> None:
        del self.waiting[sock]
        self._selector.unregister(sock)


class Server:
    """A store that other processes reach at `port`; ends with the process."""

    def __init__(self, local: bool) -> None:
        """local: on the loopback alone."""
        self.store = Store()
        self._selector = selectors.DefaultSelector()
        self._acceptor = Acceptor(listen(local), self._selector, len(GREETING), self._admit)
        self.port: int = self._acceptor.listener.getsockname()[1]
        self._clients: dict[socket.socket, tuple[bytearray, bytearray]] = {}  # received, unsent
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

    def _admit(self, sock: socket.socket, greeting: bytes) -> None:
        if greeting != GREETING:
            sock.close()
            return
        self._clients[sock] = bytearray(), bytearray()
        self._selector.register(sock, selectors.EVENT_READ)

    def _handle(self, sock: socket.socket) -> None:
        """Answer what has arrived; let the client go that is of no use any more."""
        received, unsent = self._clients[sock]
        data = receive(sock)
        received += data or b""
        try:
            for request in take_frames(received):
                unsent += frame(self.store.answer(request))
            while unsent:
                del unsent[: sock.send(unsent)]
            gone = data == b""
        except BlockingIOError:
            gone = data == b""
        except (OSError, ValueError):
            gone = True
        if gone:
            self._selector.unregister(sock)
            del self._clients[sock]
            sock.close()
        else:
            self._selector.modify(sock, selectors.EVENT_READ | (selectors.EVENT_WRITE if unsent else 0))


def listen(local: bool) -> socket.socket:
    """A listening socket that does not block: on the loopback alone, or on all of this machine's interfaces."""
    if local:
        listener = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
    elif socket.has_dualstack_ipv6():
        listener = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=BACKLOG)
    else:
        listener = socket.create_server(("", 0), backlog=BACKLOG)
    listener.setblocking(False)
    return listener
