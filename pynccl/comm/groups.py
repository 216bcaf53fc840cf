"""Transactional groups: calls are recorded, and replayed between ncclGroupStart and ncclGroupEnd on a clean exit.

Recording has two gains over opening NCCL's group at once: an exception in the block launches nothing and leaves no
group open, and everything is validated before anything is launched. Buffers stay referenced until the launch.

A call belongs to the innermost group whose block the caller is in. A `with` block in a function is around whatever runs
until it ends. In a generator or a coroutine it is not: suspended in the block, it leaves the thread to others. So a
group that was opened there is known by the frame of the generator, and takes a call only if that frame is on the
caller's stack. A generator that contextlib drives is what it was written for, a part of the function that uses it.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

from ..bindings.abi import Result
from ..watch.frames import outwards
from ..watch.track import Track
from .base import Comm, check_group_result, lock
from .call import Call, after_launch
from .consistency import compare
from .observing import Observer, observers, telling
from .redop import free_unused

# CO_GENERATOR, CO_COROUTINE, CO_ITERABLE_COROUTINE, CO_ASYNC_GENERATOR: `inspect` would be a fifth of our own import.
_SUSPENDABLE = 0x20 | 0x80 | 0x100 | 0x200
_PLUMBING = {contextlib.__file__, __file__}
_ENTERING = ("__enter__", "__aenter__")  # what these open stays open in their caller


class Record:
    """The calls of an open group.

    frame       id of the frame that the block belongs to. No reference: the frame may be what holds the group.
    suspendable whether that frame is a generator's or a coroutine's; else the block has what its thread does
    """

    __slots__ = ("calls", "frame", "open", "suspendable", "thread")

    def __init__(self, frame: int, suspendable: bool) -> None:
        self.calls: list[Call] = []
        self.frame, self.suspendable = frame, suspendable
        self.thread = threading.get_ident()
        self.open = True


# Of all threads, in the order of their opening. Empty means that nobody need look for theirs.
records: list[Record] = []
os.register_at_fork(after_in_child=records.clear)  # communicators do not come along either


def recorder() -> Record | None:
    """The record that a call made now goes to; None if it is to be launched."""
    if not records:
        return None
    thread = threading.get_ident()
    if len(records) == 1 and not (only := records[0]).suspendable:  # nearly always
        return only if only.thread == thread else None
    around = [record for record in records.copy() if record.suspendable or record.thread == thread]
    if not any(record.suspendable for record in around):
        return around[-1] if around else None
    by_frame = {record.frame: record for record in around}
    for frame in outwards(sys._getframe(1)):
        if id(frame) in by_frame:
            return by_frame[id(frame)]
    # A function that has returned since, and left the group to an ExitStack.
    left = [record for record in around if not record.suspendable]
    return left[-1] if left else None


def owner_of(frame: FrameType | None, may_be_suspended: bool = True) -> tuple[int, bool]:
    """(id of the frame that a block opened from `frame` belongs to, whether that can be suspended)."""
    while frame is not None and frame.f_code.co_filename in _PLUMBING:
        frame = frame.f_back
    for around in outwards(frame) if may_be_suspended else ():
        code = around.f_code
        if code.co_flags & _SUSPENDABLE and code.co_name not in _ENTERING and not _is_driven(around.f_back):
            return id(around), True
    return id(frame), False


def _is_driven(by: FrameType | None) -> bool:
    return by is not None and by.f_code.co_filename in _PLUMBING


@contextlib.contextmanager
def group() -> Iterator[None]:
    """Fuse the calls in the block into one launch; needed where several sends and receives must progress together.

    Calls inside validate their arguments and return their `recv` at once; the contents are defined only after the
    block (and, on a stream, in that stream's order). An exception in the block launches nothing. A group inside a
    group joins the outer one, unless it is left by an exception, which drops its calls alone. Groups are per thread
    and may span communicators.

    In a generator or a coroutine the group takes the calls of that one and of what it calls. While it is suspended in
    the block, others are launched as if there were no group: those of its consumer, and those of other asyncio tasks.
    """
    outer = recorder()
    with recording_in(Record(*owner_of(sys._getframe(1)))) as record:
        yield
    _close(record, outer)


@contextlib.contextmanager
def fused() -> Iterator[None]:
    """`group` for the operations of this package, which are neither left nor suspended while it is open."""
    outer = recorder()
    with recording() as record:
        yield
    _close(record, outer)


@contextlib.contextmanager
def recording() -> Iterator[Record]:
    """Record the calls of this thread, instead of launching them or adding them to a group around."""
    with recording_in(Record(*owner_of(sys._getframe(1), may_be_suspended=False))) as record:
        yield record


@contextlib.contextmanager
def recording_in(record: Record) -> Iterator[Record]:
    """The same in this record, which knows whose calls are meant."""
    records.append(record)
    try:
        yield record
    finally:
        record.open = False
        if record in records:  # not so in a forked child
            records.remove(record)


@contextlib.contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """The observer is told of all calls of this process in the block, of all threads and communicators; see Observer.

    What is replayed by a CUDA graph is no call. A forked child has no observers."""
    nobody = Record(0, False)
    nobody.thread = -1
    observers.append(observer)
    try:
        with recording_in(nobody):
            yield
    finally:
        if observer in observers:  # not so in a forked child
            observers.remove(observer)


def _close(record: Record, outer: Record | None) -> None:
    """A block has ended well: its calls join those of the group around it, if that has not ended before."""
    if outer is not None and outer.open:
        outer.calls += record.calls
        return
    calls, record.calls = record.calls, []
    launch(calls)
    comms = {id(call.comm): call.comm for call in calls}
    calls.clear()  # the last hold on operators that were destroyed meanwhile
    for comm in comms.values():
        if comm._unused_operators:
            free_unused(comm)


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
