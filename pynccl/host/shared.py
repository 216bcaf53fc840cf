"""Collectives through memory that all ranks have mapped: steps, in which ranks say "it is there" and wait for others.

Every rank has a segment that it alone writes. In a step a rank puts what others need into one of its slots, writes the
header of its call beside it, and raises its word `posted`; others wait until the words of those whose data they need
have come so far, and read in place. All ranks make the same steps. To post step t says that all steps up to t - 2 have
been read, so a slot is free for step t, SLOTS = 4 later, once everybody has posted t - 2.

Who waits for one rank sleeps on the word of that rank. Who waits for many sleeps on one word that all share, until the
rank that posts last, and so sees that all have, wakes them together: one sleep and one wake-up a rank and step.

Before it sleeps, in futex(2), a rank looks again and again for 0.3 ms, and gives its core away between two looks to
whoever wants it. An idle core takes a tenth of a millisecond to wake up, and two ranks that take turns, each late
because it was just woken, keep doing so for the whole of a large operation (measured: 30 ms instead of 12). What ends a
wait otherwise is heard on the control connections: they are looked at whenever a sleep ends without progress, which is
after 0.2 s, or at once when a rank that fails wakes everybody.
"""

from __future__ import annotations

import struct
import time
import weakref
import zlib
from collections.abc import Callable, Sequence
from functools import partial

from . import futex
from .channel import Bell, Incoming, Outgoing
from .connection import HEAD, HEAD_BYTES, TEXT_BYTES, Label
from .failure import TransportFailure
from .segment import BELL, COMPLETE, POSTED, SLOTS, OwnSegment, Segment
from .transport import Transport
from .watchdog import Activity, mismatch, other_calls

_BEHIND = 1 << 31  # set in the difference of two words if the first is behind
_WORD = (1 << 32) - 1
_TICK_SECONDS = 0.2
_TICK = futex.timeout_of(_TICK_SECONDS)
_SHORT_TICK = futex.timeout_of(0.02)  # once a peer has failed

_SPIN_SECONDS, _LOOKS = 300e-6, 5
_HISTORY = struct.Struct("<Q")  # of a header, behind the label: a checksum of all calls so far; then the last text
_COMPARED = HEAD_BYTES + _HISTORY.size


# A message of a peer: (its rank, header or what it has to begin with, address, bytes).
Message = tuple[int, bytes, int, int]


