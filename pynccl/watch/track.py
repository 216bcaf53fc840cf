"""The calls of one communicator in the flight recorder: entered, returned, failed, and how it ended.

Written by whoever holds the lock of the communicator. See layout.py for what it writes.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

from ..interop import streams
from . import layout
from .frames import user_site
from .notes import notes
from .recorder import Recorder, now, recorder, started
from .rows import COUNT_AT, Rows, weight_of
from .settings import SITES, settings

get_ident = threading.get_ident


class Identity(NamedTuple):
    """Who a communicator is: uid, the same on all its ranks and only there; its name, and its parent's uid."""

    uid: str
    name: str
    parent: str


class Track:
    """The calls of one communicator: `enter` before the C call, `leave` after it, under the communicator's lock.

    Who is in a hurry has only `add` before it, with one of `rows`, and the watchdog notices when it was made, and has
    returned. Where `careful` is true nobody does so: each call gets its line, too, and the time when it returned.

    lock    that of the communicator
    thread  which has made the newest call
    """

    def __init__(self, recorder: Recorder, known: Identity, rank: int, size: int, careful: bool) -> None:
        memory = recorder.new_region()
        self.kept = memory is not None
        if memory is None:  # the file has no room for it: written, but nowhere to be read
            memory = memoryview(mmap.mmap(-1, recorder.region.nbytes))
        region = recorder.region
        self.recorder, self.memory, self.region = recorder, memory, region
        self.number, self.since = next(_numbers), time.time()
        self.uid, self.name, self.rank, self.size = known.uid, known.name, rank, size
        # The host library's calls take so long that the line of each costs nothing beside them.
        self.careful = careful or settings().mode == SITES
        self.children: dict[str, int] = {}  # how many were made of it, by what made them: for their names
        self.ring = self._array(region.ring, "H", region.slots)
        self.issued = self._array(region.issued, "d", region.slots)
        self.returned = self._array(region.returned, "d", region.slots)
        self._site = self._array(region.site, "H", region.slots)
        self._function = self._array(region.function, "H", region.slots)
        self._forward = self._array(region.forward, "H", region.slots)
        self._bases = self._array(region.bases, "Q", 2 * region.segments)
        self._mark_times = self._array(region.marks, "d", 2 * layout.MARKS)
        self._mark_heads = self._array(region.marks, "Q", 2 * layout.MARKS)
        self._marks, self._length = 0, region.segment
        self._touched = set(range(region.segments))  # segments in which more than the usual was written
        self.rows = Rows(memory, region, recorder.string)
        self._known = self.rows.known
        self._groups = itertools.count(1)
        self._gone: dict[int, int] = {}  # the newest call when such a stream was closed
        self.explains = False  # an error of this communicator has been explained
        parent = next((track for track in recorder.tracks if track.uid == known.parent), None)
        self.exchange: Any = None  # with which the ranks on other machines are asked
        if parent is not None and parent.exchange is not None:
            self.join(parent.exchange)
        self.comm: Callable[[], Any] = lambda: None  # the communicator, once it is there, and while it is
        self.library: Any = None  # of the communicator, once it is there; and its device
        self.ordinal = -1
        self.segment, self._numbers = -1, [0, 0]  # calls, and collective ones, before this segment
        self.lock = threading.RLock()
        self.thread = 0
        self._next = 0  # slot of the next call; a multiple of the length: a segment is to be opened for it
        for what, text in known._asdict().items():
            self.write(what, text)
        layout.COMM.pack_into(memory, 0, layout.LIVE, rank, size, size + 1, now())
        recorder.tracks.append(self)

    def join(self, exchange: Any) -> None:
        """The ranks of this communicator can be asked so."""
        self.exchange = exchange
        exchange.enrol(self.uid, self.rank)

    def made(self, comm: Any, device: str, site: str) -> None:
        """The communicator is there."""
        self.comm = weakref.ref(comm)
        self.library, self.ordinal = comm.library, comm.ordinal
        self.write("device", device)
        self.write("made_at", site)

    def _array(self, at: int, kind: Literal["H", "Q", "d"], length: int) -> Any:
        size = 2 if kind == "H" else 8
        return self.memory[at : at + size * length].cast(kind)

    def write(self, what: str, text: str) -> None:
        """A text of the region: name, device, made_at, parent, alias, error."""
        layout.put(self.memory, *layout.COMM_TEXTS[what], text)

    def _open_segment(self) -> int:
        """The first slot of the next segment, which is cleared; for whoever has the lock."""
        region, memory, length = self.region, self.memory, self.region.segment
        if self.segment >= 0:
            self._numbers[0] += length
            self._numbers[1] += self.rows.numbered_in(self.segment % region.segments * length)
        self.segment += 1
        place = self.segment % region.segments
        often, seldom = region.written(), region.seldom()
        for array, nbytes in seldom + often if self.careful or place in self._touched else often:
            begin, size = array + place * length * nbytes, length * nbytes
            memory[begin : begin + size] = bytes(size)
        self._touched.discard(place)
        self._bases[2 * place], self._bases[2 * place + 1] = self._numbers
        self.rows.segment = self.segment
        struct.pack_into("=Q", memory, layout.RING_AT, self.segment)
        return place * length

    def _take_slot(self) -> int:
        """The next slot, for the holder of the lock; -1: for none, as this is a handler of a signal that has
        interrupted the opening of a segment.

        Nothing is called between the reading and the writing of `_next`, so that no handler runs there (CPython runs
        them after calls); on 3.10 one may, and what it calls has its records overwritten."""
        slot = self._next
        if slot % self._length == 0:
            self._next = -1
            try:
                self._open_segment()
            finally:  # a Ctrl-C, too: then the segment is opened once more
                slot = self._next = max(self.segment, 0) % self.region.segments * self._length
        elif slot < 0:
            return -1
        self._next = slot + 1
        return slot

    # Calls

    def begin(self, operation: str, inputs: tuple[Any, ...], stream: int, detail: str = "") -> int:
        """`enter`, for what moves data and is called again and again, maybe in a new size each time; by the holder of
        the lock."""
        at = COUNT_AT.get(operation)  # what a call is known by: all but its addresses
        row = None if at is None or detail else self._known.get((operation, inputs[at:], stream))
        if row is None:
            row = 0 if detail else self.rows.recent(operation, inputs, stream)
            return self.enter(operation, inputs, stream, row=row, detail=detail)
        slot = self._take_slot()
        if slot < 0:
            return slot
        self.ring[slot] = row
        self.thread = get_ident()
        self.issued[slot] = now()
        if self.careful:
            self._site[slot] = self.recorder.string(user_site())
        if notes:
            self.note_own(slot)
        return slot

    def add(self, row: int) -> None:
        """`enter`, for what is described already, without the time; by the holder of the lock."""
        slot = self._take_slot()
        if slot >= 0:
            self.ring[slot] = row
            self.thread = get_ident()
            if notes:
                self.note_own(slot)

    def unnumbered(self, slot: int) -> None:
        """The call that was entered there counts as none after all."""
        if slot >= 0:
            self.ring[slot] = layout.INLINE_UNNUMBERED

    def enter(
        self,
        operation: str,
        inputs: tuple[Any, ...] = (),
        stream: int = 0,
        *,
        row: int = 0,
        weight: int | None = None,
        detail: str = "",
        group: int = 0,
        site: str = "",
    ) -> int:
        """A call is about to be made. Returns the slot, for `leave`; -1: it is not in the record."""
        with self.lock:  # which the caller has, unless it is of an init, or an end
            slot = self._take_slot()
        if slot < 0:
            return slot
        self.thread = get_ident()
        self.issued[slot] = now()
        if not row:
            if weight is None:
                weight = weight_of(operation)
            at = self.region.inline + slot * layout.ROW.size
            self.rows.write(at, operation, inputs, stream, weight, detail, site, group, False)
            row = layout.INLINE if weight else layout.INLINE_UNNUMBERED
        self.ring[slot] = row
        if self.careful:
            self._site[slot] = self.recorder.string(site or user_site())
        if notes:
            self.note_own(slot)
        return slot

    def note_own(self, slot: int) -> None:
        """The autograd function that this thread is in, if any, makes this call."""
        if (note := notes.get(get_ident())) is not None:
            self.note(slot, note)

    def note(self, slot: int, note: tuple[str, str]) -> None:
        """An autograd function makes this call."""
        self._touched.add(slot // self._length)
        self._function[slot] = self.recorder.string(note[0])
        self._forward[slot] = self.recorder.string(note[1])

    def leave(self, slot: int) -> None:
        """The call has returned."""
        if slot < 0:
            return
        self._touched.add(slot // self._length)
        self.returned[slot] = now()

    @contextlib.contextmanager
    def call(self, operation: str, *, weight: int = 1, detail: str = "") -> Iterator[None]:
        """What runs within is one call that is not made often: an init, a split, a barrier."""
        slot = self.enter(operation, weight=weight, detail=detail)
        try:
            yield
        except BaseException as error:
            self.failed(slot, error)
            raise
        self.leave(slot)

    def around(self, function: Any, operation: str, inputs: tuple[Any, ...], stream: int, row: int) -> Any:
        """The C function, with each call of it in the record: of a track that is careful."""

        def recorded(*args: Any) -> int:
            slot = self.enter(operation, inputs, stream, row=row)
            try:
                code: int = function(*args)
            except BaseException as error:
                self.failed(slot, error)
                raise
            self.leave(slot)
            return code

        return recorded

    def failed_last(self, error: BaseException | str) -> None:
        """The newest call has raised."""
        if number := self.head():
            self.failed(self._slot(number), error)

    def _slot(self, number: int) -> int:
        """That of the newest call, by its number."""
        place, length = self.segment % self.region.segments, self.region.segment
        return place * length + (number - 1 - self._bases[2 * place]) % length

    def has_returned(self, number: int) -> bool:
        """Whether the newest call has returned, where tracks are careful."""
        return bool(self.returned[self._slot(number)])

    def is_located(self, number: int) -> bool:
        """Whether the line of the newest call is known."""
        return bool(self._site[self._slot(number)])

    def locate(self, number: int, site: str) -> None:
        """By the watchdog: the line of the newest call, which has not returned."""
        slot = self._slot(number)
        if site and not self._site[slot]:
            self._touched.add(slot // self._length)
            self._site[slot] = self.recorder.string(site)

    def streams(self, after: int) -> set[int]:
        """Those of the calls after this number: of the newest ones, where there are too many."""
        found, head, length = set(), self.head(), self.region.segment
        place = self.segment % self.region.segments
        for number in range(max(after, head - length, self._bases[2 * place]) + 1, head + 1):
            stream = self.rows.stream_of(self._slot(number))
            if number > self._gone.get(stream, 0):  # CUDA may have given its address to another one
                found.add(stream)
        return found

    def forget(self, stream: int) -> None:
        """A stream is closed, or dropped: the calls made on it so far count as complete. Nothing may be asked of it."""
        self._gone[stream] = self.head()

    def failed(self, slot: int, error: BaseException | str) -> None:
        """The call has raised."""
        if slot < 0:
            return
        self._touched.add(slot // self._length)
        self.returned[slot] = now()
        self.memory[self.region.failed + slot] = 1
        self._site[slot] = self._site[slot] or self.recorder.string(user_site())
        self.write("error", _line(error))

    def new_group(self) -> int:
        """A number for the calls that are issued together."""
        return next(self._groups)

    def head(self) -> int:
        """The number of the newest call; for whoever holds the lock, or can bear one that is a little old."""
        if self.segment < 0:
            return 0
        place, length = self.segment % self.region.segments, self.region.segment
        rows = self.ring[place * length : (place + 1) * length].tolist()
        return int(self._bases[2 * place]) + (rows.index(0) if 0 in rows else length)

    def mark(self, head: int) -> None:
        """By the watchdog: this is the newest call now, and has not been at its last look."""
        place = 2 * (self._marks % layout.MARKS)
        self._marks += 1
        self._mark_heads[place + 1] = 0
        self._mark_times[place] = now()
        self._mark_heads[place + 1] = head

    def seen(self, returned: int | None = None, completed: int | None = None) -> None:
        """By the watchdog: up to these calls all have returned, have completed."""
        segment, old_returned, old_completed, *times = layout.RING.unpack_from(self.memory, layout.RING_AT)
        if returned is not None:
            old_returned, times[0] = returned, now()
        if completed is not None:
            old_completed, times[1] = completed, now()
        # The segment is the writer's: it is not touched here.
        packed = layout.RING.pack(segment, old_returned, old_completed, *times)
        self.memory[layout.RING_AT + 8 : layout.RING_AT + layout.RING.size] = packed[8:]

    def waits(self) -> None:
        """By the watchdog: its streams have not passed all of the calls so far."""
        layout.WAITS.pack_into(self.memory, layout.WAITS_AT, now())

    def end(self, how: str, site: str = "") -> None:
        """The communicator has ended."""
        if not self.recorder.mine:
            return
        self.write("ended", how)
        self.write("ended_site", site)
        layout.COMM_END.pack_into(self.memory, layout.COMM_END_AT, now())
        _, *rest = layout.COMM.unpack_from(self.memory, 0)
        layout.COMM.pack_into(self.memory, 0, layout.ENDED, *rest)
        self.recorder.free(self)


def _forget(stream: int) -> None:
    own = started()
    for track in list(own.tracks) if own is not None else ():
        track.forget(stream)


streams.on_end = _forget
_numbers = itertools.count(1)
_FIRST = 200  # characters of what was called, where the library says why it failed


def new_track(known: Identity | None, rank: int, size: int, careful: bool) -> Track | None:
    """A track for a communicator; None with PYNCCL_WATCH=off."""
    own = recorder()
    return None if own is None else Track(own, known or Identity(uid_of(), "communicator", ""), rank, size, careful)


def uid_of(*parts: Any) -> str:
    """The name of a communicator that all its ranks can make for themselves of what they all know."""
    import hashlib

    known = parts or (os.getpid(), now(), next(_numbers))  # of nothing: a name that no other rank has
    return hashlib.sha256(repr(known).encode()).hexdigest()[:32]


def _line(error: BaseException | str) -> str:
    """Its first line, and what the library itself says last."""
    text = str(error) if isinstance(error, str) else f"{type(error).__name__}: {error}"
    first, last = text.partition("\n")[0], text.partition("\n  last error: ")[2].partition("\n")[0]
    return f"{first[:_FIRST]}: {last}" if last else first
