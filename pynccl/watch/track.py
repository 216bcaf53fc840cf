"""The calls of one communicator in the flight recorder: entered, returned, failed, and how it ended.

Written by whoever holds the lock of the communicator. See layout.py for what it writes.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

from . import layout
from .frames import call_site
from .notes import notes
from .recorder import Recorder, now, recorder
from .settings import SITES, settings

# Which of the C arguments of an operation are its count, operator and rank (root or peer); -1: none. How many
# collective calls it is: sends and what not every rank calls are not numbered.
_BOTH = (2, -1, -1, 1)  # send, recv, count, type
SHAPES: dict[str, tuple[int, int, int, int]] = {
    "all_reduce": (2, 4, -1, 1),
    "reduce_scatter": (2, 4, -1, 1),
    "reduce": (2, 4, 5, 1),
    "broadcast": (2, -1, 4, 1),
    "gather": (2, -1, 4, 1),
    "scatter": (2, -1, 4, 1),
    "all_gather": _BOTH,
    "all_to_all": _BOTH,
    "alltoall": _BOTH,
    "send": (1, -1, 3, 0),
    "recv": (1, -1, 3, 0),
    "put_signal": (1, -1, 3, 0),
    "signal": (-1, -1, 0, 0),
    "wait_signal": (-1, -1, -1, 0),
}
_COUNT_AT = {operation: shape[0] for operation, shape in SHAPES.items() if shape[0] >= 0}
_MOST_RECENT = 128
_PEERS = ("send", "recv", "put_signal", "signal")


def weight_of(operation: str) -> int:
    """How many collective calls this one counts as, on every rank."""
    return SHAPES.get(operation, _BOTH)[3]


@functools.cache
def _slots(count: int) -> list[int]:
    """The numbers below, made once: to make one takes as long as to write it."""
    return list(range(count))


class Identity(NamedTuple):
    """Who a communicator is: uid, the same on all its ranks and only there; its name, and its parent's uid."""

    uid: str
    name: str
    parent: str


