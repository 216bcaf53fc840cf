"""Waits that end: what may block for ever runs beside the caller, who hears Ctrl-C, has a deadline, and can exit.

torch's stores, process groups and MPI block in C++, where neither a deadline nor a signal reaches them. So such a call
runs in a thread that is left behind when the time is up. Left-behind threads must not wake up while the interpreter
ends: before Python 3.14 a thread that asks for the GIL then is unwound through C++ destructors, which aborts all.
"""

from __future__ import annotations

import atexit
import ctypes
import math
import signal
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from ..bindings.values import seconds

T = TypeVar("T")

GRACE_SECONDS = 0.5  # past the deadline, for a call that is about to explain itself
_EXIT_SECONDS = 0.2  # for left-behind threads to end by themselves when the process does
_LONGEST_WAIT = 3600.0  # a lock does not take an infinite timeout

_left_behind: list[threading.Thread] = []


class Abandoned(Exception):
    """Raised in a thread that was left behind, to end it."""


class Clock:
    """One deadline for all that a call waits for, started when it is made; None: there is none."""

    def __init__(self, timeout: float | None) -> None:
        limit = seconds(timeout)
        self.timeout = math.inf if limit is None else limit
        self._started = time.monotonic()

    def waited(self) -> float:
        return time.monotonic() - self._started

    def left(self) -> float:
        return self.timeout - self.waited()

    def seconds(self) -> str:
        """The time really waited, for messages: the timeout where that is right within a second."""
        waited = self.waited()
        if self.timeout <= waited < self.timeout + 1:
            return f"{self.timeout:g} s"
        return f"{waited:.0f} s" if waited >= 1 else f"{waited:.2f} s"


class Wait:
    """What the calls of one wait share: the clock, and whether the caller has gone."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._gone = threading.Event()

    def pause(self, seconds: float) -> None:
        """Sleep, in a thread of `beside`; raises Abandoned there once the caller has gone."""
        if self._gone.wait(seconds):
            raise Abandoned

    def beside(self, call: Callable[[], T], late: Callable[[], Exception]) -> T:
        """What `call()` returns or raises; `late()` is raised if it does neither by half a second past the deadline."""
        outcome: list[tuple[Any, BaseException | None]] = []
        done = threading.Event()

        def run() -> None:
            try:
                outcome.append((call(), None))
            except BaseException as error:  # raised again in the thread that waits
                outcome.append((None, error))
            done.set()

        thread = threading.Thread(target=run, name="pynccl wait", daemon=True)
        thread.start()
        try:
            self._wait_for(done, late)
        except BaseException:
            self._gone.set()
            _leave_behind(thread)
            raise
        value, error = outcome.pop()
        if error is not None:
            raise error
        result: T = value
        return result

    def _wait_for(self, done: threading.Event, late: Callable[[], Exception]) -> None:
        end = max(self.clock.left(), 0.0) + GRACE_SECONDS + time.monotonic()
        while not done.wait(min(max(end - time.monotonic(), 0.0), _LONGEST_WAIT)):
            if time.monotonic() >= end and not done.is_set():
                raise late()


def duration(seconds: float) -> float:
    """`seconds` as torch can take them: timedelta knows no infinity."""
    return min(seconds, 1e6)


def _leave_behind(thread: threading.Thread) -> None:
    _left_behind[:] = [one for one in _left_behind if one.is_alive()]
    _left_behind.append(thread)
    atexit.unregister(_park)
    atexit.register(_park)


def _park() -> None:
    """Keep what is left behind in C++ from coming back while the interpreter ends: a handler of a signal holds it.

    Such a thread sits in a system call, holding no lock of the interpreter, and it ends with the process.
    """
    end = time.monotonic() + _EXIT_SECONDS
    for thread in _left_behind:
        thread.join(max(end - time.monotonic(), 0.0))
    stuck = [thread for thread in _left_behind if thread.is_alive()]
    if not stuck:
        return
    libc = ctypes.CDLL(None)
    libc.signal.restype, libc.signal.argtypes = ctypes.c_void_p, [ctypes.c_int, ctypes.c_void_p]
    number = next(n for n in range(signal.SIGRTMAX, signal.SIGRTMIN, -1) if signal.getsignal(n) == signal.SIG_DFL)
    libc.signal(number, ctypes.cast(libc.pause, ctypes.c_void_p))  # pause() never returns, and needs no GIL
    for thread in stuck:
        signal.pthread_kill(thread.ident or 0, number)
