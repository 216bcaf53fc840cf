"""Messages from one rank to another through memory that both have mapped.

A channel lies in the memory of the rank that sends: a ring of MESSAGE_SLOTS slots. Every message begins in a slot of
its own, with a header that says which call it belongs to. A word counts the slots that have been filled. A word in the
memory of the rank that receives counts those that it has emptied: room for the next one, and the news that a message
was received.

    words of the channel to p   filled | of p's channel to this rank: emptied
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from ctypes import memmove, string_at

from . import futex
from .connection import HEAD_BYTES
from .segment import BELL, MESSAGE_BYTES, MESSAGE_SLOTS, OwnSegment, Segment

_WORD = (1 << 32) - 1
_DATA_AT = HEAD_BYTES  # of a first slot


class _Ring:
    """The slots, seen from one end. `mine` counts what this end has filled or emptied, `theirs` what the
    other one has."""

    def __init__(self, address: int, mine: memoryview, theirs: memoryview) -> None:
        self._slots = [address + i * MESSAGE_BYTES for i in range(MESSAGE_SLOTS)]
        self._mine, self._theirs = mine, theirs
        self._count = 0

    @property
    def equal(self) -> bool:
        """Whether all that was filled has been emptied."""
        return bool(self._theirs[0] == self._count)

    @property
    def full(self) -> bool:
        """Of the end that fills."""
        return ((self._count - self._theirs[0]) & _WORD) == MESSAGE_SLOTS

    @property
    def slot(self) -> int:
        """The address of the next one."""
        return self._slots[self._count % MESSAGE_SLOTS]

    def step(self) -> None:
        """The next slot has been filled, or emptied."""
        if not futex.ORDERED:
            futex.barrier()
        self._count = (self._count + 1) & _WORD
        self._mine[0] = self._count


def _ring(sender: Segment, to: int, receiver: Segment, of: int, sending: bool) -> _Ring:
    """The channel from rank `of` to rank `to`, as the one end or the other sees it."""
    at, other = sender.layout.channel_words(to), receiver.layout.channel_words(of) + 4
    filled, emptied = sender.bytes[at : at + 4].cast("I"), receiver.bytes[other : other + 4].cast("I")
    address = sender.address + sender.layout.channel(to)
    return _Ring(address, filled, emptied) if sending else _Ring(address, emptied, filled)


class Bell:
    """How this rank tells others that there is something new in a channel: by a word of theirs, on which they sleep.

    Many write that word, so it counts nothing; but no value is ever stored twice, hence no news is slept through."""

    def __init__(self, rank: int, ranks: int) -> None:
        self._next = itertools.count(rank, ranks)

    def ring(self, segment: Segment) -> None:
        segment.words[BELL] = next(self._next) & _WORD
        futex.wake(segment.address + 4 * BELL)


class Outgoing:
    """What this rank sends to a peer."""

    def __init__(self, own: OwnSegment, rank: int, segment: Segment, peer: int, bell: Bell) -> None:
        self._own, self._peer, self._segment, self._bell = own, peer, segment, bell
        self._ring = _ring(own, peer, segment, rank, True)
        self._posted: deque[tuple[bytes, int, int]] = deque()
        self._at = 0  # bytes of the first one that are under way, or beyond

    def post(self, head: bytes, address: int, nbytes: int) -> None:
        self._posted.append((head, address, nbytes))

    @property
    def done(self) -> bool:
        """Whether all has been received."""
        return not self._posted and self._ring.equal

    def push(self) -> None:
        """Put what there is room for."""
        posted, ring = self._posted, self._ring
        if posted:
            self._own.reserve_channel(self._peer)
        while posted and not ring.full:
            head, address, nbytes = posted[0]
            slot = ring.slot
            if self._at:
                moved = min(MESSAGE_BYTES, nbytes - self._at)
                memmove(slot, address + self._at, moved)
            else:
                moved = min(MESSAGE_BYTES - _DATA_AT, nbytes)
                memmove(slot, head, HEAD_BYTES)
                memmove(slot + _DATA_AT, address, moved)
            self._at += moved
            if self._at == nbytes:
                posted.popleft()
                self._at = 0
            ring.step()
            self._bell.ring(self._segment)


class Incoming:
    """What this rank receives of a peer."""

    def __init__(
        self,
        own: OwnSegment,
        rank: int,
        segment: Segment,
        peer: int,
        bell: Bell,
        disagree: Callable[[bytes, bytes], Exception],
    ) -> None:
        """disagree: (header, what was expected) -> the error of another header than was expected"""
        self._segment, self._bell, self._disagree = segment, bell, disagree
        self._ring = _ring(segment, rank, own, peer, False)
        self._posted: deque[tuple[bytes, int, int]] = deque()
        self._at = 0

    def post(self, expected: bytes, address: int, nbytes: int) -> None:
        """expected: what the header begins with"""
        self._posted.append((expected, address, nbytes))

    @property
    def done(self) -> bool:
        return not self._posted

    def pull(self) -> None:
        """Take what has come of what was posted. Raises what `disagree` makes."""
        posted, ring = self._posted, self._ring
        while posted and not ring.equal:
            expected, address, nbytes = posted[0]
            if not futex.ORDERED:
                futex.barrier()
            slot = ring.slot
            if self._at:
                moved = min(MESSAGE_BYTES, nbytes - self._at)
                memmove(address + self._at, slot, moved)
            else:
                head = string_at(slot, HEAD_BYTES)
                if not head.startswith(expected):
                    raise self._disagree(head, expected)
                moved = min(MESSAGE_BYTES - _DATA_AT, nbytes)
                memmove(address, slot + _DATA_AT, moved)
            self._at += moved
            if self._at == nbytes:
                posted.popleft()
                self._at = 0
            ring.step()
            self._bell.ring(self._segment)
