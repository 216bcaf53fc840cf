"""The calls of one communicator in the flight recorder: entered, returned, failed, and how it ended.

Written by whoever holds the lock of the communicator, its init and its end excepted, beside which nothing is called.
See layout.py for what is written.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from ..interop import streams
from . import layout
from .caller_notes import notes
from .frames import user_site
from .recorder import Recorder, now, recorder, started

get_ident = threading.get_ident
_pack = layout.SLOT.pack_into
_BYTES = layout.SLOT.size
_WORDS = _BYTES // 8  # of a slot; and which of them are
_RETURNED, _NUMBER, _STREAM = layout.RETURNED_AT // 8, layout.NUMBER_AT // 8, layout.STREAM_AT // 8


class Identity(NamedTuple):
    """Who a communicator is: uid, the same on all its ranks and only there; its name, and its parent's uid."""

    uid: str
    name: str
    parent: str


class Track:
    """The calls of one communicator: `enter` before the C call, `leave` after it, under the communicator's lock.

    head    number of the newest call
    thread  which has made it
    """

    def __init__(self, recorder: Recorder, known: Identity, rank: int, size: int) -> None:
        memory, self.kept = recorder.new_region()  # whether it is in the file
        self.recorder = recorder
        self.uid, self.name, self.rank, self.size = known.uid, known.name, rank, size
        self.children: dict[str, int] = {}  # how many were made of it, by what made them: for their names
        self.head, self.thread = 0, 0
        self._collective = 0  # calls so far that all ranks make
        self._look_into(memory)
        self._ring, self._strings, self._kinds = layout.CALLS, recorder.strings, _Kinds(recorder)
        self._groups = itertools.count(1)
        self._gone: dict[int, int] = {}  # the newest call when such a stream was closed
        self.explains = False  # an error of this communicator has been explained
        parent = next((track for track in recorder.tracks if track.uid == known.parent), None)
        self.exchange: Any = parent and parent.exchange  # with which the ranks on other machines are asked
        self.comm: Callable[[], Any] = lambda: None  # the communicator, once it is there, and while it is
        self.library: Any = None  # of the communicator, once it is there; and its device
        self.ordinal = -1
        for what, text in known._asdict().items():
            self.write(what, text)
        self.comm_head.rank, self.comm_head.size, self.comm_head.made = rank, size, now()
        self.comm_head.state = layout.LIVE  # last: from now on it can be read
        recorder.tracks.append(self)

    def _look_into(self, memory: memoryview) -> None:
        self.memory = memory
        self.comm_head = layout.CommHead.from_buffer(memory)
        self._slots = memory[layout.REGION_HEAD :][: layout.CALLS * _BYTES]
        self._words, self._clocks = self._slots.cast("Q"), self._slots.cast("d")

    def detach(self) -> None:
        """Its region is another one's from now on, or its parent's: what is still written goes nowhere."""
        self._look_into(memoryview(mmap.mmap(-1, layout.REGION_BYTES)))

    def made(self, comm: Any, device: str, site: str) -> None:
        """The communicator is there."""
        self.comm = weakref.ref(comm)
        self.library, self.ordinal = comm.library, comm.ordinal
        self.write("device", device)
        self.write("made_at", site)

    def write(self, what: str, text: str) -> None:
        """A text of the communicator: name, device, made_at, parent, error."""
        layout.put(self.comm_head, what, text)

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
        """A call is about to be made. Returns its number, for `leave`.

        inputs  its C arguments up to the communicator
        detail  what else there is to say; group: that of `new_group`; site: the user's line, "": the one that runs now
        weight  as how many calls it counts that all ranks make; -1: as one, or none, by its operation

        A handler of a signal that makes a call in here takes this one's number, or has its own overwritten."""
        number, counts, at, rest = self._kinds[operation]
        if at:
            count, dtype = inputs[at], inputs[at + 1]
            first = inputs[at + 2] if rest else 0
            second = inputs[at + 3] if rest == 2 else 0
        else:
            count, dtype, first, second = layout.NO_COUNT, -1, _peer(operation, inputs), 0
        self.head = entry = self.head + 1
        if weight >= 0:
            counts = weight
        collective = 0
        if counts:
            self._collective = collective = self._collective + counts
        self.thread = get_ident()
        strings, function, forward = self._strings, 0, 0
        if notes and (note := notes.get(self.thread)) is not None:
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
            count,
            dtype,
            first,
            second,
            entry,
        )
        return entry

    def leave(self, entry: int) -> None:
        """The call has returned."""
        self._clocks[entry % self._ring * _WORDS + _RETURNED] = now()

    def failed(self, entry: int, error: BaseException | str) -> None:
        """The call has raised."""
        self.leave(entry)
        self._slots[entry % self._ring * _BYTES + layout.FLAGS_AT] |= layout.FAILED
        self.write("error", _line(error))

    def failed_since(self, head: int, error: BaseException | str) -> None:
        """The calls after this one, which are all of one group, or one, have raised."""
        for entry in range(head + 1, self.head + 1):
            self.failed(entry, error)

    def failed_last(self, error: BaseException | str) -> None:
        """The newest call has raised."""
        if self.head:
            self.failed(self.head, error)

    def gave_up(self, error: BaseException) -> None:
        """The calls that have not completed have raised: to the others this rank has waited there, and has not left."""
        for entry in range(max(self.comm_head.completed, self.head - self._ring) + 1, self.head + 1):
            stream = self._words[entry % self._ring * _WORDS + _STREAM]
            by_caller = self.library is not None and self.library.is_host and not stream  # done when it returned
            if not (by_caller and self.has_returned(entry)):
                self.failed(entry, error)
                self._slots[entry % self._ring * _BYTES + layout.FLAGS_AT] |= layout.GAVE_UP

    def unnumbered(self, entry: int) -> None:
        """The call, so far the only one, counts as none after all."""
        self._words[entry % self._ring * _WORDS + _NUMBER] = self._collective = 0

    @contextlib.contextmanager
    def call(self, operation: str, *, weight: int = 1, detail: str = "") -> Iterator[None]:
        """What runs within is one call: an init, a split, a barrier."""
        head = self.head
        try:
            entry = self.enter(operation, weight=weight, detail=detail)
            yield
            self.leave(entry)
        except BaseException as error:
            self.failed_since(head, error)
            raise

    def new_group(self) -> int:
        """A number for the calls that are issued together."""
        return next(self._groups) & 0xFFFFFFFF  # a slot has 32 bits for it

    # For the watchdog

    def has_returned(self, entry: int) -> bool:
        """Whether the call, one of the last, has returned."""
        return bool(self._clocks[entry % self._ring * _WORDS + _RETURNED])

    def streams(self, after: int) -> set[int]:
        """Those of the calls after this number that are still in the ring."""
        found, head, slots = set(), self.head, self._ring
        for entry in range(max(after, head - slots) + 1, head + 1):
            stream = self._words[entry % slots * _WORDS + _STREAM]
            if entry > self._gone.get(stream, 0):  # CUDA may have given its address to another one
                found.add(stream)
        return found

    def forget(self, stream: int) -> None:
        """A stream is closed, or dropped: the calls made on it so far count as complete. Nothing may be asked of it."""
        self._gone[stream] = self.head

    def completed(self, entry: int) -> None:
        """The calls up to this one have completed."""
        self.comm_head.completed, self.comm_head.completed_at = entry, now()

    def waits(self) -> None:
        """Its streams have not passed all of the calls so far."""
        self.comm_head.waits_at = now()

    def end(self, how: str, site: str = "") -> None:
        """The communicator has ended."""
        if not self.recorder.mine:  # in a forked child, whose parent's locks another thread may have held
            return
        self.write("ended", how)
        self.write("ended_site", site)
        self.comm_head.ended_at = now()
        self.comm_head.state = layout.ENDED
        self.recorder.free(self)


