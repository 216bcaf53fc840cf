"""Messages between the ranks of a group that share memory, posted by any thread and moved by the threads that wait.

Each rank has a segment with a channel to every peer. A send fills slots of its channel as soon as they are free, with
its tag and size in the first one; it is done once the receiver has emptied them. Slots are emptied while a recv from
that rank waits: messages with other tags are kept for a later recv. Who waits for one message moves the bytes of all,
and sleeps on one word, the rank's doorbell. So ranks may post all sends first and wait in any order.

If messages are pending and nobody waits for them for 2 ms, another thread does: see `alarm`.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from ctypes import memmove
from struct import Struct
from typing import Any, NamedTuple

import torch

from ..bindings.workers import WorkerCall
from . import futex
from .alarm import Alarm
from .channel import Doorbell, RecvChannel, SendChannel
from .connection import BRANCH, HEAD_BYTES, ROW
from .failure import exiting
from .segment import DOORBELL, OwnSegment, Segment, open_segment
from .sharing import error_text
from .transport import Transport

_HEAD = Struct("<qQ")  # tag, nbytes
_TICK_SECONDS = 0.2
_CLOSED_AT = 8  # in the words of a channel: its sender has closed it; 4 bytes further: its receiver has
_mailboxes: weakref.WeakSet[Mailbox] = weakref.WeakSet()


class Message(NamedTuple):
    """A posted send or recv. `done` is called with the mailbox locked: with the size of the message in bytes, which for
    a recv may differ from `nbytes`, or with an error."""

    tag: int
    address: int
    nbytes: int
    done: Callable[[int | BaseException], None]


class _Outbox(SendChannel):
    """The sends to a peer."""

    def __init__(self, *channel: Any) -> None:
        super().__init__(*channel)
        self.messages: list[Message] = []

    def add(self, message: Message) -> None:
        self.messages.append(message)
        self.post(_HEAD.pack(message.tag, message.nbytes).ljust(HEAD_BYTES, b"\0"), message.address, message.nbytes)

    def move(self) -> None:
        self.push()
        while len(self.messages) > self.left:
            self.messages[0].done(self.messages[0].nbytes)
            del self.messages[0]


class _Inbox(RecvChannel):
    """The recvs from a peer."""

    def __init__(self, *channel: Any) -> None:
        super().__init__(*channel)
        self.messages: list[Message] = []
        self._early: dict[int, deque[torch.Tensor]] = {}  # by tag: received before their recv
        self._tag, self._data = 0, torch.empty(0)  # of the message that is being received
        self._recv: Message | None = None  # it is received straight into this one's buffer

    def add(self, message: Message) -> None:
        if early := self._early.get(message.tag):
            _copy(early.popleft(), message)
            if not early:
                del self._early[message.tag]
        else:
            self.messages.append(message)

    def move(self) -> None:
        self.pull()

    @property
    def wanted(self) -> bool:
        return bool(self.messages) or self._at > 0

    def begin(self, head: bytes) -> tuple[int, int]:
        self._tag, nbytes = _HEAD.unpack_from(head)
        self._recv = self._first()
        if self._recv is not None and self._recv.nbytes == nbytes:
            return self._recv.address, nbytes
        self._recv, self._data = None, torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        return self._data.data_ptr(), nbytes

    def end(self) -> None:
        first = self._first()
        if first is None:
            self._early.setdefault(self._tag, deque()).append(self._data)
            return
        if self._recv is not None:
            first.done(first.nbytes)
        else:
            _copy(self._data, first)
        self.messages.remove(first)

    def _first(self) -> Message | None:
        return next((message for message in self.messages if message.tag == self._tag), None)


class _Unopened:
    """The messages to or from a peer whose memory is not open, yet or ever. None arrives."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.add = self.messages.append

    def move(self) -> None:
        """Do nothing."""


def _copy(data: torch.Tensor, message: Message) -> None:
    if data.numel() == message.nbytes:
        memmove(message.address, data.data_ptr(), message.nbytes)
    message.done(data.numel())


class _Peer(NamedTuple):
    """The memory of a peer. `path` is its file `inode` as long as the peer uses the mailbox; why: it was not opened."""

    segment: Segment | None
    path: str
    inode: int
    pid: int
    why: str


class _Letter:
    """Takes the row of a peer, which comes over the trunk."""

    def __init__(self, rows: dict[int, Any], peer: int) -> None:
        self._rows, self._peer = rows, peer

    def take(self, kind: str, content: Any) -> None:
        self._rows[self._peer] = content


