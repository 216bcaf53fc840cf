"""Collectives and messages through shared memory, synchronized in steps.

Every rank has a segment that only it writes. In a step, a rank writes its data into one of its slots and the header of
its call next to it, and increments its word `posted`. The other ranks wait for the `posted` words of the ranks whose
data they need, and read the data in place. All ranks run the same steps. A rank posts step t after it has read all
steps up to t - 2. So once all ranks have posted step t - 2, the slot of step t - SLOTS (= t - 4) is free for step t.

A rank that waits for one peer sleeps on that peer's word. A rank that waits for several peers sleeps on one common
word; the last rank to post wakes all sleepers. This costs one sleep and one wake-up per rank and step.

Before sleeping in futex(2), a rank spins for 0.3 ms, and yields its core between polls. An idle core takes 0.1 ms to
wake up, so two alternating ranks that sleep are late at every step of a large operation (measured: 30 ms instead of
12). Failures arrive on the control connections. They are read whenever a sleep ends without progress: after 0.2 s, or
at once when a failing rank wakes all others.
"""

from __future__ import annotations

import struct
import time
import weakref
import zlib
from collections.abc import Callable, Sequence
from functools import partial

from . import futex
from .channel import Doorbell, ExpectedMessages, SendChannel
from .connection import HEAD, HEAD_BYTES, TEXT_BYTES, Label
from .failure import TransportFailure
from .segment import COMPLETE, DOORBELL, POSTED, SLOTS, OwnSegment, Segment
from .transport import Transport
from .watchdog import Activity, call_mismatch, mismatch

_SIGN_BIT = 1 << 31  # of the difference of two words: set if the first is behind
_WORD = (1 << 32) - 1
_TICK_SECONDS = 0.2
_TICK = futex.timeout_of(_TICK_SECONDS)
_SHORT_TICK = futex.timeout_of(0.02)  # once a peer has failed

# In a header, after the label: checksum of all calls so far; then the text of the last call.
_HISTORY = struct.Struct("<Q")
_COMPARED = HEAD_BYTES + _HISTORY.size


# (peer, header or its required prefix, address, nbytes)
Message = tuple[int, bytes, int, int]


