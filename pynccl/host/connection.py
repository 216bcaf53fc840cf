"""A connection to one peer: the messages that are under way on it, and what the peer says of itself.

A message is a header and its data. The header says which call the message belongs to, with the call as text, for the
error that names both calls where they differ.
"""

from __future__ import annotations

import contextlib
import struct
import time
from collections import deque
from collections.abc import Mapping
from enum import IntEnum
from typing import Any, NamedTuple

from .connect import Channels
from .store import frame, take_frames

HEAD_BYTES = 128
HEAD = struct.Struct("<QQQ")  # form, bytes, number of the collective or message; then the call as text
TEXT_BYTES = HEAD_BYTES - HEAD.size

FINALIZE, FAIL, STATUS = "finalize", "fail", "status"


class Form(IntEnum):
    """What a message belongs to."""

    MESSAGE = 0  # a send
    COLLECTIVE = 1
    ANSWER = 2  # to a send: it was received


class Label(NamedTuple):
    """What the header of a message says of the call that it belongs to."""

    form: Form
    number: int  # of the collective; of the message between the two ranks
    text: bytes  # TEXT_BYTES

    def head(self, nbytes: int) -> bytes:
        """What a header begins with; then comes the text."""
        return HEAD.pack(self.form, nbytes, self.number)


class Status(NamedTuple):
    """What a rank waits for, as it tells its peers."""

    call: str
    round: int  # the number of its collective; 0 if it is in sends and receives
    messages: list[tuple[bool, int, int]]  # its sends and receives: sending, peer, the number between the two ranks
    needs: list[int]  # the ranks for which it waits


def header_text(text: str) -> bytes:
    return text.encode()[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0")


class Transfer:
    """One message that is sent or received."""

    __slots__ = ("answer", "connection", "done", "expected", "got", "head", "nbytes", "parts", "then")

    def __init__(self, connection: Connection, head: bytes | bytearray, data: memoryview) -> None:
        self.connection, self.head, self.nbytes = connection, head, len(data)
        self.done = False
        self.then: Label | None = None  # of the answer that a received message gets
        self.answer: Transfer | None = None
        self.got = 0  # bytes that have been moved, header included
        self.expected = b""  # what the header that is received begins with
        self.parts: list[Any] = [head, data] if data else [head]

    def advance(self, moved: int) -> bool:
        """So many bytes more; whether that was all."""
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
    """What there is to know about one peer."""

    def __init__(self, peer: int, channels: Channels) -> None:
        self.peer = peer
        self.data, self.control, self.rma = channels
        self.sends: deque[Transfer] = deque()
        self.recvs: deque[Transfer] = deque()
        self.inbox = bytearray()
        self.outbox = bytearray()
        self.finalized = False  # it has left in order
        self.failure: Mapping[str, Any] | None = None  # what it said when it failed
        self.status: Status | None = None  # what it has been waiting for
        self.ended_at = 0.0  # when the control connection ended, or it failed
        self.why = ""

    @property
    def lost(self) -> bool:
        """Gone, and not in order."""
        return self.ended_at > 0.0 and not self.finalized

    def send_control(self, message: Any) -> None:
        """Say something on the control connection, which never blocks."""
        self.outbox += frame(message)
        self.flush_control()

    def flush_control(self) -> None:
        with contextlib.suppress(OSError):  # it has gone, which reading finds out; or its buffer is full
            while self.outbox:
                del self.outbox[: self.control.send(self.outbox)]

    def read_control(self) -> None:
        """Read what the peer says of itself."""
        if self.ended_at and self.failure is None:
            return
        try:
            while data := self.control.recv(1 << 16):
                self.inbox += data
            self.end("its process has ended (connection closed)")
        except BlockingIOError:
            pass
        except OSError as error:
            self.end(f"its process has ended, or the network is down ({error.strerror})")
        try:
            for kind, message in take_frames(self.inbox):
                self._take(kind, message)
        except (ValueError, TypeError) as error:
            self.end(f"it sends what no rank sends ({error})")

    def end(self, why: str) -> None:
        """Nothing more is to be heard of it."""
        if not self.ended_at:
            self.ended_at, self.why = time.monotonic(), why

    def _take(self, kind: str, message: Any) -> None:
        if kind == FINALIZE:
            self.finalized = True
        elif kind == FAIL and self.failure is None:
            self.failure = message
            self.ended_at = time.monotonic()
        elif kind == STATUS:
            self.status = Status(*message)