class Mailbox:
    """The messages of one rank of a group. Its ranks exchange what they need to open each other's memory over the
    connections of a communicator, the trunk, at their first message.

    members, name  as for `init.Family`
    tick           called every 0.2 s by a thread that waits"""

    def __init__(self, trunk: Transport, members: Sequence[int], name: str, tick: Callable[[], None]) -> None:
        """Raises OSError if memory is lacking."""
        self._rank, self._size, self._tick = members.index(trunk.rank), len(members), tick
        self._trunk, self._name = trunk, name
        self._own = OwnSegment(self._size)
        self._doorbell = Doorbell(self._rank, self._size)
        self._carriers = {peer: trunk.connection(rank) for peer, rank in enumerate(members) if rank != trunk.rank}
        self._rows: dict[int, Any] = {}  # received from the peers
        self._peers: dict[int, _Peer] = {}  # those whose row was used
        self._strangers: set[int] = set()  # peers of messages, without a row yet
        self._next_tick = 0.0
        self.inherited = False  # by a forked child, which must leave the shared memory alone
        self._boxes: dict[tuple[int, bool], Any] = {}  # (peer, whether it sends) -> _Outbox, _Inbox or _Unopened
        self._lock = threading.Lock()
        self._pending = self._waiting = 0  # number of messages, of threads
        self._attended, self._closed, self._spins = False, False, True
        self._alarm = Alarm(lambda: WorkerCall(self._attend, "messages"))
        self.broken: BaseException | None = None  # an exception of a signal handler while messages were moved
        _mailboxes.add(self)
        with trunk.control_lock:
            trunk.branches.add(name, {carrier.peer: _Letter(self._rows, at) for at, carrier in self._carriers.items()})

    # Peers

    def _meet(self, peer: int) -> None:
        """Send this rank's row to a peer, once."""
        with self._lock:
            if peer in self._peers or peer in self._strangers:
                return
        row = {"pid": os.getpid(), "fd": self._own.fd, "token": self._own.token.hex()}
        with self._trunk.control_lock:
            self._carriers[peer].send_control([BRANCH, [self._name, [ROW, row]]])
        with self._lock:  # only now: who rings the peer's doorbell relies on the row, which a second thread may repeat
            if peer not in self._peers:
                self._strangers.add(peer)

    def _read_rows(self) -> None:
        """Open the memory of the peers whose rows have arrived."""
        with self._lock:
            strangers = list(self._strangers)
        with self._trunk.control_lock:
            for peer in strangers:
                if self._carriers[peer].outbox:
                    self._carriers[peer].flush_control()
                self._carriers[peer].read_control()
        with self._lock:
            for peer in [stranger for stranger in self._strangers if stranger in self._rows]:
                self._open(peer, self._rows[peer])

    def _open(self, peer: int, row: Mapping[str, Any]) -> None:
        """Map the memory of a peer. If that fails, `lost` says so."""
        path, segment, inode, why = f"/proc/{row['pid']}/fd/{row['fd']}", None, 0, ""
        try:
            inode = os.stat(path).st_ino
            segment = open_segment(row["pid"], row["fd"], bytes.fromhex(row["token"]), self._size)
        except OSError as error:
            why = f"its memory cannot be opened: {error_text(error)}"
        self._spins = self._spins and row["pid"] != os.getpid()  # a rank in this process would need the GIL
        self._peers[peer] = _Peer(segment, path, inode, row["pid"], why)
        self._strangers.discard(peer)
        if segment is not None:
            for sends in (False, True):
                if (waiting := self._boxes.pop((peer, sends), None)) is not None:
                    box = self._boxes[peer, sends] = self._box(peer, sends)
                    for message in waiting.messages:
                        box.add(message)
            self._doorbell.ring(segment)  # it may wait for this rank's row, which is there by now

    def lost(self, peer: int, sends: bool) -> str:
        """Return why messages to (sends) or from a peer cannot pass any more; "" if they can."""
        if peer not in self._peers:
            return self._carriers[peer].closed
        segment, path, inode, pid, why = self._peers[peer]
        try:
            gone = os.stat(path).st_ino != inode
        except OSError:
            gone = True
        if gone:
            alive = os.path.exists(f"/proc/{pid}/exe")  # a zombie has none
            return "it has left the process group" if alive else "its process has ended"
        if segment is None:
            return why
        at = segment.layout.channel_words(self._rank) + _CLOSED_AT + 4 * sends
        return "it gave up on a message between them" if segment.bytes[at] else ""

    # Messages

    def post(self, peer: int, sends: bool, message: Message) -> None:
        """Post a send to, or a recv from, a peer."""
        if peer not in self._peers:
            self._meet(peer)
            self._read_rows()
        with self._lock:
            if (box := self._boxes.get((peer, sends))) is None:
                box = self._boxes[peer, sends] = self._box(peer, sends)
            left = len(box.messages)
            box.add(message)
            self._pending += len(box.messages) - left
            self._move([box], 0)
            self._leave_alone()

    def _box(self, peer: int, sends: bool) -> _Outbox | _Inbox | _Unopened:
        segment = self._peers[peer].segment if peer in self._peers else None
        if segment is None:
            return _Unopened()
        return (_Outbox if sends else _Inbox)(self._own, self._rank, segment, peer, self._doorbell)

    def progress(self, waiters: int = 0) -> None:
        """Move the bytes of all messages as far as possible now.   waiters: 1 if this thread waits for one"""
        with self._lock:
            self._move(self._boxes.values(), waiters)

    def _move(self, boxes: Iterable[Any], waiters: int) -> None:
        """Move the bytes of these messages, and wake the other threads that wait if some are done."""
        done = 0
        try:
            for box in boxes:
                if box.messages and self.broken is None:
                    left = len(box.messages)
                    box.move()
                    done += left - len(box.messages)
        except BaseException as error:  # also a lack of memory
            self.broken = error
            self._pending = sum(len(box.messages) for box in self._boxes.values())
            raise
        self._pending -= done
        if done and self._waiting > waiters:
            self._doorbell.ring(self._own)

    def fail(self, peer: int, sends: bool, error: BaseException) -> None:
        """Fail the pending messages to or from a peer, and let it know. No more may be posted."""
        if self.inherited:
            return
        with self._lock:
            box = self._boxes.pop((peer, sends), None)
            self._own.bytes[self._own.layout.channel_words(peer) + _CLOSED_AT + 4 * (not sends)] = 1
            if box is not None:
                self._pending -= len(box.messages)
                for message in box.messages:
                    message.done(error)
            self._doorbell.ring(self._own)

    # Waiting

    def wait(self, over: Callable[[], bool], limit: float | None) -> bool:
        """Block until `over()`, which other threads and the messages make true; return False after `limit` seconds."""
        with self._lock:
            self._waiting += 1
            self._alarm.clear()
        try:
            return self._wait(over, math.inf if limit is None else time.monotonic() + limit, True)
        finally:
            with self._lock:
                self._waiting -= 1
                self._leave_alone()

    def wait_pending(self, limit: float) -> bool:
        """Block until no message is pending."""
        return self.wait(lambda: not self._pending, limit)

    def _wait(self, over: Callable[[], bool], end: float, waits: bool) -> bool:
        word, address = self._own.words[DOORBELL : DOORBELL + 1], self._own.address + 4 * DOORBELL
        while True:
            value = word[0]  # load it before the data that it announces
            if not futex.ORDERED:
                futex.barrier()
            if self._strangers:
                self._read_rows()
            self.progress(int(waits))
            if over():
                return True
            if (now := time.monotonic()) >= self._next_tick:
                self._next_tick = now + _TICK_SECONDS
                self._tick()
                if over():
                    return True
            if now >= end:
                return False
            if not (waits and self._spins and futex.spin(word, value)):
                futex.wait(address, value, futex.timeout_of(max(min(self._next_tick, end) - now, 0.0)))

    def _attend(self) -> None:
        self._attended = True
        try:
            self._wait(lambda: not self._pending or self._waiting > 0 or exiting.is_set(), math.inf, False)
        except Exception:  # the messages fail, see `broken`
            with contextlib.suppress(Exception):
                self._tick()
        with self._lock:
            self._attended = False
            self._leave_alone()

    def _leave_alone(self) -> None:
        """See to it that the messages are moved if nobody waits for one. Called with the lock held."""
        if self._pending and not (self._waiting or self._attended or self._closed or exiting.is_set()):
            self._alarm.set()

    # End

    def close(self) -> None:
        """Leave. The peers notice it; the memory is freed with its last user."""
        if self.inherited:
            return
        with self._trunk.control_lock:
            self._trunk.branches.remove(self._name)
        with self._lock:
            self._own.close()
            self._closed = True

    def after_fork(self) -> None:
        """In a forked child: the messages are the parent's."""
        self._lock, self.inherited, self._closed = threading.Lock(), True, True
        self._boxes.clear()
        self._strangers.clear()
        self._pending = 0
        self._own.after_fork()


def after_fork() -> None:
    """In a forked child, to which no mailbox belongs."""
    for mailbox in list(_mailboxes):
        mailbox.after_fork()
    _mailboxes.clear()