class _Kinds(dict[str, tuple[int, int, int, int]]):
    """Operation -> its string, as how many collective calls it counts, which of its C arguments is its count, and how
    many follow the data type. Filled as operations are met."""

    def __init__(self, recorder: Recorder) -> None:
        self._strings = recorder.strings

    def __missing__(self, operation: str) -> tuple[int, int, int, int]:
        at, names = layout.ARGUMENTS.get(operation, (0, ()))
        counts = int(operation not in layout.UNNUMBERED)
        self[operation] = found = (self._strings[operation], counts, at, len(names))
        return found


def _peer(operation: str, inputs: tuple[Any, ...]) -> int:
    """That of a signal; of several none is named."""
    if operation == "signal" and inputs:
        return int(inputs[0])
    return int(inputs[1][0].peer) if operation == "wait_signal" and inputs and inputs[0] == 1 else -1


def _forget(stream: int) -> None:
    own = started()
    for track in list(own.tracks) if own is not None else ():
        track.forget(stream)


streams.on_end = _forget
_numbers = itertools.count(1)
_FIRST = 200  # characters of what was called, where the library says why it failed


def new_track(known: Identity | None, rank: int, size: int) -> Track | None:
    """A track for a communicator; None with PYNCCL_WATCH=off."""
    own = recorder()
    return None if own is None else Track(own, known or Identity(uid_of(), "communicator", ""), rank, size)


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
