"""Record the calls of one communicator in the flight recorder: entered, returned, failed; and how it ended.

Writers hold the communicator's lock, except in its init and its end, when no other call can run. layout.py describes
the format.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import os
import struct
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from ..bindings.errors import NcclError, Outcome, outcome_of
from ..interop import streams
from ..interop.handles import DEFAULT_STREAMS, LASTING, number_of, source_of
from . import layout
from .frames import attributions, posting_stream, user_site
from .layout import CommEnd
from .recorder import Recorder, now, recorder, started

get_ident = threading.get_ident
_pack, _CODE = layout.SLOT.pack_into, struct.Struct("=i")
_BYTES = layout.SLOT.size
_WORDS = _BYTES // 8  # 8-byte words per slot, and indices of some of them
_RETURNED, _NUMBER, _STREAM = layout.RETURNED_AT // 8, layout.NUMBER_AT // 8, layout.STREAM_AT // 8


class Identity(NamedTuple):
    """The identity of a communicator: uid (unique, and the same on all its ranks), name, and the uid of its parent."""

    uid: str
    name: str
    parent: str


class Track:
    """The calls of one communicator: `enter` before the C call, `leave` after it, under the communicator's lock.

    head    number of the newest call
    thread  the thread that made it
    ranks   global rank of each rank; (): unknown
    """

    def __init__(self, recorder: Recorder, known: Identity, rank: int, size: int, ranks: Sequence[int] = ()) -> None:
        memory, self.in_file = recorder.new_region()  # in_file: not in private memory
        self.recorder = recorder
        self.uid, self.name, self.rank, self.size, self.ranks = known.uid, known.name, rank, size, ranks
        self.children: dict[str, int] = {}  # origin ("split", ...) -> number of children so far: for their names
        self.head, self.thread = 0, 0
        self._collective = 0  # number of collective calls so far
        self._use_region(memory)
        self._ring, self._strings, self._operations = layout.CALLS, recorder.strings, _Operations(recorder)
        self._groups = itertools.count(1)
        self._messages: dict[tuple[layout.Half, int], int] = {}  # half and peer -> number of messages so far
        self._closed_streams: dict[int, int] = {}  # stream -> the newest call when it was closed
        self._sources: dict[int, weakref.ref[Any]] = {}  # stream -> the object of another library that has it
        self.explains = False  # whether an error of this communicator has been explained
        # To ask the ranks on other nodes. Until the communicator has an exchange of its own: that of its parent, or of
        # the first communicator of this process.
        known_exchanges = [track.exchange for track in recorder.tracks if track.uid == known.parent or not known.parent]
        self.exchange: Any = next(filter(None, known_exchanges), None)
        self.comm: Callable[[], Any] = lambda: None  # returns the communicator while it exists
        self.posts_on = posting_stream()  # the stream of its synchronous calls, which another thread makes; 0: none
        self.recorded: tuple[int, int, Any] = 0, 0, None  # call, stream, and an event recorded there after that call
        self.library: Any = None  # of the communicator once it exists, and the ordinal of its device
        self.ordinal = -1
        for what, text in known._asdict().items():
            self.write(what, text)
        self.comm_head.rank, self.comm_head.size, self.comm_head.made = rank, size, now()
        if len(ranks) <= layout.LISTED_RANKS:
            self.comm_head.ranks[: len(ranks)] = ranks
        self.comm_head.valid = 1  # written last: from now on the region is valid
        recorder.tracks.append(self)

    def _use_region(self, memory: memoryview) -> None:
        self.memory = memory
        self.comm_head = layout.CommHead.from_buffer(memory)
        self._slots = memory[layout.REGION_HEAD :][: layout.CALLS * _BYTES]
        self._words, self._clocks = self._slots.cast("Q"), self._slots.cast("d")

    def detach(self) -> None:
        """Discard all further writes: its region now belongs to another communicator, or to the parent process."""
        self._use_region(memoryview(mmap.mmap(-1, layout.REGION_BYTES)))

    def made(self, comm: Any, device: str, site: str) -> None:
        """Record that the communicator was created."""
        self.comm = weakref.ref(comm)
        self.library, self.ordinal = comm.library, comm.ordinal
        self.write("device", device)
        self.write("made_at", site)

    def write_uid(self, uid: str) -> None:
        """Replace the uid, which was unknown until the ranks could agree on one."""
        self.uid = uid
        self.write("uid", uid)

    def exclude(self, ranks: Sequence[int]) -> None:
        """Record that these ranks do not take part in the shrink that follows."""
        ctypes.memset(self.comm_head.excluded, 0, layout.LISTED_RANKS)
        for rank in ranks:
            if rank < layout.LISTED_RANKS:
                self.comm_head.excluded[rank] = 1

    def write(self, what: str, text: str) -> None:
        """Write a text field of the communicator: name, device, made_at, parent, error."""
        layout.put(self.comm_head, what, text)

    @property
    def number(self) -> int:
        """This rank, for messages: the global rank, unless several ranks are in this process."""
        if self.ranks:
            return self.ranks[self.rank]
        launched = int(self.recorder.head.rank)
        shared = sum(track.uid == self.uid for track in self.recorder.tracks) > 1
        return self.rank if shared or launched < 0 else launched

    # Calls

    def enter(
        self,
        operation: str,
        inputs: tuple[Any, ...] = (),
        stream: int = 0,
        detail: str = "",
        group: int = 0,
        site: str = "",
        weight: int = -1,
        flags: int = 0,
    ) -> int:
        """Record that a call is about to be made. Return its number, for `leave`.

        inputs  its C arguments up to the communicator
        detail  further arguments as text; group: from `new_group`; site: the user's line, "": the current one
        weight  number of collective calls that it counts as; -1: one or none, depending on the operation

        If a signal handler makes a call while this runs, one of the two records may overwrite the other."""
        number, counts, at, rest = self._operations[operation]
        if self.posts_on and not stream:
            stream, flags = self.posts_on, flags | layout.POSTED
        if stream > DEFAULT_STREAMS:
            flags |= self._note_source(stream)
        if at:
            count, dtype = inputs[at], inputs[at + 1]
            first = inputs[at + 2] if rest else 0
            second = 0
            if rest == 2:  # of a message, the second one is its number
                second = self._number_message(operation, first) if at == 1 else inputs[at + 3]
        else:
            count, dtype, first, second = layout.NO_COUNT, -1, -1, 0
            if operation in layout.SIGNALS and inputs:
                first, signals = _peer_and_signals(operation, inputs)
                second = self._number_message(operation, first, signals)
        self.head = entry = self.head + 1
        if weight >= 0:
            counts = weight
        collective = 0
        if counts:
            self._collective = collective = self._collective + counts
        self.thread = get_ident()
        strings, function, forward = self._strings, 0, 0
        if attributions and (note := attributions.get(self.thread)) is not None:
            function, forward = strings[note[0]], strings[note[1]]
        _pack(
            self._slots,
            entry % self._ring * _BYTES,
            entry,
            now(),
            0.0,
            collective,
            stream,
            group,
            number,
            strings[site or user_site()],
            strings.of_detail(detail) if detail else 0,
            function,
            forward,
            flags,
            0,  # Outcome.PENDING
            count,
            dtype,
            first,
            second,
            -1,
            entry,
        )
        return entry

    def _number_message(self, operation: str, peer: int, signals: int = 1) -> int:
        """Return the number of this message, or signal, among those to, or from, this peer."""
        key = layout.MESSAGES[operation], peer
        self._messages[key] = number = self._messages.get(key, 0) + signals
        return number

    def _note_source(self, stream: int) -> int:
        """Note who vouches for a stream, and return the flag of one for which nobody does."""
        if self.library is None or self.library.is_host:
            return 0
        if not streams.is_known(stream):
            return layout.UNKNOWN_STREAM
        source = source_of(stream)
        if source is None or source is LASTING:
            self._sources.pop(int(stream), None)  # of an earlier stream with this handle
            return 0
        try:
            self._sources[int(stream)] = weakref.ref(source)
        except TypeError:  # it may die unnoticed
            return layout.UNKNOWN_STREAM
        return 0

    def leave(self, entry: int) -> None:
        """Record that the call has returned."""
        self._clocks[entry % self._ring * _WORDS + _RETURNED] = now()

    def failed(self, entry: int, error: BaseException) -> None:
        """Record that the call has raised. If the watchdog aborted it, that stays its outcome."""
        at = entry % self._ring * _BYTES
        if self._slots[at + layout.OUTCOME_AT] != Outcome.ABORTED_BY_WATCHDOG:
            self.leave(entry)
            self._slots[at + layout.OUTCOME_AT], code = outcome_of(error)
            _CODE.pack_into(self._slots, at + layout.CODE_AT, code)
        self.write("error", _line(error))
        self.note_failure(error)

    def note_failure(self, error: BaseException) -> None:
        """Note an error that may end the process."""
        if isinstance(error, NcclError):
            self.recorder.last_failure = (str(error), *outcome_of(error))

    def failed_since(self, head: int, error: BaseException) -> None:
        """Record that the calls after `head`, a single call or one group, have raised."""
        for entry in range(head + 1, self.head + 1):
            self.failed(entry, error)

    def failed_last(self, error: BaseException) -> None:
        """Record that the newest call has raised."""
        if self.head:
            self.failed(self.head, error)

    def aborted_by_watchdog(self, error: BaseException) -> None:
        """Record that the watchdog aborted the unfinished calls: for other ranks, this rank waited there until then."""
        for entry in range(max(self.comm_head.completed, self.head - self._ring) + 1, self.head + 1):
            stream = self._words[entry % self._ring * _WORDS + _STREAM]
            synchronous = not stream or stream == self.posts_on
            by_caller = self.library is not None and self.library.is_host and synchronous
            if not (by_caller and self.has_returned(entry)):
                self.failed(entry, error)
                self._slots[entry % self._ring * _BYTES + layout.OUTCOME_AT] = Outcome.ABORTED_BY_WATCHDOG

    def unnumbered(self, entry: int) -> None:
        """Do not count the call, so far the only one, as a collective after all."""
        self._words[entry % self._ring * _WORDS + _NUMBER] = self._collective = 0

    @contextlib.contextmanager
    def call(self, operation: str, *, weight: int = 1, detail: str = "") -> Iterator[None]:
        """Context manager: record the body as one call (init, split, barrier)."""
        head = self.head
        try:
            entry = self.enter(operation, weight=weight, detail=detail)
            yield
            self.leave(entry)
        except BaseException as error:
            self.failed_since(head, error)
            raise

    def new_group(self) -> int:
        """Return a number for calls that are issued as one group."""
        return next(self._groups) & 0xFFFFFFFF  # a slot has 32 bits for it

    # For the watchdog

    def has_returned(self, entry: int) -> bool:
        """Return whether a recent call has returned."""
        return bool(self._clocks[entry % self._ring * _WORDS + _RETURNED])

    def is_posted(self, entry: int) -> bool:
        """Return whether another thread than the program's made a recent call."""
        return bool(self._slots[entry % self._ring * _BYTES + layout.FLAGS_AT] & layout.POSTED)

    def streams(self, after: int, last: int) -> dict[int, Any]:
        """Return the streams of the calls from `after` + 1 to `last` that are still in the ring buffer, and that exist,
        with the object that has each, or None: while the caller keeps it, the stream is not dropped."""
        found: dict[int, Any] = {}
        for entry in range(max(after, last - self._ring) + 1, last + 1):
            at = entry % self._ring
            stream, flags_at = self._words[at * _WORDS + _STREAM], at * _BYTES + layout.FLAGS_AT
            if self._words[at * _WORDS] != entry or self._slots[flags_at] & layout.UNKNOWN_STREAM:
                continue
            if entry <= self._closed_streams.get(stream, 0):  # a newer stream may have the handle of a closed one
                continue
            known = self._sources.get(stream)
            source = known() if known is not None else None
            if known is None or _has_stream(source, stream):
                found[stream] = source
            else:
                self._slots[flags_at] |= layout.UNKNOWN_STREAM
        return found

    def forget(self, stream: int) -> None:
        """Record that a stream was closed or dropped: it must not be used, and its calls so far count as completed."""
        self._closed_streams[stream] = self.head

    def completed(self, entry: int) -> None:
        """Record that the calls up to this one have completed."""
        self.comm_head.completed, self.comm_head.completed_at = entry, now()

    def mark_awaited(self, since: float) -> None:
        """Record since when the program waits for its posted calls; 0.0: it does not."""
        self.comm_head.awaited_at = since

    def mark_waiting(self) -> None:
        """Record that its streams have not completed all calls so far."""
        self.comm_head.waits_at = now()

    def end(self, how: CommEnd, site: str = "") -> None:
        """Record that the communicator has ended."""
        if not self.recorder.mine:  # in a forked child, whose parent's locks another thread may have held
            return
        self.write("ended_site", site)
        self.comm_head.ended_at = now()
        self.comm_head.ended = how
        self.recorder.release(self)