class Track:
    """The calls of one communicator: `enter` before the C call, `leave` after it, under the communicator's lock.

    `ring` and `cursor` are for those who cannot afford a call of Python: `ring[next(cursor)] = row` is all they do,
    with a row of `describe`, and the watchdog notices when it has returned. Where `careful` is true nobody does so:
    each call gets its line, too, and the time when it returned."""

    def __init__(self, recorder: Recorder, known: Identity, rank: int, size: int, careful: bool) -> None:
        memory = recorder.new_region()
        self.kept = memory is not None
        if memory is None:  # more communicators than the file has room for: written, but nowhere to be read
            memory = memoryview(mmap.mmap(-1, recorder.region.nbytes))
        region = recorder.region
        self.recorder, self.memory, self.region = recorder, memory, region
        self.number = next(_numbers)
        self.uid, self.name, self.rank, self.size = known.uid, known.name, rank, size
        # The host library's calls take so long that the line of each costs nothing beside them.
        self.careful = careful or settings().mode == SITES
        self.children: dict[str, int] = {}  # how many were made of it, by what made them: for their names
        self._row_bytes = layout.ROW.size
        self.ring = self._array(region.ring, "H", region.slots)
        self.issued = self._array(region.issued, "d", region.slots)
        self.returned = self._array(region.returned, "d", region.slots)
        self._site = self._array(region.site, "H", region.slots)
        self._function = self._array(region.function, "H", region.slots)
        self._forward = self._array(region.forward, "H", region.slots)
        self._bases = self._array(region.bases, "Q", 2 * region.segments)
        self._weights: dict[int, int] = {}  # of the rows that count as another number of collective calls than 0 or 1
        self._rows = {kind: iter(kind) for kind in (layout.ONE, layout.NONE, layout.OTHER)}
        self._on_streams: dict[tuple[int, int], int] = {}
        # Rows that were given back, and in which segment.
        self._free_rows: dict[range, list[tuple[int, int]]] = {kind: [] for kind in self._rows}
        self._recent: dict[Any, int] = {}  # the rows of calls that nobody keeps, by what they are called with
        self._groups = itertools.count(1)
        self.explains = False  # an error of this communicator has been explained
        parent = next((track for track in recorder.tracks if track.uid == known.parent), None)
        self.exchange: Any = None  # with which the ranks on other machines are asked
        if parent is not None and parent.exchange is not None:
            self.join(parent.exchange)
        self.comm: Callable[[], Any] = lambda: None  # the communicator, once it is there, and while it is
        self.segment = -1
        self.cursor: Iterator[int] = itertools.chain.from_iterable(self._segments())
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
        self.write("device", device)
        self.write("made_at", site)

    def _array(self, at: int, kind: Literal["H", "Q", "d"], length: int) -> Any:
        size = 2 if kind == "H" else 8
        return self.memory[at : at + size * length].cast(kind)

    def write(self, what: str, text: str) -> None:
        """A text of the region: name, device, made_at, parent, alias, error."""
        layout.put(self.memory, *layout.COMM_TEXTS[what], text)

    def _segments(self) -> Iterator[list[int]]:
        """The slots, one segment after the other; each is cleared before it is written to again."""
        region, memory, entries, numbered, place = self.region, self.memory, 0, 0, 0
        length, empty = region.segment, bytes(8 * region.segment)
        slots = _slots(region.slots)
        segment = self._array(layout.RING_AT, "Q", 1)
        for self.segment in itertools.count():
            if self.segment:
                entries += length
                numbered += self._numbered_in(place * length)
            place = self.segment % region.segments
            for array, nbytes in region.arrays():
                begin, size = array + place * length * nbytes, length * nbytes
                memory[begin : begin + size] = empty[:size]
            self._bases[2 * place], self._bases[2 * place + 1] = entries, numbered
            segment[0] = self.segment
            yield slots[place * length : (place + 1) * length]

    def _numbered_in(self, first: int) -> int:
        """The collective calls in the full segment that begins with this slot."""
        length, at = self.region.segment, self.region.ring + 2 * first
        kinds = bytes(self.memory[at : at + 2 * length])[layout.HIGH :: 2]
        numbered = length - kinds.count(layout.NONE.start >> 8) - kinds.count(layout.INLINE_UNNUMBERED >> 8)
        if kinds.count(layout.OTHER.start >> 8):
            rows = self.ring[first : first + length].tolist()
            numbered += sum(self._weights[row] - 1 for row in rows if row in layout.OTHER)
        return numbered

    # Calls

    def describe(
        self,
        operation: str,
        inputs: tuple[Any, ...],
        stream: int,
        *,
        weight: int | None = None,
        detail: str = "",
        site: str = "",
        plan: bool = False,
    ) -> int:
        """The row that describes a call which will be made again; 0: there is none left, `enter` describes it."""
        weight = weight_of(operation) if weight is None else weight
        number = self._take_row(weight)
        if number:
            at = self.region.table + number * self._row_bytes
            self._write_row(at, operation, inputs, stream, weight, detail, site, 0, plan)
        return number

    def unnumbered(self, slot: int) -> None:
        """The call that was entered there counts as none after all."""
        self.ring[slot] = layout.INLINE_UNNUMBERED

    def _take_row(self, weight: int) -> int:
        """A row for what counts as so many collective calls; 0: there is none left."""
        kind = (layout.NONE, layout.ONE)[weight] if 0 <= weight <= 1 else layout.OTHER
        free = self._free_rows[kind]
        if free and free[0][1] + self.region.segments < self.segment:  # no slot holds it any more
            row = free.pop(0)[0]
        else:
            row = next(self._rows[kind], 0)
        if row in layout.OTHER:
            self._weights[row] = weight
        return row

    def give_back(self, row: int) -> None:
        """The row is not needed any more."""
        rows = [row]
        for key in [key for key in self._on_streams if key[0] == row]:
            rows.append(self._on_streams.pop(key))
        for one in dict.fromkeys(rows):
            for kind, free in self._free_rows.items():
                if one in kind:
                    free.append((one, self.segment))

    def begin(self, operation: str, inputs: tuple[Any, ...], stream: int) -> int:
        """`enter`, for what moves data and is called again and again, maybe in a new size each time."""
        row = self._recent.get((operation, inputs[_COUNT_AT.get(operation, 0) :], stream))
        if row is None:
            return self._begin_anew(operation, inputs, stream)
        for slot in self.cursor:
            break
        self.ring[slot] = row
        self.issued[slot] = now()
        if self.careful:
            self._site[slot] = self.recorder.string(call_site())
        if notes:
            self.note_own(slot)
        return slot

    def _begin_anew(self, operation: str, inputs: tuple[Any, ...], stream: int) -> int:
        at = _COUNT_AT.get(operation)
        if at is None:  # what it is called with is no part of the description
            return self.enter(operation, inputs, stream)
        if len(self._recent) >= _MOST_RECENT:
            for row in self._recent.values():
                self.give_back(row)
            self._recent.clear()
        row = self.describe(operation, inputs, stream)
        if row:
            self._recent[operation, inputs[at:], stream] = row
        return self.enter(operation, inputs, stream, row=row)

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
        """A call is about to be made. Returns the slot, for `leave`."""
        slot = next(self.cursor)
        self.issued[slot] = now()
        if not row:
            if weight is None:
                weight = weight_of(operation)
            at = self.region.inline + slot * self._row_bytes
            self._write_row(at, operation, inputs, stream, weight, detail, site, group, False)
            row = layout.INLINE if weight else layout.INLINE_UNNUMBERED
        self.ring[slot] = row
        if self.careful:
            self._site[slot] = self.recorder.string(site or call_site())
        if notes:
            self.note_own(slot)
        return slot

    def note_own(self, slot: int) -> None:
        """The autograd function that this thread is in, if any, makes this call."""
        if (note := notes.get(threading.get_ident())) is not None:
            self.note(slot, note)

    def note(self, slot: int, note: tuple[str, str]) -> None:
        """An autograd function makes this call."""
        self._function[slot] = self.recorder.string(note[0])
        self._forward[slot] = self.recorder.string(note[1])

    def leave(self, slot: int) -> None:
        """The call has returned."""
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

    def row_on(self, row: int, stream: int) -> int:
        """The row of the same call on another stream; the same row where there is none left."""
        other = self._on_streams.get((row, stream))
        if other is None:
            size, table = self._row_bytes, self.region.table
            values = list(layout.ROW.unpack_from(self.memory, table + row * size))
            number = self._take_row(values[4])
            if number:
                values[9] = stream
                layout.ROW.pack_into(self.memory, table + number * size, *values)
            other = self._on_streams[row, stream] = number or row
        return other

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
            self._site[slot] = self.recorder.string(site)

    def streams(self, after: int) -> set[int]:
        """Those of the calls after this number: of the newest ones, where there are too many."""
        found, head, length = set(), self.head(), self.region.segment
        place = self.segment % self.region.segments
        for number in range(max(after, head - length, self._bases[2 * place]) + 1, head + 1):
            slot = self._slot(number)
            row = self.ring[slot]
            inline = row >= layout.ROWS
            at = self.region.inline + slot * self._row_bytes if inline else self.region.table + row * self._row_bytes
            found.add(layout.ROW.unpack_from(self.memory, at)[9])
        return found

    def failed(self, slot: int, error: BaseException | str) -> None:
        """The call has raised."""
        self.returned[slot] = now()
        self.memory[self.region.failed + slot] = 1
        self._site[slot] = self._site[slot] or self.recorder.string(call_site())
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

    def _write_row(
        self,
        at: int,
        operation: str,
        inputs: tuple[Any, ...],
        stream: int,
        weight: int,
        detail: str,
        site: str,
        group: int,
        plan: bool,
    ) -> None:
        count_at, op_at, rank_at, _ = SHAPES.get(operation, (-1, -1, -1, 1))
        string = self.recorder.string
        flags = (layout.PLAN if plan else 0) | (
            layout.PEER if operation in _PEERS else layout.ROOT if rank_at >= 0 else 0
        )
        count, dtype = (inputs[count_at], inputs[count_at + 1]) if count_at >= 0 and inputs else (layout.NO_COUNT, -1)
        layout.ROW.pack_into(
            self.memory,
            at,
            string(operation),
            string(detail) if detail else 0,
            flags,
            dtype,
            weight,
            inputs[op_at] if op_at >= 0 and inputs else -1,
            inputs[rank_at] if rank_at >= 0 and inputs else -1,
            group,
            count,
            stream,
            string(site) if site else 0,
        )


_numbers = itertools.count(1)


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
    text = str(error) if isinstance(error, str) else f"{type(error).__name__}: {error}"
    return text.partition("\n")[0]
