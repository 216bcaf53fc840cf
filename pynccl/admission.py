"""Who may come in where this process listens: whoever shows that he knows a key; nobody else is heard.

    listener -> caller    what this is, 16 random bytes
    caller -> listener    who he is (two numbers), 16 random bytes, HMAC-SHA256 of all this
    listener -> caller    HMAC-SHA256 of that; zeros: his key is another one

The key itself does not travel, what was heard once is of no use again, and each end knows that the other has the key.
What follows is neither signed nor encrypted: against strangers who read or change packets on the way it does nothing.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable

STRANGERS = 256  # connections that have not been admitted
STRANGER_SECONDS = 5.0
BACKLOG = 4096
KEY_VARIABLE = "PYNCCL_JOB_KEY"

_LEAST_KEY = 16  # characters
_AT_ONCE = 64  # are let in before those who are in have their turn
_MAGIC = b"PYNCCLa1"
_NONCE_BYTES = 16
_HELLO_BYTES = len(_MAGIC) + _NONCE_BYTES
_PROOF_BYTES = 32
_REFUSED = bytes(_PROOF_BYTES)
_ANSWER = struct.Struct(f"<II{_NONCE_BYTES}s{_PROOF_BYTES}s")

Who = tuple[int, int]


class Refused(ConnectionError):
    """Whoever listens has another key, or is something else."""


def job_key() -> bytes:
    """The secret that all processes of the job have in their environment; b"" where there is none."""
    text = os.environ.get(KEY_VARIABLE, "")
    if 0 < len(text) < _LEAST_KEY:  # and is not shown
        raise ValueError(
            f"{KEY_VARIABLE} is too short: it has {len(text)} characters, expected {_LEAST_KEY} or more that nobody "
            "guesses, the same on all ranks, such as the output of: openssl rand -hex 16"
        )
    return text.encode(errors="surrogateescape")


def sign(key: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, b"".join(parts), "sha256")


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


def receive(sock: socket.socket, most: int = 1 << 16) -> bytes | None:
    """What has come on a connection that does not block; None if nothing has, b"" at its end."""
    try:
        return sock.recv(most)
    except BlockingIOError:
        return None
    except OSError:
        return b""


class Caller:
    """The end of a connection that wants to be admitted."""

    def __init__(self, sock: socket.socket, key: bytes, who: Who = (0, 0)) -> None:
        self.sock, self.who, self._key = sock, who, key
        self._received = bytearray()
        self._expected = b""  # of the listener, once it has been answered

    def step(self) -> bool:
        """Go on with what comes within the socket's timeout; whether it is admitted now. OSError: it is not; Refused:
        nor will it be."""
        wanted = _PROOF_BYTES if self._expected else _HELLO_BYTES
        try:
            data = self.sock.recv(wanted - len(self._received))
        except TimeoutError:
            return False
        if not data:
            raise ConnectionResetError("connection closed")
        self._received += data
        if len(self._received) < wanted:
            return False
        if self._expected:
            if not hmac.compare_digest(self._received, self._expected):
                raise Refused("another process listens there, or one with another key")
            return True
        if not self._received.startswith(_MAGIC):
            raise Refused("another program listens there")
        said = struct.pack(f"<II{_NONCE_BYTES}s", *self.who, secrets.token_bytes(_NONCE_BYTES))
        answer = said + sign(self._key, b"caller", bytes(self._received), said)
        self._expected = sign(self._key, b"listener", answer)
        self._received.clear()
        self.sock.sendall(answer)
        return False

    def wait(self, deadline: float) -> None:
        """Until it is admitted, on a connection that blocks; TimeoutError past time.monotonic() = deadline."""
        admitted = False
        while not admitted:
            if (left := deadline - time.monotonic()) <= 0:
                raise TimeoutError("timed out")
            self.sock.settimeout(left)
            admitted = self.step()


class Acceptor:
    """A listening socket, and those who have connected to it and not shown yet that they know the key.

    Strangers cannot crowd out ranks: of the connections that have not been admitted, the oldest go first."""

    def __init__(
        self,
        listener: socket.socket,
        selector: selectors.BaseSelector,
        key: bytes,
        admitted: Callable[[socket.socket, Who], None],
    ) -> None:
        """admitted: takes over a connection, which does not block."""
        self.listener, self._selector, self._key, self._admitted = listener, selector, key, admitted
        self.waiting: dict[socket.socket, tuple[float, bytes, bytearray]] = {}  # since when, hello, what it has said
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
        for _ in range(_AT_ONCE):
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
            hello = _MAGIC + secrets.token_bytes(_NONCE_BYTES)
            sock.setblocking(False)
            try:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.send(hello)
            except OSError:
                sock.close()
                continue
            self.waiting[sock] = time.monotonic(), hello, bytearray()
            self._selector.register(sock, selectors.EVENT_READ)
            self.drop()

    def _read(self, sock: socket.socket) -> bool:
        """Read a stranger's answer; False if it is not complete."""
        _, hello, answer = self.waiting[sock]
        data = receive(sock, _ANSWER.size - len(answer))
        answer += data or b""
        if data is None or (data and len(answer) < _ANSWER.size):
            return False
        self._forget(sock)
        if data:
            self._judge(sock, hello, bytes(answer))
        else:
            sock.close()
        return True

    def _judge(self, sock: socket.socket, hello: bytes, answer: bytes) -> None:
        one, other, _, proof = _ANSWER.unpack(answer)
        known = hmac.compare_digest(proof, sign(self._key, b"caller", hello, answer[:-_PROOF_BYTES]))
        try:
            sock.send(sign(self._key, b"listener", answer) if known else _REFUSED)
        except OSError:
            known = False
        if known:
            self._admitted(sock, (one, other))
        else:
            sock.close()

    def drop(self, most: int = STRANGERS, seconds: float = STRANGER_SECONDS) -> None:
        """Close all but the newest `most`, and those that took longer than `seconds`."""
        now, surplus = time.monotonic(), len(self.waiting) - most
        for i, (sock, (since, _, _)) in enumerate(list(self.waiting.items())):  # in the order in which they came
            due = i < surplus or now - since > seconds
            if due and not self._read(sock):  # its answer may have come meanwhile
                self._forget(sock)
                sock.close()

    def close(self) -> None:
        for sock in (self.listener, *self.waiting):
            with contextlib.suppress(OSError):
                sock.close()

    def _forget(self, sock: socket.socket) -> None:
        del self.waiting[sock]
        self._selector.unregister(sock)