def _has_stream(source: Any, stream: int) -> bool:
    """Return whether an object still has this stream."""
    with contextlib.suppress(Exception):  # it may be closed
        return source is not None and bool(number_of(source) == stream)
    return False


class _Operations(dict[str, tuple[int, int, int, int]]):
    """Operation -> row of its name, number of collective calls it counts as, index of its count among the C arguments,
    and number of arguments after the data type. Filled on first use."""

    def __init__(self, recorder: Recorder) -> None:
        self._strings = recorder.strings

    def __missing__(self, operation: str) -> tuple[int, int, int, int]:
        at, names = layout.ARGUMENTS.get(operation, (0, ()))
        counts = int(operation not in layout.MESSAGES)
        self[operation] = found = (self._strings[operation], counts, at, len(names))
        return found


def _peer_and_signals(operation: str, inputs: tuple[Any, ...]) -> tuple[int, int]:
    """Return the peer, -1 if there are several, and how many signals are sent or awaited."""
    if operation == "signal":
        return int(inputs[0]), 1
    return (int(inputs[1][0].peer), int(inputs[1][0].opCnt)) if inputs[0] == 1 else (-1, 1)


def _forget_stream(stream: int) -> None:
    own = started()
    for track in list(own.tracks) if own is not None else ():
        track.forget(stream)


streams.on_end = _forget_stream
_numbers = itertools.count(1)
_MAX_CHARS = 200  # of the message, if the library's own last error follows


def new_track(known: Identity | None, rank: int, size: int, ranks: Sequence[int] = ()) -> Track | None:
    """Create a track for a communicator; return None with PYNCCL_WATCH=off."""
    own = recorder()
    return None if own is None else Track(own, known or Identity(uid_of(), "communicator", ""), rank, size, ranks)


def uid_of(*parts: Any) -> str:
    """Return a uid derived from `parts`, which all ranks know: so all ranks compute the same uid."""
    import hashlib

    known = parts or (os.getpid(), now(), next(_numbers))  # without parts: unique to this call
    return hashlib.sha256(repr(known).encode()).hexdigest()[:32]


def _line(error: BaseException) -> str:
    """Return the first line of an error, and the library's own last error."""
    text = f"{type(error).__name__}: {error}"
    first, last = text.partition("\n")[0], text.partition("\n  last error: ")[2].partition("\n")[0]
    return f"{first[:_MAX_CHARS]}: {last}" if last else first
