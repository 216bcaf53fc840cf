"""A connection to one peer: its pending messages and the peer's status.

A message is a header followed by data. The header identifies the call and has its text, so that a mismatch error can
name both calls.
"""

from __future__ import annotations

import struct
import time
from collections import deque
from collections.abc import Mapping
from enum import IntEnum
from typing import Any, NamedTuple

from .connect import Channels
from .failure import by_signal
from .store import frame, take_frames

HEAD_BYTES = 128
HEAD = struct.Struct("<QQQ")  # form, nbytes, sequence number; then the call as text
TEXT_BYTES = HEAD_BYTES - HEAD.size

FINALIZE, FAIL, STATUS = "finalize", "fail", "status"
ROW, BRANCH = "row", "branch"  # a row of the transport's selection; a message of a communicator that has no sockets


class Form(IntEnum):
    """The type of a message."""

    MESSAGE = 0  # a send
    COLLECTIVE = 1
    ACK = 2  # acknowledges a send


class Label(NamedTuple):
    """The call that a message belongs to, as in its header."""

    form: Form
    number: int  # sequence number of the collective, or of the message between the two ranks
    text: bytes  # of TEXT_BYTES

    def head(self, nbytes: int) -> bytes:
        """Return the header without the text."""
        return HEAD.pack(self.form, nbytes, self.number)


class Status(NamedTuple):
    """What a rank waits for, as sent to one of its peers."""

    call: str
    round: int  # sequence number of its collective; 0 if it is in sends and receives
    messages: list[tuple[bool, int, int]]  # its sends and receives: (is send, peer, sequence number)
    needs: list[int]  # the ranks that it waits for
    sent: int  # number of messages to the peer that it has begun to send, also in earlier calls
    received: int  # of those from the peer that it has begun to receive


def header_text(text: str) -> bytes:
    return text.encode()[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0")


class Transfer:
    """One message in flight."""

    __slots__ = ("ack", "ack_label", "connection", "done", "expected", "got", "head", "nbytes", "parts")

    def __init__(self, connection: Connection, head: bytes | bytearray, data: memoryview) -> None:
        self.connection, self.head, self.nbytes = connection, head, len(data)
        self.done = False
        self.ack_label: Label | None = None  # a receive sends an acknowledgement with this label
        self.ack: Transfer | None = None
        self.got = 0  # bytes transferred, including the header
        self.expected = b""  # required prefix of the received header
        self.parts: list[Any] = [head, data] if data else [head]

    def advance(self, moved: int) -> bool:
        """Count `moved` more bytes; return whether the transfer is complete."""
        self.got += moved
        if self.got == HEAD_BYTES + self.nbytes:
            self.done = True
            self.parts = []
            return True
        while self.parts and moved >= len(self.parts[0]):
            moved -= len(self.parts.pop(0))
        if moved:
            self.parts[0] = memoryview(self.parts[0])[moved:]
        return False


class Connection:
    """The sockets, queues and status of one peer."""

    def __init__(self, peer: int, channels: Channels) -> None:
        self.peer = peer
        self.data, self.control, self.rma = channels
        self.sends: deque[Transfer] = deque()
        self.recvs: deque[Transfer] = deque()
        self.inbox = bytearray()
        self.outbox = bytearray()
        self.finalized = False  # it ended normally
        self.failure: Mapping[str, Any] | None = None  # the notice that it sent when it failed
        self.status: Status | None = None  # what it waits for
        self.rows: dict[int, Any] = {}  # received rows, by number
        self.branches = Branches()
        self.closed = ""  # why the control connection is closed; "": it is open
        self.ended_at = 0.0  # when the control connection closed or the peer failed; 0.0 before
        self.end_reason = ""

    @property
    def peer_failed(self) -> bool:
        """Whether the peer failed or exited without finalizing."""
        return self.ended_at > 0.0 and not self.finalized

    def send_control(self, message: Any) -> None:
        """Queue a message on the control connection and send without blocking."""
        self.outbox += frame(message)
        self.flush_control()

    def flush_control(self) -> None:
        try:
            while self.outbox:
                del self.outbox[: self.control.send(self.outbox)]
        except OSError as error:  # the peer has gone, which read_control reports; or its buffer is full
            if by_signal(error):
                raise

    def read_control(self) -> None:
        """Read and handle the control messages of the peer."""
        if self.closed:
            return
        try:
            while data := self.control.recv(1 << 16):
                self.inbox += data
            self._close("its process has ended (connection closed)")
        except BlockingIOError:
            pass
        except OSError as error:
            if by_signal(error):
                raise
            self._close(f"its process has ended, or the network is down ({error.strerror})")
        try:
            for kind, message in take_frames(self.inbox):
                self.take(kind, message)
        except (ValueError, TypeError) as error:
            self._close(f"it sent an invalid control message ({error})")

    def _close(self, why: str) -> None:
        self.closed = why
        self.end(why)

    def end(self, why: str) -> None:
        """Record the end of the control connection."""
        if not self.ended_at:
            self.ended_at, self.end_reason = time.monotonic(), why

    def take(self, kind: str, message: Any) -> None:
        """Handle one control message of the peer."""
        if kind == FINALIZE:
            self.finalized = True
        elif kind == FAIL and self.failure is None:
            self.failure = message
            self.ended_at = time.monotonic()
        elif kind == STATUS:
            self.status = Status(*message)
        elif kind == ROW:
            number, row = message
            self.rows[int(number)] = row
        elif kind == BRANCH:
            self.branches.take(self.peer, *message)


class Branches:
    """The communicators whose control messages travel over the control connections of this one: see `branch`."""

    def __init__(self) -> None:
        self.connections: dict[str, Mapping[int, Any]] = {}  # name -> rank in this communicator -> object with take()
        self._early: dict[str, list[tuple[int, Any]]] = {}  # messages for those that this rank has not connected yet

    def add(self, name: str, connections: Mapping[int, Any]) -> None:
        self.connections[name] = connections
        for peer, message in self._early.pop(name, ()):
            self.take(peer, name, message)

    def remove(self, name: str) -> None:
        self.connections.pop(name, None)

    def take(self, peer: int, name: str, message: Any) -> None:
        """Handle a message of `peer` for the communicator `name`."""
        kind, content = message
        if name in self.connections:
            if (connection := self.connections[name].get(peer)) is not None:
                connection.take(kind, content)
        elif kind == ROW or name in self._early:  # others are of a communicator that has ended here
            self._early.setdefault(name, []).append((peer, message))
