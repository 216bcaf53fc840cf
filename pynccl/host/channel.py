"""Messages from one rank to another through memory that both have mapped.

A channel lies in the memory of the rank that sends, and has two rings: MESSAGE_SLOTS small slots and as many large
ones. Every message begins in a small slot, with a header that says which call it belongs to, and what of its data has
room there; the rest goes through the large slots.
Words count the slots of each ring that have been filled, and, in the memory of the rank that receives, emptied: the
second is both room for the next one and the news that a message was received.

    words of the channel to p   filled small, filled large | of p's channel to this rank: emptied small, emptied large
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from ctypes import memmove, string_at

from . import futex
from .connection import HEAD_BYTES
from .segment import BELL, LINE_BYTES, MESSAGE_BYTES, MESSAGE_SLOTS, OwnSegment, Segment

_WORD = (1 << 32) - 1
_DATA_AT = HEAD_BYTES  # of a first slot


class _Ring:
    """The slots of one kind, seen from one end. `mine` counts what this end has filled or emptied, `theirs` what the
    other one has."""

    def __init__(self, address: int, slot_bytes: int, mine: memoryview, theirs: memoryview) -> None:
        self.slot_bytes = slot_bytes
        self._slots = [address + i * slot_bytes for i in range(MESSAGE_SLOTS)]
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


def _rings(sender: Segment, to: int, receiver: Segment, of: int, sending: bool) -> tuple[_Ring, _Ring]:
    """The small and the large one of the channel from rank `of` to rank `to`, as the one end or the other sees it."""
    at, other = sender.layout.channel(to), receiver.layout.channel(of)
    filled = sender.bytes[at : at + 8].cast("I")
    emptied = receiver.bytes[other + 8 : other + 16].cast("I")
    places = (
        (sender.address + at + LINE_BYTES, sender.layout.message_small_bytes),
        (sender.address + sender.layout.large_channel(to), MESSAGE_BYTES),
    )
    small, large = (
        _Ring(address, nbytes, *((filled[i : i + 1], emptied[i : i + 1])[:: 1 if sending else -1]))
        for i, (address, nbytes) in enumerate(places)
    )
    return small, large


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
        self._small, self._large = _rings(own, peer, segment, rank, True)
        self._posted: deque[tuple[bytes, int, int]] = deque()
        self._at = 0  # bytes of the first one that are under way, or beyond

    def post(self, head: bytes, address: int, nbytes: int) -> None:
        self._posted.append((head, address, nbytes))

    @property
    def done(self) -> bool:
        """Whether all has been received."""
        return not self._posted and self._small.equal and self._large.equal

    def push(self) -> None:
        """Put what there is room for."""
        posted = self._posted
        while posted:
            head, address, nbytes = posted[0]
            ring = self._large if self._at else self._small
            if ring.full:
                return
            slot = ring.slot
            if self._at:
                moved = min(ring.slot_bytes, nbytes - self._at)
                memmove(slot, address + self._at, moved)
            else:
                moved = min(ring.slot_bytes - _DATA_AT, nbytes)
                if moved < nbytes:
                    self._own.reserve_channel(self._peer)
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
        self._small, self._large = _rings(segment, rank, own, peer, False)
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
        posted = self._posted
        while posted:
            expected, address, nbytes = posted[0]
            ring = self._large if self._at else self._small
            if ring.equal:
                return
            if not futex.ORDERED:
                futex.barrier()
            slot = ring.slot
            if self._at:
                moved = min(ring.slot_bytes, nbytes - self._at)
                memmove(address + self._at, slot, moved)
            else:
                head = string_at(slot, HEAD_BYTES)
                if not head.startswith(expected):
                    raise self._disagree(head, expected)
                moved = min(ring.slot_bytes - _DATA_AT, nbytes)
                memmove(address, slot + _DATA_AT, moved)
            self._at += moved
            if self._at == nbytes:
                posted.popleft()
                self._at = 0
            ring.step()
            self._bell.ring(self._segment)
