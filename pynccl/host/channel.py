"""Messages from one rank to another through shared memory.

A channel is a ring buffer of MESSAGE_SLOTS slots in the sender's memory. Every message starts in a new slot, with a
header that identifies it. A word in the sender's memory counts filled slots. A word in the receiver's memory counts
emptied slots, which frees them and acknowledges the messages.

    words of the channel to p   filled | of p's channel to this rank: emptied
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from ctypes import memmove, string_at

from . import futex
from .connection import HEAD_BYTES
from .segment import DOORBELL, MESSAGE_BYTES, MESSAGE_SLOTS, OwnSegment, Segment

_WORD = (1 << 32) - 1
_SIGN_BIT = 1 << 31  # of the difference of two words: set if the first is behind
_DATA_AT = HEAD_BYTES  # offset of the data in the first slot of a message


class _Ring:
    """The ring buffer, seen from one end. `mine` counts the slots that this end has filled or emptied, `theirs` those
    of the other end."""

    def __init__(self, address: int, mine: memoryview, theirs: memoryview) -> None:
        self._slots = [address + i * MESSAGE_BYTES for i in range(MESSAGE_SLOTS)]
        self._mine, self._theirs = mine, theirs
        self._count = 0

    @property
    def equal(self) -> bool:
        """Whether all filled slots have been emptied."""
        return bool(self._theirs[0] == self._count)

    def passed(self, count: int) -> bool:
        """Whether the other end has counted up to `count`."""
        return not (self._theirs[0] - count) & _SIGN_BIT

    @property
    def full(self) -> bool:
        """Whether no slot is free. For the sender."""
        return ((self._count - self._theirs[0]) & _WORD) == MESSAGE_SLOTS

    @property
    def slot(self) -> int:
        """The address of the next slot."""
        return self._slots[self._count % MESSAGE_SLOTS]

    def step(self) -> int:
        """Count the next slot as filled or emptied; return the count."""
        if not futex.ORDERED:
            futex.barrier()
        self._count = (self._count + 1) & _WORD
        self._mine[0] = self._count
        return self._count


def _ring(sender: Segment, to: int, receiver: Segment, source: int, sending: bool) -> _Ring:
    """Return the sending or receiving end of the channel from rank `source` to rank `to`."""
    at, other = sender.layout.channel_words(to), receiver.layout.channel_words(source) + 4
    filled, emptied = sender.bytes[at : at + 4].cast("I"), receiver.bytes[other : other + 4].cast("I")
    address = sender.address + sender.layout.channel(to)
    return _Ring(address, filled, emptied) if sending else _Ring(address, emptied, filled)


class Doorbell:
    """Wakes a peer after a change in a channel, by writing a word on which that peer sleeps.

    Several ranks write the word, so it is not a counter. But no value is stored twice, so no wake-up is lost."""

    def __init__(self, rank: int, ranks: int) -> None:
        self._next = itertools.count(rank + ranks, ranks)  # not 0, which the word is before

    def ring(self, segment: Segment) -> None:
        segment.words[DOORBELL] = next(self._next) & _WORD
        futex.wake(segment.address + 4 * DOORBELL)


class SendChannel:
    """The sending end of the channel to a peer."""

    def __init__(self, own: OwnSegment, rank: int, segment: Segment, peer: int, doorbell: Doorbell) -> None:
        self._own, self._segment, self._doorbell = own, segment, doorbell
        self._ring = _ring(own, peer, segment, rank, True)
        self._posted: deque[tuple[bytes, int, int]] = deque()
        self._at = 0  # bytes of the first message that are in slots
        self._ends: deque[int] = deque()  # counts of the last slots of messages that were not received yet

    def post(self, head: bytes, address: int, nbytes: int) -> None:
        self._posted.append((head, address, nbytes))

    @property
    def left(self) -> int:
        """Number of messages that the peer has not received."""
        ends, ring = self._ends, self._ring
        while ends and ring.passed(ends[0]):
            ends.popleft()
        return len(self._posted) + len(ends)

    def push(self) -> None:
        """Fill the free slots."""
        posted, ring = self._posted, self._ring
        while posted and not ring.full:
            head, address, nbytes = posted[0]
            slot = ring.slot
            self._own.reserve_message(slot)
            if self._at:
                moved = min(MESSAGE_BYTES, nbytes - self._at)
                memmove(slot, address + self._at, moved)
            else:
                moved = min(MESSAGE_BYTES - _DATA_AT, nbytes)
                memmove(slot, head, HEAD_BYTES)
                memmove(slot + _DATA_AT, address, moved)
            self._at += moved
            count = ring.step()
            if self._at == nbytes:
                self._ends.append(count)
                posted.popleft()
                self._at = 0
            self._doorbell.ring(self._segment)


class RecvChannel:
    """The receiving end of the channel from a peer. What is received, `wanted`, `begin` and `end` decide."""

    def __init__(self, own: OwnSegment, rank: int, segment: Segment, peer: int, doorbell: Doorbell) -> None:
        self._segment, self._doorbell = segment, doorbell
        self._ring = _ring(segment, rank, own, peer, False)
        self._address = self._nbytes = self._at = 0  # of the message that is being received

    @property
    def wanted(self) -> bool:
        """Whether to receive what comes next."""
        raise NotImplementedError

    def begin(self, head: bytes) -> tuple[int, int]:
        """Return the address and the number of bytes for the message with this header."""
        raise NotImplementedError

    def end(self) -> None:
        """The message has been received."""
        raise NotImplementedError

    def pull(self) -> None:
        """Read the filled slots."""
        ring = self._ring
        while self.wanted and not ring.equal:
            if not futex.ORDERED:
                futex.barrier()
            slot = ring.slot
            if self._at:
                moved = min(MESSAGE_BYTES, self._nbytes - self._at)
                memmove(self._address + self._at, slot, moved)
            else:
                self._address, self._nbytes = self.begin(string_at(slot, HEAD_BYTES))
                moved = min(MESSAGE_BYTES - _DATA_AT, self._nbytes)
                memmove(self._address, slot + _DATA_AT, moved)
            self._at += moved
            if self._at == self._nbytes:
                self._at = 0
                self.end()
            ring.step()
            self._doorbell.ring(self._segment)


class ExpectedMessages(RecvChannel):
    """Receives messages in the order in which they were posted."""

    def __init__(
        self,
        own: OwnSegment,
        rank: int,
        segment: Segment,
        peer: int,
        doorbell: Doorbell,
        mismatch: Callable[[int, bytes, bytes], Exception],
    ) -> None:
        """mismatch: (peer, received header, expected prefix) -> the error to raise"""
        super().__init__(own, rank, segment, peer, doorbell)
        self._peer, self._mismatch = peer, mismatch
        self._posted: deque[tuple[bytes, int, int]] = deque()

    def post(self, expected: bytes, address: int, nbytes: int) -> None:
        """expected: required prefix of the header"""
        self._posted.append((expected, address, nbytes))

    @property
    def wanted(self) -> bool:
        return bool(self._posted)

    def begin(self, head: bytes) -> tuple[int, int]:
        """Raises the error of `mismatch`."""
        expected, address, nbytes = self._posted[0]
        if not head.startswith(expected):
            raise self._mismatch(self._peer, head, expected)
        return address, nbytes

    def end(self) -> None:
        self._posted.popleft()