class SharedMemory:
    """One rank's end. Used by the thread whose operation it is, as a Transport; `wake` and `close` from any thread."""

    def __init__(self, rank: int, segments: Sequence[Segment], transport: Transport, activity: Activity, spin: bool):
        """segments: of all ranks, this one's an OwnSegment. spin: each rank is a process of its own."""
        own = segments[rank]
        assert isinstance(own, OwnSegment)
        self.rank, self.segments, self._own = rank, segments, own
        self.peers = tuple(peer for peer in range(len(segments)) if peer != rank)
        self._transport = weakref.ref(transport)  # which ends with its communicator, though operations are still kept
        self._activity = activity
        self._posted = [segment.words[POSTED : POSTED + 1] for segment in segments]
        self._words = [segment.address + 4 * POSTED for segment in segments]
        self._complete = segments[0].words[COMPLETE : COMPLETE + 1]
        self._complete_word = segments[0].address + 4 * COMPLETE
        self._spins = spin
        bell = Bell(rank, len(segments))
        self._outgoing = {peer: Outgoing(own, rank, segments[peer], peer, bell) for peer in self.peers}
        self._incoming = {
            peer: Incoming(own, rank, segments[peer], peer, bell, partial(_unexpected, rank, activity, peer))
            for peer in self.peers
        }
        self.reserved = False  # memory behind the slots
        self._step = 0
        self._header, self._last_text = b"", bytes(TEXT_BYTES)
        self._history = 0
        self._compare = False  # labels, at the first step of a call

    # A call

    def begin(self, label: Label, nbytes: int) -> None:
        """A call begins."""
        head = label.head(nbytes) + label.text
        self._history = zlib.crc32(head, self._history)
        self._header = head + _HISTORY.pack(self._history) + self._last_text
        self._last_text = label.text
        self._compare = True

    def room(self) -> int:
        """Wait until the slot of the next step is free; returns its number."""
        self._wait(self.peers, (self._step - 1) & _WORD)
        return (self._step + 1) % SLOTS

    def post(self) -> int:
        """Say that this rank's part of the next step is in its slot; returns the slot's number."""
        self._step = step = (self._step + 1) & _WORD
        slot = step % SLOTS
        header = self._header
        self._own.headers[slot][: len(header)] = header
        if not futex.ORDERED:
            futex.barrier()
        posted = self._posted
        posted[self.rank][0] = step
        futex.wake(self._words[self.rank])  # also the barrier between this store and the looks at the others'
        if len(posted) > 2:
            for other in posted:
                if (other[0] - step) & _BEHIND:
                    break
            else:
                self._complete[0] = step
                futex.wake(self._complete_word)
        return slot

    def wait(self, peers: Sequence[int]) -> None:
        """Wait until these peers' parts of the step that was posted last are there."""
        self._wait(peers, self._step)
        if self._compare:
            self._compare = False
            mine, slot = self._header[:_COMPARED], self._step % SLOTS
            for peer in peers:
                if self.segments[peer].headers[slot][:_COMPARED] != mine:
                    raise self._mismatch(peer, bytes(self.segments[peer].headers[slot]))

    def reserve(self) -> None:
        """Have memory behind the slots."""
        self._own.reserve_slots()
        self.reserved = True

    # Messages

    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message]) -> None:
        """Send and receive at once, in this order for each peer. What is sent has been received at the end."""
        outgoing, incoming = {}, {}
        for peer, head, address, nbytes in sends:
            outgoing[peer] = self._outgoing[peer]
            outgoing[peer].post(head, address, nbytes)
        for peer, expected, address, nbytes in recvs:
            incoming[peer] = self._incoming[peer]
            incoming[peer].post(expected, address, nbytes)

        def awaited() -> list[int]:
            for channel in outgoing.values():
                channel.push()
            for other in incoming.values():
                other.pull()
            left = [peer for peer, channel in outgoing.items() if not channel.done]
            return left + [peer for peer, other in incoming.items() if not other.done and peer not in left]

        self.until(self._own.words[BELL : BELL + 1], self._own.address + 4 * BELL, awaited)

    # Waiting

    def _wait(self, peers: Sequence[int], step: int) -> None:
        posted = self._posted
        for peer in peers:
            if (posted[peer][0] - step) & _BEHIND:
                alone = len(peers) == 1
                word, address = (posted[peer], self._words[peer]) if alone else (self._complete, self._complete_word)
                self.until(word, address, lambda: [p for p in peers if (posted[p][0] - step) & _BEHIND])
                break
        if not futex.ORDERED:
            futex.barrier()

    def until(self, word: memoryview, address: int, awaited: Callable[[], Sequence[int]]) -> None:
        """Until this rank waits for nobody any more. Raises TransportFailure.

        word, address: what peers change, and wake, after whatever may make a difference.
        awaited: makes what progress there can be; the ranks that are waited for after that."""
        transport = self._transport()
        if transport is None:
            raise TransportFailure("the communicator has ended")
        started = time.monotonic()
        next_tick = started + _TICK_SECONDS
        while True:
            value = word[0]  # before the look at what it tells of
            if not futex.ORDERED:
                futex.barrier()
            if not awaited():
                return
            if transport.broken is not None:
                raise transport.broken
            if self._spins and self._spin(word, value):
                continue
            futex.wait(address, value, _SHORT_TICK if transport.has_lost else _TICK)
            if word[0] == value or time.monotonic() > next_tick:
                next_tick = time.monotonic() + _TICK_SECONDS
                transport.hear()
                if peers := awaited():  # after what was heard: who has ended, or gone on, did so before
                    transport.look(peers, started, compare=True, all_is_here=True)

    def _spin(self, word: memoryview, value: int) -> bool:
        """Look again and again for a short time, while nobody else wants the core; whether the word has changed."""
        until = time.perf_counter() + _SPIN_SECONDS
        while time.perf_counter() < until:
            for _ in range(_LOOKS):
                if word[0] != value:
                    return True
            futex.give_way()
        return False

    def _mismatch(self, peer: int, theirs: bytes) -> TransportFailure:
        mine = self._header
        for at in (HEAD.size, _COMPARED):  # this call; the one before, for whose peer nobody waited
            if mine[at : at + TEXT_BYTES] != theirs[at : at + TEXT_BYTES]:
                break
        else:
            at = HEAD.size
        return other_calls(self.rank, _text(mine, at), peer, _text(theirs, at))

    # Memory and end

    @property
    def nbytes(self) -> int:
        return self._own.nbytes

    def wake(self) -> None:
        """Wake all who sleep, here and in other processes, to hear how this rank or another one has ended."""
        bells = [segment.address + 4 * BELL for segment in self.segments]
        for address in (*self._words, self._complete_word, *bells):
            futex.wake(address)

    def after_fork(self) -> None:
        self._own.after_fork()

    def close(self) -> None:
        """Let nobody open this rank's memory any more. It ends with its last user."""
        self._own.close()


def _text(header: bytes, at: int) -> str:
    return header[at : at + TEXT_BYTES].rstrip(b"\0").decode(errors="replace")


def _unexpected(rank: int, activity: Activity, peer: int, head: bytes, expected: bytes) -> TransportFailure:
    return mismatch(rank, activity.describe(), peer, head, expected)
