"""Transactional groups: calls are recorded, and replayed between ncclGroupStart and ncclGroupEnd on a clean exit.

Recording has two gains over opening NCCL's group at once: an exception in the block launches nothing and leaves no
group open, and everything is validated before anything is launched. Buffers stay referenced until the launch.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any

from ..bindings.abi import Result
from ..watch.track import Track
from .base import Comm, check_group_result, locked
from .call import Call, after_launch, issue
from .consistency import compare
from .observers import observed
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


def enqueue_calls(calls: list[Call]) -> None:
    """Launch the calls, or record them if a group is open around the caller."""
    record = recorder()
    if record is not None:
        record.calls += calls
    elif len(calls) > 1:
        launch(calls)
    else:
        (call,) = calls
        if call.comm.checking:
            compare(calls)
        with call.comm.lock, observed(calls):
            said = (call.inputs, call.stream, call.compared, call.site, call.flags)
            issue(call.comm, call.operation, call.function, call.args, *said)
        after_launch(calls)()


def launch(calls: list[Call]) -> None:
    """Issue `calls` as one NCCL group. Raises the first error, after the group has been closed."""
    if not calls:
        return
    comms = list({id(call.comm): call.comm for call in calls}.values())
    if any(comm.checking for comm in comms):
        compare(calls)
    with locked(comms):
        for comm in comms:
            comm.check_alive()
        with observed(calls):
            prepared = [(call.function, call.args) for call in calls]
            replay(calls, comms, prepared, comms[0].library.ncclGroupEnd, partial(enter, calls))
    after_launch(calls)()


def enter(calls: Sequence[Call]) -> None:
    """Calls that are about to be made together, for the record."""
    groups = {track: track.new_group() for call in calls if (track := call.comm._track) is not None}
    for call in calls:
        if (track := call.comm._track) is not None:
            given = (call.operation, call.inputs, call.stream, call.compared, groups[track], call.site)
            track.enter(*given, flags=call.flags)


def replay(
    calls: Sequence[Call],
    comms: list[Comm],
    prepared: Sequence[tuple[Callable[..., int], tuple[Any, ...]]],
    end: Callable[[], int],
    enter: Callable[[], None],
) -> None:
    """The calls, all of `comms`, as one group that `end` closes. The caller holds the locks.

    prepared  the C function of each, and its finished arguments
    enter     writes them into the record"""
    library = comms[0].library
    heads = {track: track.head for comm in comms if (track := comm._track) is not None}
    library.check(library.ncclGroupStart(), "ncclGroupStart")
    try:
        enter()
        for call, (function, args) in zip(calls, prepared, strict=True):
            code = function(*args)
            if code and code != Result.IN_PROGRESS:
                raise library.error(code, call.text(), call.comm._handle)
    except BaseException as error:
        # Ctrl-C too. NCCL launches nothing of a group in which a call failed, but it must not stay open.
        end()
        _settle(heads, error)
        raise
    try:
        code = end()
        _settle(heads, None if code in (Result.SUCCESS, Result.IN_PROGRESS) else library.error_string(code))
    except BaseException as error:
        _settle(heads, error)
        raise
    if code:
        names = ", ".join(call.text() for call in calls[:4]) + (", ..." if len(calls) > 4 else "")
        check_group_result(comms, code, f"group of {len(calls)} calls: {names}")


def _settle(heads: dict[Track, int], error: BaseException | str | None) -> None:
    """The calls after these have returned, or raised."""
    for track, head in heads.items():
        if error is not None:
            track.failed_since(head, error)
        else:
            for entry in range(head + 1, track.head + 1):
                track.leave(entry)
