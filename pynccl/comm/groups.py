"""Transactional groups: calls are recorded, and replayed between ncclGroupStart and ncclGroupEnd on a clean exit.

Recording has two gains over opening NCCL's group at once: an exception in the block launches nothing and leaves no
group open, and everything is validated before anything is launched. Buffers stay referenced until the launch.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar

from ..bindings.abi import Result
from ..watch.track import Track
from .base import Comm, check_group_result, lock
from .call import Call, after_launch
from .consistency import compare
from .observing import Observer, observers, telling
from .redop import free_unused


class Record:
    """The calls of an open group.   outer: the group around it, None: there is none"""

    __slots__ = ("calls", "open", "outer")

    def __init__(self, outer: Record | None) -> None:
        self.calls: list[Call] = []
        self.outer, self.open = outer, True


_innermost: ContextVar[Record | None] = ContextVar("innermost group", default=None)  # of this thread, or asyncio task
records: list[Record] = []  # all that are open. Empty means that nobody need look for theirs.


def _forget() -> None:  # in a forked child, to which communicators do not come along either
    records.clear()
    _innermost.set(None)


os.register_at_fork(after_in_child=_forget)


def recorder() -> Record | None:
    """The record that a call made now goes to; None if it is to be launched."""
    return _still_open(_innermost.get()) if records else None


def _still_open(record: Record | None) -> Record | None:
    """It, or the nearest one around it that is open: a group may be closed before a group inside it."""
    while record is not None and not record.open:
        record = record.outer
    return record


@contextlib.contextmanager
def group() -> Iterator[None]:
    """Fuse the calls in the block into one launch; needed where several sends and receives must progress together.

    Calls inside validate their arguments and return their `recv` at once; the contents are defined only after the
    block (and, on a stream, in that stream's order). An exception in the block launches nothing. A group inside a
    group joins the outer one, unless it is left by an exception, which drops its calls alone. Groups may span
    communicators.

    A group takes the calls of its thread, or of its asyncio task and of tasks that this starts in the block. So do not
    yield inside the block in a generator: until it goes on, the calls of its consumer are in the group.
    """
    with recording() as record:
        yield
    calls, record.calls = record.calls, []
    if (outer := _still_open(record.outer)) is not None:
        outer.calls += calls
        return
    launch(calls)
    comms = {id(call.comm): call.comm for call in calls}
    calls.clear()  # the last hold on operators that were destroyed meanwhile
    for comm in comms.values():
        if comm._unused_operators:
            free_unused(comm)


@contextlib.contextmanager
def recording() -> Iterator[Record]:
    """Record the calls of the block, instead of launching them or adding them to a group around."""
    record = Record(recorder())
    _innermost.set(record)
    records.append(record)
    try:
        yield record
    finally:
        record.open = False
        if record in records:  # not so in a forked child
            records.remove(record)
        if _innermost.get() is record:
            _innermost.set(record.outer)


@contextlib.contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """The observer is told of all calls of this process in the block, of all threads and communicators; see Observer.

    What is replayed by a CUDA graph is no call. A forked child has no observers."""
    nobody = Record(None)
    records.append(nobody)
    observers.append(observer)
    try:
        yield
    finally:
        if nobody in records:
            records.remove(nobody)
        if observer in observers:  # not so in a forked child
            observers.remove(observer)


def launch(calls: list[Call]) -> None:
    """Issue `calls` as one NCCL group. Raises the first error, after the group has been closed."""
    if not calls:
        return
    comms = {id(call.comm): call.comm for call in calls}
    if any(comm.checking for comm in comms.values()):
        compare(calls)
    with contextlib.ExitStack() as locks:
        lock(locks, comms.values())
        if observers:
            locks.enter_context(telling(calls))
        replay(calls, calls[0].comm.library.ncclGroupEnd, list(comms.values()))
    after_launch(calls)


def enter(calls: Sequence[Call]) -> list[tuple[Track, int]]:
    """Calls that are about to be made together, for the record; returns what `leave` takes once they have returned."""
    tracks = {track: track.new_group() for call in calls if (track := call.comm._track) is not None}
    group = len(calls) > 1
    return [
        (
            track,
            track.enter(
                call.operation,
                call.inputs,
                call.stream,
                detail=call.compared,
                group=group and tracks[track],
                site=call.site,
            ),
        )
        for call in calls
        if (track := call.comm._track) is not None
    ]


def leave(slots: list[tuple[Track, int]], error: BaseException | str | None = None) -> None:
    for track, slot in slots:
        if error is None:
            track.leave(slot)
        else:
            track.failed(slot, error)


def replay(calls: list[Call], end: Callable[[], int], comms: list[Comm]) -> None:
    """The calls, all of them of `comms`, as one group that `end` closes. The caller holds the locks."""
    library = calls[0].comm.library
    library.check(library.ncclGroupStart(), "ncclGroupStart")
    code, slots = 0, []
    try:
        slots = enter(calls)
        for call in calls:
            code = call.function(*call.args)
            if code and code != Result.IN_PROGRESS:
                raise library.error(code, call.text(), call.comm._handle)
    except BaseException as error:
        # Ctrl-C too. NCCL launches nothing of a group in which a call failed, but it must not stay open.
        end()
        leave(slots, error)
        raise
    code = end()
    leave(slots, None if code in (Result.SUCCESS, Result.IN_PROGRESS) else library.error_string(code))
    if code:
        names = ", ".join(call.text() for call in calls[:4]) + (", ..." if len(calls) > 4 else "")
        check_group_result(comms, code, f"group of {len(calls)} calls: {names}")
