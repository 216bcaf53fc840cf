"""Whose turn it is to call a communicator: a reentrant lock that is taken in one C call, and hands over what its holder
needs next, the slot of the flight recorder.

What is called a hundred thousand times a second cannot afford an RLock and a counter beside it. So the lock is a list
with one number in it: who pops the number has the lock, and who appends the next one gives it back.

    try:
        slot = take()
    except IndexError:
        ...  # another thread has it, or this one: go the way of `with turn`, which waits
    try:
        ...
    finally:
        give(following[slot])
        slot = None
    if waiting:
        wake()

A function that does so is marked `@quick`; its variables are named, and take() and give() have lines of their own, as
here. A handler of a signal, or an object that is freed, may interrupt it and come to `with turn`, which finds the
function among its callers, as it finds out that nobody has the number: after a Ctrl-C between take() and `try`.

A handler runs after a call has returned, and before what it returned is kept. So who stands in the line of take() has
the number, and who stands in that of give() has it no more.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

_LOOK_SECONDS = 0.05  # after which one who waits looks whether anybody has it
_quick: set[CodeType] = set()
get_ident = threading.get_ident


def quick(function: F) -> F:
    """A decorator for functions that take the lock as shown above."""
    _quick.add(function.__code__)
    return function


class _Waiter:
    __slots__ = ("bell", "slot")

    def __init__(self) -> None:
        self.bell = threading.Lock()
        self.bell.acquire()
        self.slot: int | None = None  # handed over


class Turn:
    """The lock, as `with turn`, acquire and release, and for those who are in a hurry take, give, waiting and wake.

    slot  the number, for the holder of acquire(), who may change it; -1 for one who has interrupted a quick function
    """

    def __init__(self, slot: int = 0, lost: Callable[[], int] = lambda: 0) -> None:
        """lost  says which number it is, should nobody have it any more"""
        self._numbers = [slot]
        self.take: Callable[[], int] = self._numbers.pop
        self.give: Callable[[Any], None] = self._numbers.append
        self.waiting: list[_Waiter] = []
        self.slot = -1
        self._lost, self._finding = lost, threading.RLock()
        self._owner = self._depth = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """As that of threading.RLock."""
        try:
            slot = self.take()
        except IndexError:
            return self._acquire_later(timeout if blocking else 0.0)
        self.slot, self._owner, self._depth = slot, get_ident(), 1
        return True

    def release(self) -> None:
        """As that of threading.RLock."""
        if self._owner != get_ident():
            raise RuntimeError("cannot release a lock that this thread does not have")
        self._depth -= 1
        if self._depth:
            return
        slot: int | None = self.slot
        self._owner, self.slot = 0, -1
        if slot != -1:
            self.give(slot)
            slot = None
            if self.waiting:
                self.wake()

    def is_mine(self) -> bool:
        """Whether this thread has it, by acquire()."""
        return self._owner == get_ident()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def wake(self) -> None:
        """The lock is free, and others wait: it goes to the one who came first."""
        try:
            slot: int | None = self.take()
        except IndexError:  # somebody else's already
            return
        try:
            waiter = self.waiting.pop(0)
        except IndexError:
            self.give(slot)
            return
        waiter.slot, slot = slot, None
        waiter.bell.release()

    def at_fork(self) -> None:
        """In a forked child: a thread that did not come along may have it."""
        self._numbers[:] = [0]
        self.waiting.clear()
        self._finding = threading.RLock()
        self._owner = self._depth = 0

    def _acquire_later(self, timeout: float) -> bool:
        if self._owner == get_ident():
            self._depth += 1
            return True
        waiter = _Waiter()
        if self._is_interrupted():
            waiter.slot = -1
        elif timeout:
            self._wait(waiter, timeout)
        if waiter.slot is None:
            return False
        self.slot, self._owner, self._depth = waiter.slot, get_ident(), 1
        return True

    def _wait(self, waiter: _Waiter, timeout: float) -> None:
        """Until it has the number, or it is late; -1: a function that this thread is in the middle of has got it."""
        end = time.monotonic() + timeout if timeout > 0 else float("inf")
        missed: int | None = None
        self.waiting.append(waiter)
        try:
            self.wake()  # it may have been given back meanwhile
            while waiter.slot is None and (left := end - time.monotonic()) > 0:
                if waiter.bell.acquire(timeout=min(left, _LOOK_SECONDS)):
                    continue
                if waiter.slot is None and waiter not in self.waiting:  # a Ctrl-C in wake()
                    self.waiting.append(waiter)
                if self._is_interrupted() and self._leave(waiter):
                    waiter.slot = -1
                    return
                missed = self._find(missed)
        except BaseException:  # Ctrl-C
            if not self._leave(waiter) and waiter.slot is not None:
                self.give(waiter.slot)
                if self.waiting:
                    self.wake()
            raise
        self._leave(waiter)

    def _find(self, missed: int | None) -> int | None:
        """The number that should be next, if nobody has it: made anew if it was missed at the look before, too."""
        if not self._nobody_has_it():
            return None
        number = self._lost()
        if number == missed and self._finding.acquire(blocking=False):
            try:
                if self._nobody_has_it() and not self._numbers:
                    self.give(number)
            finally:
                self._finding.release()
            self.wake()
        return number

    def _leave(self, waiter: _Waiter) -> bool:
        """Whether it was still waiting."""
        try:
            self.waiting.remove(waiter)
        except ValueError:  # it has the lock
            return False
        return True

    def _is_interrupted(self) -> bool:
        """Whether this thread is in the middle of a function that has the number: a quick one, or one of these."""
        return any(self._has_it(frame) for frame in _callers(sys._getframe(1)))

    def _nobody_has_it(self) -> bool:
        """Whether no thread is where one is that has it: a Ctrl-C came when it was taken, and before it was kept."""
        if self._owner or self._numbers:
            return False
        for ident, frame in sys._current_frames().items():
            if any(self._has_it(one) for one in _callers(frame)):
                return False
            if self._takes(frame) and ident != get_ident():
                return False
        return True

    def _has_it(self, frame: FrameType) -> bool:
        """Whether this function, which has called another one or was interrupted, has the number."""
        if not self._takes(frame):
            return False
        if frame.f_code is Turn._acquire_later.__code__:
            waiter = frame.f_locals.get("waiter")
            return waiter is not None and waiter.slot not in (None, -1)
        if frame.f_lineno == _line_of(frame.f_code, "take"):
            return True
        slot = frame.f_locals.get("slot")
        return slot is not None and slot >= 0 and frame.f_lineno != _line_of(frame.f_code, "give")

    def _takes(self, frame: FrameType) -> bool:
        """Whether it is a quick function of this lock, or one of those below, in which the number is on its way."""
        if frame.f_code in _quick:
            return bool(frame.f_locals.get("take") == self.take)
        return frame.f_code in _TAKING and frame.f_locals.get("self") is self


_TAKING = {Turn.acquire.__code__, Turn.release.__code__, Turn.wake.__code__, Turn._acquire_later.__code__}


@functools.cache
def _line_of(code: CodeType, name: str) -> int:
    """The last line in which this function calls what has this name."""
    import dis  # which takes long to import

    offsets = [one.offset for one in dis.get_instructions(code) if one.argval == name]
    return max((line or 0 for start, end, line in code.co_lines() for at in offsets if start <= at < end), default=0)


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
