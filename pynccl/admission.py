"""Authentication of TCP connections between ranks: a mutual handshake that proves knowledge of a shared key.

    listener -> caller    protocol magic, 16 random bytes
    caller -> listener    its id (two numbers), 16 random bytes, HMAC-SHA256 of all this
    listener -> caller    HMAC-SHA256 of that; zeros: the caller has the wrong key

The key itself is never sent, replaying a recorded handshake fails, and both ends prove that they have the key.
Only the handshake is protected. The traffic after it is neither signed nor encrypted: an attacker on the network path
can still read or change it.
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

MAX_UNAUTHENTICATED = 256  # connections whose handshake is not complete
HANDSHAKE_SECONDS = 5.0
BACKLOG = 4096
KEY_VARIABLE = "PYNCCL_JOB_KEY"

_MIN_KEY_CHARS = 16
_MAX_ACCEPTS = 64  # per event of the listener, so that admitted connections are served in between
_MAGIC = b"PYNCCLa1"
_NONCE_BYTES = 16
_HELLO_BYTES = len(_MAGIC) + _NONCE_BYTES
_PROOF_BYTES = 32
_REJECTED = bytes(_PROOF_BYTES)
_ANSWER = struct.Struct(f"<II{_NONCE_BYTES}s{_PROOF_BYTES}s")

PeerId = tuple[int, int]


class HandshakeError(ConnectionError):
    """The listener has a different key, or is another program."""


def job_key() -> bytes:
    """Return the job's shared secret from the environment; b"" if it is not set."""
    text = os.environ.get(KEY_VARIABLE, "")
    if 0 < len(text) < _MIN_KEY_CHARS:  # the message does not show it
        raise ValueError(
            f"{KEY_VARIABLE} is too short: it has {len(text)} characters, expected {_MIN_KEY_CHARS} or more. Set the "
            "same random value on all ranks, such as the output of: openssl rand -hex 16"
        )
    return text.encode(errors="surrogateescape")


def sign(key: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, b"".join(parts), "sha256")


def listen(local: bool) -> socket.socket:
    """Return a nonblocking listening socket, on the loopback interface only (`local`) or on all interfaces."""
    if local:
        listener = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
    elif socket.has_dualstack_ipv6():
        listener = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=BACKLOG)
    else:
        listener = socket.create_server(("", 0), backlog=BACKLOG)
    listener.setblocking(False)
    return listener


def receive(sock: socket.socket, max_bytes: int = 1 << 16) -> bytes | None:
    """Read from a nonblocking connection. Return None if no data is available, b"" if it is closed or failed."""
    try:
        return sock.recv(max_bytes)
    except BlockingIOError:
        return None
    except OSError:
        return b""


class ClientHandshake:
    """The caller's side of the handshake."""

    def __init__(self, sock: socket.socket, key: bytes, peer_id: PeerId = (0, 0)) -> None:
        self.sock, self.peer_id, self._key = sock, peer_id, key
        self._received = bytearray()
        self._expected = b""  # the listener's proof; set once the caller has answered

    def step(self) -> bool:
        """Process what arrives within the socket's timeout; return whether the handshake is complete.

        Raises OSError if the connection fails, and HandshakeError if retrying cannot help."""
        expected_bytes = _PROOF_BYTES if self._expected else _HELLO_BYTES
        try:
            data = self.sock.recv(expected_bytes - len(self._received))
        except TimeoutError:
            return False
        if not data:
            raise ConnectionResetError("connection closed")
        self._received += data
        if len(self._received) < expected_bytes:
            return False
        if self._expected:
            if not hmac.compare_digest(self._received, self._expected):
                raise HandshakeError("the listener is another process, or has another key")
            return True
        if not self._received.startswith(_MAGIC):
            raise HandshakeError("the listener is another program")
        message = struct.pack(f"<II{_NONCE_BYTES}s", *self.peer_id, secrets.token_bytes(_NONCE_BYTES))
        answer = message + sign(self._key, b"caller", bytes(self._received), message)
        self._expected = sign(self._key, b"listener", answer)
        self._received.clear()
        self.sock.sendall(answer)
        return False

    def wait(self, deadline: float) -> None:
        """Complete the handshake on a blocking connection; TimeoutError once time.monotonic() passes `deadline`."""
        admitted = False
        while not admitted:
            if (left := deadline - time.monotonic()) <= 0:
                raise TimeoutError("timed out")
            self.sock.settimeout(left)
            admitted = self.step()


class Acceptor:
    """The listener's side of the handshake: a listening socket and the connections that are not authenticated yet.

    Strangers cannot crowd out ranks: when there are too many unauthenticated connections, the oldest are closed."""

    def __init__(
        self,
        listener: socket.socket,
        selector: selectors.BaseSelector,
        key: bytes,
        admitted: Callable[[socket.socket, PeerId], None],
    ) -> None:
        """admitted: called with each authenticated connection, which is nonblocking, and the caller's id."""
        self.listener, self._selector, self._key, self._admitted = listener, selector, key, admitted
        # Not authenticated yet: time of accept, hello sent, answer so far.
        self.waiting: dict[socket.socket, tuple[float, bytes, bytearray]] = {}
        selector.register(listener, selectors.EVENT_READ)

    def handle(self, sock: socket.socket) -> bool:
        """Handle a socket that the selector reported as ready; return False if it does not belong to this acceptor."""
        if sock is self.listener:
            self._accept()
        elif sock in self.waiting:
            self._read(sock)
        else:
            return False
        return True

    def _accept(self) -> None:
        for _ in range(_MAX_ACCEPTS):
            try:
                sock, _ = self.listener.accept()
            except BlockingIOError:
                return
            except ConnectionError:  # the caller has closed it already
                continue
            except OSError:  # out of file descriptors
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
        """Read the answer of an unauthenticated caller; return False if it is still incomplete."""
        _, hello, answer = self.waiting[sock]
        data = receive(sock, _ANSWER.size - len(answer))
        answer += data or b""
        if data is None or (data and len(answer) < _ANSWER.size):
            return False
        self._unregister(sock)
        if data:
            self._verify(sock, hello, bytes(answer))
        else:
            sock.close()
        return True

    def _verify(self, sock: socket.socket, hello: bytes, answer: bytes) -> None:
        first, second, _, proof = _ANSWER.unpack(answer)
        known = hmac.compare_digest(proof, sign(self._key, b"caller", hello, answer[:-_PROOF_BYTES]))
        try:
            sock.send(sign(self._key, b"listener", answer) if known else _REJECTED)
        except OSError:
            known = False
        if known:
            self._admitted(sock, (first, second))
        else:
            sock.close()

    def drop(self, max_waiting: int = MAX_UNAUTHENTICATED, seconds: float = HANDSHAKE_SECONDS) -> None:
        """Close all unauthenticated connections except the newest `max_waiting`, and those older than `seconds`."""
        now, surplus = time.monotonic(), len(self.waiting) - max_waiting
        for i, (sock, (since, _, _)) in enumerate(list(self.waiting.items())):  # oldest first
            due = i < surplus or now - since > seconds
            if due and not self._read(sock):  # its answer may have arrived in the meantime
                self._unregister(sock)
                sock.close()

    def close(self) -> None:
        for sock in (self.listener, *self.waiting):
            with contextlib.suppress(OSError):
                sock.close()

    def _unregister(self, sock: socket.socket) -> None:
        del self.waiting[sock]
        self._selector.unregister(sock)
