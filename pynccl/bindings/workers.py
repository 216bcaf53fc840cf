"""Calls that may block for ever are made in worker threads, which are left behind when their time is up.

NCCL's init, finalize, destroy and abort block for as long as a peer is missing; torch's stores, process groups and MPI
block in C++; a GPU driver whose queue is full blocks whoever asks. Neither a deadline nor a signal reaches them there.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import math
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from .values import seconds

T = TypeVar("T")

GRACE_SECONDS = 0.5  # past the deadline, for a call that is about to explain itself
LEFT_BEHIND_SECONDS = 1.0  # for all calls that outlived their deadlines, at the end of the process


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


class Begun(Generic[T]):
    """A call that a worker makes, from now on."""

    _value: T
    _error: BaseException | None = None

    def __init__(self, call: Callable[[], T], name: str) -> None:
        self._call, self._name, self.done = call, name, threading.Event()
        _running.add(self)
        prepare_exit()
        _calls.put(self)

    def run(self) -> None:
        thread = threading.current_thread()
        idle, thread.name = thread.name, f"pynccl {self._name}"
        try:
            self._value = self._call()
        except BaseException as error:  # raised again in the thread that waits
            self._error = error
        thread.name = idle
        _running.discard(self)
        self.done.set()

    def result(self, limit: float, late: Callable[[], Exception]) -> T:
        """What it returns or raises; where it does neither in so many seconds, `late()` is raised, and it goes on."""
        if not self.done.wait(min(max(limit, 0.0), threading.TIMEOUT_MAX)):
            raise late()
        if self._error is not None:
            raise self._error
        return self._value


_calls: queue.SimpleQueue[Begun[Any]] = queue.SimpleQueue()
_running: set[Begun[Any]] = set()
_workers = 0


def _work(calls: queue.SimpleQueue[Begun[Any]]) -> None:
    while True:
        calls.get().run()


def prepare_exit() -> None:
    """Have two workers wait for calls, since Python 3.12 and later start no threads while the interpreter ends.

    Two for the program that leaves a communicator open that has failed: one closes all that are open, by a deadline,
    and has the other abort this one, by another deadline."""
    global _workers
    with contextlib.suppress(RuntimeError):  # the interpreter is ending
        while _workers < len(_running) + 2:
            threading.Thread(target=_work, args=(_calls,), name="pynccl worker", daemon=True).start()
            _workers += 1


def call_at_exit(call: Callable[[], object], limit: float) -> bool:
    """Make a call while the interpreter ends; False if it has not returned after so many seconds."""
    return Begun(call, "exit").done.wait(limit)


@atexit.register  # before any library is loaded, so after what the libraries do at exit, which ends calls into them
def _end_left_behind() -> None:
    """Wait for what was left behind, and let what comes back later do no harm.

    Before Python 3.14 a thread that comes back while the interpreter ends is unwound, for which C++ calls
    std::terminate(), which aborts the process. So ends a program that finds a free port for MASTER_PORT with a socket,
    leaves that open, and gets Ctrl-C in pynccl.init(): torch waits there until the socket goes with the interpreter.
    From now on std::terminate() holds the thread that calls it."""
    clock = Clock(LEFT_BEHIND_SECONDS)
    if not all(call.done.wait(max(clock.left(), 0.0)) for call in list(_running)):
        with contextlib.suppress(OSError, AttributeError):  # there is no C++ in the process
            ctypes.CDLL("libstdc++.so.6", os.RTLD_NOLOAD)._ZSt13set_terminatePFvvE(ctypes.CDLL(None).pause)


def leak(held: Any) -> None:
    """Never free this: what frees it would act on what this process, a forked child, does not have."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))


def _after_fork_in_child() -> None:
    global _calls, _running, _workers
    leak((_calls, _running))  # their threads did not come along, and what they hold is the parent's
    _calls, _running, _workers = queue.SimpleQueue(), set(), 0


os.register_at_fork(after_in_child=_after_fork_in_child)


class Abandoned(Exception):
    """Raised in a call whose caller has gone, to end it."""


class Wait:
    """What the calls of one wait share: the clock, and whether the caller has gone."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self._gone = clock, threading.Event()

    def pause(self, seconds: float) -> None:
        """Sleep, in a call of `beside`; raises Abandoned there once the caller has gone."""
        if self._gone.wait(seconds):
            raise Abandoned

    def beside(self, call: Callable[[], T], late: Callable[[], Exception]) -> T:
        """What `call()` returns or raises; `late()` is raised if it does neither by half a second past the deadline.

        For what blocks in C++. The caller hears Ctrl-C meanwhile, also without a deadline."""
        try:
            return Begun(call, "wait").result(max(self.clock.left(), 0.0) + GRACE_SECONDS, late)
        except BaseException:
            self._gone.set()
            raise


class Silent(Exception):
    """A question has not been answered for so many seconds."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"no answer for {seconds:g} s")
        self.seconds = seconds


class Helper:
    """Asks what may never answer, beside its caller; never again while it has not answered."""

    _asked: Begun[Any] | None = None
    _clock = Clock(None)

    def ask(self, call: Callable[[], T], limit: float) -> T:
        """What `call()` returns or raises; Silent if it, or an earlier one, has done neither for so many seconds."""
        if self._asked is not None and not self._asked.done.is_set():
            raise self._silent()
        asked = Begun(call, "question")
        self._asked, self._clock = asked, Clock(None)
        return asked.result(limit, self._silent)

    def _silent(self) -> Silent:
        return Silent(self._clock.waited())
