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
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

from .values import seconds

T = TypeVar("T")

GRACE_SECONDS = 0.5  # after the deadline, for a call that is about to raise a better error
EXIT_SECONDS, FAILED_EXIT_SECONDS = 10.0, 3.0  # for the whole end of a process; if it ends with an exception
LEFT_BEHIND_SECONDS = 1.0  # of these for the calls that outlived their deadlines
_CHECK_SECONDS = 0.05  # between two calls of `check` during a wait
_IDLE_SECONDS = 2.0  # then a worker that is not needed ends


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


_exit = Clock(None)  # of the end of this process


def begin_exit(failed: bool = False) -> bool:
    """Start the clock of this process's end, unless it runs. Return whether the process has `failed`, as said so far.

    It is one clock for all that is waited for at exit, which would add up otherwise."""
    global _exit
    if _exit.timeout == math.inf:
        _exit = Clock(EXIT_SECONDS)
    if failed:
        _exit.timeout = FAILED_EXIT_SECONDS
    return _exit.timeout == FAILED_EXIT_SECONDS


def exit_left(at_most: float = EXIT_SECONDS) -> float:
    """Return how many seconds an exit hook may wait: what is left for the whole end, and `at_most`."""
    begin_exit()
    return max(min(_exit.left(), at_most), 0.0)


def wait_at_exit(waits: Iterable[Callable[[float], object]], at_most: float) -> bool:
    """Call methods such as `thread.join` with what is left of `exit_left(at_most)`. Return whether all were true."""
    end = time.monotonic() + exit_left(at_most)
    returned = [wait(max(end - time.monotonic(), 0.0)) for wait in waits]
    return all(returned)


def ends_before(timeout: float | None) -> bool:
    """Return whether the process is ending, and will have ended before this timeout. None: it has."""
    return timeout is None or _exit.left() < timeout


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
    """A call in progress in a worker thread.

    until_exit  it returns when the process begins to end"""

    _value: T
    _error: BaseException | None = None

    def __init__(self, call: Callable[[], T], name: str, until_exit: bool = False) -> None:
        self._call, self._name, self.done = call, name, Flag()
        (_until_exit if until_exit else _running).add(self)
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
        _until_exit.discard(self)
        self.done.set()

    def result(
        self, limit: float, timeout_error: Callable[[], Exception], check: Callable[[], object] | None = None
    ) -> T:
        """Return the result of the call, or raise its exception.

        After `limit` seconds, or at the end of the process, raise `timeout_error()`; the call goes on in its thread.

        check  called now and then meanwhile, may raise too"""
        end, slice_ = time.monotonic() + limit, threading.TIMEOUT_MAX if check is None else _CHECK_SECONDS
        while not self.done.wait(max(min(end - time.monotonic(), _exit.left(), slice_), 0.0)):
            if min(end - time.monotonic(), _exit.left()) <= 0:
                raise timeout_error()
            if check is not None:
                check()
        if self._error is not None:
            raise self._error
        return self._value


_calls: queue.SimpleQueue[WorkerCall[Any]] = queue.SimpleQueue()
_running: set[WorkerCall[Any]] = set()
_until_exit: set[WorkerCall[Any]] = set()
_workers: set[threading.Thread] = set()


def _needed() -> int:
    """Return the number of workers: one per call, and one to close the communicators at exit, since Python >= 3.12
    cannot start threads while the interpreter shuts down. The watchdog, which ends before, runs in that one."""
    return len(_running) + max(len(_until_exit), 1)


def _work() -> None:
    me = threading.current_thread()
    while True:
        try:
            _calls.get(timeout=_IDLE_SECONDS).run()
        except queue.Empty:
            _workers.discard(me)  # before it looks, since others may look at the same time
            if len(_workers) >= _needed():
                return
            _workers.add(me)


def prepare_exit() -> None:
    """Start the workers that are needed."""
    with contextlib.suppress(RuntimeError):  # the interpreter is shutting down
        while len(_workers) < _needed():
            worker = threading.Thread(target=_work, name="pynccl worker", daemon=True)
            worker.start()
            _workers.add(worker)


def call_at_exit(call: Callable[[], object]) -> bool:
    """Make a call while the process ends; return False if there is not enough time for it."""
    return WorkerCall(call, "exit").done.wait(exit_left())


@atexit.register  # before any library is loaded, so it runs after the libraries' exit handlers, which end pending calls
def _end_left_behind() -> None:
    """Wait for calls still running in workers, and let the process end before those that return later abort it.

    Before Python 3.14, a thread that returns from C++ while the interpreter shuts down is unwound, which calls
    std::terminate() and aborts the process. Example: a program finds a free MASTER_PORT with a socket, keeps the socket
    open, and pynccl.init() gets Ctrl-C or times out, while torch waits until the interpreter closes the socket. So
    abort() first sleeps, for long enough to end: sleep() becomes the handler of its signal, whose number is the
    seconds, 6."""
    waits = [call.done.wait for call in list(_running)]
    if not wait_at_exit(waits, LEFT_BEHIND_SECONDS) and sys.version_info < (3, 14):
        with contextlib.suppress(OSError, AttributeError):  # libstdc++ is not loaded
            libc, libstdcxx = ctypes.CDLL(None), ctypes.CDLL("libstdc++.so.6", os.RTLD_NOLOAD)
            libc.signal(signal.SIGABRT, libc.sleep)
            libstdcxx._ZSt13set_terminatePFvvE(libc.abort)  # the default handler prints a line


def keep_forever(obj: Any) -> None:
    """Never free `obj`: in a forked child, its destructor would act on resources that the child does not have."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(obj))


def _after_fork_in_child() -> None:
    global _calls, _running, _until_exit, _workers, _exit
    keep_forever((_calls, _running, _until_exit))  # the child has none of their threads; the contents are the parent's
    _calls, _running, _until_exit, _workers, _exit = queue.SimpleQueue(), set(), set(), set(), Clock(None)


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
