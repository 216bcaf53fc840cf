"""Alarms, for work that a thread does if the program does not do it in time.

To wake a thread costs a program that posts a call and then waits for it more than a small call itself, since the two
compete for the GIL. So a timer of the kernel wakes one thread, for all alarms that were not cleared in time.
"""

from __future__ import annotations

import ctypes
import math
import os
import select
import threading
import time
from collections.abc import Callable

_MONOTONIC, _CLOEXEC = 1, 0o2000000
_IDLE_SECONDS = 1.0  # then the thread ends
_libc = ctypes.PyDLL(None, use_errno=True)  # calls keep the GIL, which another thread could take otherwise
_lock = threading.Lock()
_deadlines: dict[Alarm, float] = {}  # by time.monotonic()
_next = math.inf  # when the timer expires; it may then be too early for all, since that costs less than to stop it
_timer = -1


class Alarm:
    """Calls `ring()`, which returns at once, in some thread `seconds` after `set()`, unless `clear()` comes first."""

    def __init__(self, ring: Callable[[], object], seconds: float = 2e-3) -> None:
        self.ring, self._seconds = ring, seconds

    def set(self) -> None:
        """Do nothing if it is set."""
        if self in _deadlines:
            return
        try:
            with _lock:
                deadline = time.monotonic() + self._seconds
                if deadline < _next:
                    _set_timer(deadline, self._seconds)
                _deadlines[self] = deadline
        except (OSError, RuntimeError):  # no descriptor or no thread is left
            self.ring()

    def clear(self) -> None:
        _deadlines.pop(self, None)


def _set_timer(deadline: float, seconds: float) -> None:
    global _next, _timer
    if _timer < 0:
        timer = _libc.timerfd_create(_MONOTONIC, _CLOEXEC)
        if timer < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        try:
            threading.Thread(target=_attend, args=(timer,), name="pynccl alarms", daemon=True).start()
        except RuntimeError:
            os.close(timer)
            raise
        _timer = timer
    _libc.timerfd_settime(_timer, 0, (ctypes.c_long * 4)(0, 0, int(seconds), int(seconds % 1 * 1e9)), None)
    _next = deadline


def _attend(timer: int) -> None:
    global _next, _timer
    timers = select.poll()
    timers.register(timer, select.POLLIN)
    while True:
        if expired := timers.poll(_IDLE_SECONDS * 1e3):
            os.read(timer, 8)
        with _lock:
            if not expired and _next == math.inf:
                os.close(timer)
                _timer = -1
                return
            now, _next = time.monotonic(), math.inf
            deadlines = _deadlines.copy()
            due = [alarm for alarm, deadline in deadlines.items() if deadline <= now]
            if len(due) < len(deadlines):
                left = min(deadline for deadline in deadlines.values() if deadline > now)
                _set_timer(left, max(left - now, 1e-6))
        for alarm in due:
            if _deadlines.pop(alarm, None) is not None:
                alarm.ring()


def after_fork() -> None:
    """In a forked child, which has no thread for them."""
    global _lock, _next, _timer
    _lock, _next = threading.Lock(), math.inf
    _deadlines.clear()
    timer, _timer = _timer, -1
    if timer >= 0:
        os.close(timer)
