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

A function that does so is marked `@quick`; its variables are named, and take() and give() are called, as here. A
handler of a signal, or an object that is freed, may interrupt it and come to `with turn`, which finds the function
among its callers, as it finds out that nobody has the number: after a Ctrl-C between take() and `try`.

A handler runs after a call has returned, and before what it returned is kept, and up to Python 3.10 between any two
instructions. So by the instruction that a function is at is known whether it has the number.

A Ctrl-C may also come as acquire() returns, or as release() begins, and leave the lock with a thread that is done with
it. So whoever waits looks whether that thread is still in a function that can have it: the one that called acquire(),
or one of this package.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

_INTERRUPTS_FAILURES = sys.version_info < (3, 11)
_LOOK_SECONDS = 0.05  # after which one who waits looks whether anybody has it
_quick: set[CodeType] = set()
get_ident, _getframe = threading.get_ident, sys._getframe


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
        self._owner = 0
        self._by: list[CodeType] = []  # the functions of the owner that have called acquire()
        self._outer: list[tuple[int, list[CodeType]]] = []  # slot and such functions of what was interrupted

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """As that of threading.RLock."""
        try:
            slot = self.take()
        except IndexError:
            return self._acquire_later(timeout if blocking else 0.0, _getframe(1).f_code)
        owner = get_ident()
        self.slot, self._by = slot, [_getframe(1).f_code]
        self._owner = owner
        return True

    def release(self) -> None:
        """As that of threading.RLock."""
        if self._owner != get_ident():
            raise RuntimeError("cannot release a lock that this thread does not have")
        if len(self._by) > 1:
            self._by.pop()
            return
        slot: int | None = self.slot  # from here on it has it without being the owner
        self._owner = 0
        slot = self.slot  # which a handler of a signal may have changed until then
        if slot == -1:
            self.slot, self._by = self._outer.pop()
            return
        self.slot = -1
        self.give(slot)
        slot = None
        if self.waiting:
            self.wake()

    def is_mine(self) -> bool:
        """Whether this thread has it, by acquire()."""
        return self._owner == get_ident()

    __enter__ = acquire

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
            slot = None
            return
        waiter.slot, slot = slot, None
        waiter.bell.release()

    def at_fork(self) -> None:
        """In a forked child: a thread that did not come along may have it."""
        self._numbers[:] = [0]
        self.waiting.clear()
        self._finding = threading.RLock()
        self._owner = 0
        self._outer.clear()

    def _acquire_later(self, timeout: float, by: CodeType) -> bool:
        if self._owner == get_ident():
            with self._finding:
                if self._owner == get_ident():
                    self._by.append(by)
                    return True
        waiter = _Waiter()
        if self._is_interrupted():
            waiter.slot = -1
        elif timeout:
            self._wait(waiter, timeout)
        if waiter.slot is None:
            return False
        owner = get_ident()
        if waiter.slot == -1:
            self._outer.append((self.slot, self._by))
        self.slot, self._by = waiter.slot, [by]
        self._owner = owner
        return True

    def _wait(self, waiter: _Waiter, timeout: float) -> None:
        """Until it has the number, or it is late; -1: a function that this thread is in the middle of has got it."""
        end = time.monotonic() + timeout if timeout > 0 else float("inf")
        missed: int | None = None
        slot: int | None = None
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
                slot = waiter.slot
                waiter.slot = None
                self.give(slot)
                slot = None
                if self.waiting:
                    self.wake()
            raise
        self._leave(waiter)

    def _find(self, missed: int | None) -> int | None:
        """The number that should be next, if nobody has it: made anew if it was missed at the look before, too."""
        if self._owner:
            self._take_from(self._owner)
            return None
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

    def _take_from(self, owner: int) -> None:
        """From a thread that has it by acquire(), and is in no function that could give it back."""
        with self._finding:  # nor can that thread acquire it once more now
            by = self._by.copy()
            if any(one.co_flags & _SUSPENDS or one in _LEND for one in by):
                return
            if any(_may_hold(frame.f_code, by) for frame in _callers(sys._current_frames().get(owner))):
                return
            if self._owner is not owner:  # each acquire() has a number object of its own
                return
            slot, self.slot = self.slot, -1
            self._owner = 0
            self._outer.clear()
            if slot == -1:
                return
            self.give(slot)
        self.wake()

    def _leave(self, waiter: _Waiter) -> bool:
        """Whether it was still waiting."""
        try:
            self.waiting.remove(waiter)
        except ValueError:  # it has the lock
            return False
        return True

    def _is_interrupted(self) -> bool:
        """Whether this thread is in the middle of a function that has the number: a quick one, or one of these."""
        found = next((frame for frame in _callers(sys._getframe(1)) if self._has_it(frame)), None)
        if found is None:
            return False
        # Up to Python 3.10 a handler also runs when take() has failed, and before that is caught.
        return not _INTERRUPTS_FAILURES or not self._takes_now(found) or not self._another_has_it()

    def _another_has_it(self) -> bool:
        if self._owner or self._numbers:
            return True
        threads = [frame for ident, frame in sys._current_frames().items() if ident != get_ident()]
        return any(self._has_it(frame) for thread in threads for frame in _callers(thread))

    def _nobody_has_it(self) -> bool:
        """Whether no thread is where one is that has it: a Ctrl-C came when it was taken, and before it was kept."""
        places = self._places()
        return places is not None and places == self._places()  # it may move from who is asked later to who was before

    def _places(self) -> list[tuple[int, int]] | None:
        """Where all threads are; None if one is where it has the number."""
        places = []
        if self._owner or self._numbers:
            return None
        for ident, frame in sys._current_frames().items():
            if self._takes(frame) and ident != get_ident() and frame.f_code is not Turn._wait.__code__:
                return None
            for one in _callers(frame) if ident != get_ident() else _callers(_getframe(2)):
                if self._has_it(one):
                    return None
                places.append((id(one), one.f_lasti))
        return None if self._owner or self._numbers else places

    def _has_it(self, frame: FrameType) -> bool:
        """Whether this function, which has called another one or was interrupted, has the number."""
        if not self._takes(frame):
            return False
        if frame.f_code is Turn._acquire_later.__code__:
            waiter = frame.f_locals.get("waiter")
            return waiter is not None and waiter.slot not in (None, -1)
        if self._takes_now(frame):
            return True
        slot = frame.f_locals.get("slot")
        return slot is not None and slot >= 0 and frame.f_lasti not in _between(frame.f_code, "give")

    @staticmethod
    def _takes_now(frame: FrameType) -> bool:
        return frame.f_lasti in _between(frame.f_code, "take")

    def _takes(self, frame: FrameType) -> bool:
        """Whether it is a quick function of this lock, or one of those below, in which the number is on its way."""
        if frame.f_code in _quick:
            return bool(frame.f_locals.get("take") == self.take)
        return frame.f_code in _TAKING and frame.f_locals.get("self") is self


_TAKING = {one.__code__ for one in (Turn.acquire, Turn.release, Turn.wake, Turn._acquire_later, Turn._wait)}


@functools.cache
def _between(code: CodeType, name: str) -> frozenset[int]:
    """Where this function is when it has called what has this name, and has not set a variable since."""
    import dis  # which takes long to import

    found: set[int] = set()
    instructions = iter(dis.get_instructions(code))
    for one in instructions:
        if one.argval != name:
            continue
        call = next(later for later in instructions if later.opname.startswith(("PRECALL", "CALL")))
        kept = next(later for later in instructions if later.opname.startswith("STORE_FAST"))
        found.update(range(call.offset, kept.offset))
    return frozenset(found)


_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_SUSPENDS = 0x20 | 0x80 | 0x200  # CO_GENERATOR, CO_COROUTINE, CO_ASYNC_GENERATOR of inspect
_LEND = {contextlib.ExitStack.enter_context.__code__}


def _may_hold(code: CodeType, by: list[CodeType]) -> bool:
    """Whether this function may have called acquire(), and will call release()."""
    return code in by or code.co_filename.startswith(_PACKAGE)


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
