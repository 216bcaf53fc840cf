"""Transactional groups: record the calls, and issue them between ncclGroupStart and ncclGroupEnd on a clean exit.

Compared with opening NCCL's group at once, recording has two advantages: an exception in the block launches nothing and
leaves no group open, and all calls are validated before the first is launched. Buffers stay referenced until the
launch.
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
    """The calls recorded by an open group.   outer: the enclosing group or None"""

    __slots__ = ("calls", "open", "outer")

    def __init__(self, outer: Record | None) -> None:
        self.calls: list[Call] = []
        self.outer, self.open = outer, True


_innermost: ContextVar[Record | None] = ContextVar("innermost group", default=None)  # per thread and asyncio task
records: list[Record] = []  # all open groups of the process; empty: recorder() returns at once


def _forget() -> None:  # in a forked child, where communicators are unusable too
    records.clear()
    _innermost.set(None)


os.register_at_fork(after_in_child=_forget)


def recorder() -> Record | None:
    """Return the record of the innermost open group, or None outside groups."""
    return _still_open(_innermost.get()) if records else None


def _still_open(record: Record | None) -> Record | None:
    """Return it, or its nearest enclosing record that is open: an outer group can be closed before an inner one."""
    while record is not None and not record.open:
        record = record.outer
    return record


@contextlib.contextmanager
def group() -> Iterator[None]:
    """Context manager that merges the calls in the block into one NCCL group and launches them on exit.

    Use it for sends and receives that must progress together, and for calls on several communicators of one process.

    Each call in the block validates its arguments and returns its recv at once. The contents of recv are valid only
    after the block, in stream order. If the block raises, nothing is launched. A nested group joins the outer one; if
    the nested block raises, only its own calls are dropped. A group can span communicators.

    A group captures the calls of its thread, or of its asyncio task and of tasks started in the block. Do not yield
    from a generator inside the block: the calls of its consumer would join the group.
    """
    with recording() as record:
        yield
    calls, record.calls = record.calls, []
    if (outer := _still_open(record.outer)) is not None:
        outer.calls += calls
        return
    launch(calls)
    comms = {id(call.comm): call.comm for call in calls}
    calls.clear()  # releases the last references to operators that were closed in the meantime
    for comm in comms.values():
        if comm._unused_operators:
            free_unused(comm)


@contextlib.contextmanager
def recording() -> Iterator[Record]:
    """Record the calls in the block without launching them and without adding them to an enclosing group."""
    record = Record(recorder())
    _innermost.set(record)
    records.append(record)
    try:
        yield record
    finally:
        record.open = False
        if record in records:  # it is not in a forked child
            records.remove(record)
        if _innermost.get() is record:
            _innermost.set(record.outer)


def enqueue_calls(calls: list[Call]) -> None:
    """Launch the calls, or record them if the caller is inside a group."""
    record = recorder()
    if record is not None:
        record.calls += calls
    elif len(calls) > 1:
        launch(calls)
    else:
        (call,) = calls
        if call.comm.checking:
            compare(calls)
        with call.comm._lock, observed(calls):
            details = (call.inputs, call.stream, call.compared, call.site, call.flags)
            issue(call.comm, call.operation, call.function, call.args, *details)
        after_launch(calls)()


def launch(calls: list[Call]) -> None:
    """Issue the calls as one NCCL group. Raises the first error, after closing the group."""
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
    """Write the calls of a group into the flight recorder before they are made."""
    groups = {track: track.new_group() for call in calls if (track := call.comm._track) is not None}
    for call in calls:
        if (track := call.comm._track) is not None:
            details = (call.operation, call.inputs, call.stream, call.compared, groups[track], call.site)
            track.enter(*details, flags=call.flags)


def replay(
    calls: Sequence[Call],
    comms: list[Comm],
    prepared: Sequence[tuple[Callable[..., int], tuple[Any, ...]]],
    end: Callable[[], int],
    enter: Callable[[], None],
) -> None:
    """Make the calls, which belong to `comms`, as one NCCL group. The caller holds the locks.

    prepared  C function and converted arguments of each call
    end       C function that closes the group
    enter     writes the calls into the flight recorder"""
    library = comms[0].library
    heads = {track: track.head for comm in comms if (track := comm._track) is not None}
    library.check(library.ncclGroupStart(), "ncclGroupStart")
    try:
        enter()
        for call, (function, args) in zip(calls, prepared, strict=True):
            code = function(*args)
            if code and code != Result.IN_PROGRESS:
                raise call.comm._error(code, call.text())
    except BaseException as error:
        # Also on Ctrl-C. NCCL launches nothing if a call of the group failed, but the group must be closed.
        end()
        _settle(heads, error)
        raise
    try:
        code = end()
        failed = code not in (Result.SUCCESS, Result.IN_PROGRESS)
        _settle(heads, comms[0]._error(code, f"group of {len(calls)} calls") if failed else None)
    except BaseException as error:
        _settle(heads, error)
        raise
    if code:
        names = ", ".join(call.text() for call in calls[:4]) + (", ..." if len(calls) > 4 else "")
        check_group_result(comms, code, f"group of {len(calls)} calls: {names}")


def _settle(heads: dict[Track, int], error: BaseException | None) -> None:
    """Record that the calls after these entries returned, or failed with an error."""
    for track, head in heads.items():
        if error is not None:
            track.failed_since(head, error)
        else:
            for entry in range(head + 1, track.head + 1):
                track.leave(entry)
