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

A function that does so is marked `@quick`, and calls nothing that may want the same lock by the same way; its variables
are named as here. A handler of a signal, or an object that is freed, may interrupt it and come to `with turn`, which
finds the function among its callers, as it finds out that nobody has the number: a Ctrl-C between take() and `try`.
"""

from __future__ import annotations

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
        self.take, self.give = self._numbers.pop, self._numbers.append
        self.waiting: list[_Waiter] = []
        self.slot = -1
        self._lost = lost
        self._owner = self._depth = 0
        self._borrowed = False

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
        slot, borrowed = self.slot, self._borrowed
        self._owner, self._borrowed, self.slot = 0, False, -1
        if not borrowed:
            self.give(slot)
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
            slot = self.take()
        except IndexError:  # somebody else's already
            return
        try:
            waiter = self.waiting.pop(0)
        except IndexError:
            self.give(slot)
            return
        waiter.slot = slot
        waiter.bell.release()

    def at_fork(self) -> None:
        """In a forked child: a thread that did not come along may have it."""
        self._numbers[:] = [0]
        self.waiting.clear()
        self._owner = self._depth = 0

    def _acquire_later(self, timeout: float) -> bool:
        if self._owner == get_ident():
            self._depth += 1
            return True
        if self._is_interrupted():
            self.slot, self._owner, self._depth, self._borrowed = -1, get_ident(), 1, True
            return True
        slot = self._wait(timeout) if timeout else None
        if slot is None:
            return False
        self.slot, self._owner, self._depth = slot, get_ident(), 1
        return True

    def _wait(self, timeout: float) -> int | None:
        end = time.monotonic() + timeout if timeout > 0 else float("inf")
        waiter = _Waiter()
        self.waiting.append(waiter)
        try:
            self.wake()  # it may have been given back meanwhile
            while waiter.slot is None and (left := end - time.monotonic()) > 0:
                if not waiter.bell.acquire(timeout=min(left, _LOOK_SECONDS)) and self._nobody_has_it():
                    self.give(self._lost())
                    self.wake()
        except BaseException:  # Ctrl-C
            if not self._leave(waiter) and waiter.slot is not None:
                self.give(waiter.slot)
                if self.waiting:
                    self.wake()
            raise
        self._leave(waiter)
        return waiter.slot

    def _leave(self, waiter: _Waiter) -> bool:
        """Whether it was still waiting."""
        try:
            self.waiting.remove(waiter)
        except ValueError:  # it has the lock
            return False
        return True

    def _is_interrupted(self) -> bool:
        """Whether the lock is that of a quick function which this thread is in the middle of."""
        return any(
            self._is_of(frame) and frame.f_locals.get("slot") is not None for frame in _callers(sys._getframe(1))
        )

    def _nobody_has_it(self) -> bool:
        """Whether no thread is where one is that has it: a Ctrl-C came when it was taken, and before it was kept."""
        if self._owner or self._numbers:
            return False
        for ident, frame in sys._current_frames().items():
            if ident == get_ident():
                continue
            if frame.f_code in _HOLDING and frame.f_locals.get("self") is self:
                return False
            if any(self._is_of(one) for one in _callers(frame)):
                return False
        return True

    def _is_of(self, frame: FrameType) -> bool:
        return frame.f_code in _quick and frame.f_locals.get("take") == self.take


_HOLDING = {Turn.acquire.__code__, Turn.release.__code__, Turn.wake.__code__, Turn._acquire_later.__code__}


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
