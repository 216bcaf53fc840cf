"""Which open group a call belongs to: the innermost one whose block the caller is in.

A `with` block in a function is around whatever runs until it ends. In a generator or a coroutine it is not: suspended
in the block, it leaves the thread to others. So a group that was opened there is known by the frame of the generator,
and takes a call only if that frame is on the caller's stack. A generator that contextlib drives is what it was written
for, a part of the function that uses it.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .groups import Call

# CO_GENERATOR, CO_COROUTINE, CO_ITERABLE_COROUTINE, CO_ASYNC_GENERATOR: `inspect` would be a fifth of our own import.
_SUSPENDABLE = 0x20 | 0x80 | 0x100 | 0x200
_PLUMBING = {contextlib.__file__, __file__, os.path.join(os.path.dirname(__file__), "groups.py")}
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
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if id(frame) in by_frame:
            return by_frame[id(frame)]
        frame = frame.f_back
    # A function that has returned since, and left the group to an ExitStack.
    left = [record for record in around if not record.suspendable]
    return left[-1] if left else None


def owner_of(frame: FrameType | None, may_be_suspended: bool = True) -> tuple[int, bool]:
    """(id of the frame that a block opened from `frame` belongs to, whether that can be suspended)."""
    while frame is not None and frame.f_code.co_filename in _PLUMBING:
        frame = frame.f_back
    block = id(frame)
    while may_be_suspended and frame is not None:
        code, back = frame.f_code, frame.f_back
        if code.co_flags & _SUSPENDABLE and code.co_name not in _ENTERING and not _is_driven(back):
            return id(frame), True
        frame = back
    return block, False


def _is_driven(by: FrameType | None) -> bool:
    return by is not None and by.f_code.co_filename in _PLUMBING
