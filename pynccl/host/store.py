"""The store where ranks meet: a table of texts, and a server that lends it to other processes.

What NCCL's bootstrap root is to NCCL. A request is a list in JSON behind its length, [operation, arguments ..], and so
is its answer. Nobody but a client that greets is listened to, and strangers cannot crowd out ranks: of the connections
that have not greeted yet, the oldest go first.
"""

from __future__ import annotations

import json
import selectors
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

GREETING = b"PYNCCLh2"
MAX_FRAME = 16 << 20
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


class Store:
    """Texts by key, for the threads of this process."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}
        self._lock = threading.Lock()

    def set(self, key: str, text: str) -> None:
        with self._lock:
            self._texts[key] = text

    def get(self, keys: Sequence[str]) -> list[str | None]:
        """The text of each key; None where there is none."""
        with self._lock:
            return [self._texts.get(key) for key in keys]

    def add(self, key: str, amount: int) -> int:
        """The number at `key`, 0 at first, plus `amount`."""
        with self._lock:
            total = int(self._texts.get(key, "0")) + amount
            self._texts[key] = str(total)
            return total

    def claim(self, key: str, text: str) -> str:
        """What is at `key`: `text` if nothing was."""
        with self._lock:
            return self._texts.setdefault(key, text)

    def answer(self, request: Any) -> Any:
        """What a client asks for. Raises ValueError for what is no request."""
        if not isinstance(request, list) or not request or request[0] not in ("set", "get", "add", "claim"):
            raise ValueError(f"{request!r} is no request")
        try:
            return getattr(self, request[0])(*request[1:])
        except (TypeError, AttributeError) as error:
            raise ValueError(f"{request!r} is no request") from error


class _Client:
    """One connection of the server."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.since = time.monotonic()
        self.greeted = False
        self.received = bytearray()
        self.unsent = bytearray()

    def serve(self, store: Store) -> bool:
        """Answer what has arrived; False once the connection is of no use any more."""
        try:
            data = self.sock.recv(1 << 16)
        except BlockingIOError:
            return self.flush()
        except OSError:
            return False
        self.received += data
        if not self.greeted and len(self.received) >= len(GREETING):
            if self.received[: len(GREETING)] != GREETING:
                return False
            del self.received[: len(GREETING)]
            self.greeted = True
        if self.greeted:
            try:
                for request in take_frames(self.received):
                    self.unsent += frame(store.answer(request))
            except ValueError:
                return False
        return bool(data) and self.flush()

    def flush(self) -> bool:
        """Send what the connection takes now; False if it is gone."""
        try:
            while self.unsent:
                del self.unsent[: self.sock.send(self.unsent)]
        except BlockingIOError:
            pass
        except OSError:
            return False
        return True


class Server:
    """A store that other processes reach at `port`; ends with the process."""

    def __init__(self, local: bool) -> None:
        """local: on the loopback alone."""
        self.store = Store()
        self._listener = listen(local)
        self.port: int = self._listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._clients: dict[socket.socket, _Client] = {}
        threading.Thread(target=self._serve, name="pynccl-host-store", daemon=True).start()

    def close(self) -> None:
        """Close this process's ends, at exit or in a forked child."""
        for sock in [self._listener, *self._clients]:
            sock.close()

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select(STRANGER_SECONDS):
                if key.fileobj is self._listener:
                    self._accept()
                elif (client := self._clients.get(key.fileobj)) is not None:  # type: ignore[call-overload]
                    if client.serve(self.store):
                        self._watch(client)
                    else:
                        self._drop(client)
            self._drop_strangers(STRANGERS, STRANGER_SECONDS)

    def _accept(self) -> None:
        for sock in accepted(self._listener, lambda: self._drop_strangers(0, 0.0)):
            self._clients[sock] = _Client(sock)
            self._selector.register(sock, selectors.EVENT_READ)
            self._drop_strangers(STRANGERS, STRANGER_SECONDS)

    def _watch(self, client: _Client) -> None:
        writing = selectors.EVENT_WRITE if client.unsent else 0
        self._selector.modify(client.sock, selectors.EVENT_READ | writing)

    def _drop(self, client: _Client) -> None:
        self._selector.unregister(client.sock)
        del self._clients[client.sock]
        client.sock.close()

    def _drop_strangers(self, most: int, seconds: float) -> None:
        """All but the newest `most` of those that have not greeted, and those that took longer than `seconds`."""
        strangers = [client for client in self._clients.values() if not client.greeted]
        now = time.monotonic()
        for i, client in enumerate(strangers):  # in the order in which they came
            due = i < len(strangers) - most or now - client.since > seconds
            if due and not (client.serve(self.store) and client.greeted):  # its greeting may have come meanwhile
                self._drop(client)


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


def accepted(listener: socket.socket, make_room: Any) -> Iterator[socket.socket]:
    """The connections that wait at `listener`; `make_room` is called where the process has no descriptor left."""
    while True:
        try:
            sock, _ = listener.accept()
        except BlockingIOError:
            return
        except ConnectionError:  # closed again already
            continue
        except OSError:
            make_room()
            time.sleep(0.01)
            return
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield sock
