"""Worker threads for calls that may block forever. When the deadline passes, the caller returns and the thread stays.

NCCL's init, finalize, destroy and abort block while a peer is missing; torch's stores, process groups and MPI block in
C++; a GPU driver whose launch queue is full blocks its callers. Deadlines and signals do not reach such calls.
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

GRACE_SECONDS = 0.5  # after the deadline, for a call that is about to raise a better error
LEFT_BEHIND_SECONDS = 1.0  # wait at exit for all calls that outlived their deadlines


class Clock:
    """A deadline for everything that one call waits for. It starts on construction; None: no deadline."""

    def __init__(self, timeout: float | None, name: str = "timeout") -> None:
        limit = seconds(timeout, name)
        self.timeout = math.inf if limit is None else limit
        self._started = time.monotonic()

    def waited(self) -> float:
        return time.monotonic() - self._started

    def left(self) -> float:
        return self.timeout - self.waited()

    def seconds(self) -> str:
        """Return the time waited, for messages: the timeout itself if that is accurate to a second."""
        waited = self.waited()
        if self.timeout <= waited < self.timeout + 1:
            return f"{self.timeout:g} s"
        return f"{waited:.0f} s" if waited >= 1 else f"{waited:.2f} s"


class Flag:
    """A threading.Event that is made in a tenth of the time, and cannot be cleared."""

    def __init__(self) -> None:
        self.value = False
        self._unset = threading.Lock()
        self._unset.acquire()

    def set(self) -> None:
        if not self.value:
            self.value = True
            self._unset.release()

    def is_set(self) -> bool:
        return self.value

    def wait(self, limit: float | None = None) -> bool:
        if not self.value and self._unset.acquire(timeout=-1 if limit is None else max(limit, 0.0)):
            self._unset.release()
        return self.value


class WorkerCall(Generic[T]):
    """A call in progress in a worker thread.   here: make it in this thread, as if that were a worker"""

    _value: T
    _error: BaseException | None = None

    def __init__(self, call: Callable[[], T], name: str, here: bool = False) -> None:
        self._call, self._name, self.done = call, name, Flag()
        _running.add(self)
        if here:
            self.run()
        else:
            prepare_exit()
            _calls.put(self)

    def run(self) -> None:
        thread = threading.current_thread()
        idle, thread.name = thread.name, f"pynccl {self._name}"
        try:
            self._value = self._call()
        except BaseException as error:  # raised again in the waiting thread
            self._error = error
        thread.name = idle
        _running.discard(self)
        self.done.set()

    def result(self, limit: float, timeout_error: Callable[[], Exception]) -> T:
        """Return the result of the call, or raise its exception.

        After `limit` seconds raise `timeout_error()`; the call continues in its thread."""
        if not self.done.wait(min(max(limit, 0.0), threading.TIMEOUT_MAX)):
            raise timeout_error()
        if self._error is not None:
            raise self._error
        return self._value


_calls: queue.SimpleQueue[WorkerCall[Any]] = queue.SimpleQueue()
_running: set[WorkerCall[Any]] = set()
_workers = 0


def _work(calls: queue.SimpleQueue[WorkerCall[Any]]) -> None:
    while True:
        calls.get().run()


def prepare_exit() -> None:
    """Keep two idle workers ready, since Python >= 3.12 cannot start threads while the interpreter shuts down.

    Two, because a program may exit with a failed communicator open: one worker closes all open communicators by a
    deadline, and the other aborts the failed one by a second deadline."""
    global _workers
    with contextlib.suppress(RuntimeError):  # the interpreter is shutting down
        while _workers < len(_running) + 2:
            threading.Thread(target=_work, args=(_calls,), name="pynccl worker", daemon=True).start()
            _workers += 1


def call_at_exit(call: Callable[[], object], limit: float) -> bool:
    """Make a call while the interpreter shuts down; return False if it takes longer than `limit` seconds."""
    return WorkerCall(call, "exit").done.wait(limit)


@atexit.register  # before any library is loaded, so it runs after the libraries' exit handlers, which end pending calls
def _end_left_behind() -> None:
    """Wait for calls still running in workers, and make those that return later harmless.

    Before Python 3.14, a thread that returns from C++ while the interpreter shuts down is unwound, which calls
    std::terminate() and aborts the process. Example: a program finds a free MASTER_PORT with a socket, keeps the socket
    open, and gets Ctrl-C in pynccl.init(), where torch waits until the interpreter closes the socket. The handler
    installed here makes std::terminate() pause the calling thread instead."""
    clock = Clock(LEFT_BEHIND_SECONDS)
    if not all(call.done.wait(max(clock.left(), 0.0)) for call in list(_running)):
        with contextlib.suppress(OSError, AttributeError):  # libstdc++ is not loaded
            ctypes.CDLL("libstdc++.so.6", os.RTLD_NOLOAD)._ZSt13set_terminatePFvvE(ctypes.CDLL(None).pause)


def keep_forever(obj: Any) -> None:
    """Never free `obj`: in a forked child, its destructor would act on resources that the child does not have."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(obj))


def _after_fork_in_child() -> None:
    global _calls, _running, _workers
    keep_forever((_calls, _running))  # the child has none of their threads, and their contents belong to the parent
    _calls, _running, _workers = queue.SimpleQueue(), set(), 0


os.register_at_fork(after_in_child=_after_fork_in_child)


class Abandoned(Exception):
    """Raised inside a worker call to end it, once its caller has stopped waiting."""


class Wait:
    """State shared by a caller and its worker call: the clock, and whether the caller has stopped waiting."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self._gone = clock, threading.Event()

    def pause(self, seconds: float) -> None:
        """Sleep inside a call made by `run_in_worker`. Raises Abandoned once the caller has stopped waiting."""
        if self._gone.wait(seconds):
            raise Abandoned

    def run_in_worker(self, call: Callable[[], T], timeout_error: Callable[[], Exception]) -> T:
        """Make a call that may block in C++ in a worker; return its result or raise its exception.

        Raises `timeout_error()` half a second after the deadline. Ctrl-C interrupts the wait at any time."""
        try:
            return WorkerCall(call, "wait").result(max(self.clock.left(), 0.0) + GRACE_SECONDS, timeout_error)
        except BaseException:
            self._gone.set()
            raise


class NoAnswer(Exception):
    """A query has not returned for `seconds` seconds."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"no answer for {seconds:g} s")
        self.seconds = seconds


class QueryWorker:
    """Run queries that may never return in a worker, one at a time: no new query starts while one is outstanding."""

    _pending: WorkerCall[Any] | None = None
    _clock = Clock(None)

    def query(self, call: Callable[[], T], limit: float) -> T:
        """Return the result of `call()`, or raise its exception.

        Raises NoAnswer if it takes longer than `limit` seconds, or at once if an earlier query is still outstanding."""
        if self._pending is not None and not self._pending.done.is_set():
            raise self._no_answer()
        pending = WorkerCall(call, "query")
        self._pending, self._clock = pending, Clock(None)
        return pending.result(limit, self._no_answer)

    def _no_answer(self) -> NoAnswer:
        return NoAnswer(self._clock.waited())