class SharedMemory:
    """One rank's access to the shared memory. Only the thread that runs the current operation may use it, except for
    `wake` and `close`."""

    def __init__(self, rank: int, segments: Sequence[Segment], transport: Transport, activity: Activity, spin: bool):
        """segments: of all ranks; this rank's is an OwnSegment. spin: spin before sleeping; requires one process per
        rank."""
        own = segments[rank]
        assert isinstance(own, OwnSegment)
        self.rank, self.segments, self._own = rank, segments, own
        self.peers = tuple(peer for peer in range(len(segments)) if peer != rank)
        self._transport = weakref.ref(transport)  # weak: queued operations must not keep the transport alive
        self._activity = activity
        self._posted = [segment.words[POSTED : POSTED + 1] for segment in segments]
        self._words = [segment.address + 4 * POSTED for segment in segments]
        self._complete = segments[0].words[COMPLETE : COMPLETE + 1]
        self._complete_word = segments[0].address + 4 * COMPLETE
        self._spins = spin
        doorbell = Doorbell(rank, len(segments))
        self._outgoing = {peer: SendChannel(own, rank, segments[peer], peer, doorbell) for peer in self.peers}
        unexpected = partial(_unexpected, rank, activity)
        self._incoming = {
            peer: ExpectedMessages(own, rank, segments[peer], peer, doorbell, unexpected) for peer in self.peers
        }
        self.reserved = 0  # bytes of each slot that have memory
        self._step = 0
        self._header, self._last_text = b"", bytes(TEXT_BYTES)
        self._history = 0
        self._compare = False  # compare headers at the first step of a call

    # A call

    def begin(self, label: Label, nbytes: int) -> None:
        """Begin a call."""
        head = label.head(nbytes) + label.text
        self._history = zlib.crc32(head, self._history)
        self._header = head + _HISTORY.pack(self._history) + self._last_text
        self._last_text = label.text
        self._compare = True

    def acquire_slot(self) -> int:
        """Wait until the slot of the next step is free; return its number."""
        self._wait(self.peers, (self._step - 1) & _WORD)
        return (self._step + 1) % SLOTS

    def post(self) -> int:
        """Announce that this rank's slot for the next step is filled; return the slot's number."""
        self._step = step = (self._step + 1) & _WORD
        slot = step % SLOTS
        header = self._header
        self._own.headers[slot][: len(header)] = header
        if not futex.ORDERED:
            futex.barrier()
        posted = self._posted
        posted[self.rank][0] = step
        futex.wake(self._words[self.rank])  # the system call is also a barrier before the loads below
        if len(posted) > 2:
            for other in posted:
                if (other[0] - step) & _SIGN_BIT:
                    break
            else:
                self._complete[0] = step
                futex.wake(self._complete_word)
        return slot

    def wait(self, peers: Sequence[int]) -> None:
        """Wait until `peers` have posted the last step of this rank."""
        self._wait(peers, self._step)
        if self._compare:
            self._compare = False
            mine, slot = self._header[:_COMPARED], self._step % SLOTS
            for peer in peers:
                if self.segments[peer].headers[slot][:_COMPARED] != mine:
                    raise self._mismatch(peer, bytes(self.segments[peer].headers[slot]))

    def reserve(self, nbytes: int) -> None:
        """Allocate memory for `nbytes` in each slot."""
        self.reserved = self._own.reserve_slots(nbytes)

    # Messages

    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message]) -> None:
        """Send and receive concurrently, in order for each peer. Returns when the peers have received all sends."""
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
            for source in incoming.values():
                source.pull()
            left = [peer for peer, channel in outgoing.items() if channel.left]
            return left + [peer for peer, source in incoming.items() if source.wanted and peer not in left]

        self.wait_until(self._own.words[DOORBELL : DOORBELL + 1], self._own.address + 4 * DOORBELL, awaited)

    # Waiting

    def _wait(self, peers: Sequence[int], step: int) -> None:
        posted = self._posted
        for peer in peers:
            if (posted[peer][0] - step) & _SIGN_BIT:
                alone = len(peers) == 1
                word, address = (posted[peer], self._words[peer]) if alone else (self._complete, self._complete_word)
                self.wait_until(word, address, lambda: [p for p in peers if (posted[p][0] - step) & _SIGN_BIT])
                break
        if not futex.ORDERED:
            futex.barrier()

    def wait_until(self, word: memoryview, address: int, awaited: Callable[[], Sequence[int]]) -> None:
        """Block until `awaited` returns no ranks. Raises TransportFailure.

        word, address: the word that peers write, and wake, after every relevant change.
        awaited: makes progress, and returns the ranks that this rank still waits for."""
        transport = self._transport()
        if transport is None:
            raise TransportFailure("the communicator has ended")
        started = time.monotonic()
        next_tick = started + _TICK_SECONDS
        while True:
            value = word[0]  # load it before the data that it announces
            if not futex.ORDERED:
                futex.barrier()
            if not awaited():
                return
            if transport.broken is not None:
                raise transport.broken
            if self._spins and futex.spin(word, value):
                continue
            futex.wait(address, value, _SHORT_TICK if transport.any_peer_failed else _TICK)
            if word[0] == value or time.monotonic() > next_tick:
                next_tick = time.monotonic() + _TICK_SECONDS
                transport.read_control()
                if peers := awaited():  # again: peers may have progressed before they failed
                    transport.check_wait(peers, started, compare_calls=True, drained=True)

    def _mismatch(self, peer: int, theirs: bytes) -> TransportFailure:
        mine = self._header
        for at in (HEAD.size, _COMPARED):  # this call; the previous one, if no rank waited for that peer
            if mine[at : at + TEXT_BYTES] != theirs[at : at + TEXT_BYTES]:
                break
        else:
            at = HEAD.size
        return call_mismatch(self.rank, _text(mine, at), peer, _text(theirs, at))

    # Memory and end

    @property
    def nbytes(self) -> int:
        return self._own.nbytes

    def wake(self) -> None:
        """Wake all sleeping threads, here and in other processes, so that they read the control connections."""
        doorbells = [segment.address + 4 * DOORBELL for segment in self.segments]
        for address in (*self._words, self._complete_word, *doorbells):
            futex.wake(address)

    def after_fork(self) -> None:
        self._own.after_fork()

    def close(self) -> None:
        """Prevent peers from opening this rank's memory, which is freed by its last user."""
        self._own.close()


def _text(header: bytes, at: int) -> str:
    return header[at : at + TEXT_BYTES].rstrip(b"\0").decode(errors="replace")


def _unexpected(rank: int, activity: Activity, peer: int, head: bytes, expected: bytes) -> TransportFailure:
    return mismatch(rank, activity.describe(), peer, head, expected)
